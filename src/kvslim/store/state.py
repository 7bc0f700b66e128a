"""State of a store as a JSON-able header and named tensors, and back: plain functions for whoever writes the file.

Blocks that several sequences share are named once, blocks that none holds not at all. Slots that belong to nobody (past
a row's exact tokens, past what is valid of a block) come out as zeros: removed tokens do not leave with the rest.
What comes back is checked against the layout that the recipe makes here, because kernels follow it blindly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kvslim.codecs.side import Frozen, SidePacker
from kvslim.files import Contents, Lazy
from kvslim.header import Fields
from kvslim.layout import FLOAT8, STORAGE, TOKEN_PARTS, PackedBlock, PackedLayout, Part
from kvslim.store.layer import LayerStore, Row
from kvslim.store.pool import Pool
from kvslim.store.table import BlockTable, Entry
from kvslim.transforms.base import Saved

DTYPES = {name: STORAGE[name] for name in ("fp16", "bf16", "fp32")}  # that models make keys in
_MOST_CHANNELS = 1 << 16  # of a layer: kv_heads * head_dim
_LAST_POSITION = 1 << 31

Build = Callable[[int, int, tuple[int, int], torch.dtype], LayerStore]
"""Makes an empty store: layer, kv_heads, head_dims of K and V, dtype of the model's keys."""


# -- out ---------------------------------------------------------------------------------------------------------------


def describe(table: BlockTable, stores: Mapping[int, LayerStore]) -> tuple[dict[str, Any], dict[str, Lazy]]:
    """Return the header and the tensors of layers that share `table`, between two passes."""
    held = list(dict.fromkeys(entry.block for row in table.rows for entry in row))  # in order of first use
    number = {block: at for at, block in enumerate(held)}
    used = [0] * len(held)
    for entry in (entry for row in table.rows for entry in row):
        used[number[entry.block]] = max(used[number[entry.block]], entry.valid)
    header = {
        "block": table.block,
        "blocks": len(held),
        "rows": [[(number[entry.block], entry.valid) for entry in row] for row in table.rows],
    }
    out = _Out()
    header["layers"] = [_describe_layer(layer, store, held, used, out) for layer, store in stores.items() if store.rows]
    return header, out.tensors


