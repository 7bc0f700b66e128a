"""What the evaluations on cases stand on: one pass for several caches, batches, and a file of results that goes on."""

import json
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvslim
from kvslim.errors import InputError, ResultFileError
from kvslim.eval.answering import Batch, answer, force, prefill
from kvslim.eval.cases import Case, Fed, check_context, header, label, measure_cases, total_tokens, with_control
from kvslim.eval.forced import feed
from kvslim.eval.results import Results
from kvslim.eval.shared_prefill import SharedPrefill, can_share
from kvslim.integrations.transformers import compat
from kvslim.recipe import Recipe
from tiny_models import FAMILIES, LINEAR, pair, prompt

RECIPES = [
    "none",
    "int8+recent=0+block=32",
    "kivi4+recent=0+block=32",
    "slim4+recent=0+block=32",
    "turbo3+recent=0+block=32",
]
CPU = torch.device("cpu")


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [prompt(1, length, seed=length)[0] for length in lengths]


@pytest.mark.filterwarnings("ignore::kvslim.errors.PackingWarning")
@pytest.mark.parametrize(("family", "lengths"), [*((family, (150, 90)) for family in FAMILIES), ("gemma3", (150,))])
def test_one_pass_fills_every_cache_as_a_pass_of_its_own_does(family, lengths):
    model, _ = pair(family)
    batch = Batch.of(prompts(*lengths), CPU)
    shared = [kvslim.KVCache(model, recipe) for recipe in RECIPES]
    assert can_share(shared) == (family not in (*LINEAR, "gemma3n"))
    logits = prefill(model, shared, batch)
    then = prompt(len(lengths), 7, seed=1)
    for recipe, cache in zip(RECIPES, shared, strict=True):
        own = kvslim.KVCache(model, recipe)
        assert torch.equal(prefill(model, [own], batch), logits)
        assert cache.report() == own.report()
        for one, other in zip(cache.tensors(), own.tensors(), strict=True):
            assert torch.equal(one, other)
        for one, other in zip(force(model, cache, batch, then, 3), force(model, own, batch, then, 3), strict=True):
            assert torch.equal(one, other)


def test_a_pass_for_several_caches_runs_the_model_once():
    model, _ = pair("llama")
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    prefill(model, [kvslim.KVCache(model, recipe) for recipe in ("none", "int8", "int4")], Batch.of(prompts(40), CPU))
    hook.remove()
    assert len(calls) == 1


def test_a_batch_is_padded_on_the_left():
    batch = Batch.of([torch.tensor([5, 6, 7]), torch.tensor([8])], CPU)
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.ids[0].tolist() == [5, 6, 7]
    assert batch.ids[1, 2] == 8
    assert batch.lengths.tolist() == [3, 1]


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_answers_are_those_of_generate(recipe):
    model, _ = pair("llama")
    both = prompts(70, 41)
    batch, seen = Batch.of(both, CPU), []
    cache = kvslim.KVCache(model, recipe)
    logits = prefill(model, [cache], batch)
    found = answer(model, cache, batch, logits, new_tokens=12, on_tokens=seen.append)
    assert sum(seen) == 2 * 12
    for ids, row in zip(both, found, strict=True):
        cache = kvslim.KVCache(model, recipe)
        done = model.generate(ids[None], **{compat.CACHE_ARGUMENT: cache}, max_new_tokens=12, do_sample=False)
        assert row == done[0, len(ids) :].tolist()


def test_an_answer_ends_before_the_end_token_and_counts_in_full(monkeypatch):
    model, _ = pair("llama")
    both = prompts(70, 41)
    batch = Batch.of(both, CPU)

    def run() -> tuple[list[list[int]], int]:
        cache, seen = kvslim.KVCache(model, "none"), []
        logits = prefill(model, [cache], batch)
        return answer(model, cache, batch, logits, new_tokens=12, on_tokens=seen.append), sum(seen)

    whole, _ = run()
    stop = whole[0][4]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop])
    found, seen = run()
    assert found == [row[: row.index(stop)] if stop in row else row for row in whole]
    assert stop not in found[0]
    assert seen == 2 * 12


