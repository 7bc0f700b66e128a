"""Calibrate a model: one forward pass over random token ids (or a text), its keys and queries recorded per layer.

Random ids serve as well as text (docs/recipes/slim.md) and need no data. The result is cached on disk by the model's
fingerprint, so a model pays its few seconds once per machine. It belongs to the model, like its weights: all caches
share it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvslim.cache import LayerCache
from kvslim.calibration import Calibration
from kvslim.errors import InputError, StateError, StateFileError
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.fingerprint import fingerprint
from kvslim.recipe import Recipe
from kvslim.transforms.balance import centred_power
from kvslim.transforms.rope import Rope, find_rope

TOKENS = 1024
_SHIFT_TOKENS, _SHIFT = 256, 1024
_FARTHEST = 32768  # random positions are drawn below this
_SEED = 20241129
_LEAST_TOKENS = 256
_log = logging.getLogger("kvslim")
_known: weakref.WeakKeyDictionary[Any, Calibration] = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[Any, list[Calibration]] = weakref.WeakKeyDictionary()  # given ones, by model

Record = dict[int, tuple[torch.Tensor, torch.Tensor]]  # layer -> keys (G, T, D), queries (G, rows, D)


def calibration_of(model: Any, directory: Path | None = None) -> Calibration:
    """Return the random-id calibration of `model`: from memory, from disk, or taken now and kept in both."""
    if model in _known:
        return _known[model]
    directory = directory or Path.home() / ".cache" / "kvslim" / "calibrations"
    mark = fingerprint(model)
    path = directory / f"{mark}.safetensors"
    try:
        found = Calibration.load(path, mark)
    except StateFileError:
        _log.info("calibrating on %d random token ids, once per model", TOKENS)
        found = calibrate(model)
        try:
            found.save(path)
        except StateFileError as error:
            _log.warning("calibration not kept on disk (%s); it will be taken again next time", error)
    _known[model] = found
    return found


def keep(holder: Any, calibration: Calibration) -> Callable[[], Calibration | None]:
    """Let a model own a calibration, so that its caches only refer to it; a config cannot, so then the result does."""
    if not hasattr(holder, "forward"):
        return partial(_same, calibration)
    given = _kept.setdefault(holder, [])
    for known in (_known.get(holder), *given):
        if known is not None and (known is calibration or known.same_as(calibration)):
            return weakref.ref(known)  # loaded again, for another cache
    given.append(calibration)
    return weakref.ref(calibration)


def _same(calibration: Calibration) -> Calibration:
    return calibration


@torch.no_grad()
def calibrate(
    model: Any,
    ids: torch.Tensor | None = None,
    source: str = "random ids",
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Take the statistics of every full-attention layer.

    Parameters
    ----------
    model : PreTrainedModel
        On kvslim's attention.
    ids : Tensor of shape (tokens,), int64, optional
        Token ids of a text; random ids without.
    source : str
        Name of the text.
    progress : callable, optional
        Told what is being done.

    Raises
    ------
    InputError
        Fewer than 256 tokens.
    """
    tell = progress or (lambda _: None)
    if ids is None:
        ids = _random_ids(model)
    if ids.numel() < _LEAST_TOKENS:
        raise InputError(f"{ids.numel()} tokens are too few for statistics; give at least {_LEAST_TOKENS}")
    device = model.device
    ids = ids.to(device)
    tell("statistics")
    record = _run(model, ids, torch.arange(ids.numel()))
    tell("rotary positions")
    short = ids[:_SHIFT_TOKENS]
    shifted = [_run(model, short, torch.arange(short.numel()) + shift) for shift in (1, _SHIFT)]
    spread: Record | None = None
    generator = torch.Generator().manual_seed(_SEED)
    layers = {}
    for layer, (keys, queries) in record.items():
        moment = queries.mT @ queries / queries.shape[1]
        found = {"query_moment": moment, "key_power": centred_power(keys), "key_mean": keys.mean(1)}
        rope = find_rope(keys[:, : short.numel()], shifted[0][layer][0], shifted[1][layer][0], _SHIFT)
        positions = torch.randint(_FARTHEST, (keys.shape[1],), generator=generator).to(device)
        if rope is not None:
            found |= _with_rope(keys, rope, positions)
        else:
            if spread is None:
                tell("random positions")
                spread = _run(model, short, _spread_positions(model, short.numel()))
            found["random_mean"] = spread[layer][0].mean(1)
        layers[layer] = found
    return Calibration(fingerprint(model), source, ids.numel(), layers)


class _Recorder(LayerCache):
    """A layer that hands each chunk's keys and queries to `record` before it takes them in."""

    record: Record

    def settle(self, query: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None = None) -> None:
        (key, _), _ = self._chunk()
        groups = query[0].float().reshape(key.shape[1], -1, query.shape[-1])
        self.record[self.layer] = key[0].float(), groups
        super().settle(query, mask, positions)


def _run(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> Record:
    from kvslim.integrations.transformers.adapter import KVCache, PackedLayer

    record: Record = {}
    cache = KVCache(model, Recipe.parse("none"))
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PackedLayer):
            layer.core = _Recorder(cache.recipe, index, cache.table)
            layer.core.record = record
    positions = positions.to(ids.device)
    arguments = {compat.CACHE_ARGUMENT: cache, "position_ids": positions[None], "logits_to_keep": 1}
    model(input_ids=ids[None], use_cache=True, **arguments)
    if not record and any(isinstance(layer, PackedLayer) for layer in cache.layers):
        raise StateError("the model did not use the cache it was given; kvslim cannot calibrate it")
    return record


def _with_rope(keys: torch.Tensor, rope: Rope, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = rope.turn(keys, -torch.arange(keys.shape[1], device=keys.device))
    return {
        "plain_mean": plain.mean(1),
        "random_mean": rope.turn(plain, positions).mean(1),
        "rope_pairs": rope.pairs,
        "rope_frequency": rope.frequency,
    }


def _random_ids(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(model.config.get_text_config(decoder=True).vocab_size, (TOKENS,), generator=generator)


def _spread_positions(model: Any, count: int) -> torch.Tensor:
    config = model.config.get_text_config(decoder=True)
    farthest = min(_FARTHEST, getattr(config, "max_position_embeddings", None) or _FARTHEST)
    return torch.linspace(0, farthest - 1, count).long()
