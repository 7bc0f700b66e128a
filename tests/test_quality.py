"""`eval quality`: the protocol, the remembered baseline, and the rows, on a tiny model; and Qwen 0.5B's figures."""

import json
import os
import random
import string

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvslim
from kvslim.cli.app import app
from kvslim.errors import InputError
from kvslim.eval import measures, shelf
from kvslim.eval.baseline import Baseline
from kvslim.eval.forced import feed, feed_chunks
from kvslim.eval.protocol import OFFSETS, Protocol
from kvslim.eval.quality import measure_quality, result, tokenize, total_tokens
from kvslim.eval.shelf import Shelf
from kvslim.eval.text import Text, load_text, python_docs
from kvslim.integrations.transformers import loading
from kvslim.integrations.transformers.loading import LoadedModel
from kvslim.presets import PRESETS

# blocks small enough that most of a short passage is sealed
INT8, INT4 = "int8+recent=0+block=32", "int4+recent=0+block=32"
SMALL = Protocol(prefill=96, score=64, chunk=16, prefixes=2)
KEYS = [
    *("recipe", "bits_per_value", "bits_per_value_packed", "nbytes", "nbytes_16bit", "kl_mean", "kl_p99", "kl_p999"),
    *("top1", "ppl", "ppl_ratio", "kl_each", "kl_trimmed"),
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random Llama with logits wide enough that quantization shows."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return kvslim.enable(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 300, (700,), generator=torch.Generator().manual_seed(1))


def test_the_control_recipe_changes_nothing(model, ids):
    (row,) = measure_quality(model, ids, ["none"], SMALL)
    assert abs(row.kl_mean) < 1e-8
    assert row.top1 == 1.0
    assert row.ppl_ratio == pytest.approx(1.0, abs=1e-5)


def test_more_bits_are_better_and_take_more(model, ids):
    eight, four = measure_quality(model, ids, [INT8, INT4], SMALL)
    assert 0 < eight.kl_mean < four.kl_mean / 10
    assert eight.top1 >= four.top1
    assert eight.bits_per_value_packed == pytest.approx(8, abs=0.1)
    assert four.bits_per_value_packed == pytest.approx(4, abs=0.1)
    assert four.nbytes < eight.nbytes < eight.nbytes_16bit
    assert len(four.kl_each) == 2
    assert four.kl_mean == pytest.approx(sum(four.kl_each) / 2)
    assert four.kl_trimmed <= four.kl_mean <= four.kl_p99 <= four.kl_p999


def test_recipes_of_one_run_share_the_first_pass_and_measure_as_if_alone(model, ids, monkeypatch):
    alone = [measure_quality(model, ids, [recipe], SMALL)[0] for recipe in (INT8, INT4)]
    lengths, forward = [], model.forward

    def counted(*args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    assert measure_quality(model, ids, [INT8, INT4], SMALL) == alone
    assert lengths.count(SMALL.prefill) == 2 * SMALL.prefixes, "the baseline's and one for both recipes, a passage"


def test_a_remembered_baseline_gives_the_same_rows(model, ids, tmp_path, monkeypatch):
    kept = Shelf(tmp_path)
    fresh = measure_quality(model, ids, [INT4], SMALL)
    first = measure_quality(model, ids, [INT4], SMALL, shelf=kept)
    assert len(list(tmp_path.iterdir())) == 2, "one file a passage, no drafts left"
    monkeypatch.setattr(Baseline, "_run", lambda *_: pytest.fail("the baseline was made again"))
    assert measure_quality(model, ids, [INT4], SMALL, shelf=kept) == first == fresh


def test_an_interrupted_or_damaged_baseline_is_made_again(model, ids, tmp_path):
    kept = Shelf(tmp_path)
    tokens = 0

    def interrupt(count: int) -> None:
        nonlocal tokens
        tokens += count
        if tokens > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_quality(model, ids, [INT4], SMALL, shelf=kept, on_tokens=interrupt)
    assert not list(tmp_path.iterdir())
    rows = measure_quality(model, ids, [INT4], SMALL, shelf=kept)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:200])
    assert measure_quality(model, ids, [INT4], SMALL, shelf=kept) == rows


