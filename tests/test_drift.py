"""`eval drift`: divergence, repetition and loops as pure functions; KL along the way; going on; the verb."""

import json

import pytest
import torch
from typer.testing import CliRunner

import kvslim
from kvslim.cli.app import app
from kvslim.errors import InputError
from kvslim.eval import measures
from kvslim.eval.cases import measure_cases, with_control
from kvslim.eval.drift import Drift, DriftProtocol, summarize
from kvslim.eval.forced import feed, feed_chunks
from kvslim.eval.repetition import distinct_ngrams, first_divergence, loop_tokens
from kvslim.eval.results import Results
from kvslim.eval.text import Text
from kvslim.integrations.transformers import loading
from kvslim.recipe import Recipe

TEXT = Text("words", " ".join(f"Sentence number {index} ends here." for index in range(60)))
SETUP = DriftProtocol(prompts=3, prompt_tokens=200, new_tokens=30, window=12, chunk=8)
INT8, INT4 = "int8+recent=0+block=32", "int4+recent=0+block=32"


@pytest.mark.parametrize(
    ("base", "run", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
        ([], [1], 0),
    ],
)
def test_first_divergence(base, run, expected):
    assert first_divergence(base, run) == expected


def test_distinct_ngrams():
    assert distinct_ngrams(range(10)) == 1.0
    assert distinct_ngrams([1] * 13) == 0.1
    assert distinct_ngrams([1, 2] * 4) == 0.4
    assert distinct_ngrams([1, 2, 3]) == 1.0
    assert distinct_ngrams([1, 1, 1], n=1) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], 0),
        (list(range(50)), 0),
        ([7, 8, 1, 2, 3, 1, 2, 3], 0),
        ([7, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3], 9),
        ([7, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1], 10),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3, 9], 0),
        ([5, 4, 4, 4], 3),
        ([4, 4], 0),
        (list(range(65)) * 3, 0),
        (list(range(64)) * 3, 192),
    ],
)
def test_loops_are_three_times_the_same_up_to_the_end(ids, expected):
    assert loop_tokens(ids) == expected


def measured(loaded, recipes, setup=SETUP, batch=1, path=None):
    task = Drift(loaded.tokenizer, TEXT, setup)
    asked = with_control([Recipe.parse(recipe) for recipe in recipes])
    with Results(path, {"setup": str(setup)}) as results:
        return measure_cases(task, loaded.model, asked, results, batch=batch)


@pytest.fixture(scope="module")
def whole(byte_model, tmp_path_factory):
    """A run that was never interrupted: its rows and its file."""
    path = tmp_path_factory.mktemp("drift") / "whole.jsonl"
    return measured(byte_model, [INT8, INT4], path=path), path.read_bytes()


@pytest.fixture(scope="module")
def rows(whole):
    return whole[0]


def test_the_control_does_not_drift_and_fewer_bits_drift_more(rows):
    none, int8, int4 = summarize(rows)
    assert (none.kl_mean, none.top1, none.equal, none.divergence_tokens) == (pytest.approx(0, abs=1e-9), 1.0, 3, 30)
    assert 0 < int8.kl_mean < int4.kl_mean / 10
    assert int4.divergence_tokens <= int8.divergence_tokens
    assert int4.top1 <= int8.top1
    assert [len(each.kl_windows) for each in (none, int8, int4)] == [3, 3, 3]
    weighted = [tokens * kl for tokens, kl in zip((12, 12, 6), int4.kl_windows, strict=True)]
    assert int4.kl_mean == pytest.approx(sum(weighted) / 30)


