"""How a layout looks to a kernel: its segments cut into parts that one shift and one mask unpack. Plain frozen values.

A segment's codes are read as ``2**k`` parts of whole vectors where the first plane of `bitpack` holds several channels
in a byte: part `k` of a 4-bit segment is all low nibbles, or all high ones. Narrow planes and widths without such a
division are read as one part, every channel from its own byte.

Values are what the table says, divided by a `unit` that the scales take back:

``affine``   ``code - zero``: the code becomes the mantissa of an fp16 number (``0x6400 | code`` is 1024 + code)
``e2m1``     four-bit float, shifted into fp16's exponent and mantissa
``e4m3``, ``e5m2``   eight-bit float, the same way
``table``    looked up in fp16
``raw``      the stored value itself
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch

from kvslim.bitpack import PLANES, packed_width, unit_of
from kvslim.codecs.levels import integer_unit
from kvslim.layout import RAW_BITS, STORAGE, PackedLayout, Segment, part_nbytes

_NARROWEST = 16  # channels of a part that a matrix unit still takes
_WIDEST = 1024  # stored channels of one side
_PARTS = ("code", "token", "zero", "channel", "offset", "block")
ADDRESSES = 2 * len(_PARTS)  # columns of a pool's address table: the parts of K, then those of V


class NoTritonFormError(Exception):
    """A layout, transform or input that the kernels do not read; the message names it."""


@dataclass(frozen=True)
class Plane:
    """Some bits of the codes: `bits` from `low` on, in `nbytes` bytes of each unit from byte `start` on."""

    bits: int
    low: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class CodeForm:
    """One segment, or a piece of it: segments are cut into widths that are powers of two.

    Attributes
    ----------
    width, first : int
        Channels, and the first of them among the stored ones.
    parts, lanes, run : int
        Parts; channels of one part, padded to a power of two; adjacent channels of a part.
    unit_channels, unit_nbytes, start : int
        A packing unit of bitpack.py, and the segment's first byte in a token's codes.
    planes : tuple of Plane
    values, zero, unit
        How codes become values, see the module docstring; `unit` is a float, as is `zero`.
    table : int
        First entry in the table of all segments.
    group, expand, scale : int
        Channels per token scale where there are several, else 0; how many adjacent ones of a part share one; the first
        scale among a token's.
    place : int
        Its first part among those of all segments.
    """

    width: int
    first: int
    parts: int
    lanes: int
    run: int
    unit_channels: int
    unit_nbytes: int
    start: int
    planes: tuple[Plane, ...]
    values: str
    zero: float
    unit: float
    table: int
    group: int
    expand: int
    scale: int
    place: int

    @property
    def entries(self) -> int:
        """Entries of its table."""
        return 1 << sum(plane.bits for plane in self.planes)


@dataclass(frozen=True)
class SideForm:
    """One side.

    Attributes
    ----------
    codes : tuple of CodeForm
    width, block : int
        Stored channels; tokens per block.
    code_nbytes, scales : int
        Bytes of a token's codes; token scales per token.
    token, zero, channel, offset, scale : str
        Dtype of the part, empty where there is none; `scale` is the part ``block``.
    dot : str
        Dtype that values are multiplied in.
    nbytes : tuple of int
        Bytes per block and kv head of each part, in the order of `part_names`; 0 where it is absent.
    columns, columns_of_all : int
        Where the side's parts begin in the address table, and the width of that table.
    ragged : bool
        Whether the last step of a block reaches past it (`stepped`).
    """

    codes: tuple[CodeForm, ...]
    width: int
    block: int
    code_nbytes: int
    scales: int
    token: str
    zero: str
    channel: str
    offset: str
    scale: str
    dot: str
    nbytes: tuple[int, ...]
    columns: int
    columns_of_all: int = ADDRESSES
    ragged: bool = False

    @property
    def parts(self) -> int:
        """Parts of all segments."""
        return sum(codes.parts for codes in self.codes)


def side_form(
    layout: PackedLayout, table: torch.Tensor | None, side: str, *, arithmetic: bool = True, widest: int = _WIDEST
) -> SideForm:
    """Describe one side's layout to the kernels.

    Parameters
    ----------
    layout : PackedLayout
    table : Tensor of shape (sum of 2**bits over segments,), fp32, or None
        As the codec gives it.
    side : str
        ``k`` or ``v``.
    arithmetic : bool
        Whether codes of up to four bits become values by arithmetic where they can, or are looked up.
    widest : int
        Channels of a segment that are taken at once at most, a power of two.

    Raises
    ------
    NoTritonFormError
        The layout is wider than the kernels go.
    """
    width = sum(segment.width for segment in layout.segments)
    if width > _WIDEST:
        raise NoTritonFormError(f"{width} stored channels: the kernels go to {_WIDEST}")
    parts = {part.name: part for part in layout.parts}
    dtype = {name: parts[name].dtype if name in parts else "" for name in _PARTS}
    code_nbytes = parts["code"].shape[-1] * STORAGE[parts["code"].dtype].itemsize
    scales = parts["token"].shape[-1] if "token" in parts else 0
    return SideForm(
        codes=_codes(layout, table, arithmetic, widest),
        width=width,
        block=layout.block,
        code_nbytes=code_nbytes,
        scales=scales,
        token=dtype["token"],
        zero=dtype["zero"],
        channel=dtype["channel"],
        offset=dtype["offset"],
        scale=dtype["block"],
        dot=dtype["code"] if table is None else "fp16",
        nbytes=tuple(part_nbytes(parts[name]) if name in parts else 0 for name in _PARTS),
        columns=0 if side == "k" else len(_PARTS),
    )


def stepped(form: SideForm, tokens: int) -> SideForm:
    """`form` for kernels that take so many tokens of a block at a time."""
    return replace(form, ragged=form.block % tokens > 0)


def kernel_table(form: SideForm, table: torch.Tensor | None) -> torch.Tensor:
    """Return the table that the kernels look values up in, fp16; one unused entry where nothing is looked up."""
    if table is None or all(codes.values != "table" for codes in form.codes):
        return torch.zeros(1, dtype=torch.float16)
    segments = {codes.table: codes for codes in form.codes}  # pieces of a segment share its entries
    pieces = [table[first : first + codes.entries] / codes.unit for first, codes in segments.items()]
    return torch.cat(pieces).half()


def part_names() -> tuple[str, ...]:
    """Parts in the order of the address table's columns."""
    return _PARTS


