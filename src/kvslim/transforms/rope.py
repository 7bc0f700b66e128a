"""Rotary positions, as far as packing needs them: which channels turn together, and how fast.

Found from the keys themselves rather than from a model's code: shifting every position by s leaves the hidden states
of a rotary model alone and turns each key by R_s. So two passes over the same tokens, one shifted, show the pairs and
their frequencies, whatever the family calls them. Where no pairing explains the shift, positions are not understood.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_TOLERANCE = 2e-3  # share of a shifted key that the rotation may leave unexplained


@dataclass(frozen=True)
class Rope:
    """Rotary pairs of one layer.

    Attributes
    ----------
    pairs : Tensor of shape (2, n), int64
        First and second channel of each pair; channels in no pair do not turn.
    frequency : Tensor of shape (n,), fp64
        Radians per position.
    """

    pairs: torch.Tensor
    frequency: torch.Tensor

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """R_t x for tokens (..., tokens or 1, head_dim) at `positions` (tokens,), also fractional or negative ones."""
        angle = positions.double()[:, None] * self.frequency.to(positions.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., self.pairs[0]], x[..., self.pairs[1]]
        out = x.expand(*x.shape[:-2], len(positions), x.shape[-1]).clone()
        out[..., self.pairs[0]] = first * cos - second * sin
        out[..., self.pairs[1]] = second * cos + first * sin
        return out

    def mean_turn(self, mean: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
        """Mean of R_t mean over ``t = start .. start + tokens - 1``, in closed form.

        Parameters
        ----------
        mean : Tensor of shape (kv_heads, head_dim)
        starts : Tensor of shape (pages,)
        tokens : int

        Returns
        -------
        Tensor of shape (pages, kv_heads, head_dim)
            Per pair: R at the page's midpoint, times sin(n f / 2) / (n sin(f / 2)).
        """
        middle = starts.double() + (tokens - 1) / 2
        return self.turn(self._shrunk(mean, tokens)[:, None], middle).transpose(0, 1)

    def mean_scores(self, q: torch.Tensor, mean: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
        """Products of queries with `mean_turn`, without the turned means: two numbers per pair and page.

        Parameters
        ----------
        q : Tensor of shape (kv_heads, rows, head_dim)
        mean, starts, tokens
            As `mean_turn` takes them.

        Returns
        -------
        Tensor of shape (kv_heads, rows, pages)
        """
        mean = self._shrunk(mean, tokens)[:, None]
        angle = (starts.double() + (tokens - 1) / 2) * self.frequency.to(starts.device)[:, None]
        q1, q2 = q[..., self.pairs[0]], q[..., self.pairs[1]]
        m1, m2 = mean[..., self.pairs[0]], mean[..., self.pairs[1]]
        still = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
        still[self.pairs.flatten()] = False
        turning = (q1 * m1 + q2 * m2) @ angle.cos().to(q.dtype) + (q2 * m1 - q1 * m2) @ angle.sin().to(q.dtype)
        return turning + (q * mean)[..., still].sum(-1, keepdim=True)

    def _shrunk(self, mean: torch.Tensor, tokens: int) -> torch.Tensor:
        """Each pair of `mean` times the length that the mean of its turns over so many positions has."""
        half = self.frequency / 2
        shrink = torch.where(
            half.sin().abs() < 1e-12, torch.ones_like(half), (tokens * half).sin() / (tokens * half.sin())
        )
        shrunk = mean.clone()
        for side in self.pairs:
            shrunk[..., side] *= shrink.to(mean)
        return shrunk


def find_rope(keys: torch.Tensor, by_one: torch.Tensor, by_many: torch.Tensor, many: int) -> Rope | None:
    """Find the rotary pairs from the same tokens at shifted positions.

    Parameters
    ----------
    keys, by_one, by_many : Tensor of shape (kv_heads, tokens, head_dim)
        Keys at positions p, p + 1 and p + `many`.
    many : int

    Returns
    -------
    Rope or None
        None where no known pairing explains the shift.
    """
    for pairs in _pairings(keys.shape[-1]):
        z0, z1, zn = (
            torch.complex(k[..., pairs[0]].double(), k[..., pairs[1]].double()) for k in (keys, by_one, by_many)
        )
        coarse = (z1 * z0.conj()).sum((0, 1)).angle()
        fine = (zn * z0.conj()).sum((0, 1)).angle()
        turns = ((coarse * many - fine) / (2 * math.pi)).round()
        rope = Rope(pairs, (fine + 2 * math.pi * turns) / many)
        left = torch.cat(
            [
                rope.turn(keys.double(), torch.full((keys.shape[1],), float(s))) - k
                for s, k in ((1, by_one), (many, by_many))
            ]
        )
        if float(left.norm() / keys.norm() / math.sqrt(2)) < _TOLERANCE:
            return rope
    return None


def _pairings(head_dim: int) -> list[torch.Tensor]:
    """Pairings in use: halves (Llama), neighbours (GPT-J), and halves of a leading part only (GPT-NeoX, Phi)."""
    channels = torch.arange(head_dim)
    found = [
        torch.stack((channels[: head_dim // 2], channels[head_dim // 2 :])),
        torch.stack((channels[::2], channels[1::2])),
    ]
    parts = (part for part in (head_dim // 2, head_dim // 4, head_dim * 3 // 4) if part >= 2 and part % 2 == 0)
    return found + [torch.stack((channels[: part // 2], channels[part // 2 : part])) for part in parts]
