"""Check: whether a contestant still is the same model, before anything is said about its speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvslim.eval.measures import log_probs, token_kl

KL_LIMIT = 5.0  # nats per token: beyond it the output has nothing to do with the 16-bit cache's
# log-probabilities this close are a tie: what another order of summation may change in a real model, in float32 and in
# roundings of the model's dtype
_TIE, _TIE_ROUNDINGS = 1e-4, 64


@dataclass
class Check:
    """Next-token distributions of a contestant against those of the 16-bit cache.

    Attributes
    ----------
    exact : bool
        Whether the contestant must choose the same tokens.
    tie : float
        Log-probabilities closer than this are a tie.
    kl : list of Tensor
        Per position, (batch,).
    differing, tokens : int
        Tokens chosen otherwise without a tie, of so many.
    """

    exact: bool
    tie: float
    kl: list[torch.Tensor] = field(default_factory=list)
    differing: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, exact: bool, dtype: torch.dtype) -> Check:
        """Make an empty one for a model of `dtype`."""
        return cls(exact, max(_TIE, _TIE_ROUNDINGS * torch.finfo(dtype).eps))

    def add(self, base: torch.Tensor, run: torch.Tensor) -> None:
        """Compare one position's logits, both (batch, vocabulary)."""
        base, run = log_probs(base), log_probs(run)
        self.kl.append(token_kl(base, run))
        behind = base.amax(-1) - base.gather(-1, run.argmax(-1, keepdim=True)).squeeze(-1)
        self.differing += int((behind > self.tie).sum())
        self.tokens += len(behind)

    def add_all(self, base: Sequence[torch.Tensor], run: Sequence[torch.Tensor]) -> None:
        """Compare several positions' logits."""
        for before, after in zip(base, run, strict=True):
            self.add(before, after)

    @property
    def kl_mean(self) -> float:
        """KL(16 bits || contestant) in nats per token; NaN or Inf if its logits were."""
        return float(torch.cat(self.kl).mean())

    def failure(self) -> str | None:
        """Why no speed may be named, or None."""
        if not math.isfinite(self.kl_mean):
            return "its logits contain NaN or Inf"
        if self.kl_mean > KL_LIMIT:
            return f"KL {self.kl_mean:.2f} against the 16-bit cache is above {KL_LIMIT:g}: not the same model any more"
        if self.exact and self.differing:
            return f"{self.differing} of {self.tokens} tokens differ, though this cache quantizes nothing"
        return None
