"""Block tables and reference counts: which blocks a sequence consists of, and who still needs them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.errors import StateError
from kvslim.store.table import BlockAllocator, BlockTable, Entry, Placement

BLOCK = 8


def table_of(*lengths: int) -> BlockTable:
    """A table whose rows hold whole blocks for `lengths` tokens."""
    table = BlockTable(BlockAllocator(), BLOCK)
    table.start(len(lengths))
    for row, length in enumerate(lengths):
        if length:
            table.place(row, 0, length, whole=True)
    return table


def test_allocator_hands_out_the_lowest_free_id():
    allocator = BlockAllocator()
    assert [allocator.allocate() for _ in range(4)] == [0, 1, 2, 3]
    allocator.release([2, 0])
    assert allocator.in_use == 2
    assert [allocator.allocate() for _ in range(3)] == [0, 2, 4]
    assert allocator.in_use == 5


def test_allocator_counts_references():
    allocator = BlockAllocator()
    block = allocator.allocate()
    allocator.retain([block, block])
    assert allocator.references(block) == 3
    allocator.release([block, block])
    assert allocator.in_use == 1
    allocator.release([block])
    assert (allocator.references(block), allocator.in_use) == (0, 0)


def test_releasing_too_often_is_an_error():
    allocator = BlockAllocator()
    block = allocator.allocate()
    allocator.release([block])
    with pytest.raises(StateError, match=f"block {block} "):
        allocator.release([block])


def test_place_takes_whole_blocks():
    table = table_of(0)
    assert table.place(0, 0, 16, whole=True) == [Placement(0, 0, 8), Placement(1, 0, 8)]
    assert table.rows[0] == [Entry(0, 8), Entry(1, 8)]
    assert table.tokens(0) == 16


def test_place_finds_the_same_slots_for_the_layers_after_the_first():
    table = table_of(0)
    first = table.place(0, 0, 24, whole=True)
    assert table.place(0, 0, 24, whole=True) == first
    assert table.place(0, 8, 24, whole=True) == first[1:]
    assert table.allocator.in_use == 3


def test_place_begins_a_new_block_after_a_crop_inside_one():
    table = table_of(16)
    table.crop(0, 11)
    assert table.rows[0] == [Entry(0, 8), Entry(1, 3)]
    assert table.place(0, 11, 19, whole=True) == [Placement(2, 0, 8)]
    assert table.rows[0] == [Entry(0, 8), Entry(1, 3), Entry(2, 8)]
    assert table.place(0, 0, 19, whole=True) == [Placement(0, 0, 8), Placement(1, 0, 3), Placement(2, 0, 8)]


def test_token_by_token_fills_the_last_block():
    table = table_of(0)
    places = [table.place(0, at, at + 1, whole=False) for at in range(10)]
    assert places == [[Placement(at // 8, at % 8, 1)] for at in range(10)]
    assert table.rows[0] == [Entry(0, 8), Entry(1, 2)]


def test_several_tokens_over_a_block_border():
    table = table_of(0)
    table.place(0, 0, 6, whole=False)
    assert table.place(0, 6, 19, whole=False) == [Placement(0, 6, 2), Placement(1, 0, 8), Placement(2, 0, 3)]


def test_a_cropped_block_of_ones_own_is_filled_again():
    table = table_of(0)
    table.place(0, 0, 7, whole=False)
    table.crop(0, 3)
    assert table.place(0, 3, 5, whole=False) == [Placement(0, 3, 2)]


def test_a_shared_block_is_copied_before_it_is_written():
    table = table_of(0)
    table.place(0, 0, 5, whole=False)
    fork = table.fork()
    first = table.place(0, 5, 6, whole=False)
    assert first == [Placement(1, 5, 1, source=0)]
    assert table.place(0, 5, 6, whole=False) == first  # the next layer copies as well
    assert table.place(0, 6, 7, whole=False) == [Placement(1, 6, 1)]
    assert fork.place(0, 5, 6, whole=False) == [Placement(0, 5, 1)]  # by now it is the fork's alone
    assert (table.rows, fork.rows) == ([[Entry(1, 7)]], [[Entry(0, 6)]])


def test_a_layer_that_lags_behind_reads_what_it_has_not_copied_yet():
    table = table_of(0)
    table.place(0, 0, 13, whole=False)
    fork = table.fork()
    table.place(0, 13, 22, whole=False)
    assert table.rows[0] == [Entry(0, 8), Entry(2, 8), Entry(3, 6)]
    assert table.entries(0, 22) == table.rows[0]
    assert table.entries(0, 13) == [Entry(0, 8), Entry(1, 5)]
    assert table.place(0, 13, 22, whole=False)[0] == Placement(2, 5, 3, source=1)
    table.crop(0, 14)
    assert table.rows[0] == [Entry(0, 8), Entry(2, 6)]
    assert table.entries(0, 13) == [Entry(0, 8), Entry(2, 5)]
    assert fork.entries(0, 13) == [Entry(0, 8), Entry(1, 5)]


def test_rows_that_part_copy_once_each():
    table = table_of(0)
    table.place(0, 0, 10, whole=False)
    table.pick([0, 0, 0])
    places = [table.place(row, 10, 11, whole=False) for row in range(3)]
    assert places == [[Placement(2, 2, 1, source=1)], [Placement(3, 2, 1, source=1)], [Placement(1, 2, 1)]]
    assert table.allocator.in_use == 4


def test_restore_undoes_a_copy():
    table = table_of(0)
    table.place(0, 0, 5, whole=False)
    table.pick([0, 0])
    before = table.snapshot()
    for row in range(2):
        table.place(row, 5, 30, whole=False)
    table.restore(before)
    assert table.rows == [[Entry(0, 5)], [Entry(0, 5)]]
    assert (table.allocator.in_use, table.allocator.references(0)) == (1, 2)
    assert table.place(0, 5, 6, whole=False) == [Placement(1, 5, 1, source=0)]


def test_crop_lets_go_of_blocks_past_the_end():
    table = table_of(32)
    table.crop(0, 17)
    assert table.rows[0] == [Entry(0, 8), Entry(1, 8), Entry(2, 1)]
    assert table.allocator.in_use == 3
    table.crop(0, 16)
    assert table.allocator.in_use == 2
    table.crop(0, 0)
    assert (table.rows[0], table.allocator.in_use) == ([], 0)


def test_entries_cover_part_of_a_row():
    table = table_of(24)
    assert table.entries(0, 24) == [Entry(0, 8), Entry(1, 8), Entry(2, 8)]
    assert table.entries(0, 9) == [Entry(0, 8), Entry(1, 1)]
    assert table.entries(0, 0) == []


def test_pick_repeats_selects_and_reorders():
    table = table_of(8, 16, 8)
    table.pick([1, 1, 0])
    assert [[entry.block for entry in row] for row in table.rows] == [[1, 2], [1, 2], [0]]
    assert [table.allocator.references(block) for block in range(4)] == [1, 2, 2, 0]
    table.pick([2])
    assert table.allocator.in_use == 1
    table.pick([])
    assert table.allocator.in_use == 0


def test_rows_after_a_pick_do_not_share_a_list():
    table = table_of(8)
    table.pick([0, 0])
    table.crop(0, 3)
    assert table.rows == [[Entry(0, 3)], [Entry(0, 8)]]
    table.place(1, 8, 16, whole=True)
    assert len(table.rows[0]) == 1


def test_fork_shares_blocks_and_lets_go_when_dropped():
    table = table_of(16)
    fork = table.fork()
    assert [table.allocator.references(block) for block in (0, 1)] == [2, 2]
    fork.crop(0, 8)
    assert table.tokens(0) == 16
    del fork
    assert [table.allocator.references(block) for block in (0, 1)] == [1, 1]


def test_blocks_outlive_the_table_they_were_forked_from():
    table = table_of(16)
    fork, allocator = table.fork(), table.allocator
    table.clear()
    assert allocator.in_use == 2
    fork.clear()
    assert allocator.in_use == 0


def test_a_fork_of_an_empty_table_counts_its_own_blocks():
    """It shares no pool, so ids that another cache took would only leave its own pool empty there."""
    table = BlockTable(BlockAllocator(), BLOCK)
    fork = table.fork()
    table.start(1)
    table.place(0, 0, 80, whole=True)
    fork.start(1)
    assert fork.place(0, 0, 8, whole=True) == [Placement(0, 0, 8)]


operations = st.lists(
    st.tuples(
        st.sampled_from(["whole", "token", "crop", "pick", "fork", "drop"]), st.integers(0, 40), st.integers(0, 7)
    ),
    max_size=30,
)


@given(operations)
@settings(max_examples=150, deadline=None)
def test_counts_are_the_number_of_rows_that_hold_a_block(steps):
    """Whatever is done to tables that share an allocator, counts match, and no two tokens ever share a slot."""
    tables = [table_of(0)]
    written: dict[tuple[int, int], int] = {}  # (block, slot) -> token written there
    content: list[list[list[int]]] = [[[]]]  # per table and row: the tokens expected
    token = 0
    for name, number, pick in steps:
        at = pick % len(tables)
        table, rows = tables[at], content[at]
        row = number % len(rows) if rows else 0
        if name in ("whole", "token") and rows:
            count = number // BLOCK * BLOCK if name == "whole" else number
            length = len(rows[row])
            for block, slot, size, source in table.place(row, length, length + count, whole=name == "whole"):
                if source is not None:
                    written.update({(block, i): written[source, i] for i in range(slot)})
                for i in range(size):
                    written[block, slot + i] = token
                    rows[row].append(token)
                    token += 1
        elif name == "crop" and rows:
            keep = min(number, len(rows[row]))
            table.crop(row, keep)
            rows[row] = rows[row][:keep]
        elif name == "pick" and rows:
            order = [row, (row + 1) % len(rows)][: 1 + pick % 2]
            table.pick(order)
            content[at] = [list(rows[i]) for i in order]
        elif name == "fork" and rows and any(rows):
            tables.append(table.fork())
            content.append([list(row) for row in rows])
        elif name == "drop" and len(tables) > 1:
            tables.pop(at).clear()
            content.pop(at)
        held: dict[int, int] = {}
        for table, rows in zip(tables, content, strict=True):
            for entries, expected in zip(table.rows, rows, strict=True):
                got = [written[entry.block, slot] for entry in entries for slot in range(entry.valid)]
                assert got == expected
                for entry in entries:
                    held[entry.block] = held.get(entry.block, 0) + 1
        for allocator in {id(table.allocator): table.allocator for table in tables}.values():
            counts = [allocator.references(block) for block in range(len(held) + 50) if block < len(allocator._counts)]
            assert [count for count in counts if count] == [held[block] for block in sorted(held)]
            assert allocator.in_use == len(held)
