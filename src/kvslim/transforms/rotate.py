"""rotate: an orthogonal map of the channels, so that every coordinate looks alike and nearly Gaussian.

Hadamard: H[i,j] = (-1)^popcount(i & j) / sqrt(n) (Sylvester), block-diagonal with the largest power of two that divides
the width where the width is not one: 96 = 3x32, 80 = 5x16. Orthogonal: a seeded random matrix (TurboQuant, arXiv
2504.19874). Tokens take the butterfly form of H (adds and subtracts only, in a fixed order, so that a row's bits do not
depend on the rows beside it); queries and outputs take the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from typing_extensions import override

from kvslim.errors import RecipeError
from kvslim.registry import choice
from kvslim.transforms.base import Fitted, Sample, Saved, Transform
from kvslim.transforms.dense import orthogonal, row_product, signs

_SEED = 20250428  # part of the byte format: caches on disk were written with this rotation


@dataclass(frozen=True)
class Rotate(Transform):
    """x' = x A with A orthogonal.

    Stores nothing: A follows from the settings and head_dim, one copy a process. Asks of q the same map (A^-T = A) and
    of the output A^T. Does not commute with RoPE, which turns channel pairs that A mixes.

    Attributes
    ----------
    kind : str
        ``hadamard`` or ``orthogonal``.
    signs : bool
        Flip channels by fixed random signs first. Changes nothing measurable.
    parts : int
        Rotate the first `parts` channels and the rest separately; 0 rotates all channels together.
    """

    kind: str = choice("hadamard", "hadamard", "orthogonal")
    signs: bool = False
    parts: int = 0

    @override
    def fit(self, sample: Sample) -> Rotation:
        return self._rotation(sample.x.shape[-1])

    @override
    def restore(self, saved: Saved) -> Rotation:
        return self._rotation(saved.head_dim)

    def _rotation(self, head_dim: int) -> Rotation:
        if not 0 <= self.parts < head_dim:
            raise RecipeError(f"rotate: parts={self.parts} is not below head_dim={head_dim}; use 0 to {head_dim - 1}")
        return Rotation(self, head_dim)


class Rotation(Fitted):
    """`Rotate` for one head_dim."""

    def __init__(self, settings: Rotate, head_dim: int):
        self.settings = settings
        self.head_dim = head_dim

    @override
    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        if self.settings.kind == "orthogonal":
            return row_product(x, self._matrix(x, torch.float64))
        if self.settings.signs:
            x = x * sign_vector(self.head_dim).to(x)
        widths = part_widths(self.head_dim, self.settings.parts)
        return torch.cat([butterfly(part) for part in x.split(widths, dim=-1)], dim=-1)

    @override
    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return q @ self._matrix(q, torch.float32), None

    @override
    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return acc @ self._matrix(acc, torch.float32).T

    def _matrix(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rotation_matrix(self.settings, self.head_dim, str(like.device), dtype)


def butterfly(x: torch.Tensor) -> torch.Tensor:
    """Block-diagonal orthonormal Hadamard transform of the last axis, fp32, in log2(block) passes."""
    shape, size = x.shape, block_size(x.shape[-1])
    half = 1
    while half < size:
        low, high = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        half *= 2
    return x * size**-0.5


def block_size(width: int) -> int:
    """Largest power of two that divides `width`."""
    return width & -width


@lru_cache(maxsize=64)
def rotation_matrix(settings: Rotate, head_dim: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A of shape (head_dim, head_dim), shared by every cache of the process."""
    widths = part_widths(head_dim, settings.parts)
    if settings.kind == "orthogonal":
        blocks = [orthogonal(width, _SEED + i) for i, width in enumerate(widths)]
    else:
        blocks = [butterfly(torch.eye(width, dtype=torch.float64)) for width in widths]
    matrix = torch.block_diag(*blocks)
    if settings.signs:
        matrix = sign_vector(head_dim)[:, None] * matrix
    return matrix.to(device, dtype)


def part_widths(head_dim: int, parts: int) -> list[int]:
    """Channels that are rotated together, part by part."""
    return [parts, head_dim - parts] if parts else [head_dim]


def sign_vector(head_dim: int) -> torch.Tensor:
    """Signs of shape (head_dim,), fp64, that ``signs`` flips channels by."""
    return signs(head_dim, _SEED)