def test_answers_and_divergence_are_those_of_the_plain_words(byte_model, rows):
    """Written out for one prompt: generate, then both caches fed the 16-bit answer."""
    model, tokenizer = byte_model.model, byte_model.tokenizer
    ids = torch.tensor(tokenizer(TEXT.content)["input_ids"])
    start = len(ids) // 3
    assert [row["case"] for row in rows[::3]] == ["at-0", f"at-{start}", f"at-{2 * len(ids) // 3}"]
    prompt = ids[start : start + 200]
    answers, streams = [], []
    for recipe in ("none", INT4):
        cache = kvslim.KVCache(model, recipe)
        logits = feed(model, cache, prompt, 0, keep=1)
        fork, found = cache.fork(), []
        for position in range(200, 230):
            found.append(int(logits.argmax()))
            logits = feed(model, fork, torch.tensor(found[-1:]), position, keep=1)
        answers.append(found)
        streams.append(torch.cat(list(feed_chunks(model, cache, torch.tensor(answers[0]), 200, 8, lambda _: None))))
    none, _, int4 = rows[3:6]
    assert (none["ids"], int4["ids"]) == tuple(answers)
    assert int4["first_divergence"] == first_divergence(*answers)
    base, run = map(measures.log_probs, streams)
    windows = measures.token_kl(base, run).split(12)
    assert int4["kl_windows"] == pytest.approx([float(window.mean()) for window in windows], rel=1e-4)
    assert int4["window_tokens"] == [12, 12, 6]
    assert int4["top1"] == pytest.approx(float(measures.agreement(base, run).double().mean()))
    assert int4["answer"] == tokenizer.decode(answers[1])


def test_answers_that_end_early_are_scored_as_far_as_they_go(byte_model, rows, monkeypatch):
    stop = rows[0]["ids"][16]
    monkeypatch.setattr(byte_model.model.generation_config, "eos_token_id", stop)
    for batch in (1, 3):
        found = measured(byte_model, [INT4], batch=batch)
        for row, full in zip(found[::2], rows[::3], strict=True):
            length = full["ids"].index(stop) if stop in full["ids"] else 30
            assert row["ids"] == full["ids"][:length]
        for row, control in zip(found[1::2], found[::2], strict=True):
            assert sum(row["window_tokens"]) == control["new_tokens"]
        assert len(found[0]["ids"]) <= 16
        summarize(found)


def test_a_batch_gives_the_same_as_one_by_one(byte_model, rows):
    for alone, together in zip(rows, measured(byte_model, [INT8, INT4], batch=3), strict=True):
        assert together["ids"] == alone["ids"]
        assert together["kl_mean"] == pytest.approx(alone["kl_mean"], rel=0.01, abs=1e-8)


@pytest.mark.parametrize("kept", [1, 5])
def test_it_goes_on_from_any_row(byte_model, whole, tmp_path, kept):
    """Also where the control is finished and only its answer is known."""
    path = tmp_path / "out.jsonl"
    rows, content = whole
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 1 + kept]))
    assert measured(byte_model, [INT8, INT4], path=path) == rows
    assert path.read_bytes() == content


def test_the_question_is_asked_in_the_chat_template(byte_model, monkeypatch):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}go{% endif %}"
    monkeypatch.setattr(byte_model.tokenizer, "chat_template", template)
    text = byte_model.tokenizer.decode(Drift(byte_model.tokenizer, TEXT, SETUP).cases[0].ids)
    assert text.startswith(f"<{TEXT.content[:200]}\n\nExplain the text above")
    assert text.endswith(">go")


def test_a_short_text_and_a_protocol_of_nothing_are_refused(byte_model):
    with pytest.raises(InputError, match=r"words has [\d,]+ tokens, 9 prompts of 1,000 need 9,000"):
        Drift(byte_model.tokenizer, TEXT, DriftProtocol(prompts=9, prompt_tokens=1000))
    with pytest.raises(InputError, match="window=0 is out of range"):
        DriftProtocol(window=0)


@pytest.fixture
def run(byte_model, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: byte_model)
    file = tmp_path / "words.txt"
    file.write_text(TEXT.content)
    small = ("--text", str(file), "--prompts", "2", "--prompt-tokens", "200", "-n", "30", "--window", "20")
    return lambda *arguments: CliRunner().invoke(app, ["eval", "drift", *small, *arguments])


def test_the_verb_prints_json(run):
    data = json.loads(run("--recipe", "int8", "--json", "--batch", "2").stdout)
    assert (data["kind"], data["protocol"]["new_tokens"]) == ("drift", 30)
    assert [row["recipe"] for row in data["rows"]] == ["none", "int8"] * 2
    assert [each["recipe"] for each in data["summary"]] == ["none", "int8"]
    assert len(data["summary"][1]["kl_windows"]) == 2


def test_the_verb_prints_a_table(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    done = run("--recipe", "int8")
    assert done.exit_code == 0, done.output
    assert "tiny on words.txt, 2 x (200 + up to 30) tokens" in done.stdout
    assert "KL 0-" in done.stdout and "KL 20-" in done.stdout
