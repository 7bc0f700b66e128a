"""What a codec is: it says which parts it stores, and turns tokens into those parts.

Reading is written once, in decode.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvslim.bitpack import packed_width
from kvslim.errors import RecipeError
from kvslim.layout import PackedLayout, Part, Segment


class Codec(ABC):
    """Settings of a codec, a frozen dataclass."""

    @property
    def needs_queries(self) -> bool:
        """Whether encoding uses the query moment (write-time feedback)."""
        return False

    @property
    def mse_bound(self) -> float | None:
        """Mean square error on N(0,1) that it keeps below at any head_dim; None: 32 * 4**-bits, bits per code.

        `kvslim.testing` holds the codec to it. The default is 2.5 bits worse than Shannon's limit.
        """
        return None

    @abstractmethod
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        """Which parts a block has; raises RecipeError where head_dim and the settings do not fit."""

    def table(self) -> torch.Tensor | None:
        """TABLE of all segments in turn, fp32 of shape (sum of 2**bits,); None where codes are the values."""
        return None

    @abstractmethod
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Encode tokens.

        Parameters
        ----------
        x : Tensor of shape (blocks, kv_heads, tokens, head_dim), fp32
            Transformed tokens. `tokens` is the block size; fewer only for codecs without block statistics.
        feedback : Tensor of shape (kv_heads, head_dim, head_dim), optional
            U of the query metric for write-time feedback (`codecs.feedback.metric_factor`).

        Returns
        -------
        dict
            Part name -> tensor of shape (blocks, kv_heads, ...) as the layout declares.
        """

    @property
    def earlier_blocks(self) -> int:
        """How many blocks before a block its parameters are drawn from, too; 0 for nearly every codec."""
        return 0

    def encode_after(self, x: torch.Tensor, earlier: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode one block, for codecs with `earlier_blocks`.

        Parameters
        ----------
        x : Tensor of shape (1, kv_heads, tokens, head_dim), fp32
        earlier : Tensor of shape (1, kv_heads, earlier tokens, head_dim), fp32
            What the bytes of the blocks before it decode to; as few as there are, none for the first block.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes each block from its own tokens")

    def expand_query(self, query: torch.Tensor) -> torch.Tensor:
        """Map transformed queries (..., head_dim) to the stored width; the identity where that is head_dim."""
        return query

    def reduce_output(self, acc: torch.Tensor) -> torch.Tensor:
        """Map summed values (..., stored width) back to head_dim; the identity where that is the stored width."""
        return acc


def group_of(scale: str, head_dim: int) -> int:
    """Channels per scale of a codec's ``scale`` argument: its number, else all channels."""
    return int(scale) if scale.isdigit() else head_dim


def check_group(codec: str, group: int, head_dim: int) -> None:
    """Raise RecipeError unless `group` divides `head_dim`."""
    if group < 1 or head_dim % group:
        sizes = {8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 256, 512, head_dim}
        allowed = [size for size in sorted(sizes) if head_dim % size == 0]
        raise RecipeError(
            f"{codec}: group={group} does not divide head_dim={head_dim}; use one of {', '.join(map(str, allowed))}"
        )


def token_layout(head_dim: int, block: int, bits: int, group: int, parts: tuple[Part, ...]) -> PackedLayout:
    """One-segment layout: the code part, then `parts`."""
    code = Part("code", (block, packed_width(head_dim, bits)), "u8")
    return PackedLayout(head_dim, block, (Segment(head_dim, bits, group),), (code, *parts))


def grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """View the last axis as (groups, group)."""
    return x.unflatten(-1, (-1, group))


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest entry of an ascending `table`, ties to the lower index; uint8, shape of `x`."""
    return torch.bucketize(x.contiguous(), midpoints(table), out_int32=True).to(torch.uint8)


def midpoints(table: torch.Tensor) -> torch.Tensor:
    """Edges between the cells of an ascending `table`."""
    return (table[1:] + table[:-1]) / 2
