"""Whatever is done to a file of a cache, loading it gives an equal cache or a StateFileError. Nothing else."""

import copy
import hashlib
import json
import struct
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import golden_cache
import kvslim
from kvslim import files
from kvslim.errors import KVSlimError, StateFileError
from test_adapter import state_hash

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


class Case:
    """A file that was saved, and what is equal to it."""

    def __init__(self, folder: Path, recipe: str = golden_cache.RECIPE):
        self.model = golden_cache.model()
        self.path = folder / "cache.safetensors"
        self.cache = golden_cache.cache_of(self.model, recipe)
        ids = torch.tensor(golden_cache.PROMPT)[golden_cache.ORDER, :-5]
        self.cache.save(self.path, ids=ids, notes={"n": 1})
        self.content = self.path.read_bytes()
        self.hash = state_hash(self.cache)
        self.start = 8 + struct.unpack("<Q", self.content[:8])[0]
        self.index = json.loads(self.content[8 : self.start])

    def load(self, content: bytes, mmap: bool = False, verify: bool = True) -> kvslim.KVCache | None:
        """The cache in a file of this content; None where it is refused."""
        self.path.write_bytes(content)
        try:
            return kvslim.KVCache.load(self.path, self.model, mmap=mmap, verify=verify)
        except StateFileError as refusal:
            assert str(self.path) in str(refusal)
            return None

    def check(self, content: bytes, mmap: bool = False) -> None:
        loaded = self.load(content, mmap)
        assert loaded is None or state_hash(loaded) == self.hash

    def signed(self, header: Any = None, data: bytes | None = None, index: Any = None) -> bytes:
        """A file with other contents and the digest that belongs to them."""
        index = copy.deepcopy(self.index if index is None else index)
        data = self.content[self.start :] if data is None else data
        metadata = index["__metadata__"]
        if header is not None:
            metadata["header"] = json.dumps(header)
        digest = files._digest(metadata)
        names = [name for name in index if name != "__metadata__"]
        dtypes = {name: files._DTYPES[index[name]["dtype"]] for name in names}
        for name in sorted(names, key=lambda name: files._place(name, dtypes[name])):
            begin, end = index[name]["data_offsets"]
            files._add(digest, name, dtypes[name], tuple(index[name]["shape"]), memoryview(data[begin:end]))
        metadata["digest"] = digest.hexdigest()
        head = json.dumps(index).encode()
        head += b" " * (-len(head) % 8)
        return struct.pack("<Q", len(head)) + head + data

    @property
    def header(self) -> dict:
        return json.loads(self.index["__metadata__"]["header"])


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("fuzz"))


def test_the_tools_of_this_file_make_a_file_that_loads(case):
    for content in (case.content, case.signed(), case.signed(case.header)):
        loaded = case.load(content)
        assert loaded is not None
        assert state_hash(loaded) == case.hash


@given(
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4), mmap=st.booleans()
)
@FUZZ
def test_flipped_bytes(case, edits, mmap):
    content = bytearray(case.content)
    for at, flip in edits:
        content[at % len(content)] ^= flip
    case.check(bytes(content), mmap)


@given(at=st.integers(0, 1 << 20), size=st.integers(0, 1 << 20), what=st.sampled_from(["cut", "remove", "repeat", "move"]), junk=st.binary(max_size=40))  # fmt: skip
@FUZZ
def test_truncations_and_splices(case, at, size, what, junk):
    content = case.content
    at %= len(content)
    size %= len(content) - at + 1
    piece = content[at : at + size]
    changed = {
        "cut": content[:at] + junk,
        "remove": content[:at] + content[at + size :],
        "repeat": content[:at] + piece + junk + content[at:],
        "move": piece + content[:at] + content[at + size :],
    }[what]
    case.check(changed)


def places(value: Any, way: tuple = ()) -> list[tuple]:
    """Ways to every value in nested JSON."""
    found = [way] if way else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        found += places(each, (*way, key))
    return found


def changed(value: Any, way: tuple, new: Any) -> Any:
    value = copy.deepcopy(value)
    at = value
    for key in way[:-1]:
        at = at[key]
    if new is Edit.DELETE:
        del at[way[-1]]
    elif new is Edit.DOUBLE and isinstance(at, list):
        at.append(copy.deepcopy(at[way[-1]]))
    elif new in (Edit.MORE, Edit.LESS) and type(at[way[-1]]) in (int, float):
        at[way[-1]] += 1 if new is Edit.MORE else -1
    else:
        at[way[-1]] = None if new in (Edit.DOUBLE, Edit.MORE, Edit.LESS) else new
    return value


class Edit(Enum):
    DELETE, DOUBLE, MORE, LESS = range(4)


