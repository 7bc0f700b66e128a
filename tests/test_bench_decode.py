"""`kvslim bench decode`: complete rows, results checked before speeds, random keys, memory; on tiny models."""

import json

import pytest
import torch
import transformers
from transformers import DynamicCache
from typer.testing import CliRunner

from kvslim.bench.check import KL_LIMIT, Check
from kvslim.bench.decode import measure_decode, weights_nbytes
from kvslim.bench.fill import RandomKV
from kvslim.bench.gauge import Gauge
from kvslim.bench.plan import Plan
from kvslim.cli.app import app
from kvslim.cli.counts import read_counts
from kvslim.errors import InputError
from kvslim.eval.contestants import BASELINE, Contestant, Held, using_attention
from kvslim.eval.forced import feed_batch
from kvslim.eval.peers import PEERS
from kvslim.eval.quality import tokenize
from kvslim.eval.text import python_docs
from kvslim.integrations.transformers import loading
from kvslim.integrations.transformers.loading import LoadedModel, load_model
from kvslim.recipe import Recipe
from tiny_models import build, prompt

INT8 = "int8+recent=0+block=32"
SMALL = Plan(contexts=(64,), batches=(1, 2), steps=2, rounds=2, chunk=40)
SPEEDS = (
    *("decode_tokens_per_s", "decode_ms", "decode_ms_p25", "decode_ms_p75", "decode_ms_mean"),
    *("decode_cpu_ms_per_token", "first_token_ms", "speedup_vs_16bit"),
)
HELD = ("nbytes", "nbytes_16bit", "bits_per_value")


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return prompt(1, 400)[0]


def recipes(*texts: str) -> list[Contestant]:
    return [Contestant.of_recipe(Recipe.parse(text)) for text in texts]


def test_rows_are_complete_and_positive(model, ids):
    contestants = [*recipes("none", INT8), Contestant.of_peer(PEERS["hf-fp8"])]
    rows = measure_decode(model, ids, contestants, SMALL, memory_nbytes=2**30)
    names = [BASELINE, "none", INT8, "hf-fp8"]
    assert [(row.cache, row.batch) for row in rows] == [(name, batch) for batch in (1, 2) for name in names]
    for row in rows:
        assert row.withheld is None, row
        assert all(getattr(row, name) > 0 for name in (*SPEEDS, *HELD)), row
        assert row.decode_ms_p25 <= row.decode_ms <= row.decode_ms_p75
        assert row.decode_tokens_per_s == pytest.approx(1000 * row.batch / row.decode_ms)
        assert row.nbytes_16bit == 2 * 2 * 3 * 2 * 32 * (64 + 5) * row.batch, "K and V, 3 layers, 2 heads, 32 channels"
        assert row.kernel == "sdpa" or row.kernel.startswith(("native ", "reference"))
        room = 2**30 - weights_nbytes(model)
        assert row.largest_batch == room // (row.nbytes / row.batch)
    one, two = rows[: len(names)], rows[len(names) :]
    assert one[0].kl == pytest.approx(0, abs=1e-6)
    assert one[0].speedup_vs_16bit == 1.0
    assert one[1].kl == pytest.approx(0, abs=1e-6)
    assert one[2].kl > 1e-9
    assert one[0].nbytes == 2 * one[0].nbytes_16bit, "the model is in float32"
    assert two[0].nbytes == 2 * one[0].nbytes
    assert {key for row in rows for key in row.to_dict()} >= {"kind", *SPEEDS, *HELD, "peak_nbytes", "withheld"}


def test_peak_memory_is_at_least_what_was_taken():
    gauge = Gauge(torch.device("cpu"))
    with gauge.first_turn():
        kept = torch.ones(2**24)  # 64 MiB
        torch.ones(2**25)  # 128 MiB at once
    if gauge.peak_nbytes is None:
        pytest.skip("this system does not say how much memory a process takes")
    assert gauge.filled_nbytes == pytest.approx(kept.nbytes, rel=0.1)
    assert gauge.peak_nbytes == pytest.approx(3 * kept.nbytes, rel=0.1)
    others = torch.ones(2**24)
    with gauge.turn():
        torch.ones(2**26)  # 256 MiB on top of what the first turn kept
    assert gauge.peak_nbytes == pytest.approx(5 * others.nbytes, rel=0.1)


