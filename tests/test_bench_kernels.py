"""`bench attention` and `bench append`: results are checked before a time is printed, rows are complete."""

import json

import pytest
import torch

from kvslim.attention import dispatch
from kvslim.bench import append, attention, turns
from kvslim.bench.append import measure_append
from kvslim.bench.attention import measure_attention
from kvslim.bench.layers import Shape, filled_layer, float64_attention, question
from kvslim.errors import InputError
from kvslim.kernels.cpu import library
from kvslim.layout import block_nbytes
from kvslim.recipe import Recipe

SMALL = Shape(4, 2, 64)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(turns, "_SHORTEST_S", 1e-4)


def test_shapes_are_read():
    assert Shape.parse(" 32/8x128 ") == Shape(32, 8, 128)
    assert str(Shape(32, 8, 128)) == "32/8x128"
    for text in ("32x128", "32/5x128", "0/8x64", "4/2x0", "32/8x128x2"):
        with pytest.raises(InputError, match="shape"):
            Shape.parse(text)


@pytest.mark.parametrize("recipe", ["slim4", "kivi4", "none", "k=center/rotate/qjl:4+v=center/rotate/qjl:3"])
def test_the_oracle_is_attention_on_the_dequantized_values(recipe, reference_only):
    """Against the reference, which the oracle shares nothing with but the reader of blocks."""
    layer = filled_layer(Recipe.parse(recipe), SMALL, 500)
    query, chunk = question(SMALL)
    want = float64_attention(layer.store, query, chunk, 0.125)
    got = dispatch.attend(query, layer.store, chunk, None, attention.Score(0.125))
    assert (got - want).abs().max() / want.abs().max() < 5e-6


def test_attention_rows(monkeypatch):
    rows = measure_attention(
        [Recipe.parse("slim4"), Recipe.parse("int8")], [SMALL], [300], rounds=2, with_reference=True
    )
    assert [(row.recipe, row.shape, row.tokens) for row in rows] == [("slim4", "4/2x64", 300), ("int8", "4/2x64", 300)]
    for row in rows:
        assert row.withheld is None
        assert 0 < row.rel_error < attention.BOUND
        assert row.cpu_ms > 0
        assert row.speedup_vs_torch_bf16 > 0
        assert row.speedup_vs_torch_fp32 > 0
        assert row.speedup_vs_reference > 0
        assert row.kernel == f"native {library.native().isa}"


def test_bytes_read_are_those_of_the_tokens_held():
    layer = filled_layer(Recipe.parse("slim4"), SMALL, 4 + 128 + 40)
    block = sum(block_nbytes(packer.layout) for packer in layer.store.packers)
    assert attention.bytes_read(layer.store) == 2 * (block + (4 + 40) * (64 + 64) * 2)


def test_a_wrong_result_gets_no_time(monkeypatch):
    right = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *rest, **more: right(*rest, **more) * 1.01)
    (row,) = measure_attention([Recipe.parse("slim4")], [SMALL], [300], rounds=1)
    assert row.cpu_ms is None
    assert row.speedup_vs_torch_bf16 is None
    assert "past 2e-04" in row.withheld


def test_append_rows():
    rows = measure_append([Recipe.parse("slim4"), Recipe.parse("kivi4")], [SMALL], [1, 2], rounds=1)
    assert [(row.recipe, row.side, row.blocks) for row in rows] == [
        (recipe, side, blocks) for recipe in ("slim4", "kivi4") for blocks in (1, 2) for side in "kv"
    ]
    for row in rows:
        assert row.equal
        assert row.ns_per_vector > 0
        assert row.kernel == ("reference" if row.recipe == "kivi4" else f"native {library.native().isa}")


def test_other_bytes_get_no_time(monkeypatch):
    right = append.encode

    def wrong(*rest):
        block = right(*rest)
        block.parts["code"][0, 0, 0, 0] ^= 1
        return block

    monkeypatch.setattr(append, "encode", wrong)
    for row in measure_append([Recipe.parse("slim4")], [SMALL], [1], rounds=1):
        assert not row.equal
        assert row.ns_per_vector is None


def test_the_clock_is_that_of_work():
    taken = turns.cpu_seconds({"one": lambda: torch.ones(200_000).exp(), "four": lambda: torch.ones(800_000).exp()}, 5)
    assert 1.5 < taken["four"] / taken["one"] < 12


def test_the_verbs_print_json(run):
    small = ("--shapes", "2/1x32", "--rounds", "1", "--threads", "1", "--json")
    code, out, _ = run("bench", "attention", "--tokens", "200", *small)
    found = json.loads(out)
    assert code == 0
    assert found["kind"] == "bench-attention"
    assert found["command"] == "kvslim bench attention --shapes 2/1x32 --tokens 200 --rounds 1 --threads 1 --json"
    assert {
        "shape",
        "tokens",
        "recipe",
        "kernel",
        "speedup_vs_torch_bf16",
        "rel_error",
        "bytes_read",
        "threads",
    } <= set(found["rows"][0])
    code, out, _ = run("bench", "append", "--blocks", "1", "--isa", "portable", *small)
    found = json.loads(out)
    assert code == 0
    assert [row["kernel"] for row in found["rows"]] == ["native portable"] * 2
    library.use("")


def test_the_verbs_refuse_what_they_do_not_understand(run):
    for arguments, message in (
        (("attention", "--shapes", "7"), "shape '7'"),
        (("attention", "--tokens", "many"), "--tokens"),
        (("append", "--isa", "mmx"), "instruction set 'mmx'"),
    ):
        code, _, err = run("bench", *arguments)
        assert code != 0
        assert message in err
