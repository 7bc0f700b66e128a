"""Byte order of packed codes: what `pack` must write is spelled out here by hand."""

import pytest
import torch

from kvslim.bitpack import pack, packed_width, unit_of, unpack
from kvslim.errors import InputError

BITS = range(1, 9)
WIDTHS = (1, 5, 7, 8, 12, 16, 17, 24, 32, 40, 48, 64, 80, 96, 112, 128, 256, 512)


def random_codes(*shape: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", WIDTHS)
def test_unpack_inverts_pack(bits, width):
    codes = random_codes(2, 3, width, bits=bits)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_width(width, bits))
    assert torch.equal(unpack(packed, bits, width), codes)


@pytest.mark.parametrize("bits", BITS)
def test_extreme_codes_stay_apart(bits):
    """The highest code beside zeros: a shift or mask that is off by one leaks into a neighbour."""
    top = 2**bits - 1
    for at in range(32):
        codes = torch.zeros(32, dtype=torch.uint8)
        codes[at] = top
        packed = pack(codes, bits)
        assert sum(bin(byte).count("1") for byte in packed.tolist()) == bits
        assert torch.equal(unpack(packed, bits, 32), codes)


@pytest.mark.parametrize(
    ("width", "unit"),
    [(32, 32), (64, 32), (96, 32), (48, 16), (80, 16), (112, 16), (24, 8), (40, 8), (8, 8), (7, 8), (9, 8)],
)
def test_units(width, unit):
    assert unit_of(width) == unit


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [w for w in WIDTHS if w % 8 == 0])
def test_no_byte_is_wasted_where_eight_divides_the_width(bits, width):
    assert packed_width(width, bits) == width * bits // 8


def test_padding_of_the_last_unit():
    assert packed_width(9, 4) == 8  # two units of eight channels, four bytes each
    assert pack(torch.full((9,), 15, dtype=torch.uint8), 4).tolist() == [255, 255, 255, 255, 15, 0, 0, 0]


def test_golden_bytes_of_4_bits():
    """Channels 0-15 in the low nibbles, 16-31 in the high ones."""
    codes = torch.tensor([*range(16), *range(15, -1, -1)], dtype=torch.uint8)
    assert bytes(pack(codes, 4).tolist()).hex() == "f0e1d2c3b4a5968778695a4b3c2d1e0f"


def test_golden_bytes_of_4_bits_in_a_unit_of_8():
    assert bytes(pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8), 4).tolist()).hex() == "51627384"


def test_golden_bytes_of_2_bits():
    """Byte i holds channels i, i+8, i+16, i+24 at bits 0, 2, 4, 6."""
    codes = torch.tensor([0] * 8 + [1] * 8 + [2] * 8 + [3] * 8, dtype=torch.uint8)
    assert bytes(pack(codes, 2).tolist()).hex() == "e4" * 8
    codes = torch.tensor([3, 0, 1, 2, 0, 0, 0, 1, *[0] * 23, 2], dtype=torch.uint8)
    assert bytes(pack(codes, 2).tolist()).hex() == "0300010200000081"


def test_golden_bytes_of_3_bits():
    """First the low two bits of all channels as a 2-bit plane, then the high bit as a 1-bit plane."""
    codes = torch.tensor([0] * 8 + [5] * 8 + [2] * 8 + [7] * 8, dtype=torch.uint8)
    low = "e4" * 8  # 0, 1, 2, 3 as above
    high = "cc" * 4  # byte i: channels i, i+4, i+8, ... i+28, so 0 0 1 1 0 0 1 1 from bit 0 on
    assert bytes(pack(codes, 3).tolist()).hex() == low + high


def test_golden_bytes_of_8_and_1_bits():
    codes = torch.tensor([200, 1, 0, 255, 7, 8, 9, 10], dtype=torch.uint8)
    assert pack(codes, 8).tolist() == codes.tolist()
    assert pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.uint8), 1).tolist() == [0b10001101]


@pytest.mark.parametrize("bits", BITS)
def test_input_that_is_not_contiguous(bits):
    codes = random_codes(64, 6, 32, bits=bits)
    turned = codes.transpose(0, 1)[:, ::2].flip(1)  # [6, 32 of 64, 32]
    assert not turned.is_contiguous()
    assert torch.equal(pack(turned, bits), pack(turned.contiguous(), bits))
    packed = pack(codes, bits)
    wide = torch.zeros(64, 6, 2 * packed.shape[-1], dtype=torch.uint8)
    wide[..., ::2] = packed
    assert torch.equal(unpack(wide[..., ::2], bits, 32), codes)


@pytest.mark.parametrize("bits", BITS)
def test_packing_does_not_write_into_its_input(bits):
    codes = random_codes(3, 40, bits=bits)
    before = codes.clone()
    packed = pack(codes, bits)
    packed.fill_(255)
    assert torch.equal(codes, before)


def test_no_rows_at_all():
    assert pack(torch.zeros(0, 32, dtype=torch.uint8), 4).shape == (0, 16)
    assert unpack(torch.zeros(0, 16, dtype=torch.uint8), 4, 32).shape == (0, 32)


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_widths_that_do_not_exist(bits):
    with pytest.raises(InputError, match=f"bits={bits} .*use 1 to 8"):
        packed_width(32, bits)
