"""The append kernel under triton's interpreter: the reference's bytes, for every form that a preset has."""

import copy
from dataclasses import asdict, replace

import pytest
import torch

from kvslim.codecs import build_codec
from kvslim.codecs.decode import decode
from kvslim.codecs.side import Frozen, SidePacker
from kvslim.kernels import encode as encoding
from kvslim.kernels.triton.device import target_called
from kvslim.layout import PackedBlock
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe, Side
from kvslim.transforms.base import Chain, Sample

pytest.importorskip("triton")
from kvslim.kernels.triton import append_variants, encoder

CODED = {(form.d, label) for form, label in append_variants.forms().items()}


def frozen_side(recipe: str, letter: str, dim: int, heads: int = 2) -> tuple[SidePacker, Frozen]:
    parsed = Recipe.parse(recipe)
    side = parsed.key if letter == "k" else parsed.value
    packer = SidePacker(side, dim, parsed.block, "fp16")
    torch.manual_seed(1)
    half = torch.arange(dim // 2)
    prior = {
        "plain_mean": torch.randn(heads, dim),
        "rope_pairs": torch.stack((half, half + dim // 2)),
        "rope_frequency": 10000.0 ** -(half.double() / len(half)),
    }
    query = torch.randn(heads, 200, dim) * (1 + half.repeat(2)[:dim] % 3)
    sample = Sample(tokens(1, heads, 150, dim)[0], query.mT @ query / 200, parsed.block, 150, prior)
    return packer, packer.freeze(sample)


def tokens(blocks: int, heads: int, count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Tokens around a mean per channel, not contiguous, with NaN wherever no token is."""
    generator = torch.Generator().manual_seed(seed)
    spread = 1 + torch.arange(dim) % 7
    x = torch.randn(blocks, count, heads, dim, generator=generator) * spread + 2 * spread
    room = torch.full((blocks + 1, count + 3, heads + 1, dim + 5), torch.nan)
    room[:blocks, 2 : count + 2, :heads, :dim] = x
    return room[:blocks, 2 : count + 2, :heads, :dim].transpose(1, 2)


def both(packer: SidePacker, frozen: Frozen, x: torch.Tensor) -> tuple[PackedBlock, PackedBlock]:
    assert not encoder.refusal(packer, frozen)
    starts = torch.arange(len(x)) * packer.layout.block + 1000
    return packer.encode(x.float(), frozen, starts), encoder.encode(packer, x, frozen, starts)


def assert_same(packer: SidePacker, frozen: Frozen, x: torch.Tensor) -> None:
    want, got = both(packer, frozen, x)
    assert want.parts.keys() == got.parts.keys()
    for name, tensor in want.parts.items():
        assert got.parts[name].dtype == tensor.dtype
        assert torch.equal(got.parts[name], tensor), name  # as numbers: numpy's sums lose the sign of a zero


# random rotations are summed in another order than the reference's: their own test
@pytest.mark.parametrize("label", sorted(label for dim, label in CODED if dim == 64 and "turbo" not in label))
def test_bytes_of_every_preset(label):
    name, _, letter = label.partition(" ")
    carried = letter == "k" and "slim" in name  # channel by channel, which takes the interpreter seconds
    packer, frozen = frozen_side(name, letter or "k", 16 if carried else 64, heads=1)
    assert_same(packer, frozen, tokens(1 if carried else 2, 1, packer.layout.block, packer.layout.head_dim))


@pytest.mark.parametrize("dim", [80, 96, 192, 256, 512])
@pytest.mark.parametrize("recipe", ["slim3", "int8", "fp8"])
def test_head_dims(recipe, dim):
    packer, frozen = frozen_side(recipe, "v", dim)
    assert_same(packer, frozen, tokens(1, 1, packer.layout.block if recipe == "int8" else 9, dim))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", [40, 80, 128])
def test_every_width_is_packed_alike(bits, dim):
    """Units of 8, 16 and 32 channels, planes of 1 to 8 bits."""
    packer, frozen = frozen_side(f"k=none+v=table:{bits}", "v", dim)
    assert_same(packer, frozen, tokens(1, 1, 3, dim))


@pytest.mark.parametrize(
    "recipe", ["k=center/balance/rotate:signs/table:4:feedback", "k=center:kind=page/table:3:feedback"]
)
@pytest.mark.parametrize("fit", ["ls", "norm", "eden", "plain", "search"])
def test_chains_and_fits_with_feedback(recipe, fit):
    packer, frozen = frozen_side(f"{recipe}:fit={fit}+v=none", "k", 24, heads=1)
    assert_same(packer, frozen, tokens(1, 1, 5, 24))


def test_heads_have_their_own_parameters():
    packer, frozen = frozen_side("k=center/balance/table:2:feedback+v=none", "k", 8, heads=3)
    assert_same(packer, frozen, tokens(2, 3, 3, 8))


@pytest.mark.parametrize("count", [1, 63, 65, 130])
def test_odd_lengths(count):
    """Tokens of page-safe recipes come one by one or many at once, in no whole tiles."""
    packer, frozen = frozen_side("slim4p", "v", 64)
    assert_same(packer, frozen, tokens(1, 1, count, 64))


@pytest.mark.parametrize("block", [16, 32, 48, 256])
def test_means_of_any_block(block):
    """Large values that nearly cancel: another order of additions gives another mean."""
    packer, frozen = frozen_side(f"k=table:2:mean+v=none+block={block}", "k", 32)
    half = 1e4 * torch.randn(1, 2, block // 2, 32, generator=torch.Generator().manual_seed(0))
    shuffled = half[:, :, torch.randperm(block // 2, generator=torch.Generator().manual_seed(1))]
    assert_same(packer, frozen, torch.cat((half, 0.01 - shuffled), dim=2))


def test_ties_go_to_the_lower_level():
    packer, frozen = frozen_side("ultrafp4", "v", 64)
    x = (torch.arange(64 * 4).view(1, 1, 4, 64) % 49 - 24) / 4  # every midpoint of E2M1, exactly
    assert_same(packer, frozen, x)
    packer, frozen = frozen_side("k=none+v=table:2:kind=lloydint:fit=plain", "v", 64)
    edge = float((frozen.table[2] + frozen.table[3]) / 2)  # of values whose rms is 1
    x = torch.tensor([edge, (2 - edge**2) ** 0.5]).repeat(32).view(1, 1, 1, 64)
    assert_same(packer, frozen, torch.cat((x, -x), dim=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    for recipe, letter in (("slim4", "v"), ("nvfp4", "k"), ("kivi4", "k")):
        packer, frozen = frozen_side(recipe, letter, 64)
        assert_same(packer, frozen, tokens(1, 1, packer.layout.block, 64).to(dtype))


@pytest.mark.parametrize(
    "label", ["slim4 v", "int8 v", "kivi4 k", "kivi4 v", "nvfp4 v", "ultrafp4 v", "fp8 v", "nf4 v"]
)
def test_zeros_constants_outliers_and_tiny_values(label):
    name, _, letter = label.partition(" ")
    packer, frozen = frozen_side(f"{name}+block=32", letter, 64, heads=4)
    x = torch.randn(1, 4, packer.layout.block, 64)
    x[:, 0] = 0
    x[:, 1] = 3.5
    x[:, 2, :, 5] = 6e4
    x[:, 3] *= 1e-9
    assert_same(packer, frozen, x)
    got = decode(both(packer, frozen, x)[1], frozen.table)
    assert got.isfinite().all()
    assert got[:, 0].abs().max() < 1e-5


def test_random_rotations_differ_at_ties_alone():
    """Sums of another order: of 4,096 codes hardly one moves, by one level; the error stays."""
    packer, frozen = frozen_side("turbo4", "v", 64)
    x = tokens(1, 1, 64, 64)
    want, got = both(packer, frozen, x)
    assert (want.parts["code"] != got.parts["code"]).float().mean() < 1e-3
    assert torch.allclose(want.parts["token"].float(), got.parts["token"].float(), rtol=1e-3)
    exact = frozen.chain.forward(x)
    errors = [(decode(packed, frozen.table) - exact).square().mean() for packed in (want, got)]
    assert torch.isclose(*errors, rtol=1e-4)


REFUSED = {
    ("turbo4-qjl", "k"): "codec qjl",
    ("turbo3.5", "k"): "transform Permutation",
    ("ultra4", "k"): "codec equalize",
    ("kvarn4", "v"): "codec kvarn",
    ("none", "k"): "codec none",
    ("k=affine:4:feedback+v=none", "k"): "codec affine with feedback",
    ("k=none+v=table:4:std", "v"): "codec table with std",
    ("k=none+v=table:4:scale=24", "v"): "groups of 24 channels (powers of two)",
    ("k=none+v=center/rotate:kind=orthogonal/table:4", "v"): "a random orthogonal rotation after another transform",
    ("k=none+v=rotate:parts=32/table:4", "v"): "transform Rotation by parts",
    ("k=none+v=float8:kind=e5m2", "v"): "codec float8",
}


@pytest.mark.parametrize(("recipe", "letter"), REFUSED)
def test_what_is_not_covered_is_refused_by_name(recipe, letter):
    packer, frozen = frozen_side(recipe, letter, 96)
    assert encoder.refusal(packer, frozen) == REFUSED[recipe, letter]


@pytest.mark.parametrize("text", ["affine:4", "table:4", "fp4", "float8"])
def test_a_codec_derived_from_a_known_one_is_refused(text):
    """It may encode in its own way, which the kernel cannot know."""
    codec = build_codec(Side.parse(text))
    derived = type("Derived", (type(codec),), {})(**asdict(codec))
    for one, refused in ((codec, ""), (derived, "codec derived")):
        packer = SidePacker.of(one, 64, 32)
        assert encoder.refusal(packer, Frozen(Chain(()), one.table())) == refused


@pytest.mark.parametrize("recipe", ["balance/table:4", "center/table:4", "rotate/table:4"])
def test_a_transform_derived_from_a_known_one_is_refused(recipe):
    packer, frozen = frozen_side(f"k={recipe}+v=none", "k", 64)
    (known,) = frozen.chain.steps
    derived = copy.copy(known)
    derived.__class__ = type("Derived", (type(known),), {})
    assert not encoder.refusal(packer, frozen)
    assert encoder.refusal(packer, replace(frozen, chain=Chain((derived,)))) == "transform Derived"


def test_every_preset_is_covered_or_refused():
    missing = {name.split("-")[0] for name, _ in REFUSED if name in PRESETS}
    assert {label.split()[0] for _, label in CODED} | missing | {"k4v2"} >= {name.split("-")[0] for name in PRESETS}


def test_the_interpreter_is_for_tests_alone():
    """On a CPU the C++ encoder serves, whatever triton can do."""
    packer, frozen = frozen_side("slim4", "v", 64)
    name, reason = encoding.explain(packer, frozen, torch.device("cpu"))
    assert name.startswith("native ")
    assert not reason


def test_an_architecture_has_a_target_or_a_reason():
    assert target_called("sm_90").name == "sm_90"
    assert target_called("gfx1102").name == "gfx1100"
    assert "sm_75 is none of sm_80" in target_called("sm_75")
    assert "gfx1030 is none of" in target_called("gfx1030")
