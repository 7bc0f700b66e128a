"""One pass of the model over a prompt that fills several caches.

Tokens of one chunk attend to each other exactly, so while a prompt goes in as one chunk, every layer sees the same
keys, values and queries whatever the recipe: the caches come out byte for byte as if each had had a pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvslim.attention.reference import Score
from kvslim.cache import LayerCache
from kvslim.integrations.transformers import KVCache
from kvslim.integrations.transformers.adapter import PackedLayer
from kvslim.integrations.transformers.handle import PackedStates


def can_share(caches: Sequence[KVCache]) -> bool:
    """Whether `SharedPrefill` knows every layer: recurrent states change in place, so those need a pass per cache."""
    known = (PackedLayer, DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in known for cache in caches for layer in cache.layers)


class SharedPrefill(Cache):
    """Stands for several empty caches during their first forward pass, and only then.

    Parameters
    ----------
    caches : sequence of KVCache
        For the same model; see `can_share`.
    """

    def __init__(self, caches: Sequence[KVCache]):
        super().__init__(layers=caches[0].layers)
        self.caches = caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        states = [cache.update(key_states, value_states, layer_idx, *args, **kwargs) for cache in self.caches]
        if not isinstance(states[0][0], PackedStates):
            return states[0]
        cores = cast(LayerCache, _Cores([key.layer for key, _ in states]))
        return PackedStates(cores, key_states), PackedStates(cores, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[0].get_seq_length(layer_idx)


class _Cores:
    """One layer of all the caches, with what the attention function asks of a `LayerCache`."""

    def __init__(self, cores: list[LayerCache]):
        self.cores = cores

    @property
    def length(self) -> int:
        return self.cores[0].length

    @property
    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.cores[0].pending

    def claim(self, module: Any) -> None:
        for core in self.cores:
            core.claim(module)

    def settle(self, query: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None = None) -> None:
        for core in self.cores:
            core.settle(query, mask, positions)

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        score: Score,
        *,
        causal: bool = True,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outs = [core.attend(query, mask, score, causal=causal, positions=positions) for core in self.cores]
        return outs[0]

    def take_back(self) -> None:
        for core in self.cores:
            core.take_back()