class _Out:
    """Tensors by name; one that several layers or rows share gets one name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Lazy] = {}
        self._names: dict[int, str] = {}

    def name_of(self, tensor: torch.Tensor, name: str) -> str:
        """Return the name of `tensor`, which is `name` where it has none yet."""
        if id(tensor) not in self._names:
            self._names[id(tensor)], self.tensors[name] = name, Lazy.of(tensor)
        return self._names[id(tensor)]


def _describe_layer(layer: int, store: LayerStore, held: list[int], used: list[int], out: _Out) -> dict[str, Any]:
    longest = max(row.sinks + row.tail for row in store.rows)
    for side, exact in zip("kv", (store.key, store.value), strict=True):
        shape = (*exact.shape[:2], longest, exact.shape[3])
        out.tensors[f"{layer}.{side}.exact"] = Lazy(shape, exact.dtype, partial(_exact, exact, store.rows, longest))
        for part in store.pool.layouts[side].parts if held else ():
            form = (len(held), store.kv_heads, *part.shape)
            make = partial(_blocks, store.pool, side, part, held, used)
            out.tensors[f"{layer}.{side}.block.{part.name}"] = Lazy(form, STORAGE[part.dtype], make)
    frozen = list(dict.fromkeys(row.frozen for row in store.rows if row.frozen is not None))
    return {
        "layer": layer,
        "dtype": store.packers[0].dtype,
        "kv_heads": store.kv_heads,
        "head_dims": store.head_dims,
        "layouts": [plain_layout(packer.layout) for packer in store.packers],
        "length": store.length,
        "key_mean_share": store.key_mean_share,
        "frozen": [_describe_frozen(f"{layer}", at, pair, out) for at, pair in enumerate(frozen)],
        "rows": [_describe_row(f"{layer}.moment.{at}", row, frozen, out) for at, row in enumerate(store.rows)],
    }


def _describe_frozen(layer: str, at: int, pair: tuple[Frozen, Frozen], out: _Out) -> dict[str, dict[str, str]]:
    return {
        side: {
            name: out.name_of(tensor, f"{layer}.{side}.frozen.{at}.{name}") for name, tensor in own.tensors().items()
        }
        for side, own in zip("kv", pair, strict=True)
    }


def _describe_row(moment: str, row: Row, frozen: list[tuple[Frozen, Frozen]], out: _Out) -> dict[str, Any]:
    return {
        "sinks": row.sinks,
        "packed": row.packed,
        "tail": row.tail,
        "holes": row.holes,
        "origin": row.origin,
        "queries": row.queries,
        "frozen": None if row.frozen is None else frozen.index(row.frozen),
        "moment": None if row.moment is None else out.name_of(row.moment, moment),
    }


def plain_layout(layout: PackedLayout) -> Any:
    """Return a layout as JSON would give it back."""
    return json.loads(json.dumps(asdict(layout)))


def _exact(exact: torch.Tensor, rows: list[Row], longest: int) -> torch.Tensor:
    out = exact[:, :, :longest].clone()
    for index, row in enumerate(rows):
        out[index, :, row.sinks + row.tail :] = 0
    return out


def _blocks(pool: Pool, side: str, part: Part, held: list[int], used: list[int]) -> torch.Tensor:
    out = pool.read_part(side, part.name, held)
    cut = [at for at, valid in enumerate(used) if valid < part.shape[0]] if part.name in TOKEN_PARTS else []
    if cut:
        out = out.clone()
        for at in cut:
            out[at, :, used[at] :] = 0
    return out


# -- back --------------------------------------------------------------------------------------------------------------


def restore(
    head: Fields, contents: Contents, table: BlockTable, build: Build, *, mapped: bool
) -> dict[int, LayerStore]:
    """Fill `table`, which must be empty, and return the stores that `describe` described.

    Where `build` gives stores of a pool that other tables use already, `table` must share their allocator; blocks take
    free places there.

    Parameters
    ----------
    head : Fields
    contents : Contents
        The file that the tensors come from.
    table : BlockTable
    build : callable
        See `Build`.
    mapped : bool
        Leave sealed blocks in the mapped file where the pool is empty, instead of copying them.

    Raises
    ------
    StateFileError
        Something is not as it must be; `table` is empty then.
    """
    if head.integer("block") != table.block:
        head.refuse("block", f"the recipe's {table.block}")
    blocks = head.integer("blocks", 0)
    rows = _rows(head, blocks, table.block)
    taken = table.adopt(rows, blocks)
    stores = {}
    try:
        for fields in head.each("layers"):
            layer = fields.integer("layer")
            store = build(layer, *_sizes(fields))
            stores[layer] = store
            _restore_layer(fields, contents, store, rows, taken, mapped=mapped)
        if len({store.length for store in stores.values()}) > 1 or len(stores) != len(head.each("layers")):
            head.refuse("layers", "layers of one length, each once")
        if rows and not stores:
            head.refuse("rows", "no sequences, because no layer has any")
    except BaseException:
        table.clear()
        raise
    return stores


def _rows(head: Fields, blocks: int, block: int) -> list[list[Entry]]:
    rows = [[Entry(*pair) for pair in row] for row in head.lists_of_pairs("rows")]
    for row in rows:
        ids = [entry.block for entry in row]
        if len(set(ids)) < len(ids) or any(each >= blocks for each in ids):
            head.refuse("rows", f"different block ids below {blocks} in each row")
        if not all(1 <= entry.valid <= block for entry in row):
            head.refuse("rows", f"1 to {block} tokens in each block")
    if len({entry.block for row in rows for entry in row}) != blocks:
        head.refuse("blocks", "the number of blocks that the rows hold")
    return rows


def _sizes(fields: Fields) -> tuple[int, tuple[int, int], torch.dtype]:
    dtype = fields.text("dtype")
    if dtype not in DTYPES:
        fields.refuse("dtype", f"one of {', '.join(DTYPES)}")
    kv_heads = fields.integer("kv_heads", 1, _MOST_CHANNELS)
    head_dims = fields.integers("head_dims", 1, _MOST_CHANNELS // kv_heads)
    if len(head_dims) != 2:
        fields.refuse("head_dims", "that of keys and that of values")
    return kv_heads, (head_dims[0], head_dims[1]), DTYPES[dtype]


def _restore_layer(
    fields: Fields, contents: Contents, store: LayerStore, rows: list[list[Entry]], taken: list[int], *, mapped: bool
) -> None:
    if fields.value.get("layouts") != [plain_layout(packer.layout) for packer in store.packers]:
        fields.refuse("layouts", "what this kvslim makes of the recipe")
    described = fields.each("rows")
    if not rows or len(described) != len(rows):
        fields.refuse("rows", f"one for each of {len(rows)} sequences")
    length, share = fields.integer("length"), fields.number("key_mean_share")
    frozen = [_frozen(each, contents, store) for each in fields.each("frozen")]
    restored = [
        _row(each, contents, store, length, sum(entry.valid for entry in row), frozen)
        for each, row in zip(described, rows, strict=True)
    ]
    try:
        store.start(len(rows))
    except RuntimeError as error:  # of torch's allocator
        fields.refuse("rows", f"sequences that fit into memory ({error})")
    _restore_exact(contents, store, fields.integer("layer"), max(row.sinks + row.tail for row in restored))
    if taken:
        _restore_blocks(contents, store, fields.integer("layer"), taken, mapped=mapped)
    store.rows, store.length, store.key_mean_share = restored, length, share


def _restore_exact(contents: Contents, store: LayerStore, layer: int, longest: int) -> None:
    for side, target in zip("kv", (store.key, store.value), strict=True):
        name = f"{layer}.{side}.exact"
        saved = contents.take(name, (*target.shape[:2], longest, target.shape[3]), target.dtype)
        contents.check_finite(name, saved)
        target[:, :, :longest] = saved


def _restore_blocks(contents: Contents, store: LayerStore, layer: int, taken: list[int], *, mapped: bool) -> None:
    pool = store.pool
    slab = {side: _parts(contents, store, layer, side, len(taken)) for side in "kv"}
    if mapped and not pool.capacity and taken == list(range(len(taken))):
        pool.adopt(slab, len(taken))
        return
    pool.reserve(max(taken) + 1)
    for side, parts in slab.items():
        pool.write(side, taken, PackedBlock(pool.layouts[side], parts))


def _parts(contents: Contents, store: LayerStore, layer: int, side: str, blocks: int) -> dict[str, torch.Tensor]:
    parts = {}
    for part in store.pool.layouts[side].parts:
        name = f"{layer}.{side}.block.{part.name}"
        parts[part.name] = saved = contents.take(name, (blocks, store.kv_heads, *part.shape), STORAGE[part.dtype])
        if contents.verify:
            contents.check_finite(name, saved.view(FLOAT8[part.dtype]).float() if part.dtype in FLOAT8 else saved)
    return parts


def _frozen(fields: Fields, contents: Contents, store: LayerStore) -> tuple[Frozen, Frozen]:
    key, value = (
        _frozen_side(fields.fields(side), contents, store, packer, head_dim)
        for side, packer, head_dim in zip("kv", store.packers, store.head_dims, strict=True)
    )
    return key, value


def _frozen_side(fields: Fields, contents: Contents, store: LayerStore, packer: SidePacker, head_dim: int) -> Frozen:
    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return contents.take_finite(fields.text(name), shape, dtype).to(store.device)

    names = frozenset(fields.value)
    return packer.restore(Saved(names, take, store.kv_heads, head_dim, store.block, fields.where), store.device)


def _row(
    fields: Fields,
    contents: Contents,
    store: LayerStore,
    length: int,
    in_blocks: int,
    frozen: list[tuple[Frozen, Frozen]],
) -> Row:
    sinks = fields.integer("sinks", 0, store.sinks)
    row = Row(
        sinks,
        fields.integer("packed", in_blocks, in_blocks),
        fields.integer("tail", 0, store.slots - store.sinks),
        tuple(fields.pairs("holes", length)),
        origin=fields.integer("origin", 0, _LAST_POSITION),
        queries=fields.integer("queries"),
    )
    edges = [0, *(edge for hole in row.holes for edge in hole)]
    if any(a > b for a, b in pairwise(edges)) or any(a == b for a, b in row.holes):
        fields.refuse("holes", "ascending ranges that are not empty")
    if store.real_tokens(row, length) != row.tokens:
        fields.refuse("tail", f"what makes {store.real_tokens(row, length)} tokens of {length} columns")
    if (row.packed or row.tail) and sinks != store.sinks:
        fields.refuse("sinks", f"{store.sinks} where more tokens follow")
    if fields.has("frozen"):
        row.frozen = frozen[fields.integer("frozen", 0, len(frozen) - 1)]
    elif row.packed:
        fields.refuse("frozen", "parameters, because tokens are packed")
    if fields.has("moment"):
        size = store.head_dims[0]
        row.moment = contents.take_finite(fields.text("moment"), (store.kv_heads, size, size), torch.float32)
        row.moment = row.moment.to(store.device)
    return row


def unfrozen(stores: Iterable[LayerStore]) -> bool:
    """Whether some sequence still waits for its parameters, which a calibration will shape."""
    return any(row.frozen is None for store in stores for row in store.rows)
