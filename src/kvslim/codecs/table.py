"""table: codes of any fixed table of levels, with a scale per token or channel group.

    x[t,c] ~ offset[c] + channel[c] * token[t,j] * TABLE[code[t,c]]

The values of a scale group are divided by their rms r (``nf``: their largest magnitude), coded to the nearest level,
and the scale is then fitted to the codes (see scales.py). ``mean`` stores the block mean as the offset; ``std`` divides
by the block's standard deviation per channel (blockwise variance equalization). Both are fp16 and the residual is taken
against the rounded values, so that their rounding costs nothing. ``feedback`` carries rounding errors (see feedback.py)
and fits the scale in the metric of the queries: s = (y^T M z) / (y^T M y).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, check_group, group_of, grouped, midpoints, nearest, token_layout
from kvslim.codecs.feedback import code_with_feedback, whiten
from kvslim.codecs.levels import KINDS, levels
from kvslim.codecs.scales import FITS, TINY, best_multiple, fit_ratio, normalised, root, to_fp16, total
from kvslim.errors import RecipeError
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice

# with feedback the best multiple of r is not quite that of plain rounding: these around it are tried as well
NEARBY = (0.95, 1.05)


@dataclass(frozen=True)
class TableCodec(Codec):
    """Codes of a fixed table.

    Attributes
    ----------
    bits : int
        1 to 8.
    kind : str
        Which levels, see levels.py.
    scale : str
        ``token``, or the number of channels per scale.
    fit : str
        How the stored scale follows from the codes, see scales.py.
    mean, std : bool
        Store the block mean, the block standard deviation, per channel.
    feedback : bool
        Carry rounding errors while writing; needs one scale per token.
    """

    bits: int = choice(4, 1, 2, 3, 4, 5, 6, 7, 8)
    kind: str = choice("lloyd", *KINDS)
    scale: str = "token"
    fit: str = choice("ls", *FITS)
    mean: bool = False
    std: bool = False
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.scale != "token" and not self.scale.isdigit():
            raise RecipeError(f"table: scale={self.scale}; use token or a number of channels")
        if self.feedback and (self.std or self.scale != "token"):
            what = "std" if self.std else f"scale={self.scale}"
            raise RecipeError(f"table: feedback needs one scale per token, got {what}; drop it or feedback")
        levels(self.kind, self.bits)  # refuses a width that the kind does not have

    @property
    @override
    def needs_queries(self) -> bool:
        return self.feedback

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        group = group_of(self.scale, head_dim)
        check_group("table", group, head_dim)
        parts = [Part("token", (block, head_dim // group), "fp16")]
        if self.mean:
            parts.append(Part("offset", (head_dim,), "fp16"))
        if self.std:
            parts.append(Part("channel", (head_dim,), "fp16"))
        return token_layout(head_dim, block, self.bits, group, tuple(parts))

    @override
    def table(self) -> torch.Tensor:
        return levels(self.kind, self.bits)

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        statistics: dict[str, torch.Tensor] = {}
        if self.mean:
            offset = to_fp16(total(x, -2) / x.shape[-2])
            x = x - offset.float()
            statistics["offset"] = offset.squeeze(-2)
        if self.std:
            channel = to_fp16(root(total(x.square(), -2) / x.shape[-2]))
            x = divided(x, channel.float())
            statistics["channel"] = channel.squeeze(-2)
        values = grouped(x, group_of(self.scale, x.shape[-1]))
        z, r = normalised(values, by_range=self.kind == "nf")
        table = self.table().to(x.device)
        multiple = best_multiple(z, table) if self.fit == "search" else torch.ones_like(r)
        if self.feedback and feedback is not None:
            codes, ratio = self._carried(z.squeeze(-2), multiple.squeeze(-2), table, feedback)
            ratio = ratio.unsqueeze(-2)
        else:
            codes = nearest(z / multiple, table)
            ratio = fit_ratio(z, table[codes.int()], self.fit)
        token = to_fp16(r * ratio).squeeze(-1)
        return {"code": pack(codes.reshape(x.shape), self.bits), "token": token, **statistics}

    def _carried(
        self, z: torch.Tensor, multiple: torch.Tensor, table: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scale ratio of z [B, G, T, D] with feedback, at `multiple` [B, G, T, 1] or the best one near it."""
        whole = whiten(z, factor)
        codes, ratio, loss = _carried_at(z, whole, multiple, table, factor, self.fit)
        for nearby in NEARBY if self.fit == "search" else ():
            other_codes, other_ratio, other_loss = _carried_at(z, whole, multiple * nearby, table, factor, self.fit)
            better = other_loss < loss
            codes = torch.where(better, other_codes, codes)
            ratio = torch.where(better, other_ratio, ratio)
            loss = torch.minimum(other_loss, loss)
        return codes, ratio


def _carried_at(
    z: torch.Tensor,
    whole: torch.Tensor,
    multiple: torch.Tensor,
    table: torch.Tensor,
    factor: torch.Tensor,
    fit: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of z / multiple with feedback, the scale ratio of z, and the error in the metric of the queries.

    `whole` is z, whitened.
    """
    edges = midpoints(table)

    def quantize(_: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.bucketize(column, edges, out_int32=True)
        return codes, table[codes]

    codes, _, error = code_with_feedback(z / multiple, factor, quantize)
    whole = whole / multiple
    y = whole - error
    ratio = fit_ratio(whole, y, fit)
    loss = total((multiple * (whole - ratio * y)).square())
    return codes, multiple * ratio, loss


def divided(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return x / by, and 0 where `by` is 0: such a channel is constant and its offset says it all."""
    return torch.where(by > 0, x / by.clamp_min(TINY), torch.zeros_like(x))
