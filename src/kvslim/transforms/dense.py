"""Dense matrices: seeded ones that are the same on every machine, and a product whose rows stand alone.

Random matrices are not stored with a cache, only their seed is in the code, so torch's generators (whose streams may
change between versions and processors) are not used here. Packed bytes must not depend on how tokens were chunked, but
libraries add up a product's terms in an order that changes with its shape: products are taken in fp64, where that order
does not reach the fp32 result.
"""

from __future__ import annotations

import math
import random

import torch


def row_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``x @ matrix`` in fp32, each row with the same bits however many rows there are.

    Parameters
    ----------
    x : Tensor of shape (..., rows, inner), fp32
    matrix : Tensor of shape (inner, outer), fp64
    """
    return (x.double() @ matrix).float()


def gaussian(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Matrix of N(0,1) entries, fp64: Box-Muller on Python's Mersenne twister, whose stream is guaranteed."""
    uniform = random.Random(seed).random
    count = rows * columns
    values: list[float] = []
    while len(values) < count:
        radius, angle = math.sqrt(-2 * math.log(1 - uniform())), 2 * math.pi * uniform()
        values += (radius * math.cos(angle), radius * math.sin(angle))
    return torch.tensor(values[:count], dtype=torch.float64).view(rows, columns)


def orthogonal(size: int, seed: int) -> torch.Tensor:
    """Random orthogonal matrix, fp64: QR of a Gaussian one, columns signed so that the factorization is unique."""
    q, r = torch.linalg.qr(gaussian(size, size, seed))
    return q * r.diagonal().sign()


def signs(size: int, seed: int) -> torch.Tensor:
    """Random signs, fp64."""
    source = random.Random(seed)
    return torch.tensor([1.0 - 2.0 * source.getrandbits(1) for _ in range(size)], dtype=torch.float64)
