"""Pools: sealed blocks stay where they are, whatever is added, and are read back in any order."""

import pytest
import torch

from kvslim.codecs import build_codec
from kvslim.layout import PackedBlock, block_nbytes
from kvslim.recipe import Side
from kvslim.store.pool import Pool

HEADS, DIM, BLOCK = 2, 16, 8


def make_pool(key: str = "affine:4:asym:scale=channel", value: str = "affine:8:scale=16") -> Pool:
    layouts = [build_codec(Side.parse(side)).layout(DIM, BLOCK) for side in (key, value)]
    return Pool(*layouts, HEADS, torch.device("cpu"))


def blocks_of(pool: Pool, side: str, ids: list[int]) -> PackedBlock:
    """Blocks whose every byte tells the id."""
    parts = {}
    for part in pool.layouts[side].parts:
        dtype = torch.uint8 if part.dtype == "u8" else torch.float16
        parts[part.name] = torch.stack([torch.full((HEADS, *part.shape), id_ + 1, dtype=dtype) for id_ in ids])
    return PackedBlock(pool.layouts[side], parts)


def fill(pool: Pool, ids: list[int]) -> None:
    pool.reserve(max(ids) + 1)
    for side in "kv":
        pool.write(side, ids, blocks_of(pool, side, ids))


def ids_in(packed: PackedBlock) -> list[int]:
    """The ids that `fill` wrote, one per block; every byte of a block must agree."""
    found = []
    for row in range(len(packed.parts["code"])):
        values = {float(v) for part in packed.parts.values() for v in part[row].float().unique()}
        assert len(values) == 1
        found.append(int(values.pop()) - 1)
    return found


def test_an_empty_pool_holds_nothing():
    pool = make_pool()
    assert (pool.capacity, pool.nbytes, list(pool.tensors())) == (0, 0, [])


def test_bytes_are_those_of_the_tensors():
    pool = make_pool()
    fill(pool, list(range(37)))
    assert pool.nbytes == sum(tensor.nbytes for tensor in pool.tensors())
    per_block = HEADS * sum(block_nbytes(layout) for layout in pool.layouts.values())
    assert pool.nbytes == pool.capacity * per_block


def test_growth_never_moves_what_is_stored():
    pool = make_pool()
    fill(pool, [0, 1, 2])
    before = {id(tensor): (tensor.data_ptr(), tensor.clone()) for tensor in pool.tensors()}
    for size in range(4, 300):
        pool.reserve(size)
    kept = {id(tensor): tensor for tensor in pool.tensors() if id(tensor) in before}
    assert len(kept) == len(before)
    for key, (pointer, values) in before.items():
        assert kept[key].data_ptr() == pointer
        assert torch.equal(kept[key], values)
    assert ids_in(pool.read("k", [0, 1, 2])) == [0, 1, 2]


def test_spare_room_stays_small():
    """Growth block by block keeps at most a sixteenth to spare, and few slabs."""
    pool = make_pool()
    for size in range(1, 1200):
        pool.reserve(size)
        assert pool.capacity <= size + max(1, size // 16)
    assert len(list(pool.tensors())) < 5 * 130


def test_reserving_at_once_takes_exactly_what_is_asked_for():
    pool = make_pool()
    pool.reserve(50)
    assert pool.capacity == 50
    pool.reserve(20)
    assert pool.capacity == 50


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [5], [4, 5, 6, 7, 8], [9, 0, 1, 9, 9], list(range(10))])
def test_reading_in_any_order_and_across_slabs(order):
    pool = make_pool()
    for size in (3, 4, 8, 10):  # four slabs
        pool.reserve(size)
    fill(pool, list(range(10)))
    for side in "kv":
        packed = pool.read(side, order)
        assert ids_in(packed) == order
        assert packed.parts["code"].shape[:2] == (len(order), HEADS)


def test_writing_across_slabs_and_out_of_order():
    pool = make_pool()
    for size in (2, 5, 6):
        pool.reserve(size)
    fill(pool, [4, 1, 5, 2, 3, 0])
    assert ids_in(pool.read("k", list(range(6)))) == list(range(6))
    fill(pool, [3])
    assert ids_in(pool.read("v", list(range(6)))) == list(range(6))


def test_consecutive_blocks_of_a_slab_are_read_without_a_copy():
    pool = make_pool()
    fill(pool, list(range(6)))
    storages = {tensor.untyped_storage().data_ptr() for tensor in pool.tensors()}
    for part in pool.read("k", [2, 3, 4]).parts.values():
        assert part.untyped_storage().data_ptr() in storages


def test_writing_tokens_leaves_the_other_slots_alone():
    pool = make_pool("affine:8:scale=16", "affine:8:scale=16")
    fill(pool, [0, 1, 2])
    side = pool.layouts["k"]
    tokens = {part.name: torch.full((1, HEADS, 3, *part.shape[1:]), 77, dtype=torch.float16) for part in side.parts}
    pool.write_tokens("k", 1, 4, PackedBlock(side, tokens))
    for name, part in pool.read("k", [0, 1, 2]).parts.items():
        assert (part[0] == 1).all(), name
        assert (part[2] == 3).all(), name
        assert (part[1, :, 4:7] == 77).all(), name
        assert (part[1, :, :4] == 2).all(), name
        assert (part[1, :, 7:] == 2).all(), name
    assert ids_in(pool.read("v", [0, 1, 2])) == [0, 1, 2]


def test_copy_takes_both_sides():
    pool = make_pool()
    fill(pool, [0, 1, 2])
    pool.reserve(5)
    pool.copy(1, 4)
    for side in "kv":
        assert ids_in(pool.read(side, [0, 1, 2, 4])) == [0, 1, 2, 1]


def test_clear_frees_everything():
    pool = make_pool()
    fill(pool, [0, 1])
    pool.clear()
    assert (pool.capacity, pool.nbytes, list(pool.tensors())) == (0, 0, [])
    fill(pool, [0])
    assert ids_in(pool.read("k", [0])) == [0]
