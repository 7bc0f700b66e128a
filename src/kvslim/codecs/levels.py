"""Code tables: the levels that codes of a given width stand for, ascending. Values are for a variable of unit rms.

lloyd      Lloyd-Max levels of N(0,1): each level is the mean of its cell, cells meet at midpoints.
lloydint   the same snapped to integers up to 127, 31 (``lloydint6``) or 15 (``lloydint5``), divided by the scale of
           least mean square error for N(0,1), so that TABLE * scale is an exact small integer for integer kernels.
log        a sign and 2^(b-1) geometric levels; smallest level and ratio of least mean square error for N(0,1).
nf         NormalFloat (QLoRA, arXiv 2305.14314): normal quantiles with an exact zero; 1 is the largest magnitude.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import torch

from kvslim.errors import RecipeError

KINDS = ("lloyd", "lloydint", "lloydint6", "lloydint5", "nf", "log")

_LLOYD = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
# positive integers and the scale they are divided by; the cost in MSE against lloyd stands beside each
_SNAPPED = {
    ("lloydint", 2): ((15, 50), 33.10491),  # 0.0 %
    ("lloydint", 3): ((10, 31, 55, 88), 40.90626),  # 0.0 %
    ("lloydint", 4): ((6, 18, 30, 43, 58, 75, 95, 127), 46.26453),  # 0.2 %
    ("lloydint6", 4): ((1, 4, 7, 11, 14, 18, 24, 31), 11.46090),  # 5.9 %
    ("lloydint5", 4): ((1, 2, 4, 6, 8, 10, 12, 15), 5.83177),  # 15 %
}
_LARGEST_INTEGER = 128
_INTEGER_TOLERANCE = 1e-4  # levels are rounded to fp32
_LOG = {  # bits: smallest level, ratio
    1: (0.797885, 1.0),
    2: (0.452780, 3.335876),
    3: (0.325562, 1.862682),
    4: (0.215936, 1.432675),
    5: (0.141339, 1.229819),
    6: (0.092353, 1.124833),
    7: (0.060263, 1.068368),
    8: (0.039252, 1.037473),
}


@lru_cache(maxsize=64)
def levels(kind: str, bits: int) -> torch.Tensor:
    """TABLE of shape (2**bits,), fp32, ascending.

    Raises
    ------
    RecipeError
        Where `kind` has no form of that width.
    """
    if kind == "lloyd":
        return _mirrored(_LLOYD[bits] if bits in _LLOYD else _lloyd(2 ** (bits - 1)))
    if kind == "log":
        smallest, ratio = _LOG[bits]
        return _mirrored([smallest * ratio**i for i in range(2 ** (bits - 1))])
    if kind == "nf" and bits >= 2:
        return torch.tensor(_normal_float(2**bits), dtype=torch.float32)
    if (kind, bits) in _SNAPPED:
        integers, scale = _SNAPPED[kind, bits]
        return _mirrored([integer / scale for integer in integers])
    allowed = [width for name, width in _SNAPPED if name == kind] or range(2, 9)
    raise RecipeError(
        f"table: kind={kind} has no {bits}-bit form; use bits {', '.join(map(str, allowed))}, or kind=lloyd"
    )


def integer_unit(table: torch.Tensor) -> float:
    """Return the unit that all levels are whole multiples of, up to 128 times; 0.0 where there is none."""
    return _integer_unit(tuple(table.tolist()))


@lru_cache(maxsize=64)
def _integer_unit(levels: tuple[float, ...]) -> float:
    values = torch.tensor(levels, dtype=torch.float64)
    largest = float(values.abs().max())
    for count in range(1, _LARGEST_INTEGER + 1):
        multiples = values * (count / largest)
        if float((multiples - multiples.round()).abs().max()) < _INTEGER_TOLERANCE:
            return largest / count
    return 0.0


def _mirrored(positive: tuple[float, ...] | list[float]) -> torch.Tensor:
    half = torch.tensor(positive, dtype=torch.float32)
    return torch.cat((-half.flip(0), half))


def _normal_float(size: int) -> list[float]:
    """Levels of NF: quantiles from one half to `edge` on either side of an exact zero, one more above it than below."""
    edge = 1 - (1 / (2 * (size - 1)) + 1 / (2 * size)) / 2
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:
        return [quantile(edge + (0.5 - edge) * i / count) for i in range(count)]

    above, below = side(size // 2), side(size // 2 - 1)
    top = above[0]
    return [-value / top for value in below] + [0.0] + [value / top for value in reversed(above)]


def _lloyd(count: int) -> list[float]:
    """Return the `count` positive Lloyd-Max levels of N(0,1): Lloyd steps, then Newton steps on the same equations."""
    quantile = NormalDist().inv_cdf
    start = [math.sqrt(3) * quantile(0.5 + (i + 0.5) / (2 * count)) for i in range(count)]  # the high-rate density
    level = torch.tensor(start, dtype=torch.float64)
    for _ in range(200):
        mass, moment, _ = _cells(level)
        level = moment / mass
    for _ in range(10):
        mass, moment, density = _cells(level)
        edges = (level[1:] + level[:-1]) / 2
        above, below = (level[:-1] - edges) * density / 2, (edges - level[1:]) * density / 2
        diagonal = mass.clone()
        diagonal[:-1] += above
        diagonal[1:] += below
        jacobian = torch.diag(diagonal) + torch.diag(above, 1) + torch.diag(below, -1)
        level = level - torch.linalg.solve(jacobian, level * mass - moment)
    return [round(value, 6) for value in level.tolist()]


def _cells(level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probability and first moment of N(0,1) in each level's cell, and the density at the inner edges."""
    edges = torch.cat((level.new_zeros(1), (level[1:] + level[:-1]) / 2, level.new_full((1,), math.inf)))
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    mass = torch.special.ndtr(edges).diff()
    return mass, -density.diff(), density[1:-1]