def test_a_remembered_baseline_belongs_to_its_model_and_protocol(model, ids, tmp_path):
    kept = Shelf(tmp_path)
    Baseline(model, SMALL, kept).log_probs(SMALL.passages(ids)[0], lambda _: None)
    shifted = Protocol(prefill=96, score=64, chunk=16, prefixes=2, offset_positions=5)
    Baseline(model, shifted, kept).log_probs(SMALL.passages(ids)[0], lambda _: None)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
        Baseline(model, SMALL, kept).log_probs(SMALL.passages(ids)[0], lambda _: None)
        model.lm_head.weight[0, 0] -= 1
    assert len(list(tmp_path.iterdir())) == 3


def test_logits_changed_after_the_head_are_not_remembered(model, ids, tmp_path, monkeypatch):
    forward = type(model).forward

    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits / 5) * 5
        return output

    monkeypatch.setattr(type(model), "forward", capped)
    fresh = measure_quality(model, ids, [INT4], SMALL)
    for _ in range(2):
        assert measure_quality(model, ids, [INT4], SMALL, shelf=Shelf(tmp_path)) == fresh
    assert not list(tmp_path.iterdir())


def test_the_shelf_drops_the_least_recently_used(tmp_path):
    kept = Shelf(tmp_path, limit_nbytes=3000)
    for index in range(4):
        kept.save(f"k{index}", torch.zeros(200))
        os.utime(tmp_path / f"k{index}.safetensors", (index, index))
        if index == 1:
            kept.load("k0")  # used again: newer than all
    assert kept.load("k0") is not None
    assert kept.load("k1") is None


def test_it_is_the_protocol(model, ids):
    """The row equals what the protocol's words say, written out for one passage."""
    protocol = Protocol(prefill=96, score=64, chunk=16, prefixes=1)
    (row,) = measure_quality(model, ids, [INT4], protocol)
    (ids,) = protocol.passages(ids)
    runs = []
    for cache in (DynamicCache(config=model.config), kvslim.KVCache(model, INT4)):
        feed(model, cache, ids[:96], 0, keep=1)
        runs.append(torch.cat(list(feed_chunks(model, cache, ids[96:160], 96, 16, lambda _: None))).log_softmax(-1))
    base, run = runs
    assert row.kl_mean == pytest.approx(measures.token_kl(base, run).mean().item())
    expected = torch.nn.functional.nll_loss(run, ids[97:161]).exp().item()
    assert row.ppl == pytest.approx(expected, rel=1e-5)


def test_positions_do_not_matter(model, ids):
    near = measure_quality(model, ids, ["none", INT8], SMALL)
    far = Protocol(prefill=96, score=64, chunk=16, prefixes=2, offset_positions=1000)
    for row, moved in zip(near, measure_quality(model, ids, ["none", INT8], far), strict=True):
        assert moved.kl_mean == pytest.approx(row.kl_mean, rel=0.5, abs=1e-8)


def test_progress_adds_up(model, ids, tmp_path):
    for _ in range(2):  # the second time the baseline is remembered
        seen = []
        measure_quality(model, ids, ["none", INT8], SMALL, shelf=Shelf(tmp_path), on_tokens=seen.append)
        assert sum(seen) == total_tokens(SMALL, recipes=2)


def test_the_result_is_json_with_all_keys(model, ids):
    rows = measure_quality(model, ids, ["kivi4"], SMALL)
    text = Text("a.txt", "text")
    data = json.loads(json.dumps(result("tiny", text, len(ids), SMALL, rows)))
    assert list(data) == ["model", "text", "protocol", "versions", "rows"]
    assert data["text"] == {"name": "a.txt", "sha256": "982d9e3eb996f559", "tokens": 700}
    assert data["protocol"]["offsets"] == [0, 539]
    assert set(data["versions"]) == {"kvslim", "torch", "transformers", "python"}
    assert sorted(data["rows"][0]) == sorted(KEYS)


