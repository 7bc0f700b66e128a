"""Scales: how a group of values is normalised before its codes are searched, and which scale is stored afterwards.

With z the values divided by r and y = TABLE[code], the stored scale is s = r * ratio:

    plain   1                        TurboQuant's letter: the norm itself
    ls      <z,y> / <y,y>            least squares against the codes
    norm    ||z|| / ||y||            norm-matched: ||s y|| = ||r z||
    eden    <z,z> / <z,y>            unbiased (EDEN, Vargaftik et al. 2022): <s y, r z> = ||r z||^2
    search  as ls, with the codes of z/m for the m of least squared error among nine from 0.8 to 1.2: the same bytes and
            0.79, 0.86, 0.91 of the error of ls at 4 bits and head_dim 64, 128, 256 (3 bits .90, .95, .97; 2 bits .98)
"""

from __future__ import annotations

import torch

from kvslim.codecs.base import nearest

FITS = ("ls", "plain", "norm", "eden", "search")
TINY = 2.0**-24  # smallest fp16 step
LARGEST = 65504.0
MULTIPLES = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    """Round to fp16, saturating."""
    return x.clamp(-LARGEST, LARGEST).half()


def range_error(steps: int) -> float:
    """Mean square error of `steps` even steps over the range of N(0,1): below 10 in a block of 2^14 values."""
    return (10 / steps) ** 2 / 12


def total(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Sum along `axis`, which stays as size 1, by folding the axis in half (zero-padded to a power of two).

    Scales are bytes, and this order of additions is the same on every processor; a library's own is not.
    """
    x = x.movedim(axis, 0)
    size = 1 << (len(x) - 1).bit_length()
    while size > 1:
        size //= 2
        low, high = x[:size], x[size:]
        x = torch.cat((low[: len(high)] + high, low[len(high) :])) if len(high) < size else low + high
    return x.movedim(0, axis)


def root(x: torch.Tensor) -> torch.Tensor:
    """Square root, fp32, rounded correctly: scales are bytes, and torch's own differs by a bit between processors."""
    return x.double().sqrt().float()


def normalised(values: torch.Tensor, *, by_range: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each group by its rms, or by its largest magnitude.

    Parameters
    ----------
    values : Tensor of shape (..., group), fp32
    by_range : bool

    Returns
    -------
    z : Tensor of shape (..., group), fp32
    r : Tensor of shape (..., 1), fp32
        Rounded to fp16; 0 where the group is zero, whose z is 0 too.
    """
    size = values.abs().amax(-1, keepdim=True) if by_range else root(total(values.square()) / values.shape[-1])
    r = to_fp16(size).float()
    return values / r.clamp_min(TINY), r


def fit_ratio(z: torch.Tensor, y: torch.Tensor, fit: str) -> torch.Tensor:
    """Ratio of the stored scale to r, of shape (..., 1).

    Parameters
    ----------
    z, y : Tensor of shape (..., group), fp32
        Normalised values and what their codes stand for.
    fit : str
        One of `FITS`.
    """
    if fit == "plain":
        return torch.ones_like(z[..., :1])
    if fit in ("ls", "search"):
        return total(z * y) / total(y * y).clamp_min(TINY)
    if fit == "norm":
        return root(total(z * z) / total(y * y).clamp_min(TINY))
    return total(z * z) / total(z * y).clamp_min(TINY)


def best_multiple(z: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Multiple m of r whose codes, those of z/m, err least under a least-squares scale; ``[..., 1]``."""
    best, most = torch.ones_like(z[..., :1]), torch.zeros_like(z[..., :1])
    for multiple in MULTIPLES:
        y = table[nearest(z * (1 / multiple), table).int()]  # a product: nine divisions would be half of the work
        # what a least-squares scale explains of <z,z>
        gain = total(z * y).square() / total(y * y).clamp_min(TINY)
        best = torch.where(gain > most, multiple, best)
        most = torch.maximum(gain, most)
    return best


def asymmetric_range(low: torch.Tensor, high: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fp16 scale and zero so that `steps` uniform steps from zero reach from `low` to `high`.

    A range of zero becomes the smallest scale, and the zero point alone reproduces the constant.
    """
    zero = to_fp16(low)
    # the range is counted from the stored zero, so that its rounding cannot push the top of the range out
    scale = (high - zero.float()) / steps
    return scale.clamp(TINY, LARGEST).half(), zero
