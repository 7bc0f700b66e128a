"""Clip searches: where uniform codes of a block should end. Each returns one limit per block and head.

The values are uniform over -limit..limit in 2^b levels; what lies beyond is coded as the end level.

    percentile   the 99th percentile of |z|: near the least squared error for Gaussian values at 4 bits
    minimax      the largest error is least: from max|z| * (1 - 2^-b), half a step is lost inside and outside alike
    mse          least squared error over a geometric grid from max|z| down to an eighth of it
"""

from __future__ import annotations

import torch

CLIPS = ("none", "percentile", "minimax", "mse")
_PERCENTILE = 0.99
_GRID = tuple(2 ** (-i / 8) for i in range(25))


def clip_limit(z: torch.Tensor, bits: int, clip: str) -> torch.Tensor:
    """Limit of the codes.

    Parameters
    ----------
    z : Tensor of shape (blocks, kv_heads, tokens, head_dim), fp32
    bits : int
    clip : str
        One of `CLIPS`; ``none`` is the largest magnitude.

    Returns
    -------
    Tensor of shape (blocks, kv_heads, 1, 1), fp32
    """
    size = z.abs().flatten(-2)
    if clip == "percentile":
        limit = size.kthvalue(max(1, round(_PERCENTILE * size.shape[-1])), dim=-1).values[..., None, None]
    else:
        limit = size.amax(-1)[..., None, None]
    if clip == "minimax":
        limit = limit * (1 - 2.0**-bits)
    return _least_squares(z, bits, limit) if clip == "mse" else limit


def uniform_codes(z: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes 0..2^bits-1 of the levels (code - (2^bits - 1)/2) * step, as fp32."""
    return torch.floor(z / step + 2 ** (bits - 1)).clamp_(0, 2**bits - 1)


def _least_squares(z: torch.Tensor, bits: int, top: torch.Tensor) -> torch.Tensor:
    centre = (2**bits - 1) / 2
    best, least = top, torch.full_like(top, torch.inf)
    for share in _GRID:
        step = (top * share / centre).clamp_min(torch.finfo(z.dtype).tiny)
        error = ((uniform_codes(z, step, bits) - centre) * step - z).square().mean((-2, -1), keepdim=True)
        best = torch.where(error < least, top * share, best)
        least = torch.minimum(error, least)
    return best