def test_a_question_is_read_through_each_packed_cache():
    """The text in one pass, the last tokens in another: as when a cache is filled first and asked later."""
    model, _ = pair("llama")
    both, recipes = prompts(90, 70), ["none", "int4+recent=0+block=32"]
    cases = [Case(str(index), ids) for index, ids in enumerate(both)]
    fed = Fed.of(model, cases, [Recipe.parse(recipe) for recipe in recipes], 9, lambda _: None)
    exact = prefill(model, [kvslim.KVCache(model, "none")], Batch.of(both, CPU))
    torch.testing.assert_close(fed.logits["none"], exact, atol=1e-4, rtol=0)
    assert (fed.logits[recipes[1]] - exact).abs().max() > 0.01
    for index, ids in enumerate(both):
        for recipe in recipes:
            cache = kvslim.KVCache(model, recipe)
            feed(model, cache, ids[:-9], 0, keep=1)
            want = feed(model, cache, ids[-9:], len(ids) - 9, keep=1)[0]
            torch.testing.assert_close(fed.logits[recipe][index], want, atol=1e-4, rtol=0)


class Echo:
    """A task whose row is the first tokens of each answer."""

    kind, new_tokens, question_tokens, work_per_token, feeds_control = "echo", 3, 5, 1, False

    def __init__(self, count: int = 5):
        self.cases = [Case(f"case-{index}", ids) for index, ids in enumerate(prompts(*range(40, 40 + count)))]

    def protocol(self) -> dict[str, Any]:
        return {"cases": len(self.cases)}

    def measure(self, fed: Fed, missing: Sequence[str], results: Results) -> Iterator[dict[str, Any]]:
        for recipe in missing:
            rows, found = fed.rows_of(recipe), fed.answers(recipe, 3)
            for row, ids in zip(rows, found, strict=True):
                yield {**row, "ids": ids}


ASKED = [Recipe.parse(text) for text in ("none", "int8", "int4+sinks=8")]


def run(path: Path | None, *, batch: int = 2, on_tokens: Any = lambda _: None, **changes: Any) -> list[dict[str, Any]]:
    model, _ = pair("llama")
    task, recipes = changes.get("task", Echo()), changes.get("recipes", ASKED)
    with Results(path, header(task, changes.get("name", "tiny"), model, recipes, batch)) as results:
        return measure_cases(task, model, recipes, results, batch=batch, on_tokens=on_tokens)


def test_rows_come_case_by_case_and_are_in_the_file(tmp_path):
    rows = run(tmp_path / "out.jsonl")
    assert [(row["case"], row["recipe"]) for row in rows[:4]] == [
        ("case-0", "none"),
        ("case-0", "int8"),
        ("case-0", "int4+sinks=8"),
        ("case-1", "none"),
    ]
    assert all({"nbytes", "bits_per_value", "prompt_tokens", "ids"} <= set(row) for row in rows)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(map(str, lines[1:])) == sorted(map(str, rows))
    assert run(None) == rows


def test_bytes_are_shared_out_by_tokens():
    rows = [row for row in run(None, batch=5) if row["recipe"] == "none"]
    assert [row["nbytes"] / row["prompt_tokens"] for row in rows] == [
        pytest.approx(rows[0]["nbytes"] / 40, rel=0.01)
    ] * 5
    layers, sides, heads, head_dim, fp32 = 3, 2, 2, 32, 4
    assert sum(row["nbytes"] for row in rows) >= layers * sides * heads * head_dim * fp32 * sum(range(40, 45))


@pytest.mark.parametrize("stop", [1, 60, 130, 240])
def test_an_interrupted_run_goes_on_to_the_same_rows(tmp_path, stop):
    """Stopped after so many tokens, wherever in a batch that is; then with a torn last line."""
    path, whole = tmp_path / "out.jsonl", run(None)
    tokens = 0

    def interrupt(count: int) -> None:
        nonlocal tokens
        tokens += count
        if tokens > stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, on_tokens=interrupt)
    finished = len(path.read_bytes().splitlines()) - 1
    assert finished < len(whole)
    with path.open("ab") as file:
        file.write(b'{"recipe": "int8", "case": "case-4", "ids": [1')
    assert run(path) == whole
    assert len(path.read_bytes().splitlines()) == 1 + len(whole), "nothing measured twice, the torn line gone"


