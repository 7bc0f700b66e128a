"""KVCache: a transformers `Cache` whose full-attention layers are packed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvslim.cache import LayerCache
from kvslim.calibration import Calibration
from kvslim.codecs.side import prior_use
from kvslim.errors import InputError, KVSlimError, PackedCacheError, StateError, UnsupportedModelError
from kvslim.integrations.transformers import compat, dense, saving
from kvslim.integrations.transformers.calibrate import calibration_of, keep
from kvslim.integrations.transformers.fingerprint import fingerprint
from kvslim.integrations.transformers.handle import PackedStates
from kvslim.integrations.transformers.report import LayerReport, Report, storage_nbytes
from kvslim.integrations.transformers.saving import Saved
from kvslim.presets import DEFAULT_RECIPE
from kvslim.recipe import Recipe
from kvslim.store.step import Step
from kvslim.store.table import BlockAllocator, BlockTable


class PackedLayer(CacheLayerMixin):
    """A layer of `KVCache`, as transformers sees it. Operations on the whole cache belong to `KVCache`.

    Parameters
    ----------
    core : LayerCache
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, core: LayerCache):
        super().__init__()
        self.core = core

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PackedStates, PackedStates]:
        self.core.append(key_states, value_states)
        self.is_initialized = True
        return PackedStates(self.core, key_states), PackedStates(self.core, value_states)

    def get_seq_length(self) -> int:
        return self.core.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.core.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _whole_cache(self, name: str) -> None:
        raise StateError(f"{name}() on one layer would leave the others behind; call it on the KVCache")

    def crop(self, tokens_to_remove: int) -> None:
        self._whole_cache("crop")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._whole_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._whole_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._whole_cache("batch_select_indices")

    def reset(self) -> None:
        self._whole_cache("reset")

    def offload(self) -> None:
        _stays("offload")

    def prefetch(self) -> None:
        _stays("prefetch")


