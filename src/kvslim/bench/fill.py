"""Random keys and values that look like a model's own, written into any cache without running the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvslim.errors import InputError
from kvslim.eval.contestants import using_attention
from kvslim.eval.forced import feed
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.adapter import PackedLayer

_SAMPLE = 256  # tokens of text that statistics are taken from


@dataclass(frozen=True)
class RandomKV:
    """Mean and spread of keys and values, per layer.

    Attributes
    ----------
    layers : dict of int to (Tensor, Tensor, Tensor, Tensor)
        Layer -> mean and deviation of its keys, then of its values, each of shape (1, kv_heads, 1, head_dim).
    heads : int
        Query heads.
    """

    layers: dict[int, tuple[torch.Tensor, ...]]
    heads: int

    @classmethod
    def of(cls, model: Any, ids: torch.Tensor) -> RandomKV:
        """Take statistics of a model from the beginning of a text of shape (tokens,).

        Raises
        ------
        InputError
            The model has layers that keep a state instead of keys and values.
        """
        cache = DynamicCache(config=model.config)
        with using_attention(model, "sdpa"):
            feed(model, cache, ids[:_SAMPLE], 0, keep=1)
        layers = {}
        for index, layer in enumerate(cache.layers):
            if compat.is_linear(layer):
                raise InputError(
                    f"layer {index} keeps a state of linear attention, which random keys cannot fill; use --fill text"
                )
            if getattr(layer, "keys", None) is not None:
                layers[index] = tuple(
                    part
                    for states in (layer.keys, layer.values)
                    for part in (states.mean(2, keepdim=True), states.std(2, keepdim=True, correction=0))
                )
        return cls(layers, model.config.get_text_config(decoder=True).num_attention_heads)

    def fill(self, cache: Any, context: int, batch: int) -> None:
        """Store `context` tokens of `batch` sequences, the same in every cache; packed layers see random queries."""
        for index, (key_mean, key_spread, value_mean, value_spread) in self.layers.items():
            random = torch.Generator(key_mean.device).manual_seed(index)

            def normal(like: torch.Tensor, heads: int, random: torch.Generator = random) -> torch.Tensor:
                shape = (batch, heads, context, like.shape[-1])
                return torch.randn(shape, generator=random, dtype=like.dtype, device=like.device)

            kv_heads = key_mean.shape[1]
            key = key_mean + key_spread * normal(key_mean, kv_heads)
            value = value_mean + value_spread * normal(value_mean, kv_heads)
            cache.update(key, value, index)
            layer = cache.layers[index]
            if isinstance(layer, PackedLayer):
                layer.core.settle(normal(key_mean, self.heads), None)
