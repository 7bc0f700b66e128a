"""balance: scale channels so that the keys' rounding error falls where queries look least.

    w_c = ( E[q_c^2] / E[(k - mu)_c^2] )^(1/4)        x' = w x,   q' = q / w

mu is the mean over 128 consecutive tokens, which block-mean centering removes as well. With a prior w_r (from random
token ids, see calibration) and n tokens of the prompt, t = n / (n + 256):

    log w = t log w_online + (1 - t) (log w_r, its mean shifted to that of log w_online)

w is never 1 for want of data: rotation without balance destroys Qwen2.5's keys (docs/recipes/turboquant.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvslim.errors import StateFileError
from kvslim.registry import choice
from kvslim.transforms.base import Fitted, Sample, Saved, Transform

_SPAN = 128  # tokens whose mean is taken out before the variance
_PRIOR_TOKENS = 256  # prompt tokens that weigh as much as the prior
_FLOOR = 1e-6  # of the mean over channels: a dead channel must not get an infinite weight


@dataclass(frozen=True)
class Balance(Transform):
    """x' = x diag(w) per kv head.

    Stores w (kv_heads, head_dim). Asks of q the division by w, and the same of the output. Commutes with RoPE only with
    ``pairs``, which gives the two channels of a rotary pair (c and c + head_dim / 2) one weight.

    Attributes
    ----------
    source : str
        ``mix`` (prompt and prior), ``online`` (prompt alone) or ``prior`` (calibration alone).
    pairs : bool
        One weight per rotary pair.
    """

    needs_queries = True
    source: str = choice("mix", "mix", "online", "prior")
    pairs: bool = False

    @property
    def prior(self) -> str:
        return {"mix": "helps", "online": "unused", "prior": "needed"}[self.source]

    def fit(self, sample: Sample) -> Balanced:
        prior = _prior_log_weight(sample, self.pairs)
        if prior is not None and self.source == "prior":
            return Balanced(prior.exp())
        own = log_weight(_query_power(sample), centred_power(sample.x), self.pairs)
        if prior is None or self.source == "online":
            return Balanced(own.exp())
        t = sample.tokens / (sample.tokens + _PRIOR_TOKENS)
        prior = prior + own.mean(-1, keepdim=True) - prior.mean(-1, keepdim=True)
        return Balanced((t * own + (1 - t) * prior).exp())

    def restore(self, saved: Saved) -> Balanced:
        weight = saved.vector("weight")
        if not bool((weight > 0).all()):
            raise StateFileError(f"{saved.where}: a weight is not above 0; the file is damaged, write it again")
        return Balanced(weight)


class Balanced(Fitted):
    """Channel weights w of shape (kv_heads, head_dim)."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        return x * self.weight.unsqueeze(-2)

    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return q / self.weight.unsqueeze(-2), None

    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return acc / self.weight.unsqueeze(-2)


def centred_power(x: torch.Tensor) -> torch.Tensor:
    """E[(x - mu)^2] per channel, mu the mean of each run of 128 tokens: ``(kv_heads, tokens, D) -> (kv_heads, D)``."""
    whole = x.shape[1] // _SPAN * _SPAN
    if whole == 0:
        return x.var(1, correction=0)
    return x[:, :whole].unflatten(1, (-1, _SPAN)).var(2, correction=0).mean(1)


def log_weight(query_power: torch.Tensor, key_power: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Return log w of shape (kv_heads, head_dim)."""
    if pairs:
        query_power, key_power = _paired(query_power), _paired(key_power)
    return (_floored(query_power).log() - _floored(key_power).log()) / 4


def _query_power(sample: Sample) -> torch.Tensor:
    if sample.moment is None:
        return torch.ones_like(sample.x[:, 0])
    return sample.moment.diagonal(dim1=-2, dim2=-1)


def _prior_log_weight(sample: Sample, pairs: bool) -> torch.Tensor | None:
    if not {"query_moment", "key_power"} <= sample.prior.keys():
        return None
    power = sample.prior["query_moment"].diagonal(dim1=-2, dim2=-1)
    return log_weight(power, sample.prior["key_power"], pairs)


def _floored(power: torch.Tensor) -> torch.Tensor:
    mean = power.mean(-1, keepdim=True)
    return power.clamp_min(_FLOOR * mean).clamp_min(torch.finfo(torch.float32).tiny)


def _paired(power: torch.Tensor) -> torch.Tensor:
    half = power.shape[-1] // 2
    return ((power[..., :half] + power[..., half:]) / 2).repeat(1, 2)
