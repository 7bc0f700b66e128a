"""The packed form: which parts a block of packed tokens has. Plain frozen values, no behaviour.

Every side (K or V) of every recipe is stored as::

    x'[t,c] ~ offset[c] + channel[c] * block * ( token[t,j] * TABLE[code[t,c]] + zero[t,j] )

``t`` counts the tokens of a block, ``c`` the channels of one kv head, ``j`` the scale group of channel ``c``. A part
that is absent counts as 1 (scales) or 0 (zero, offset). Channels may be divided into *segments* with their own bit
width and table (outlier channels at one bit more; a residual sign plane); nearly every layout has exactly one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Part dtype name -> the torch dtype that holds its bytes. One-byte floats are stored as uint8 so that every tensor
# operation and file format can carry them.
STORAGE = {
    "u8": torch.uint8,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
}
FLOAT8 = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
TOKEN_PARTS = ("code", "token", "zero")  # first axis counts tokens; the rest stands once per block
RAW_BITS = 16  # codes this wide are the values themselves, without a table


@dataclass(frozen=True)
class Segment:
    """Adjacent channels that share a bit width and a table.

    Attributes
    ----------
    width : int
        Number of channels.
    bits : int
        Bits per code, 1-8; 16 or 32 means the values themselves in a float dtype.
    group : int
        Channels per token scale (`width`: one scale per token); 0 where there is no token scale.
    """

    width: int
    bits: int
    group: int = 0


@dataclass(frozen=True)
class Part:
    """One tensor of a block: its name, shape per block and kv head, and dtype name (a key of `STORAGE`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PackedLayout:
    """Which parts exist for one side of one layer.

    Attributes
    ----------
    head_dim : int
        Channels of the model's K or V.
    block : int
        Tokens per block, P.
    segments : tuple of Segment
        Channel ranges in storage order; their widths sum to the stored width.
    parts : tuple of Part
        ``code`` always; ``token``, ``zero``, ``channel``, ``offset``, ``block`` where the codec has them.
    """

    head_dim: int
    block: int
    segments: tuple[Segment, ...]
    parts: tuple[Part, ...]


@dataclass
class PackedBlock:
    """Tensors of one or more blocks.

    Attributes
    ----------
    layout : PackedLayout
    parts : dict of str to Tensor
        Name -> tensor of shape ``(..., *part.shape)``; leading axes are usually ``(blocks, kv_heads)``.
    """

    layout: PackedLayout
    parts: dict[str, torch.Tensor]


def part_nbytes(part: Part) -> int:
    """Bytes of one part, per block and kv head."""
    count = 1
    for size in part.shape:
        count *= size
    return count * STORAGE[part.dtype].itemsize


def block_nbytes(layout: PackedLayout) -> int:
    """Bytes of one block of one kv head, all parts."""
    return sum(part_nbytes(part) for part in layout.parts)


def bits_per_value(layout: PackedLayout) -> float:
    """Stored bits per value of the model's K or V, all parts of a full block."""
    return 8 * block_nbytes(layout) / (layout.block * layout.head_dim)


def is_token_wise(layout: PackedLayout) -> bool:
    """Whether each token is stored on its own (no block statistics), so that it may be packed as it comes."""
    return all(part.name in TOKEN_PARTS for part in layout.parts)
