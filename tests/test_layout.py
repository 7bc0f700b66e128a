"""The packed form as a value: bytes and bits per value of the presets, worked out here by hand."""

import pytest

from kvslim.codecs import build_codec
from kvslim.layout import PackedLayout, Part, Segment, bits_per_value, block_nbytes, is_token_wise, part_nbytes
from kvslim.recipe import Recipe, Side


def layout_of(side: str, head_dim: int, block: int) -> PackedLayout:
    return build_codec(Side.parse(side)).layout(head_dim, block)


def preset_bits(name: str, head_dim: int) -> tuple[float, float]:
    recipe = Recipe.parse(name)
    key, value = (layout_of(str(side), head_dim, recipe.block) for side in (recipe.key, recipe.value))
    return bits_per_value(key), bits_per_value(value)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 512])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_one_scale_per_head_and_block(name, bits, head_dim):
    block = Recipe.parse(name).block
    assert preset_bits(name, head_dim) == (pytest.approx(bits + 16 / (block * head_dim)),) * 2


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("name", "bits"), [("kivi4", 4), ("kivi2", 2)])
def test_kivi(name, bits, head_dim):
    """Keys: scale and offset per channel over 32 tokens; values: scale and zero per token and 32 channels."""
    assert preset_bits(name, head_dim) == (bits + 2 * 16 / 32, bits + 2 * 16 / 32)


def test_pair():
    """A scale per token on both sides, and a mean per channel and block on keys."""
    assert preset_bits("k8v4", 128) == (8 + 16 / 128 + 16 / 128, 4 + 16 / 128)


def test_none_is_16_bits():
    assert preset_bits("none", 64) == (16, 16)
    assert bits_per_value(layout_of("none:dtype=fp32", 64, 128)) == 32


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(
    ("scale", "overhead"),
    [("token", 16 / 128), ("token:asym", 32 / 128), ("32", 16 / 32), ("32:asym", 32 / 32), ("channel", 16 / 64)],
)
def test_affine(bits, scale, overhead):
    assert bits_per_value(layout_of(f"affine:{bits}:scale={scale}", 128, 64)) == bits + overhead


def test_bytes_of_a_block_part_by_part():
    layout = layout_of("affine:4:asym:scale=32", 64, 128)
    assert {part.name: (part.shape, part.dtype) for part in layout.parts} == {
        "code": ((128, 32), "u8"),
        "token": ((128, 2), "fp16"),
        "zero": ((128, 2), "fp16"),
    }
    assert [part_nbytes(part) for part in layout.parts] == [128 * 32, 128 * 2 * 2, 128 * 2 * 2]
    assert block_nbytes(layout) == 128 * 32 + 2 * 128 * 2 * 2


def test_one_byte_floats_take_one_byte():
    assert part_nbytes(Part("token", (10,), "e8m0")) == part_nbytes(Part("token", (10,), "e4m3")) == 10


@pytest.mark.parametrize(
    ("side", "token_wise"),
    [
        ("none", True),
        ("affine:8:scale=token", True),
        ("affine:4:asym:scale=32", True),
        ("affine:8:scale=block", False),
        ("affine:4:asym:scale=channel", False),
    ],
)
def test_what_can_be_packed_token_by_token(side, token_wise):
    assert is_token_wise(layout_of(side, 64, 32)) is token_wise


def test_layouts_are_values():
    assert layout_of("affine:4", 64, 32) == layout_of("affine:4", 64, 32)
    assert layout_of("affine:4", 64, 32) != layout_of("affine:4", 64, 64)
    assert hash(layout_of("affine:4", 64, 32)) == hash(layout_of("affine:4", 64, 32))
    with pytest.raises(AttributeError):
        layout_of("affine:4", 64, 32).block = 8


def test_segments_add_up():
    layout = PackedLayout(64, 8, (Segment(16, 8), Segment(48, 4)), (Part("code", (8, 16 + 24), "u8"),))
    assert sum(segment.width for segment in layout.segments) == layout.head_dim
    assert bits_per_value(layout) == (16 * 8 + 48 * 4) / 64
