"""Contestants: caches under comparison. transformers' own, packed ones and those of peers run and count alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache

from kvslim.codecs import build_codec
from kvslim.codecs.none import NoneCodec
from kvslim.eval.peer_cache import PeerCache
from kvslim.eval.peers import Peer
from kvslim.integrations.transformers import KVCache, compat
from kvslim.integrations.transformers.report import LayerReport, bits_held, storage_nbytes
from kvslim.recipe import Recipe

BASELINE = "16 bit"


@dataclass(frozen=True)
class Contestant:
    """A kind of cache.

    Attributes
    ----------
    name : str
    new_cache : callable
        Makes an empty one for a model, which runs on `attention` by then.
    attention : str
        The attention implementation that it is at home in.
    exact : bool
        Whether nothing is quantized, so that the same tokens must come out.
    """

    name: str
    new_cache: Callable[[Any], Any]
    attention: str = "sdpa"
    exact: bool = False

    @classmethod
    def baseline(cls) -> Contestant:
        """Return transformers' DynamicCache."""
        return cls(BASELINE, lambda model: DynamicCache(config=model.config), exact=True)

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Contestant:
        """Return a packed cache."""
        sides = (recipe.key, recipe.value, *(override.side for override in recipe.layers))
        exact = recipe.exact == "auto" and all(isinstance(build_codec(side), NoneCodec) for side in sides)
        return cls(recipe.label or str(recipe), lambda model: KVCache(model, recipe), compat.NAME, exact)

    @classmethod
    def of_peer(cls, peer: Peer) -> Contestant:
        """Return a peer's cache."""
        return cls(peer.name, lambda model: PeerCache(model, peer))


@dataclass(frozen=True)
class Held:
    """What a cache holds, counted the same way for every kind.

    Attributes
    ----------
    nbytes, nbytes_16bit : int
        Every storage reachable from the cache, and what its tokens would take at 16 bits per value.
    bits_per_value, bits_per_value_packed : float
        Over everything held, and of quantized tokens alone (0 if there are none).
    kernel, kernel_reason : str
        What reads it, and why nothing faster does.
    """

    nbytes: int
    nbytes_16bit: int
    bits_per_value: float
    bits_per_value_packed: float
    kernel: str
    kernel_reason: str

    @classmethod
    def of(cls, cache: Any) -> Held:
        """Count what `cache` holds."""
        kernel, reason = "sdpa", f"transformers' {type(cache).__name__}"
        if isinstance(cache, KVCache):
            report = cache.report()
            layers, kernel, reason = list(report.layers), report.kernel, report.kernel_reason
        elif isinstance(cache, PeerCache):
            layers, reason = cache.layer_reports(), "every layer is dequantized whole at every step"
        else:
            layers = [LayerReport.of_dense(index, layer, "") for index, layer in enumerate(cache.layers)]
        nbytes = storage_nbytes(cache)
        return cls(nbytes=nbytes, **bits_held(layers, nbytes), kernel=kernel, kernel_reason=reason)


@contextmanager
def using_attention(model: Any, name: str) -> Iterator[None]:
    """Run the model on another attention implementation for a while."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
