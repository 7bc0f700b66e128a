"""center: take a mean out of the keys that is known before they come.

``static``   one vector per kv head, E[k] over the calibration: x' = k - mu, and q.mu is added to every packed score.
``random``   the same with keys turned to random positions 0..32767, where rotary positions are not understood.
``page``     the mean of a page of consecutive positions, from E[R_-t k] and the rotary frequencies in closed form: no
             bytes, right at every position. A static mean is not: measured at positions 0-1024 it collapses at +16384.

The block mean that is stored with a block is the codec's (``table:mean``): it needs no transform.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvslim.calibration import check_rope
from kvslim.errors import InputError
from kvslim.registry import choice
from kvslim.transforms.base import Fitted, Sample, Saved, Transform
from kvslim.transforms.rope import Rope


@dataclass(frozen=True)
class Center(Transform):
    """x' = x - mu.

    Stores mu (kv_heads, head_dim) and, for ``page``, the rotary frequencies. Asks of q its product with mu (``static``,
    ``random``), of the output mu times the probability mass. ``page`` is read as one offset per block. ``page`` follows
    RoPE; the others do not commute with it.

    Attributes
    ----------
    kind : str
        ``static``, ``random`` or ``page`` (a page is a block); ``page`` falls back to ``random`` where positions are
        not understood.
    """

    kind: str = choice("static", "static", "random", "page")

    @property
    def prior(self) -> str:
        return "helps" if self.kind == "static" else "needed"

    def fit(self, sample: Sample) -> Fitted:
        prior = sample.prior
        if self.kind == "page" and "rope_frequency" in prior:
            rope = Rope(prior["rope_pairs"].clone(), prior["rope_frequency"].clone())
            return PageMean(prior["plain_mean"].clone(), rope, sample.block)
        name = "key_mean" if self.kind == "static" else "random_mean"
        if name in prior:
            return Mean(prior[name].clone())
        if self.kind == "static":
            return Mean(sample.x.mean(1))
        raise InputError(
            f"center:kind={self.kind} needs a calibration, and this cache has none; build it from the model "
            "(KVCache(model, ...)) or pass calibration=FILE"
        )

    def restore(self, saved: Saved) -> Fitted:
        if self.kind != "page" or "plain_mean" not in saved.names:
            return Mean(saved.vector("mean"))
        rope = Rope(saved.take("rope_pairs", (2, -1), torch.int64), saved.take("rope_frequency", (-1,), torch.float64))
        check_rope(saved.where, rope.pairs, rope.frequency, saved.head_dim)
        return PageMean(saved.vector("plain_mean"), rope, saved.block)


class Mean(Fitted):
    """One mean per kv head, ``(kv_heads, head_dim)``."""

    def __init__(self, mean: torch.Tensor):
        self.mean = mean

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        return x - self.mean.unsqueeze(-2)

    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return q, q @ self.mean.unsqueeze(-1)

    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return acc + self.mean.unsqueeze(-2) * mass


class PageMean(Fitted):
    """The mean of each page of positions; `mean` is that of the keys before RoPE, ``(kv_heads, head_dim)``."""

    def __init__(self, mean: torch.Tensor, rope: Rope, page: int):
        self.mean, self.rope, self.page = mean, rope, page

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"plain_mean": self.mean, "rope_pairs": self.rope.pairs, "rope_frequency": self.rope.frequency}

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        if starts is None:  # a sample of tokens without pages: only its spread is read
            return x - x.mean(-2, keepdim=True)
        return x - self.offset(starts).unsqueeze(-2)

    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return q, None

    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        raise InputError("center:kind=page is for keys: values have no positions")

    def offset(self, starts: torch.Tensor) -> torch.Tensor:
        return self.rope.mean_turn(self.mean, starts, self.page)

    def offset_scores(self, q: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.rope.mean_scores(q, self.mean, starts, self.page)