def test_offsets_are_those_of_the_protocol():
    assert Protocol().offsets(300_000) == list(OFFSETS)
    assert Protocol().offsets(120_000) == [2000, 90_000, 120_000 - 1537]
    assert Protocol().offsets(3 * 1537) == [0, 1537, 2 * 1537], "spread where the clipped ones overlap"
    assert Protocol(prefixes=1).offsets(300_000) == [2000]
    assert Protocol(prefixes=1).offsets(1600) == [63]
    assert Protocol(prefixes=5).offsets(300_000) == [2000, 46_500, 91_000, 135_500, 180_000]


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (Protocol(prefill=96, score=64, prefixes=5), r"700 tokens, but 5 prefixes of 96 \+ 64 \+ 1 need 805"),
        (Protocol(prefill=96, score=64, prefixes=1, offset_positions=2000), "position 2,160, .* context is 2,048"),
    ],
)
def test_refusals_name_both_numbers(model, ids, protocol, message):
    with pytest.raises(InputError, match=message):
        measure_quality(model, ids, ["none"], protocol)


def test_no_recipe_is_refused(model, ids):
    with pytest.raises(InputError, match="no recipe"):
        measure_quality(model, ids, [], SMALL)


@pytest.mark.parametrize("name", ["prefill", "score", "chunk", "prefixes"])
def test_a_protocol_of_nothing_is_refused(name):
    with pytest.raises(InputError, match=f"{name}=0 is out of range"):
        Protocol(**{name: 0})


def test_texts(tmp_path):
    file = tmp_path / "a.txt"
    with pytest.raises(InputError, match="cannot read the text"):
        load_text(file)
    file.write_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        load_text(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        load_text(file)
    file.write_text("words")
    assert load_text(file) == Text("a.txt", "words")
    assert len(load_text(None).content) > 300_000


@pytest.fixture
def run(model, monkeypatch, tmp_path):
    """The verb on the tiny model, whose tokenizer reads letters; its cache folder is the test's own."""
    vocabulary = {letter: index for index, letter in enumerate(string.printable)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    loaded = LoadedModel(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer), "tiny", "tiny")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(shelf, "FOLDER", tmp_path / "baselines")
    file = tmp_path / "some.txt"
    file.write_text("".join(random.Random(0).choices(string.ascii_letters, k=350)))
    small = ("--text", str(file), "--prefill", "96", "--score", "48", "--chunk", "16", "--prefixes", "2")
    return lambda *arguments: CliRunner().invoke(app, ["eval", "quality", *small, *arguments])


def test_the_verb_prints_json(run, tmp_path):
    done = run("--recipe", "int8, int4+sinks=8", "--json")
    data = json.loads(done.stdout)
    assert [row["recipe"] for row in data["rows"]] == ["int8", "int4+sinks=8"]
    assert data["text"]["name"] == "some.txt"
    assert data["text"]["tokens"] == 350
    assert data["kind"] == "quality"
    assert data["command"] == (
        "kvslim eval quality --recipe 'int8, int4+sinks=8' --text some.txt --prefill 96 --score 48 --chunk 16 "
        "--prefixes 2 --json"
    )
    assert len(list((tmp_path / "baselines").iterdir())) == 2


def test_the_verb_prints_a_table(run):
    done = run("--recipe", "int8,int4")
    assert done.exit_code == 0, done.output
    assert "tiny on some.txt, 2 x (96 + 48) tokens" in done.stdout
    assert f"int4: {PRESETS['int4'].note}" in " ".join(done.stdout.split())


def test_the_verb_refuses_a_short_text(run):
    done = run("--prefixes", "9")
    assert isinstance(done.exception, InputError)
    assert "the text has 350 tokens" in str(done.exception)


def test_qwen_kivi4(qwen05b):
    """One passage of Python's documentation: with the default tail, and with nothing exact but the first tokens."""
    ids = tokenize(qwen05b.tokenizer, python_docs())
    protocol = Protocol(prefixes=1)
    tail, bare = measure_quality(qwen05b.model, ids, ["kivi4", "kivi4+recent=0"], protocol)
    assert tail.kl_mean <= 0.006
    assert bare.kl_mean <= 0.013
    assert bare.top1 >= 0.93
    assert bare.bits_per_value_packed == pytest.approx(5.0, rel=0.01)
