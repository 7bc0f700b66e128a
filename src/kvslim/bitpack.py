"""Byte order of packed codes: the truth that every kernel must equal.

Channels are taken in units of 32 (16 or 8 where the width is no multiple of 32). A code of ``b`` bits is cut, lowest
bits first, into planes of 8, 4, 2 or 1 bits (3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1). A plane of ``w`` bits takes
``n = unit * w / 8`` bytes; byte ``i`` holds the elements ``i, i+n, i+2n, ...`` at bit 0, w, 2w, ...

So a 4-bit unit is 16 bytes with channels 0-15 in the low and 16-31 in the high nibbles: one shift and one mask unpack
it in channel order on any vector unit.
"""

from __future__ import annotations

import torch

from kvslim.errors import InputError

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def unit_of(width: int) -> int:
    """Channels per packing unit: the largest of 32, 16, 8 that divides `width`, else 8 (the last unit is padded)."""
    return next((unit for unit in (32, 16, 8) if width % unit == 0), 8)


def packed_width(width: int, bits: int) -> int:
    """Bytes that `width` codes of `bits` bits take."""
    if bits not in PLANES:
        raise InputError(f"bits={bits} cannot be packed; use 1 to 8")
    unit = unit_of(width)
    return -(-width // unit) * unit * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes along the last axis.

    Parameters
    ----------
    codes : Tensor of shape (..., width), uint8
        Values below ``2**bits``.
    bits : int
        1 to 8.

    Returns
    -------
    Tensor of shape (..., packed_width(width, bits)), uint8
    """
    width, unit = codes.shape[-1], unit_of(codes.shape[-1])
    total = packed_width(width, bits) * 8 // bits
    if total != width:
        codes = torch.nn.functional.pad(codes, (0, total - width))
    units = codes.reshape(*codes.shape[:-1], total // unit, unit)
    planes, low = [], 0
    for plane in PLANES[bits]:
        size = unit * plane // 8
        field = (units >> low) & (2**plane - 1)
        rows = field.reshape(*field.shape[:-1], 8 // plane, size)
        packed = rows[..., 0, :].clone()
        for k in range(1, 8 // plane):
            packed |= rows[..., k, :] << (plane * k)
        planes.append(packed)
        low += plane
    return torch.cat(planes, dim=-1).flatten(-2)


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Invert `pack`.

    Parameters
    ----------
    packed : Tensor of shape (..., packed_width(width, bits)), uint8
    bits, width : int
        As given to `pack`.

    Returns
    -------
    Tensor of shape (..., width), uint8
    """
    unit = unit_of(width)
    units = packed.unflatten(-1, (packed.shape[-1] * 8 // (unit * bits), unit * bits // 8))
    codes, low, start = torch.zeros_like(units[..., :1]), 0, 0
    for plane in PLANES[bits]:
        size = unit * plane // 8
        rows = units[..., start : start + size]
        field = torch.stack([(rows >> (plane * k)) & (2**plane - 1) for k in range(8 // plane)], dim=-2).flatten(-2)
        codes = codes | (field << low)
        low, start = low + plane, start + size
    return codes.flatten(-2)[..., :width]
