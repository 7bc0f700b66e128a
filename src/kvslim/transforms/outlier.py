"""outlier: move the channels of largest mean square to the front, so that a two-segment codec can give them a bit more.

x'[c] = x[order[c]], where order lists the `count` channels of largest E[x_c^2] first; both parts keep the model's
channel order (TurboQuant's outlier channels, arXiv 2504.19874 section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kvslim.errors import RecipeError, StateFileError
from kvslim.transforms.base import Fitted, Sample, Saved, Transform


@dataclass(frozen=True)
class Outlier(Transform):
    """A permutation of the channels per kv head, outliers first.

    Stores the order, frozen at the first seal. Asks of q the same permutation and of the output its inverse. Does not
    commute with RoPE, which turns pairs of channels by their place.

    Attributes
    ----------
    count : int
        Number of outlier channels.
    """

    count: int = 32

    @override
    def fit(self, sample: Sample) -> Permutation:
        head_dim = sample.x.shape[-1]
        if not 0 < self.count < head_dim:
            raise RecipeError(f"outlier: count={self.count} of head_dim={head_dim} channels; use 1 to {head_dim - 1}")
        energy = sample.x.square().mean(-2)
        ranked = energy.argsort(dim=-1, descending=True, stable=True)
        first, rest = ranked.split([self.count, head_dim - self.count], dim=-1)
        return Permutation(torch.cat((first.sort(-1).values, rest.sort(-1).values), dim=-1))

    @override
    def restore(self, saved: Saved) -> Permutation:
        order = saved.take("order", (saved.kv_heads, saved.head_dim), torch.int64)
        if not torch.equal(order.sort(-1).values, torch.arange(saved.head_dim, device=order.device).expand_as(order)):
            raise StateFileError(f"{saved.where}: order is no permutation; the file is damaged, write it again")
        return Permutation(order)


class Permutation(Fitted):
    """Channel order per kv head.

    Parameters
    ----------
    order : Tensor of shape (kv_heads, head_dim), int64
        Channel of the model that stands at each place.
    """

    def __init__(self, order: torch.Tensor):
        self.order = order

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"order": self.order}

    @override
    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        return _take(x, self.order)

    @override
    def query(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _take(q, self.order), None

    @override
    def output(self, acc: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return _take(acc, self.order.argsort(-1))


def _take(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    index = order[:, None, :].expand(x.shape[-3:])
    return x.gather(-1, index.expand_as(x))
