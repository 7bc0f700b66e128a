"""kvarn: two-sided variance balancing of a block, then asymmetric rounding per token (KVarN, arXiv 2606.03458).

A block X [tokens, channels] is divided by a column factor m and a row factor n, found by eight passes over the standard
deviations s of columns, then rows, in the log domain:

    log m += log( clip(s_col, 1e-3, 1e3) / target ),   log n likewise,   both kept within -0.3 .. 10

with target the least clipped deviation of the block at the start. Kept are the factors of the pass with the least
imbalance, max(s) / min(s) over rows and columns together. The row factor is absorbed by each token's scale and zero:

    x[t,c] ~ channel[c] * ( token[t] * code[t,c] + zero[t] ),   channel = m

A Hadamard transform comes first. Keep some first tokens exact, or they ruin the first block's statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.bitpack import pack
from kvslim.codecs.base import Codec, token_layout
from kvslim.codecs.scales import asymmetric_range, range_error, to_fp16
from kvslim.layout import PackedLayout, Part
from kvslim.registry import choice

_PASSES = 8
_DEVIATION = (1e-3, 1e3)
_LOG = (-0.3, 10.0)


@dataclass(frozen=True)
class KVarNCodec(Codec):
    """Uniform codes after two-sided balancing.

    Attributes
    ----------
    bits : int
        1 to 8.
    """

    bits: int = choice(4, 1, 2, 3, 4, 5, 6, 7, 8)

    @property
    @override
    def mse_bound(self) -> float:
        return range_error(2**self.bits - 1)

    @override
    def layout(self, head_dim: int, block: int) -> PackedLayout:
        parts = (
            Part("token", (block, 1), "fp16"),
            Part("zero", (block, 1), "fp16"),
            Part("channel", (head_dim,), "fp16"),
        )
        return token_layout(head_dim, block, self.bits, head_dim, parts)

    @override
    def table(self) -> torch.Tensor:
        return torch.arange(2**self.bits, dtype=torch.float32)

    @override
    def encode(self, x: torch.Tensor, feedback: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        channel = to_fp16(column_factor(x))
        values = x / channel.float()
        steps = 2**self.bits - 1
        token, zero = asymmetric_range(values.amin(-1, keepdim=True), values.amax(-1, keepdim=True), steps)
        codes = torch.round((values - zero.float()) / token.float()).clamp_(0, steps).to(torch.uint8)
        return {"code": pack(codes, self.bits), "token": token, "zero": zero, "channel": channel.squeeze(-2)}


def column_factor(x: torch.Tensor) -> torch.Tensor:
    """Column factor m of least imbalance.

    Parameters
    ----------
    x : Tensor of shape (..., tokens, channels), fp32

    Returns
    -------
    Tensor of shape (..., 1, channels), fp32
    """
    columns, rows = _deviation(x, -2), _deviation(x, -1)
    target = torch.minimum(columns.amin((-2, -1), keepdim=True), rows.amin((-2, -1), keepdim=True))
    log_column, log_row = torch.zeros_like(columns), torch.zeros_like(rows)
    best, least = log_column, _imbalance(columns, rows)
    for _ in range(_PASSES):
        log_column = (log_column + (columns / target).log()).clamp(*_LOG)
        rows = _deviation(x / (log_column + log_row).exp(), -1)
        log_row = (log_row + (rows / target).log()).clamp(*_LOG)
        balanced = x / (log_column + log_row).exp()
        columns, rows = _deviation(balanced, -2), _deviation(balanced, -1)
        imbalance = _imbalance(columns, rows)
        best = torch.where(imbalance < least, log_column, best)
        least = torch.minimum(imbalance, least)
    return best.exp()


def _deviation(x: torch.Tensor, over: int) -> torch.Tensor:
    return x.std(over, correction=0, keepdim=True).clamp(*_DEVIATION)


def _imbalance(columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Largest over smallest deviation of rows and columns together, ``[..., 1, 1]``."""
    both = torch.cat((columns.flatten(-2), rows.flatten(-2)), dim=-1)
    return (both.amax(-1) / both.amin(-1))[..., None, None]