class KVCache(Cache):
    """A packed KV cache for `generate` and for plain forward calls.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        A model must already run on kvslim's attention (`kvslim.enable` or ``attn_implementation="kvslim"``).
    recipe : str or Recipe, optional
        Preset name or recipe string; see `kvslim recipes`.
    skip_layers : iterable of int, optional
        Layers that stay with transformers' own 16-bit cache.
    strict : bool, optional
        Raise where a layer cannot be packed, instead of leaving it to transformers and saying so in `report`.
    calibration : path or Calibration, optional
        Statistics of this model (`kvslim calibrate`). Without it, a recipe that gains from them takes them from one
        forward pass over random token ids, once per model and machine; given only a config, it does without.

    Raises
    ------
    RecipeError
        The recipe is not understood.
    UnsupportedModelError
        The model cannot hold a packed cache; with `strict`, also if one of its layers cannot.
    PackedCacheError
        The model still runs on another attention implementation.
    """

    def __init__(
        self,
        model: Any,
        recipe: str | Recipe = DEFAULT_RECIPE,
        *,
        skip_layers: Iterable[int] = (),
        strict: bool = False,
        calibration: str | Path | Calibration | None = None,
    ):
        compat.check_version()
        config = compat.text_config(model)
        if hasattr(model, "forward") and config._attn_implementation != compat.NAME:
            raise PackedCacheError(
                f"the model runs on attention '{config._attn_implementation}', which cannot read packed keys; call "
                "kvslim.enable(model) first, or load it with attn_implementation='kvslim'"
            )
        self.recipe = Recipe.parse(recipe)
        kinds = compat.layer_kinds(config)
        skipped = set(skip_layers)
        if skipped - set(range(len(kinds))):
            raise InputError(f"skip_layers names {sorted(skipped)}; the model has layers 0 to {len(kinds) - 1}")
        found = _calibration(model, self.recipe, len(kinds), calibration)
        self._calibration = None if found is None else keep(model, found)
        self.table = BlockTable(BlockAllocator(), self.recipe.block)
        self.step = Step(self.table)
        self.reasons: dict[int, str] = {}
        self.saved: Saved | None = None
        self._model = weakref.ref(model) if hasattr(model, "forward") else None
        layers = []
        for index, (kind, arguments, reason) in enumerate(kinds):
            if index in skipped:
                reason = compat.SKIPPED
            elif reason and strict:
                raise UnsupportedModelError(
                    f"strict: layer {index} cannot be packed ({reason}); drop strict to keep it at 16 bits"
                )
            if reason:
                self.reasons[index] = reason
                layers.append(compat.framework_layer(kind, arguments))
            else:
                compat.check_head_dim(self.recipe, index, config)
                layers.append(
                    PackedLayer(
                        LayerCache(self.recipe, index, self.table, partial(_prior, self._calibration, index), self.step)
                    )
                )
        for override in self.recipe.layers:
            if override.last >= len(kinds):
                raise InputError(f"'{override}' is past the last layer; the model has layers 0 to {len(kinds) - 1}")
        super().__init__(layers=layers)
        self.step.layers = sum(isinstance(layer, CacheLayerMixin) for layer in layers)
        self._last = max((i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)), default=-1)
        self.peak_nbytes = 0
        self._held = [0] * len(layers)

    # -- what transformers calls

    @compat.uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Hand a chunk to one layer; packed layers answer with handles for the attention function "kvslim"."""
        if layer_idx >= len(self.layers):
            raise InputError(
                f"layer {layer_idx} asked for a place, the cache was made for a model of {len(self.layers)} layers; "
                "make a new cache for this model"
            )
        layer = self.layers[layer_idx]
        # a hybrid layer has noted its recurrent state by now; that alone is no second pass
        if layer_idx in self.step.through or (isinstance(layer, PackedLayer) and layer_idx in self.step):
            self._break_off()
        self._begin()
        if not isinstance(layer, PackedLayer):
            states, undo = compat.update_layer(layer, key_states, value_states, *args, **kwargs)
            self.step.enter(layer_idx, undo)
            self.step.leave(layer_idx)
            return states
        try:
            states = layer.update(key_states, value_states, *args, **kwargs)
        except KVSlimError:
            self.step.undo()
            raise
        self._note_peak(layer_idx, key_states.nbytes + value_states.nbytes)
        return states

    @compat.uncompiled
    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hand the convolution state of a linear-attention layer to that layer."""
        self._note_linear(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @compat.uncompiled
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Hand the recurrent state of a linear-attention layer to that layer."""
        self._note_linear(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    @compat.uncompiled
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache, padding included; a forward pass counts once every layer is through."""
        return self.step.length if self.step.open and layer_idx == 0 else super().get_seq_length(layer_idx)

    @compat.uncompiled
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of one layer's mask, and where they begin."""
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every sequence.

        Parameters
        ----------
        tokens_to_remove : int
            Minus the number of tokens; 0 changes nothing in packed layers.

        Raises
        ------
        StateError
            A layer cannot give up that many tokens; no layer has changed then.
        """
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass a negative count to remove that many tokens")
        self.step.undo()
        count, length = -tokens_to_remove, self.get_seq_length()
        if count > length:
            raise StateError(f"crop({tokens_to_remove}): the cache holds only {length} tokens")
        for index, layer in enumerate(self.layers):
            refusal = "" if isinstance(layer, PackedLayer) else compat.rollback_refusal(layer, count)
            if refusal:
                raise StateError(f"crop({tokens_to_remove}): layer {index}: {refusal}; nothing was removed")
        for layer in self.layers:
            if not isinstance(layer, PackedLayer):
                layer.crop(tokens_to_remove)
        if count:
            self._crop_packed(count)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence ``i`` what sequence ``beam_idx[i]`` was (beam search)."""
        self._pick(beam_idx.tolist(), "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times; blocks are shared, not copied."""
        order = [row for row in range(len(self.table.rows)) for _ in range(repeats)]
        self._pick(order, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices`."""
        rows = indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices
        self._pick(rows.tolist(), "batch_select_indices", indices)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse: packed layers stay where their model is."""
        _stays("offload")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse: packed layers stay where their model is."""
        _stays("prefetch")

    def reset(self) -> None:
        """Forget all tokens; recipe and layers stay."""
        self.saved = None
        self.step.close()
        self.step.lost.clear()
        self.table.clear()
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.core.clear()
            else:
                layer.reset()
        self.peak_nbytes, self._held = 0, [0] * len(self.layers)

    def fork(self) -> KVCache:
        """Return a cache with the same tokens that shares sealed blocks; neither sees the other's later tokens."""
        self.step.undo()
        other = KVCache.__new__(KVCache)
        table = self.table.fork()
        other.step = Step(table)
        other.step.layers, other.step.lost = self.step.layers, set(self.step.lost)
        layers = [_copy_layer(layer, table, other.step) for layer in self.layers]
        Cache.__init__(other, layers=layers)
        other._last = self._last
        other.recipe, other.table, other.reasons = self.recipe, table, self.reasons
        other._calibration = self._calibration
        other.saved, other._model = self.saved, self._model
        other.peak_nbytes, other._held = self.peak_nbytes, list(self._held)
        return other

    def save(
        self,
        path: str | Path,
        *,
        ids: torch.Tensor | None = None,
        notes: Mapping[str, Any] | None = None,
        model: Any = None,
    ) -> None:
        """Write everything that another process needs to go on with the same tokens; see docs/files.md.

        Parameters
        ----------
        path : path
            Replaced by the whole new file, or not touched.
        ids : Tensor of shape (batch, tokens), int64, optional
            Token ids of the sequences, to be given back by `load`; as many as the cache has columns, or more.
        notes : mapping, optional
            JSON-able facts of the caller's, to be given back by `load`.
        model : PreTrainedModel, optional
            The one that the tokens came from; needed only where the cache was made from a config.

        Raises
        ------
        StateError
            A layer has a state that is not understood; nothing was written.
        StateFileError
            The file cannot be written; what was there is as before.
        """
        saving.save(self, path, self._model and self._model() if model is None else model, ids=ids, notes=notes or {})

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Any,
        *,
        recipe: str | Recipe | None = None,
        calibration: str | Path | Calibration | None = None,
        mmap: bool = False,
        verify: bool = True,
    ) -> KVCache:
        """Return the cache that `save` wrote; what the caller put beside it is in `cache.saved`.

        Parameters
        ----------
        path : path
        model : PreTrainedModel
            The model that it was saved with, on kvslim's attention.
        recipe : str or Recipe, optional
            Refuse a file of another recipe.
        calibration : path or Calibration, optional
            For sequences begun after a reset; see the class.
        mmap : bool
            Leave sealed blocks in the mapped file: their bytes are read when attention reads them, and shared by all
            processes that map the file. Only on a CPU.
        verify : bool
            Compare the digest and look for NaN in sealed blocks. Off only for files that nobody else can write.

        Raises
        ------
        StateFileError
            Missing, damaged, foreign, of another version, model or recipe.
        """
        cache = saving.load(cls, path, model, recipe, calibration, mmap=mmap, verify=verify)
        cache._held = [_layer_nbytes(layer) for layer in cache.layers]
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        # sealed blocks are never written again, so sharing them is as good as copying
        return self.fork()

    # -- reports

    def report(self) -> Report:
        """What is packed and what is not, bytes, bits per value, peak and kernel."""
        layers = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PackedLayer):
                layers.append(LayerReport.of_packed(index, layer.core))
            else:
                layers.append(LayerReport.of_dense(index, layer, self.reasons[index]))
        held = self.nbytes
        shared = storage_nbytes(self.calibration)
        return Report.of(self.recipe, layers, held, max(self.peak_nbytes, held), shared)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that the packed layers keep alive."""
        for layer in self._packed():
            if layer.core.store is not None:
                yield from layer.core.store.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor reachable from the cache; storage shared by several tensors counts once."""
        return storage_nbytes(self)

    @property
    def calibration(self) -> Calibration | None:
        """Statistics that the recipe draws on; they belong to the model and serve all its caches."""
        return None if self._calibration is None else self._calibration()

    # -- inner

    def _packed(self) -> Iterator[PackedLayer]:
        return (layer for layer in self.layers if isinstance(layer, PackedLayer))

    def _begin(self) -> None:
        if self.step.lost:
            raise StateError(
                f"layers {sorted(self.step.lost)} keep no earlier state, so the forward pass that failed in a later "
                "layer "
                "could not be undone; call cache.reset() and start again"
            )
        if not self.step.open:
            self.step.begin(self.get_seq_length())

    def _break_off(self) -> None:
        """Undo the last forward pass: a new one begins, and it never reached its end."""
        reached, length = sorted(self.step.through), self.step.length
        self.step.undo()
        if reached:  # the new pass has already taken its positions from a cache that was too long
            raise StateError(
                f"the last forward pass went only through layers {reached} of {len(self.layers)} and was undone; the "
                "cache "
                f"holds {length} tokens as before. Call the model again; if this repeats, the cache was made for "
                "another model"
            )

    def _note_linear(self, layer_idx: int) -> None:
        if layer_idx < self._last:  # after the last attention layer nothing of ours can fail any more
            self._begin()
            self.step.enter(layer_idx, None)

    def _crop_packed(self, count: int) -> None:
        kept: list[int] = []
        for layer in self._packed():
            kept = layer.core.crop(layer.core.length - count)
        for row, tokens in enumerate(kept):
            self.table.crop(row, tokens)

    def _pick(self, order: list[int], operation: str, argument: Any) -> None:
        """Apply `operation` to all layers, or to none: the packed ones become rows `order`."""
        self.step.undo()
        others = [layer for layer in self.layers if not isinstance(layer, PackedLayer)]
        for layer in others:
            if not hasattr(layer, operation):
                raise StateError(
                    f"{operation}() is not supported by transformers' {type(layer).__name__}; nothing was changed"
                )
        rows = len(self.table.rows)
        bad = [row for row in order if rows and not -rows <= row < rows]
        if bad:
            raise InputError(f"sequence {bad[0]} does not exist; the cache holds {rows}")
        if rows:
            order = [row % rows for row in order]
            self.table.pick(order)
            for packed in self._packed():
                packed.core.pick(order)
        for layer in others:
            getattr(layer, operation)(argument)

    def _note_peak(self, index: int, chunk: int) -> None:
        """Track the most bytes held at once: all layers, and the one chunk that is dense now."""
        previous = index - 1 if index else len(self.layers) - 1
        for at in {index, previous}:
            self._held[at] = _layer_nbytes(self.layers[at])
        self.peak_nbytes = max(self.peak_nbytes, sum(self._held) + chunk + self.step.nbytes)


def _stays(name: str) -> NoReturn:
    raise StateError(
        f"{name}() is not supported: packed layers stay on the device of their model; for a smaller cache choose fewer "
        "bits (`kvslim plan`)"
    )


def _calibration(model: Any, recipe: Recipe, layers: int, given: str | Path | Calibration | None) -> Calibration | None:
    """Find the calibration that `recipe` needs or gains from, if any."""
    if given is not None:
        found = given if isinstance(given, Calibration) else Calibration.load(given)
        if hasattr(model, "forward") and found.fingerprint != fingerprint(model):
            raise InputError(
                f"the calibration was made for another model (fingerprint {found.fingerprint}, this model's is "
                f"{fingerprint(model)}); make one with `kvslim calibrate`"
            )
        return found
    uses = {prior_use(side) for side in {side for layer in range(layers) for side in recipe.sides(layer)}}
    if uses == {"unused"}:
        return None
    if hasattr(model, "forward"):
        return calibration_of(model)
    if "needed" in uses:
        raise InputError(
            f"recipe '{recipe.label}' needs a calibration, and a config has no weights to take it from; pass the "
            "model, or "
            "calibration=FILE from `kvslim calibrate`"
        )
    return None


def _prior(calibration: Callable[[], Calibration | None] | None, layer: int) -> Mapping[str, torch.Tensor]:
    found = None if calibration is None else calibration()
    return {} if found is None else found.layers.get(layer, {})


def _layer_nbytes(layer: Any) -> int:
    if isinstance(layer, PackedLayer):
        return 0 if layer.core.store is None else layer.core.store.nbytes
    return storage_nbytes(layer)


def _copy_layer(layer: Any, table: BlockTable, step: Step) -> Any:
    if isinstance(layer, PackedLayer):
        copied = PackedLayer(layer.core.fork(table, step))
        copied.is_initialized = layer.is_initialized
        return copied
    return dense.copy_layer(layer)
