"""A `KVCache` in a file and back: the store's state, the layers left to transformers, and whose tokens they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvslim
from kvslim.cache import LayerCache
from kvslim.calibration import Calibration
from kvslim.errors import InputError, StateError, StateFileError
from kvslim.files import Contents, Kind, Lazy, write
from kvslim.header import Fields
from kvslim.integrations.transformers import compat, dense
from kvslim.integrations.transformers.fingerprint import fingerprint
from kvslim.recipe import Recipe
from kvslim.store import state
from kvslim.store.layer import LayerStore

if TYPE_CHECKING:
    from kvslim.integrations.transformers.adapter import KVCache

KIND = Kind("kvslim-cache", 1, "saved cache", "save it again with cache.save()")
_CALIBRATION = "calibration."


@dataclass(frozen=True)
class Saved:
    """What stood in a file beside the cache.

    Attributes
    ----------
    ids : Tensor of shape (batch, tokens), int64, or None
        Token ids; those past the cache's length are not in it yet.
    notes : dict
        The caller's own.
    """

    ids: torch.Tensor | None
    notes: dict[str, Any]


# -- out ---------------------------------------------------------------------------------------------------------------


def save(cache: KVCache, path: str | Path, model: Any, *, ids: torch.Tensor | None, notes: Mapping[str, Any]) -> None:
    """See KVCache.save."""
    if model is None:
        raise InputError(
            "this cache was made from a config, or its model is gone, so nothing says whose tokens it holds; pass "
            "save(path, model=model)"
        )
    cache.step.undo()
    if cache.step.lost:
        raise StateError(
            f"layers {sorted(cache.step.lost)} could not be set back after a forward pass that failed, so there is "
            "nothing whole to save; call cache.reset() and start again"
        )
    for index, layer in _others(cache):
        dense.check_known(index, layer)
    facts: dict[str, Any] = {
        "kvslim": kvslim.__version__,
        "fingerprint": fingerprint(model),
        "recipe": json.loads(cache.recipe.to_json()),
        "skipped": [index for index, reason in cache.reasons.items() if reason == compat.SKIPPED],
        "length": _length(cache),
        "notes": _json_able(notes),
    }
    stores = {core.layer: core.store for core in _cores(cache) if core.store is not None and core.store.rows}
    facts["store"], tensors = state.describe(cache.table, stores)
    facts["dense"] = []
    for index, layer in _others(cache):
        header, more = dense.describe(index, layer)
        facts["dense"].append(header)
        tensors |= more
    calibration = cache.calibration if state.unfrozen(stores.values()) else None
    if calibration is not None:  # else a process that has taken other statistics would go on otherwise
        facts["calibration"] = calibration.facts()
        tensors |= {f"{_CALIBRATION}{name}": Lazy.of(tensor) for name, tensor in calibration.tensors().items()}
    if ids is not None:
        if not _fit(ids, cache, facts["length"]):
            raise InputError(
                f"ids are {ids.dtype} of shape {tuple(ids.shape)}; the cache holds {facts['length']} tokens of "
                f"{len(cache.table.rows)} sequences, so give whole numbers of shape (sequences, {facts['length']} or "
                "more)"
            )
        tensors["ids"] = Lazy.of(ids.to(torch.int64))
    write(path, KIND, facts, tensors)


def _json_able(notes: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"notes cannot be written as JSON ({error}); give text, numbers, lists and mappings"
        ) from error


def _fit(ids: torch.Tensor, cache: KVCache, length: int) -> bool:
    """Whether `ids` may be those of the cache's sequences."""
    if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < length:
        return False
    return not cache.table.rows or len(ids) == len(cache.table.rows)


def _cores(cache: KVCache) -> Iterator[LayerCache]:
    return (layer.core for layer in cache.layers if hasattr(layer, "core"))


def _others(cache: KVCache) -> list[tuple[int, Any]]:
    return [(index, layer) for index, layer in enumerate(cache.layers) if not hasattr(layer, "core")]


