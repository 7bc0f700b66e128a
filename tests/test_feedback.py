"""Write-time feedback: the recursion, its factor, and what it buys in the metric of the queries."""

import pytest
import torch

from kvslim.codecs import build_codec
from kvslim.codecs.base import nearest
from kvslim.codecs.decode import decode
from kvslim.codecs.feedback import code_with_feedback, metric_factor, whiten
from kvslim.codecs.levels import levels
from kvslim.errors import RecipeError
from kvslim.layout import PackedBlock
from kvslim.recipe import Side

TABLE = levels("lloyd", 4)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment(heads: int, head_dim: int) -> torch.Tensor:
    """E[q q^T] of queries whose variance falls as 1/rank along random axes."""
    axes = torch.linalg.qr(normal(heads, head_dim, head_dim, seed=7))[0]
    return axes * (1 / torch.arange(1, head_dim + 1)) @ axes.mT


def damped(matrix: torch.Tensor, damping: float = 0.1) -> torch.Tensor:
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return matrix + damping * mean[:, None, None] * torch.eye(matrix.shape[-1])


def to_table(_: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = nearest(column, TABLE)
    return codes, TABLE[codes.int()]


def naive(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The recursion as it is written, channel by channel over all later channels."""
    z, codes = x.clone(), torch.empty_like(x, dtype=torch.uint8)
    for head in range(x.shape[1]):
        u = factor[head]
        for j in range(x.shape[-1]):
            codes[:, head, :, j], y = to_table(j, z[:, head, :, j])
            error = z[:, head, :, j] - y
            for i in range(j + 1, x.shape[-1]):
                z[:, head, :, i] -= error * (u[j, i] / u[j, j])
    return codes


def round_trip(recipe: str, x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    codec = build_codec(Side.parse(recipe))
    parts = codec.encode(x, factor)
    return decode(PackedBlock(codec.layout(x.shape[-1], x.shape[-2]), parts), codec.table())


def metric_error(error: torch.Tensor, matrix: torch.Tensor) -> float:
    return torch.einsum("bgtd,gde,bgte->bgt", error, matrix, error).mean().item()


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_factor_is_the_upper_cholesky_factor_of_the_inverse(head_dim):
    matrix = moment(2, head_dim)
    factor = metric_factor(matrix).double()
    assert torch.equal(factor, factor.triu())
    assert (factor.diagonal(dim1=-2, dim2=-1) > 0).all()
    unit = damped(matrix) / matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    product = factor.mT @ factor @ unit.double()
    torch.testing.assert_close(product, torch.eye(head_dim).double().expand(2, -1, -1), atol=1e-4, rtol=0)


def test_factor_of_no_queries_is_the_plain_metric():
    factor = metric_factor(torch.zeros(1, 8, 8))
    torch.testing.assert_close(factor / factor[0, 0, 0], torch.eye(8)[None])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96])
def test_vectorised_loop_equals_the_naive_one(head_dim):
    x, factor = normal(2, 2, 4, head_dim), metric_factor(moment(2, head_dim))
    codes, values, whitened = code_with_feedback(x, factor, to_table)
    assert torch.equal(codes, naive(x, factor))
    assert torch.equal(values, TABLE[codes.int()])
    torch.testing.assert_close(whitened, whiten(x - values, factor), atol=1e-3, rtol=1e-3)


def test_input_is_left_alone():
    x, factor = normal(1, 1, 1, 64), metric_factor(moment(1, 64))
    before = x.clone()
    code_with_feedback(x, factor, to_table)
    assert torch.equal(x, before)


def test_whitening_gives_the_metric():
    a, b, matrix = normal(3, 2, 5, 32), normal(3, 2, 5, 32, seed=1), moment(2, 32)
    factor = metric_factor(matrix)
    unit = damped(matrix) / matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    want = torch.einsum("bgtd,gde,bgte->bgt", a, unit, b)
    torch.testing.assert_close((whiten(a, factor) * whiten(b, factor)).sum(-1), want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("recipe", ["table:4", "table:2", "affine:4", "affine:3:asym", "affine:4:asym:scale=32"])
def test_plain_metric_gives_the_codes_of_no_feedback(recipe):
    x, eye = normal(2, 2, 16, 64), torch.eye(64).expand(2, -1, -1)
    assert torch.equal(round_trip(recipe + ":feedback", x, eye), round_trip(recipe, x, None))


@pytest.mark.parametrize(
    ("recipe", "gain"),
    [
        ("table:4", 0.70),
        ("table:3", 0.70),
        ("table:2", 0.72),
        ("table:4:fit=plain", 0.72),
        ("table:4:fit=norm", 0.70),
        ("table:4:fit=eden", 0.70),
        ("table:4:fit=search", 0.70),
        ("table:4:mean", 0.70),
        ("affine:4:asym", 0.70),
        ("affine:4:asym:scale=32", 0.72),
    ],
)
def test_feedback_lowers_the_error_that_queries_see(recipe, gain):
    x, matrix = normal(4, 2, 64, 64), moment(2, 64)
    factor = metric_factor(matrix)
    plain = metric_error(round_trip(recipe, x, None) - x, damped(matrix))
    fed_back = metric_error(round_trip(recipe + ":feedback", x, factor) - x, damped(matrix))
    assert fed_back < gain * plain


def test_scale_is_the_best_one_in_the_metric():
    """Around s = (y^T M z) / (y^T M y) no other scale errs less."""
    x, matrix = normal(2, 2, 32, 64), moment(2, 64)
    y = round_trip("table:3:feedback", x, metric_factor(matrix))
    errors = [metric_error(x - y * (1 + shift), damped(matrix)) for shift in (-0.01, 0.0, 0.01)]
    assert errors[1] == min(errors)


def test_search_beats_least_squares_with_feedback():
    x, matrix = normal(4, 2, 64, 64), moment(2, 64)
    factor = metric_factor(matrix)
    ls, search = (
        metric_error(round_trip(f"table:4:feedback:fit={fit}", x, factor) - x, damped(matrix))
        for fit in ("ls", "search")
    )
    assert search < 0.82 * ls


@pytest.mark.parametrize("recipe", ["table:4:feedback:fit=search", "affine:4:asym:scale=32:feedback"])
def test_tokens_do_not_depend_on_their_neighbours(recipe):
    codec, x, factor = build_codec(Side.parse(recipe)), normal(3, 2, 32, 96), metric_factor(moment(2, 96))
    whole = codec.encode(x, factor)
    for block, token in [(0, 0), (1, 17), (2, 31)]:
        alone = codec.encode(x[block : block + 1, :, token : token + 1], factor)
        for name, part in alone.items():
            assert torch.equal(part[0, :, 0], whole[name][block, :, token]), name


@pytest.mark.parametrize(
    "recipe", ["table:4:feedback:std", "table:4:feedback:scale=32", "affine:4:feedback:scale=channel"]
)
def test_settings_that_feedback_cannot_serve_are_refused(recipe):
    with pytest.raises(RecipeError, match="feedback needs"):
        build_codec(Side.parse(recipe))


def test_only_feedback_asks_for_queries():
    assert build_codec(Side.parse("table:4:feedback")).needs_queries
    assert build_codec(Side.parse("affine:4:feedback")).needs_queries
    assert not build_codec(Side.parse("table:4")).needs_queries
