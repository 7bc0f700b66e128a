"""LayerCache: the pipeline of one layer, free of any framework. Append, attend, settle."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kvslim.attention.dispatch import attend
from kvslim.attention.reference import Score
from kvslim.codecs.none import NoneCodec
from kvslim.codecs.side import SidePacker
from kvslim.errors import InputError, PackingWarning, RecipeError, StateError
from kvslim.layout import STORAGE, is_token_wise
from kvslim.recipe import Recipe
from kvslim.store.layer import LayerStore
from kvslim.store.step import Step
from kvslim.store.table import BlockTable

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_LARGE_MEAN = 0.95  # |mean key| / rms key: Qwen2.5 reaches .997 in some layers, Gemma 3 and Llama stay below .9


class LayerCache:
    """Packed keys and values of one attention layer.

    Parameters
    ----------
    recipe : Recipe
    layer : int
        Index of the layer in the model; named in errors, selects per-layer overrides.
    table : BlockTable
        Shared by the layers of a cache.
    prior : callable, optional
        Gives the calibration of this layer (see kvslim.calibration) when parameters are frozen. It belongs to the
        model, so no tensor of it is held here.
    step : Step, optional
        The forward pass under way; makes it possible to undo one that fails in a later layer.
    """

    def __init__(
        self,
        recipe: Recipe,
        layer: int,
        table: BlockTable,
        prior: Callable[[], Mapping[str, torch.Tensor]] = dict,
        step: Step | None = None,
    ):
        self.recipe, self.layer, self.table, self.prior, self.step = recipe, layer, table, prior, step
        self.store: LayerStore | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._fresh = True  # whether the pending chunk is the first
        self.owner: weakref.ReferenceType[Any] | None = None  # the model's layer whose tokens these are

    def claim(self, module: Any) -> None:
        """Note whose tokens these are.

        Raises
        ------
        InputError
            They came from another model, which is still there.
        """
        owner = None if self.owner is None or not self.length else self.owner()
        if owner is None:
            self.owner = weakref.ref(module)
        elif owner is not module:
            raise InputError(
                f"layer {self.layer}: the cache holds {self.length} tokens of another model; call cache.reset() "
                "first, or "
                "make a new cache"
            )

    @property
    def length(self) -> int:
        """Columns stored, padding included, the chunk whose attention is not done yet left out."""
        return 0 if self.store is None else self.store.length

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold a chunk until `attend` is called.

        Parameters
        ----------
        key, value : Tensor of shape (batch, kv_heads, chunk, head_dim)

        Raises
        ------
        InputError
            NaN or Inf, or a shape, dtype or batch that does not fit what is stored; nothing has changed then.
        StateError
            Autograd is on for these tensors, or the previous chunk was never attended to.
        """
        sizes = self._check(key, value)
        if self.store is None or (not self.store.rows and self._shapes(self.store) != self._shapes_of(key, value)):
            self.store = self.build(key.shape[1], (key.shape[-1], value.shape[-1]), key.dtype, key.device)
        self._check_range(self.store, key.dtype, sizes)
        self._fresh = not self.store.rows
        if self.step is not None:
            self.step.enter(self.layer, self.clear if self._fresh else self._drop)
        if self._fresh:
            self.table_rows(key.shape[0])
            self.store.start(key.shape[0])
        self.pending = key, value

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        score: Score,
        *,
        causal: bool = True,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the pending chunk over everything, then seal what left the recent window.

        Shapes as in `kvslim.attention.reference.attend`.
        """
        chunk, store = self._chunk()
        mask = _per_sequence(mask, len(store.rows))
        self._check_mask(mask, chunk[0].shape[2])
        out = attend(query, store, chunk, mask, score, causal=causal)
        self.settle(query, mask, positions)
        return out

    def settle(self, query: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None = None) -> None:
        """Take in the pending chunk, whose attention is done: sinks first, then the tail; seal what left the window."""
        chunk, store = self._chunk()
        mask = _per_sequence(mask, len(store.rows))
        share = store.key_mean_share
        before = store.settle(*chunk, query, real_columns(mask, chunk[0].shape[2]), positions)
        self.pending = None
        if share == 0.0 and store.key_mean_share > _LARGE_MEAN:
            self._warn_if_fragile()
        if self.step is not None:
            if not self._fresh:  # else append() has noted to clear it
                self.step.enter(self.layer, partial(store.restore, before), before.nbytes)
            self.step.leave(self.layer)

    def _warn_if_fragile(self) -> None:
        preset = self.recipe.preset
        if preset is not None and preset.fragile:
            # the same text for every layer, so that Python's filter shows it once
            warnings.warn(
                f"recipe '{preset.name}' {preset.note}. This model's keys lie around a mean of more than "
                f"{_LARGE_MEAN:.0%} of their size",
                PackingWarning,
                stacklevel=2,
            )

    def take_back(self) -> None:
        """Undo the forward pass under way, in this layer and in those before it."""
        if self.step is not None:
            self.step.undo()
        self.pending = None

    def _drop(self) -> None:
        self.pending = None

    def _chunk(self) -> tuple[tuple[torch.Tensor, torch.Tensor], LayerStore]:
        if self.pending is None or self.store is None:
            raise StateError(f"layer {self.layer}: no chunk is waiting; call append() first")
        return self.pending, self.store

    def table_rows(self, rows: int) -> None:
        """Start the shared table where this is the first layer to hold tokens."""
        if not self.table.rows:
            self.table.start(rows)

    def packers(self, head_dims: tuple[int, int], dtype: str) -> tuple[SidePacker, SidePacker]:
        """Build K and V sides for a model's head dims and dtype name; see `build_packers`."""
        return build_packers(self.recipe, self.layer, head_dims, dtype)

    def build(self, kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> LayerStore:
        """Return an empty store for keys and values of these sizes, as the model makes them."""
        packers = self.packers(head_dims, DTYPE_NAMES[dtype])
        dtypes = [exact_dtype(self.recipe, packer, dtype) for packer in packers]
        return LayerStore(
            packers,
            self.table,
            kv_heads=kv_heads,
            head_dims=head_dims,
            sinks=self.recipe.sinks,
            recent=self.recipe.recent,
            immediate=self.recipe.immediate,
            dtypes=(dtypes[0], dtypes[1]),
            device=device,
            prior=self.prior,
        )

    def _check(self, key: torch.Tensor, value: torch.Tensor) -> tuple[float, float]:
        """Refuse what cannot be stored; returns the largest magnitude of keys and of values."""
        if self.pending is not None:
            raise StateError(f"layer {self.layer}: the last chunk was never attended to; call attend() first")
        if key.dtype not in DTYPE_NAMES:
            raise InputError(f"layer {self.layer}: keys are {key.dtype}; use float16, bfloat16 or float32")
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise StateError(
                f"layer {self.layer}: a packed cache does not carry gradients; run under torch.no_grad() or generate()"
            )
        self._check_place(key, value)
        sizes = _largest(key), _largest(value)
        for name, states, size in zip(("keys", "values"), (key, value), sizes, strict=True):
            if not math.isfinite(size):
                row, _, token, _ = (~torch.isfinite(states)).nonzero()[0].tolist()
                raise InputError(
                    f"layer {self.layer}: {name} contain NaN or Inf at position {self.length + token} of sequence "
                    f"{row}; the cache is as before. Look for overflow in the model (fp16 activations?)"
                )
        return sizes

    def _check_place(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Refuse shapes and devices that are not those of what is stored, before any value is read."""
        if key.device.type == "meta":
            raise InputError(
                f"layer {self.layer}: keys are on the meta device, which holds no values; load the model's weights"
            )
        store = self.store
        if store is None or not store.rows:
            return
        want, got = (len(store.rows), *self._shapes(store)), (key.shape[0], *self._shapes_of(key, value))
        if want != got:
            step = (
                "move the model back, or start a new cache"
                if want[:-1] == got[:-1]
                else "use a new cache for another model or batch"
            )
            raise InputError(
                f"layer {self.layer}: (batch, kv_heads, key dim, value dim, device) is {got}, the cache holds {want}; "
                f"{step}"
            )

    def _check_range(self, store: LayerStore, given: torch.dtype, sizes: tuple[float, float]) -> None:
        for name, largest, dtype in zip(("keys", "values"), sizes, store.dtypes, strict=True):
            limit = torch.finfo(dtype).max
            if limit < torch.finfo(given).max and largest > limit:
                raise InputError(
                    f"layer {self.layer}: {name} reach {largest:.3g}, past the {limit:.0f} of {DTYPE_NAMES[dtype]}; "
                    "add '+exact=fp32' to the recipe"
                )

    @staticmethod
    def _shapes(store: LayerStore) -> tuple[object, ...]:
        return (store.kv_heads, *store.head_dims, store.device)

    @staticmethod
    def _shapes_of(key: torch.Tensor, value: torch.Tensor) -> tuple[object, ...]:
        return (key.shape[1], key.shape[-1], value.shape[-1], key.device)

    def _check_mask(self, mask: torch.Tensor | None, chunk: int) -> None:
        if mask is None:
            return
        store = self.store
        assert store is not None
        if mask.shape[-1] != store.length + chunk:
            raise InputError(
                f"layer {self.layer}: the attention mask has {mask.shape[-1]} columns, "
                f"the cache and the chunk have {store.length} + {chunk}"
            )
        for index, row in enumerate(store.rows):
            for start, stop in row.holes:
                if bool(_is_visible(mask[index, ..., start:stop]).any()):
                    raise InputError(
                        f"layer {self.layer}: columns {start}-{stop - 1} of sequence {index} were padding when they "
                        "came "
                        "and are not stored, but the attention mask now shows them; keep padding hidden"
                    )

    # -- operations; the table is the caller's, because all layers share it ------------------------------------------

    def crop(self, length: int) -> list[int]:
        """Keep the first `length` columns; returns the packed tokens that each row keeps."""
        self.pending = None
        return [] if self.store is None else self.store.crop(length)

    def pick(self, order: list[int]) -> None:
        """Make sequence ``i`` what sequence ``order[i]`` was."""
        if self.store is not None:
            self.store.pick(order)

    def fork(self, table: BlockTable, step: Step | None = None) -> LayerCache:
        """Return a layer with the same tokens that shares sealed blocks."""
        other = LayerCache(self.recipe, self.layer, table, self.prior, step)
        # a layer without tokens has no blocks to share, so its fork begins with a pool of its own
        other.store = None if self.store is None or not self.store.rows else self.store.fork(table)
        other.owner = self.owner
        return other

    def clear(self) -> None:
        """Forget all tokens; the table must have been cleared before."""
        self.pending = None
        if self.store is not None:
            self.store.clear()


def build_packers(
    recipe: Recipe, layer: int, head_dims: tuple[int, int], model_dtype: str
) -> tuple[SidePacker, SidePacker]:
    """Build the K and V sides of one layer.

    Raises
    ------
    RecipeError
        An unknown codec or transform, or settings that fit neither each other nor the head_dim.
    """
    key, value = (
        SidePacker(side, dim, recipe.block, model_dtype)
        for side, dim in zip(recipe.sides(layer), head_dims, strict=True)
    )
    for packer, side in zip((key, value), recipe.sides(layer), strict=True):
        if recipe.immediate and not is_token_wise(packer.layout):
            raise RecipeError(
                f"layer {layer}: '{side}' has block statistics, so tokens cannot be packed one by one; "
                "drop 'immediate' or use a codec with token scales"
            )
    return key, value


def exact_dtype(recipe: Recipe, packer: SidePacker, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the exact tokens of one side."""
    if recipe.exact != "auto":
        return STORAGE[recipe.exact]
    narrow = model_dtype == torch.float32 and not isinstance(packer.codec, NoneCodec)
    return torch.float16 if narrow else model_dtype


def real_columns(mask: torch.Tensor | None, chunk: int) -> torch.Tensor | None:
    """Which columns of the chunk are real tokens: those that some query of the chunk may see; (batch, chunk) or None.

    A padding column is hidden from every query, a real token is seen by its own.
    """
    if mask is None:
        return None
    return _is_visible(mask[..., mask.shape[-1] - chunk :]).flatten(1, -2).any(1)


def _per_sequence(mask: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return mask if mask is None or mask.shape[0] == rows else mask.expand(rows, -1, -1, -1)


def _largest(states: torch.Tensor) -> float:
    """Largest magnitude; NaN or Inf if there is one."""
    if not states.numel():
        return 0.0
    low, high = (float(edge) for edge in states.aminmax())
    return high if math.isnan(high) else max(-low, high)


def _is_visible(mask: torch.Tensor) -> torch.Tensor:
    # additive masks hide with -inf or with the dtype's lowest value
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
