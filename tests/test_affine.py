"""affine: errors against the formula, for every scale kind, bit width and head_dim."""

import pytest
import torch

from kvslim.codecs.affine import AffineCodec
from kvslim.codecs.decode import decode
from kvslim.errors import RecipeError
from kvslim.layout import PackedBlock

BLOCK = 32
FP16_ULP = 2.0**-11  # relative error of rounding to fp16
FP16_STEP = 2.0**-24  # its smallest step
AXES = {"block": (-2, -1), "channel": (-2,), "token": (-1,)}
SYMMETRIC = [(scale, bits, False) for scale in ("block", "token", "channel", "32") for bits in (2, 3, 4, 5, 6, 8)]
ASYMMETRIC = [(scale, bits, True) for scale in ("token", "channel", "32") for bits in (1, 2, 3, 4, 5, 6, 8)]


def round_trip(codec: AffineCodec, x: torch.Tensor) -> torch.Tensor:
    """Encode and decode ``[blocks, kv_heads, tokens, head_dim]``; the parts must be those of the layout."""
    layout = codec.layout(x.shape[-1], x.shape[-2])
    parts = codec.encode(x)
    assert list(parts) == [part.name for part in layout.parts]
    for part in layout.parts:
        assert tuple(parts[part.name].shape) == (*x.shape[:2], *part.shape)
    return decode(PackedBlock(layout, parts), codec.table())