VALUES = st.one_of(
    st.sampled_from([Edit.DELETE, Edit.DOUBLE, Edit.MORE, Edit.LESS, None, True, [], {}, "", "x", -1, 0, 1, 2, 7, 8, 9, 0.5, 1e300, 1 << 31, 1 << 40, 1 << 63, 1 << 100]),
    st.integers(-5, 60),
    st.text(max_size=5),
)  # fmt: skip


@given(data=st.data(), mmap=st.booleans())
@settings(FUZZ, max_examples=400)
def test_headers_with_other_values_and_the_digest_that_belongs_to_them(case, data, mmap):
    """What is accepted must go on: kernels follow these numbers through memory."""
    header = case.header
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(places(header)))
        header = changed(header, way, data.draw(VALUES))
    try:
        loaded = case.load(case.signed(header), mmap)
    except KVSlimError:  # of the recipe, which has its own reader
        return
    if loaded is not None:
        go_on(case, loaded)


@given(data=st.data())
@FUZZ
def test_tensors_of_other_forms_and_values(case, data):
    index, content = copy.deepcopy(case.index), bytearray(case.content[case.start :])
    name = data.draw(st.sampled_from([name for name in index if name != "__metadata__"]))
    entry = index[name]
    begin, end = entry["data_offsets"]
    kind = data.draw(st.sampled_from(["shape", "dtype", "rename", "fill", "swap"]))
    if kind == "shape":
        entry["shape"] = list(reversed(entry["shape"]))
    elif kind == "dtype":
        entry["dtype"] = data.draw(st.sampled_from([d for d in files._NAMES.values() if len(d) > 2]))
    elif kind == "rename":
        index[name + "x"] = index.pop(name)
    elif kind == "fill":
        content[begin:end] = bytes([data.draw(st.sampled_from([0, 1, 127, 128, 255]))]) * (end - begin)
    else:
        other = data.draw(st.sampled_from([each for each in index if each != "__metadata__"]))
        index[name], index[other] = index[other], index[name]
    try:
        signed = case.signed(data=bytes(content), index=index)
    except (TypeError, ValueError):
        return
    loaded = case.load(signed)
    if loaded is not None:
        go_on(case, loaded)


def go_on(case: Case, cache: kvslim.KVCache) -> None:
    """A forward pass through every kernel, and the operations; only kvslim may refuse."""
    rows, length = len(cache.table.rows), cache.get_seq_length()
    if not rows:
        return
    ids = torch.ones(rows, 12, dtype=torch.long)
    mask = torch.ones(rows, length + 12, dtype=torch.long)
    for layer in cache.layers:
        for row, each in enumerate(layer.core.store.rows if hasattr(layer, "core") else ()):
            for start, stop in each.holes:
                mask[row, start:stop] = 0
    try:
        logits = golden_cache.feed(case.model, cache, ids, mask)
    except KVSlimError:
        return
    assert logits.shape[:2] == (rows, 12)
    cache.fork().reset()
    cache.save(case.path)


BAD = {
    "block id out of range": (("store", "rows", 0, 0, 0), 99, "different block ids below"),
    "negative block id": (("store", "rows", 0, 0, 0), -1, "whole number from 0"),
    "no tokens in a block": (("store", "rows", 0, 0, 1), 0, "1 to 8 tokens"),
    "too many tokens in a block": (("store", "rows", 0, 0, 1), 9, "1 to 8 tokens"),
    "a block nobody holds": (("store", "blocks"), 99, "number of blocks that the rows hold"),
    "other block size": (("store", "block"), 16, "the recipe's 8"),
    "other kv_heads": (("store", "layers", 0, "kv_heads"), 2, "is torch.* expected torch"),
    "other head_dim": (("store", "layers", 0, "head_dims", 0), 16, "layouts is"),
    "other dtype": (("store", "layers", 0, "dtype"), "fp64", "one of fp16, bf16, fp32"),
    "other bits": (("store", "layers", 0, "layouts", 0, "segments", 0, "bits"), 3, "what this kvslim makes of the recipe"),
    "a layer that is not packed": (("store", "layers", 0, "layer"), 0, r"layers out of \[1\]"),
    "no layers": (("store", "layers"), [], "no sequences"),
    "other length": (("length",), 5, "expected"),
    "other length of a layer": (("store", "layers", 0, "length"), 5, "expected"),
    "too many exact tokens": (("store", "layers", 0, "rows", 0, "tail"), 12, "whole number from 0 to 11"),
    "packed tokens that are not there": (("store", "layers", 0, "rows", 0, "packed"), 8, "whole number from"),
    "holes out of order": (("store", "layers", 0, "rows", 2, "holes"), [[2, 1], [0, 2]], "ascending ranges"),
    "holes past the end": (("store", "layers", 0, "rows", 2, "holes"), [[20, 23]], "whole number from 0 to 21"),
    "no parameters": (("store", "layers", 0, "rows", 0, "frozen"), None, "because tokens are packed"),
    "parameters of nobody": (("store", "layers", 0, "rows", 0, "frozen"), 5, "whole number from 0 to"),
    "parameters under another name": (("store", "layers", 0, "frozen", 0, "k", "0.weight"), "1.k.exact", "is torch.* expected"),
    "parameters missing": (("store", "layers", 0, "frozen", 0, "k"), {}, "is None, expected text"),
    "position past all": (("store", "layers", 0, "rows", 0, "origin"), 1 << 33, "whole number"),
    "a window of another size": (("dense", 0, "window"), 9, "whole number from 8 to 8"),
    "another kind of layer": (("dense", 0, "kind"), "DynamicLayer", "as the model has it"),
    "fewer dense layers": (("dense",), [], "those that are not packed"),
    "negative skip": (("skipped",), [-1], "whole number from 0"),
    "another fingerprint": (("fingerprint",), "0" * 32, "another model"),
    "a future recipe": (("recipe", "version"), 2, "recipe version 2"),
}  # fmt: skip


