"""Transforms: scores and outputs are those of the untransformed tokens, whatever the settings and head_dim."""

import pytest
import torch

from kvslim.errors import RecipeError
from kvslim.recipe import Side
from kvslim.transforms import TRANSFORMS, build_transforms
from kvslim.transforms.base import Chain, Sample, fit_chain
from kvslim.transforms.dense import gaussian, orthogonal, signs
from kvslim.transforms.rotate import Rotate, butterfly, rotation_matrix

HEAD_DIMS = (16, 64, 80, 96, 128, 256)
HEADS, TOKENS = 2, 24
# one entry for each form of each transform; `test_every_transform_is_here` keeps the list whole
STEPS = (
    "rotate",
    "rotate:signs",
    "rotate:kind=orthogonal",
    "rotate:kind=orthogonal:signs",
    "rotate:parts=8",
    "rotate:kind=orthogonal:parts=8",
    "outlier:count=8",
    "balance",
    "balance:pairs",
    "outlier:count=8/rotate:parts=8",
    "balance/rotate",
    "balance/outlier:count=8/rotate:kind=orthogonal:parts=8",
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fitted(steps: str, head_dim: int) -> Chain:
    x = normal(HEADS, 256, head_dim, seed=3) * torch.linspace(0.1, 3, head_dim)
    q = normal(HEADS, 256, head_dim, seed=4) * torch.linspace(2, 0.3, head_dim)
    return fit_chain(build_transforms(Side.parse(steps + "/none")), Sample(x, moment=q.mT @ q / 256, tokens=256))


def test_every_transform_is_here():
    seen = {step.split(":")[0] for steps in STEPS for step in steps.split("/")}
    assert set(TRANSFORMS) - {"center"} <= seen  # center moves the origin; what it keeps is tested on its own


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("steps", STEPS)
def test_scores_are_kept(steps, head_dim):
    chain = fitted(steps, head_dim)
    x, q = normal(HEADS, TOKENS, head_dim), normal(HEADS, 5, head_dim, seed=1)
    mapped, bias = chain.query(q)
    assert bias is None
    torch.testing.assert_close(mapped @ chain.forward(x).mT, q @ x.mT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("steps", STEPS)
def test_output_undoes_forward(steps, head_dim):
    chain, x = fitted(steps, head_dim), normal(HEADS, TOKENS, head_dim)
    weights = normal(HEADS, 3, TOKENS, seed=2).softmax(-1)
    out = chain.output(weights @ chain.forward(x), weights.sum(-1, keepdim=True))
    torch.testing.assert_close(out, weights @ x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("steps", STEPS)
def test_a_token_maps_alone_as_among_others(steps, head_dim):
    """Bit for bit, or packed bytes would depend on how tokens were fed."""
    chain, x = fitted(steps, head_dim), normal(3, HEADS, TOKENS, head_dim)
    whole = chain.forward(x)
    for block, token in [(0, 0), (1, 7), (2, TOKENS - 1)]:
        alone = chain.forward(x[block : block + 1, :, token : token + 1])
        assert torch.equal(alone[0, :, 0], whole[block, :, token])


@pytest.mark.parametrize("steps", STEPS)
def test_offsets_pass_through_later_steps(steps):
    """A mean that an earlier step removed reaches the packed basis as any other vector would."""
    chain, mean = fitted(steps, 64), normal(4, HEADS, 64)
    assert chain.offset(torch.arange(4)) is None
    x = normal(4, HEADS, TOKENS, 64)
    torch.testing.assert_close(
        chain.forward(x - mean[:, :, None]) + chain.forward(mean[:, :, None]), chain.forward(x), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("parts", [0, 8])
def test_rotations_are_orthogonal(head_dim, kind, parts):
    matrix = rotation_matrix(Rotate(kind, signs=True, parts=parts), head_dim, "cpu", torch.float32)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), atol=1e-5, rtol=0)
    if parts:
        assert not matrix[:parts, parts:].any()
        assert not matrix[parts:, :parts].any()


def test_hadamard_is_sylvesters_and_block_diagonal_where_it_must_be():
    eye = torch.eye(4)
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(butterfly(eye), expected)
    for head_dim, size in [(96, 32), (80, 16), (128, 128)]:
        matrix = butterfly(torch.eye(head_dim))
        blocks = torch.block_diag(*[butterfly(torch.eye(size))] * (head_dim // size))
        assert torch.equal(matrix, blocks)


def test_rotations_are_shared_and_not_stored():
    first, second = fitted("rotate", 64), fitted("rotate", 64)
    assert first.tensors() == {}
    matrices = [rotation_matrix(Rotate(), 64, "cpu", torch.float32) for _ in range(2)]
    assert matrices[0] is matrices[1]
    x = normal(1, HEADS, 3, 64)
    assert torch.equal(first.forward(x), second.forward(x))


def test_rotation_makes_channels_alike():
    x = normal(1, 1, 512, 128)
    x[..., 5] *= 100
    spread = fitted("rotate", 128).forward(x).square().mean((0, 1, 2))
    assert spread.max() / spread.min() < 2


def test_outliers_come_first_and_keep_their_order():
    x = normal(HEADS, 64, 16) * 0.1
    x[0, :, [9, 2]] *= 50
    x[1, :, [15, 0, 7]] *= 50
    chain = fit_chain(build_transforms(Side.parse("outlier:count=3/none")), Sample(x))
    order = chain.tensors()["0.order"]
    assert {2, 9} <= set(order[0, :3].tolist())
    assert order[1, :3].tolist() == [0, 7, 15]
    assert order[1, 3:].tolist() == [c for c in range(16) if c not in (0, 7, 15)]
    assert order.sort(-1).values.tolist() == [list(range(16))] * HEADS


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("rotate:parts=64", "parts=64 is not below head_dim=64"),
        ("outlier:count=64", "count=64 of head_dim=64"),
        ("outlier:count=0", "count=0 of head_dim=64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(step, message):
    with pytest.raises(RecipeError, match=message):
        fitted(step, 64)


def test_seeded_matrices_are_what_they_were():
    """Caches on disk were written with these; a change of generator would garble them without a sound."""
    values = gaussian(2, 2, seed=1).flatten().tolist()
    assert [round(value, 6) for value in values] == [0.308709, -0.439637, -0.054097, 1.697943]
    assert signs(8, seed=1).tolist() == [1, -1, -1, -1, -1, 1, 1, 1]
    turned = orthogonal(2, seed=1).flatten().tolist()
    assert [round(value, 6) for value in turned] == [0.984991, 0.172607, -0.172607, 0.984991]