def _codes(layout: PackedLayout, table: torch.Tensor | None, arithmetic: bool, widest: int) -> tuple[CodeForm, ...]:
    found: list[CodeForm] = []
    first = start = entry = scale = 0
    for segment in layout.segments:
        if segment.bits >= RAW_BITS:
            lanes = power_of_two(segment.width)
            return (CodeForm(segment.width, 0, 1, lanes, lanes, lanes, 0, 0, (), "raw", 0.0, 1.0, 0, 0, 1, 0, 0),)
        assert table is not None
        levels = table[entry : entry + 2**segment.bits]
        values, zero, unit = "table", 0.0, integer_unit(levels.float()) or 1.0
        if arithmetic or segment.bits > 4:
            values, zero, unit = _values(levels, segment.bits)
        common = _code_form(segment, values, zero, unit)
        at = 0
        for width in _pieces(segment, widest):
            parts = common.parts if width // common.parts >= _NARROWEST else 1
            run = common.run if parts > 1 else power_of_two(width)
            piece = replace(
                common,
                width=width,
                first=first + at,
                parts=parts,
                lanes=power_of_two(width // parts),
                run=run,
                start=start + at // common.unit_channels * common.unit_nbytes,
                table=entry,
                expand=gcd(run, common.group) if common.group else 1,
                scale=scale + (at // common.group if common.group else 0),
                place=sum(form.parts for form in found),
            )
            found.append(piece)
            at += width
        first, start = first + segment.width, start + packed_width(segment.width, segment.bits)
        entry += 2**segment.bits
        scale += segment.width // segment.group if segment.group else 0
    return tuple(found)


def _pieces(segment: Segment, widest: int) -> list[int]:
    """Widths that are powers of two, `widest` at most, so that no lane is padding; the whole where that cannot be."""
    left, pieces = segment.width, []
    while left:
        pieces.append(min(widest, 1 << (left.bit_length() - 1)))
        left -= pieces[-1]
    group = segment.group if segment.group < segment.width else 1
    if min(pieces) < _NARROWEST or any(width % (group or 1) for width in pieces):
        return [segment.width]
    return pieces


def _code_form(segment: Segment, values: str, zero: float, unit: float) -> CodeForm:
    """A whole segment, as if it were the first."""
    channels = unit_of(segment.width)
    planes, low, at = [], 0, 0
    for bits in PLANES[segment.bits]:
        planes.append(Plane(bits, low, at, channels * bits // 8))
        low, at = low + bits, at + channels * bits // 8
    parts = 1 if segment.width % channels else 8 // planes[0].bits
    return CodeForm(
        width=segment.width,
        first=0,
        parts=parts,
        lanes=power_of_two(segment.width // parts),
        run=channels // parts,
        unit_channels=channels,
        unit_nbytes=channels * segment.bits // 8,
        start=0,
        planes=tuple(planes),
        values=values,
        zero=zero,
        unit=unit,
        table=0,
        group=segment.group if 0 < segment.group < segment.width else 0,
        expand=1,
        scale=0,
        place=0,
    )


def _values(table: torch.Tensor, bits: int) -> tuple[str, float, float]:
    """How codes of `table` become values, and with which zero and unit."""
    codes = torch.arange(2**bits, dtype=torch.float64)
    levels = table.double().cpu()
    step = float(levels[1] - levels[0])
    zero = abs(float(levels[0]) / step) if step else 0.25
    if 0 <= zero < 1024 and 2 * zero == round(2 * zero) and torch.equal((codes - zero) * step, levels):
        return "affine", zero, step
    if bits == 4 and torch.equal(levels, _float_levels(codes, 1, 2.0**-14)):
        return "e2m1", 0.0, 1.0
    if bits == 8:
        for name, mantissa, unit in (("e4m3", 3, 1.0), ("e5m2", 2, 2.0**-15)):
            floats = _float_levels(codes, mantissa, 1.0) * unit
            finite = levels != 0  # the formats' NaN and infinity read 0 in the table; no code has them
            if torch.equal(floats[finite], levels[finite]):
                return name, 0.0, unit
    return "table", 0.0, integer_unit(table.float()) or 1.0


def _float_levels(codes: torch.Tensor, mantissa: int, unit: float) -> torch.Tensor:
    """Sign-and-magnitude codes whose bits are put over fp16's, with `mantissa` bits of mantissa, divided by `unit`."""
    bits = codes.int()
    sign = 1 << (3 if mantissa == 1 else 7)
    half = ((bits & (sign - 1)) << (10 - mantissa)).to(torch.int16).view(torch.float16).double()
    return torch.where((bits & sign) > 0, -half, half) / unit


def power_of_two(count: int) -> int:
    """The power of two, 2 or more, that so many channels are padded to."""
    return 1 << max(count - 1, 1).bit_length()