@pytest.mark.parametrize(("way", "value", "message"), BAD.values(), ids=BAD)
def test_impossible_headers_are_named(case, way, value, message):
    case.path.write_bytes(case.signed(changed(case.header, way, value)))
    with pytest.raises(KVSlimError, match=message):
        kvslim.KVCache.load(case.path, case.model)


def test_nan_and_inf_in_statistics_are_refused(case):
    floats = [name for name, entry in case.index.items() if name != "__metadata__" and entry["dtype"].startswith("F")]
    assert {"1.k.block.token", "1.k.exact", "1.k.frozen.0.moment", "1.k.frozen.0.0.weight", "0.dense.keys"} <= set(
        floats
    )
    for name in floats:
        _begin, end = case.index[name]["data_offsets"]
        for value in (torch.nan, torch.inf):
            width = {"F16": torch.float16, "F32": torch.float32}[case.index[name]["dtype"]]
            data = bytearray(case.content[case.start :])
            bad = torch.tensor([value], dtype=width).view(torch.uint8).numpy().tobytes()
            data[end - len(bad) : end] = bad
            case.path.write_bytes(case.signed(data=bytes(data)))
            with pytest.raises(StateFileError, match=f"'{name}' has NaN or Inf|{name}"):
                kvslim.KVCache.load(case.path, case.model)


IMPOSSIBLE = {
    "no permutation": (
        "k=outlier:count=4/affine:8+v=affine:8+recent=3",
        "1.k.frozen.0.0.order",
        "order is no permutation",
    ),
    "a weight of zero": ("slim4+recent=3", "1.k.frozen.0.0.weight", "a weight is not above 0"),
    "channels that do not exist": ("slim4p", "1.k.frozen.0.0.rope_pairs", "no pairs of different channels below 8"),
    "no query metric": ("slim4+recent=3", "1.k.frozen.0.moment", "no query metric"),
}


@pytest.mark.parametrize(("recipe", "name", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_parameters_that_no_transform_has_are_refused(tmp_path, recipe, name, message):
    case = Case(tmp_path, recipe + "+block=8+sinks=2")
    begin, end = case.index[name]["data_offsets"]
    data = bytearray(case.content[case.start :])
    data[begin:end] = (b"\xfb" if "moment" in name else b"\0") * (end - begin)  # -6e4 as fp16
    case.path.write_bytes(case.signed(data=bytes(data)))
    with pytest.raises(StateFileError, match=message):
        kvslim.KVCache.load(case.path, case.model)


def test_memory_that_is_not_there_is_refused(case):
    """A recipe with a million recent tokens and many sequences: refused by name, not by the operating system."""
    header = case.header
    recipe = header["recipe"]
    recipe["recipe"] = recipe["recipe"].replace("recent=3", "recent=1048576")
    row = header["store"]["layers"][0]["rows"][0] | {
        "tail": 0,
        "packed": 0,
        "sinks": 0,
        "frozen": None,
        "holes": [[0, 21]],
    }
    header["store"] |= {"rows": [[]] * 2000, "blocks": 0}
    layer = header["store"]["layers"][0]
    layer |= {"rows": [row] * 2000, "frozen": [], "kv_heads": 4096}
    case.path.write_bytes(case.signed(header))
    with pytest.raises(StateFileError, match="sequences that fit into memory"):
        kvslim.KVCache.load(case.path, case.model)


def test_the_digest_covers_the_header(case):
    assert hashlib.sha256(case.content).digest() != hashlib.sha256(case.signed(case.header | {"kvslim": "9"})).digest()
    content = case.content.replace(b'\\"kvslim\\": \\"0', b'\\"kvslim\\": \\"9')
    assert content != case.content
    assert case.load(content) is None