class Forgetful(DynamicCache):
    """Holds the right number of tokens, but not the right ones."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, 30 * torch.randn_like(value_states), *args, **kwargs)


def test_a_cache_with_wrong_results_gets_no_speed(ids):
    model = build("llama")
    model.lm_head.weight.mul_(8)  # sure of its tokens, as a real model is, so that wrong ones show
    wrong = Contestant("wrong", lambda model: Forgetful(config=model.config))
    same = Contestant("control", lambda model: Forgetful(config=model.config), exact=True)
    plan = Plan(contexts=(64,), steps=4, rounds=2)
    base, lossy, exact, right = measure_decode(model, ids, [wrong, same, *recipes("none")], plan)
    assert f"above {KL_LIMIT:g}" in lossy.withheld
    assert exact.withheld
    for row in (lossy, exact):
        assert all(getattr(row, name) is None for name in SPEEDS), row
        assert row.nbytes == base.nbytes
    assert base.withheld is right.withheld is None


def test_a_cache_that_fails_gets_a_row_and_stops_nobody(model, ids):
    class Failing(DynamicCache):
        def update(self, key_states, *args, **kwargs):
            if self.get_seq_length() > 64:
                raise RuntimeError("out of something")
            return super().update(key_states, *args, **kwargs)

    failing = Contestant("failing", lambda model: Failing(config=model.config))
    base, failed, right = measure_decode(model, ids, [failing, *recipes("none")], Plan(contexts=(64,), steps=2))
    assert failed.withheld == "RuntimeError: out of something"
    assert failed.nbytes is failed.decode_ms is None
    assert base.withheld is right.withheld is None


@pytest.mark.parametrize(
    ("exact", "run", "reason"),
    [
        (False, [0.0, 1.0, 2.0], None),
        (False, [0.0, 2.0, 1.0], None),
        (True, [0.0, 2.0, 1.0], "1 of 1 tokens differ"),
        (True, [0.0, 1.0 + 1e-6, 1.0], None),
        (False, [0.0, float("nan"), 1.0], "NaN or Inf"),
        (False, [0.0, 30.0, 1.0], "above 5"),
    ],
    ids=["same", "lossy may differ", "exact may not", "a tie is no difference", "NaN", "far away"],
)
def test_the_check(exact, run, reason):
    base = [0.0, 1.0, 1.0 + 1e-6] if reason is None and exact else [0.0, 1.0, 2.0]
    check = Check.of(exact, torch.float32)
    check.add(torch.tensor([base]), torch.tensor([run]))
    failure = check.failure()
    assert failure is None if reason is None else reason in failure


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_random_keys_fill_every_cache_to_the_same_length(family, ids):
    model = build(family)
    random_kv = RandomKV.of(model, ids)
    contestants = [Contestant.baseline(), *recipes("none", INT8), Contestant.of_peer(PEERS["gguf-q8_0"])]
    caches, logits = [], []
    for contestant in contestants:
        with using_attention(model, contestant.attention):
            cache = contestant.new_cache(model)
            random_kv.fill(cache, 100, 2)
            assert [cache.get_seq_length(index) for index in range(3)] == [100] * 3
            caches.append(Held.of(cache))
            logits.append(feed_batch(model, cache, ids[None, :1].expand(2, -1), 100, keep=1)[:, -1])
            assert cache.get_seq_length() == 101
    assert len({held.nbytes_16bit for held in caches}) == 1
    assert caches[2].nbytes < caches[1].nbytes
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


def test_random_keys_look_like_the_models(ids):
    model = build("qwen2")  # whose key biases are large
    random_kv, cache, real = RandomKV.of(model, ids), DynamicCache(), DynamicCache(config=model.config)
    random_kv.fill(cache, 2000, 1)
    feed_batch(model, real, ids[None, :256], 0, keep=1)
    for layer, other in zip(cache.layers, real.layers, strict=True):
        error = (layer.keys.mean(2) - other.keys.mean(2)).abs() / other.keys.std(2)
        assert error.max() < 0.2


def test_random_keys_make_rows_without_a_first_token(model, ids):
    plan = Plan(contexts=(300,), steps=2, rounds=2, fill="random-kv")
    rows = measure_decode(model, ids[:280], recipes(INT8), plan)
    assert all(row.first_token_ms is None and row.decode_tokens_per_s > 0 and row.fill == "random-kv" for row in rows)
    assert rows[1].kl > 0


def test_random_keys_are_refused_for_linear_attention(ids):
    with pytest.raises(InputError, match="use --fill text"):
        RandomKV.of(build("qwen3-next"), ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": ()}, "contexts is empty"),
        ({"contexts": (0,)}, "contexts=0 is out of range"),
        ({"steps": 0}, "steps=0"),
        ({"fill": "random_kv"}, "Did you mean 'random-kv'?"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(InputError) as refused:
        Plan(**changes)
    assert message in str(refused.value)


def test_what_is_too_long_is_refused_with_both_numbers(model, ids):
    with pytest.raises(InputError, match="context is 1,024 tokens"):
        measure_decode(model, ids, [], Plan(contexts=(1024,)))
    with pytest.raises(InputError, match="the text has 400 tokens, a context of 512 needs 553"):
        measure_decode(model, ids, [], Plan(contexts=(512,)))


def test_progress_adds_up(model, ids):
    seen = []
    measure_decode(model, ids, recipes(INT8), SMALL, on_tokens=seen.append)
    assert sum(seen) == SMALL.total_tokens(2)


def test_the_model_keeps_its_attention(model, ids):
    measure_decode(model, ids, [], Plan(contexts=(16,), steps=1, rounds=1))
    assert model.config._attn_implementation == "kvslim"


def test_lists_of_counts():
    assert read_counts("--contexts", "256, 1024") == (256, 1024)
    for text in ("", "4,x", "0"):
        with pytest.raises(InputError, match="--batches"):
            read_counts("--batches", text)


@pytest.fixture
def run(monkeypatch, tiny_folder, tmp_path):
    """The verb on the tiny model of the command line's tests."""
    loaded = load_model(str(tiny_folder), dtype="float32", device="cpu")
    named = LoadedModel(loaded.model, loaded.tokenizer, "tiny", "tiny")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: named)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"w{index * index % 58}" for index in range(300)))
    small = ("--text", str(text), "--contexts", "40", "--steps", "2", "--rounds", "2")
    return lambda *arguments: CliRunner().invoke(app, ["bench", "decode", *small, *arguments], catch_exceptions=False)