def _length(cache: KVCache) -> int:
    return max((layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")), default=0)


# -- back --------------------------------------------------------------------------------------------------------------


def load(
    make: type[KVCache],
    path: str | Path,
    model: Any,
    recipe: str | Recipe | None,
    calibration: str | Path | Calibration | None,
    *,
    mmap: bool,
    verify: bool,
) -> KVCache:
    """See KVCache.load."""
    if not hasattr(model, "forward"):
        raise InputError(
            f"got a {type(model).__name__}, which has no weights to compare with those that a cache was saved with; "
            "pass the model"
        )
    contents = Contents(path, KIND, verify=verify)
    head = contents.header
    found, own = head.text("fingerprint"), fingerprint(model)
    if found != own:
        raise StateFileError(
            f"{path} was saved with another model (fingerprint {found}, this model's is {own}): other weights, dtype "
            "or config; load that model, or feed the tokens to this one"
        )
    if head.has("calibration"):
        calibration = _calibration(contents, calibration)
    cache = make(model, _recipe(head, recipe), skip_layers=head.integers("skipped"), calibration=calibration)
    devices = _devices(model, len(cache.layers))
    if mmap and any(devices[core.layer].type != "cpu" for core in _cores(cache)):
        raise InputError(f"mmap=True maps the file for the CPU, the model is on {model.device}; leave mmap out")
    _restore_packed(cache, head, contents, devices, mapped=mmap)
    _restore_others(cache, head, contents, devices)
    cache.saved = Saved(_ids(cache, head, contents), head.fields("notes").value)
    contents.finish()
    return cache


def _recipe(head: Fields, asked: str | Recipe | None) -> Recipe:
    fields = head.fields("recipe")
    fields.text("label")
    saved = Recipe.from_json(json.dumps(fields.value))
    if asked is not None and (wanted := Recipe.parse(asked)) != saved:
        raise StateFileError(
            f"{head.where}: the cache is packed by recipe '{saved}', asked for is '{wanted}'; leave the recipe out, "
            "or feed the tokens to a new cache"
        )
    return saved


def _calibration(contents: Contents, given: str | Path | Calibration | None) -> Calibration:
    """Statistics that came with sequences whose parameters they will shape."""
    own = Calibration.read(contents, contents.header.fields("calibration"), _CALIBRATION)
    if given is not None:
        other = given if isinstance(given, Calibration) else Calibration.load(given)
        if not own.same_as(other):
            raise InputError(
                f"{contents.path} has sequences that were begun with another calibration (from {own.source}) than the "
                f"one given (from {other.source}); leave it out"
            )
    return own


def _devices(model: Any, layers: int) -> list[torch.device]:
    """Where each layer of the model works."""
    found = [model.device] * layers
    for module in model.modules():
        index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and index < layers and weight is not None and weight.device.type != "meta":
            found[index] = weight.device
    return found


def _restore_packed(
    cache: KVCache, head: Fields, contents: Contents, devices: list[torch.device], *, mapped: bool
) -> None:
    cores = {core.layer: core for core in _cores(cache)}
    fields, length = head.fields("store"), head.integer("length")

    def build(layer: int, kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype) -> LayerStore:
        if layer not in cores:
            fields.refuse("layers", f"layers out of {list(cores)}, those that are packed")
        return cores[layer].build(kv_heads, head_dims, dtype, devices[layer])

    stores = state.restore(fields, contents, cache.table, build, mapped=mapped)
    if set(stores) not in (set(), set(cores)):
        fields.refuse("layers", f"all of layers {list(cores)}, or none")
    if any(store.length != length for store in stores.values()):
        head.refuse("length", "the length of the packed layers")
    for layer, store in stores.items():
        cores[layer].store = store
        cache.layers[layer].is_initialized = True


def _restore_others(cache: KVCache, head: Fields, contents: Contents, devices: list[torch.device]) -> None:
    others = _others(cache)
    described = head.each("dense")
    if [fields.integer("layer") for fields in described] != [index for index, _ in others]:
        head.refuse("dense", f"layers {[index for index, _ in others]}, those that are not packed")
    for fields, (index, layer) in zip(described, others, strict=True):
        dense.restore(fields, contents, layer, head.integer("length"), devices[index])


def _ids(cache: KVCache, head: Fields, contents: Contents) -> torch.Tensor | None:
    if contents.form("ids") is None:
        return None
    ids = contents.take("ids", (-1, -1), torch.int64).clone()
    if not _fit(ids, cache, head.integer("length")):
        head.refuse("length", f"no more than the ids' {ids.shape[1]}, and as many sequences")
    return ids