def by_group(x: torch.Tensor, scale: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Values so that one scale covers the returned axes."""
    if scale.isdigit():
        return x.unflatten(-1, (-1, int(scale))), (-1,)
    return x, AXES[scale]


def error_bound(x: torch.Tensor, scale: str, bits: int, asym: bool) -> torch.Tensor:
    """Half a step, plus what rounding scale and zero to fp16 can cost at the ends; shape of `x`."""
    values, over = by_group(x, scale)
    top = values.abs().amax(over, keepdim=True)
    if asym:
        steps = 2**bits - 1
        step = (values.amax(over, keepdim=True) - values.amin(over, keepdim=True)) / steps
        zero = values.amin(over, keepdim=True).abs() * FP16_ULP + FP16_STEP / 2
    else:
        steps = 2 ** (bits - 1) - 1
        step, zero = top / steps, torch.zeros_like(top)
    rounding = torch.maximum(step * FP16_ULP, torch.tensor(FP16_STEP / 2))
    bound = step / 2 + (steps + 0.5) * rounding + 2 * zero + top * 2.0**-22
    return bound.expand(values.shape).reshape(x.shape)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("scale", "bits", "asym"), SYMMETRIC + ASYMMETRIC)
@pytest.mark.parametrize("size", [1.0, 1e-3, 3e3])
def test_error_stays_below_the_formula(scale, bits, asym, size):
    x = (normal(2, 2, BLOCK, 64) + 0.7) * size
    error = (round_trip(AffineCodec(bits, asym, scale), x) - x).abs()
    bound = error_bound(x, scale, bits, asym)
    assert bool((error <= bound).all()), f"worst {float((error / bound).max()):.3f} of the bound"
    assert float((error / bound).max()) > 0.5  # the bound is no empty promise


@pytest.mark.parametrize("head_dim", [16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512])
@pytest.mark.parametrize("scale", ["block", "token", "channel", "8", "16", "32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_head_dim(head_dim, scale, bits):
    codec = AffineCodec(bits, scale != "block", scale)
    if scale.isdigit() and head_dim % int(scale):
        with pytest.raises(RecipeError, match=rf"group={scale} .*head_dim={head_dim}; use one of 8"):
            codec.layout(head_dim, BLOCK)
        return
    x = normal(1, 2, BLOCK, head_dim, seed=head_dim)
    error = (round_trip(codec, x) - x).abs()
    assert bool((error <= error_bound(x, scale, bits, codec.asym)).all())


@pytest.mark.parametrize(("scale", "bits", "asym"), SYMMETRIC + ASYMMETRIC)
@pytest.mark.parametrize("constant", [0.0, 1.0, -2.5, 1024.0])
def test_constants(scale, bits, asym, constant):
    """With a zero point a constant comes back exactly; a symmetric scale loses the rounding of one fp16 number."""
    x = torch.full((1, 2, BLOCK, 64), constant)
    got = round_trip(AffineCodec(bits, asym, scale), x)
    if asym or constant == 0:
        assert torch.equal(got, x)
    else:
        assert float((got - x).abs().max()) <= abs(constant) * FP16_ULP


@pytest.mark.parametrize(("scale", "bits", "asym"), SYMMETRIC + ASYMMETRIC)
def test_a_row_of_zeros_among_others_stays_zero(scale, bits, asym):
    x = normal(1, 1, BLOCK, 64)
    x[..., 5, :] = 0
    got = round_trip(AffineCodec(bits, asym, scale), x)
    assert bool(got.isfinite().all())
    if scale not in ("block", "channel"):
        assert torch.equal(got[..., 5, :], x[..., 5, :])
    if not asym:  # a symmetric code has an exact zero
        assert torch.equal(got[..., 5, :], x[..., 5, :])


@pytest.mark.parametrize(("scale", "bits", "asym"), SYMMETRIC + ASYMMETRIC)
def test_an_outlier_costs_only_its_own_group(scale, bits, asym):
    x = normal(1, 1, BLOCK, 64)
    calm = round_trip(AffineCodec(bits, asym, scale), x)
    x[..., 3, 7] = 1e4
    got = round_trip(AffineCodec(bits, asym, scale), x)
    assert bool(((got - x).abs() <= error_bound(x, scale, bits, asym)).all())
    assert float((got[..., 3, 7] - 1e4).abs().max()) <= 1e4 * FP16_ULP * 2
    untouched = {
        "block": x[..., :0, :],
        "token": got[..., 4:, :] - calm[..., 4:, :],
        "channel": got[..., 8:] - calm[..., 8:],
        "32": got[..., 3, 32:] - calm[..., 3, 32:],
    }[scale]
    assert not bool(untouched.any())


@pytest.mark.parametrize(("scale", "bits", "asym"), SYMMETRIC + ASYMMETRIC)
def test_denormal_values(scale, bits, asym):
    """Values below fp16's smallest step: finite, and not further off than that step."""
    x = normal(1, 1, BLOCK, 64) * 1e-9
    got = round_trip(AffineCodec(bits, asym, scale), x)
    assert float((got - x).abs().max()) <= FP16_STEP
    x = normal(1, 1, BLOCK, 64) * 1e-41
    assert float((x != 0).sum()) > 0
    assert float((round_trip(AffineCodec(bits, asym, scale), x) - x).abs().max()) <= FP16_STEP


@pytest.mark.parametrize(("scale", "bits", "asym"), SYMMETRIC + ASYMMETRIC)
def test_finite_in_finite_out(scale, bits, asym):
    x = normal(1, 1, BLOCK, 64) * 1e30
    assert bool(round_trip(AffineCodec(bits, asym, scale), x).isfinite().all())


def test_codes_by_hand():
    """Range -1..2 in 2 bits: step 1, zero -1, codes 0 1 2 3."""
    x = torch.tensor([-1.0, -0.4, 0.6, 2.0, 0.4, 1.6, -0.6, 1.4])[None, None, None].expand(1, 1, 8, 8)
    codec = AffineCodec(2, asym=True, scale="token")
    parts = codec.encode(x)
    assert parts["token"].unique().tolist() == [1.0]
    assert parts["zero"].unique().tolist() == [-1.0]
    assert round_trip(codec, x)[0, 0, 0].tolist() == [-1.0, 0.0, 1.0, 2.0, 0.0, 2.0, -1.0, 1.0]
    x = torch.tensor([-3.5, 7.0, 0.4, 0.6, -7.0, 3.4, -1.0, 6.6])[None, None, None].expand(1, 1, 8, 8)
    codec = AffineCodec(4, scale="block")
    assert codec.encode(x)["block"].item() == 1.0
    assert round_trip(codec, x)[0, 0, 0].tolist() == [-4.0, 7.0, 0.0, 1.0, -7.0, 3.0, -1.0, 7.0]


@pytest.mark.parametrize(("scale", "asym"), [("token", False), ("token", True), ("32", True)])
def test_each_token_for_itself(scale, asym):
    """What a token is packed to does not depend on its neighbours, so chunks may be cut anywhere."""
    x = normal(1, 2, BLOCK, 64)
    codec = AffineCodec(4, asym, scale)
    whole = codec.encode(x)
    for start, stop in ((0, 1), (1, 20), (20, BLOCK)):
        for name, part in codec.encode(x[:, :, start:stop]).items():
            assert torch.equal(part, whole[name][:, :, start:stop])


@pytest.mark.parametrize("scale", ["block", "channel", "token", "32"])
def test_each_block_and_head_for_itself(scale):
    x = normal(3, 2, BLOCK, 64)
    codec = AffineCodec(4, scale != "block", scale)
    whole = codec.encode(x)
    for name, part in codec.encode(x[1:2, 1:]).items():
        assert torch.equal(part, whole[name][1:2, 1:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bits": 4, "scale": "row"}, "scale=row; use block, token, channel or a number"),
        ({"bits": 1}, "bits >= 2"),
        ({"bits": 4, "asym": True, "scale": "block"}, "scale=block is symmetric"),
    ],
)
def test_settings_that_do_not_go_together(arguments, says):
    with pytest.raises(RecipeError, match=says):
        AffineCodec(**arguments)


@pytest.mark.parametrize(
    ("scale", "head_dim", "allowed"), [("64", 96, "8, 16, 24, 32, 48, 96"), ("0", 64, "8, 16"), ("7", 20, "20")]
)
def test_group_that_does_not_divide_names_what_does(scale, head_dim, allowed):
    with pytest.raises(RecipeError, match=f"group={scale} does not divide head_dim={head_dim}; use one of .*{allowed}"):
        AffineCodec(4, scale=scale).layout(head_dim, BLOCK)