def test_the_verb_prints_json(run):
    done = run("--recipe", "int8", "--against", "gguf-q8_0", "--batches", "1,2", "--memory", "1GiB", "--json")
    data = json.loads(done.stdout)
    assert [row["cache"] for row in data["rows"]] == [BASELINE, "int8", "gguf-q8_0"] * 2
    assert {row["kind"] for row in data["rows"]} == {"bench-decode"}
    assert all(row["largest_batch"] > 0 for row in data["rows"])
    assert {"model", "text", "plan", "memory", "machine", "versions", "command", "kl_limit"} <= set(data)
    assert data["machine"]["threads"] >= 1
    assert data["command"].startswith("kvslim bench decode --recipe int8 --against gguf-q8_0 --contexts 40 ")
    assert "--text words.txt" in data["command"], "no path of this machine"


def test_the_verb_prints_tables_with_what_they_mean(run):
    done = run("--recipe", "none", "--fill", "random-kv", "--memory", "1GiB")
    text = " ".join(done.stdout.split())
    assert "tiny, float32, context 40, batch 1" in text
    assert "random keys and values" in text
    assert "linearly; activations left out" in text
    assert f"transformers {transformers.__version__}" in text


def test_the_verb_says_why_it_names_no_speed(run, monkeypatch):
    monkeypatch.setattr(Check, "failure", lambda self: "not the same model any more" if not self.exact else None)
    text = " ".join(run("--recipe", "int8").stdout.split())
    assert "int8, context 40, batch 1: speed withheld: not the same model any more" in text


def test_gemma_decodes_with_packed_and_foreign_caches(gemma270m):
    ids = tokenize(gemma270m.tokenizer, python_docs())[:2000]
    contestants = [*recipes("none", "slim4"), Contestant.of_peer(PEERS["gguf-q8_0"])]
    rows = measure_decode(gemma270m.model, ids, contestants, Plan(contexts=(300,), steps=2, rounds=2))
    assert all(row.withheld is None and row.kl < 0.1 for row in rows)
    assert rows[1].kl < 1e-6
    assert rows[2].nbytes < rows[0].nbytes