def test_a_finished_run_does_not_run_the_model_again(tmp_path, monkeypatch):
    rows = run(tmp_path / "out.jsonl")
    monkeypatch.setattr(Fed, "of", lambda *_: pytest.fail("measured again"))
    assert run(tmp_path / "out.jsonl") == rows


@pytest.mark.parametrize("kept", [0, 3, 9])
def test_progress_adds_up_over_what_is_missing(tmp_path, kept):
    path, model = tmp_path / "out.jsonl", pair("llama")[0]
    run(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: 1 + kept]))
    task, seen = Echo(), []
    with Results(path, header(task, "tiny", model, ASKED, 2)) as results:
        total = total_tokens(task, ASKED, results, 2)
        measure_cases(task, model, ASKED, results, batch=2, on_tokens=seen.append)
    assert sum(seen) == total > 0


def test_files_of_something_else_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    run(path)
    before = path.read_bytes()
    for changes, name in (
        ({"name": "other"}, 'model is "tiny" there, "other" here'),
        ({"task": Echo(4)}, "protocol is"),
        ({"batch": 1}, "protocol is"),
        ({"recipes": ASKED[:2]}, "recipes is"),
    ):
        with pytest.raises(ResultFileError, match=name):
            run(path, **changes)
    assert path.read_bytes() == before
    for content, message in (
        (b"my notes, no newline", "does not hold results"),
        (b"notes\n", "line 1 of .* is not a result"),
    ):
        path.write_bytes(content)
        with pytest.raises(ResultFileError, match=message):
            run(path)
        assert path.read_bytes() == content
    path.write_bytes(before.replace(b'"case"', b'"cake"', 2))
    with pytest.raises(ResultFileError, match="line 2 of .* is not a result"):
        run(path)


def test_a_torn_header_is_begun_anew(tmp_path):
    path = tmp_path / "out.jsonl"
    rows = run(path)
    path.write_bytes(path.read_bytes()[:30])
    assert run(path) == rows


def test_a_folder_as_file_is_refused(tmp_path):
    with pytest.raises(ResultFileError, match="Is a directory; name another file with --resume"):
        run(tmp_path)
    with pytest.raises(ResultFileError, match="No such file"):
        run(tmp_path / "missing" / "out.jsonl")


def test_a_full_disk_keeps_what_is_finished(tmp_path):
    """The system refuses to let the file grow, in the middle of a line; with room again the run goes on."""
    path, whole = tmp_path / "out.jsonl", run(tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(b"".join(lines[:6])) + 20, hard))
    try:
        with pytest.raises(ResultFileError, match="the 5 finished cases are kept there. Make room"):
            run(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes().splitlines(keepends=True)[:6] == lines[:6]
    assert run(path) == whole


def test_the_control_comes_first_and_nothing_twice():
    asked = [Recipe.parse(text) for text in ("int8", "none", "int8", "int4")]
    assert [label(recipe) for recipe in with_control(asked)] == ["none", "int8", "int4"]


def test_prompts_beyond_the_context_are_refused():
    model, _ = pair("llama")
    cases = [Case("long", torch.zeros(1000, dtype=torch.long))]
    check_context(model.config, cases, 24, "")
    with pytest.raises(
        InputError, match="1,000 tokens and 25 new ones make 1,025, .* context is 1,024 tokens; go lower"
    ):
        check_context(model.config, cases, 25, "go lower")


def test_the_stand_in_hands_on_what_the_model_asks():
    model, _ = pair("gemma3")
    caches = [kvslim.KVCache(model, recipe) for recipe in ("none", "int8")]
    shared = SharedPrefill(caches)
    assert (len(shared), shared.get_seq_length()) == (3, 0)
    prefill(model, caches, Batch.of(prompts(50), CPU))
    assert shared.get_seq_length() == caches[1].get_seq_length() == 50
