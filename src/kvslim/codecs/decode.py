"""Read packed blocks: the one formula of the packed form, in fp32. Every kernel must equal this.

With the parts of layout.py, ``x'[t,c] = offset[c] + channel[c] * block * (token[t,j] * TABLE[code[t,c]] + zero[t,j])``.
"""

from __future__ import annotations

import torch

from kvslim.bitpack import packed_width, unpack
from kvslim.layout import FLOAT8, RAW_BITS, PackedBlock


def decode(packed: PackedBlock, table: torch.Tensor | None) -> torch.Tensor:
    """Return the values of packed blocks.

    Parameters
    ----------
    packed : PackedBlock
        Parts with any leading axes.
    table : Tensor of shape (sum of 2**bits over segments,), fp32, or None
        TABLE of the side; None where codes are the values.

    Returns
    -------
    Tensor of shape (..., tokens, head_dim), fp32
        In the transformed basis of the side.
    """
    parts, layout = packed.parts, packed.layout
    code = parts["code"]
    if layout.segments[0].bits >= RAW_BITS:
        return code.float()
    assert table is not None
    values, groups = [], 0
    start = first = 0
    for segment in layout.segments:
        size = packed_width(segment.width, segment.bits)
        codes = unpack(code[..., start : start + size], segment.bits, segment.width)
        x = table[first : first + 2**segment.bits].index_select(0, codes.flatten().int()).view(codes.shape)
        if segment.group:
            count = segment.width // segment.group
            x = x.unflatten(-1, (count, segment.group))
            x = x * read(packed, "token")[..., groups : groups + count, None]
            if "zero" in parts:
                x = x + read(packed, "zero")[..., groups : groups + count, None]
            x = x.flatten(-2)
            groups += count
        values.append(x)
        start, first = start + size, first + 2**segment.bits
    x = values[0] if len(values) == 1 else torch.cat(values, dim=-1)
    if "block" in parts:
        x = x * read(packed, "block")[..., None]
    if "channel" in parts:
        x = x * read(packed, "channel")[..., None, :]
    if "offset" in parts:
        x = x + read(packed, "offset")[..., None, :]
    return x


def read(packed: PackedBlock, name: str) -> torch.Tensor:
    """Return one scale or offset part in fp32, one-byte floats decoded."""
    dtype = next(part.dtype for part in packed.layout.parts if part.name == name)
    tensor = packed.parts[name]
    return (tensor.view(FLOAT8[dtype]) if dtype in FLOAT8 else tensor).float()
