"""Peers as data: quantized caches of other projects, which run on the same model, text and forward pass as recipes.

A peer is a kind of layer. It stands where a packed layer would stand (`eval/peer_cache.py`), so that sliding layers
stay with transformers for everyone alike; transformers' own `QuantizedCache` refuses models that have such layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kvslim.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Peer:
    """A quantized cache to compare with.

    Attributes
    ----------
    name, summary : str
    layer : callable
        Makes an empty cache layer.
    package : str
        What has to be installed for it beside transformers; empty if nothing.
    """

    name: str
    summary: str
    layer: Callable[[], Any]
    package: str = ""

    def check(self) -> None:
        """Raise InputError where the package that it needs is missing."""
        try:
            if self.package:
                metadata.version(self.package)
        except metadata.PackageNotFoundError as error:
            raise InputError(
                f"peer '{self.name}' needs {self.package}, which is not installed; pip install 'kvslim[peers]'"
            ) from error


def _transformers(backend: str, **arguments: int) -> Callable[[], Any]:
    def layer() -> Any:
        from kvslim.integrations.transformers import compat

        return compat.quantized_layer(backend, **arguments)

    return layer


def _ggml(kind: str) -> Callable[[], Any]:
    def layer() -> Any:
        from kvslim.eval.ggml import GGMLLayer

        return GGMLLayer(kind)

    return layer


_HF = "transformers' QuantizedCache"
_GGML = "llama.cpp's format in a layer of ours, made for comparison"
# transformers' defaults throughout (groups of 64, 128 recent tokens at full precision), but for the axis of hqq, which
# its documentation asks to set to 1
_ALL = (
    Peer("hf-quanto4", f"{_HF}, optimum-quanto 4 bits", _transformers("quanto", nbits=4), "optimum-quanto"),
    Peer("hf-quanto2", f"{_HF}, optimum-quanto 2 bits", _transformers("quanto", nbits=2), "optimum-quanto"),
    Peer("hf-hqq8", f"{_HF}, hqq 8 bits", _transformers("hqq", nbits=8, axis_key=1, axis_value=1), "hqq"),
    Peer("hf-hqq4", f"{_HF}, hqq 4 bits", _transformers("hqq", nbits=4, axis_key=1, axis_value=1), "hqq"),
    Peer("hf-hqq2", f"{_HF}, hqq 2 bits", _transformers("hqq", nbits=2, axis_key=1, axis_value=1), "hqq"),
    Peer("hf-fp8", f"{_HF}, E4M3 with one scale per layer, set by the first chunk", _transformers("fp8")),
    Peer("gguf-q8_0", f"{_GGML}: 8 bits, groups of 32", _ggml("q8_0")),
    Peer("gguf-q4_0", f"{_GGML}: 4 bits, groups of 32", _ggml("q4_0")),
)
PEERS = {peer.name: peer for peer in _ALL}


def read_peers(text: str | None) -> list[Peer]:
    """Read names of peers with commas between them.

    Raises
    ------
    InputError
        A name is unknown, or what it needs is not installed.
    """
    found = []
    for name in (part.strip() for part in (text or "").split(",")):
        if not name:
            continue
        if name not in PEERS:
            raise InputError(f"unknown peer '{name}'; known: {', '.join(PEERS)}.{did_you_mean(name, PEERS)}")
        PEERS[name].check()
        found.append(PEERS[name])
    return found
