"""`kvslim demo` on a tiny model that reads bytes: the prompt, the comparison, and what the verb prints."""

import json

import pytest
from typer.testing import CliRunner

from kvslim.cli.app import app
from kvslim.cli.demo import _DEFAULT
from kvslim.errors import InputError
from kvslim.eval.demo import BASELINE, PAGES, SCORED, Demo
from kvslim.eval.prompt import QUESTION, build_prompt
from kvslim.integrations.transformers import loading
from kvslim.integrations.transformers.loading import LoadedModel
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe

KEYS = [
    *("recipe", "bits_per_value", "nbytes", "nbytes_16bit", "peak_nbytes", "prefill_tokens_per_s"),
    *("decode_tokens_per_s", "kl_mean", "top1", "text", "new_tokens"),
]


@pytest.fixture(scope="module")
def loaded(byte_model) -> LoadedModel:
    return byte_model


@pytest.fixture(scope="module")
def demo(loaded) -> Demo:
    return Demo(loaded.model, loaded.tokenizer, max_new_tokens=8)


def test_the_prompt_holds_the_answer_far_from_the_question(loaded):
    prompt = build_prompt(loaded.tokenizer, tokens=4096, sequel=100)
    text = loaded.tokenizer.decode(prompt.ids)
    assert len(prompt.ids) >= 4096
    assert QUESTION in text
    assert "__enter__" in text[: len(text) // 2]
    assert len(prompt.sequel) == 100
    assert loaded.tokenizer.decode(prompt.sequel) not in text


def test_the_chat_template_is_used_where_there_is_one(loaded, monkeypatch):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}go{% endif %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    text = loaded.tokenizer.decode(build_prompt(loaded.tokenizer, tokens=200, sequel=10).ids)
    assert text.startswith("<Here is")
    assert text.endswith(f"{QUESTION}>go")


def test_answers(demo):
    recipes = [Recipe.parse(text) for text in ("none", "int8", "int4")]
    seen = []
    base, none, int8, int4 = demo.run(recipes, seen.append)
    assert sum(seen) == 4 * demo.tokens_per_answer
    assert [answer.recipe for answer in (base, none, int8, int4)] == [BASELINE, "none", "int8", "int4"]
    assert base.holding.bits_per_value == 16
    layers, sides, two_bytes, head_dim = 2, 2, 2, 32
    assert base.holding.nbytes == layers * sides * two_bytes * head_dim * (len(demo.prompt.ids) + 7)
    assert (base.kl_mean, base.top1) == (pytest.approx(0, abs=1e-7), 1.0)
    assert none.text == base.text
    assert abs(none.kl_mean) < 1e-7
    assert int4.holding.nbytes < int8.holding.nbytes < base.holding.nbytes
    assert int8.kl_mean < int4.kl_mean
    for answer in (base, none, int8, int4):
        assert answer.holding.peak_nbytes >= answer.holding.nbytes
        assert answer.new_tokens == 8
        assert answer.prefill_tokens_per_s > 0 < answer.decode_tokens_per_s
        assert sorted(answer.to_dict()) == sorted(KEYS)


def test_an_answer_ends_at_the_end_token(demo, monkeypatch):
    (first,) = demo.run([])
    third = demo.tokenizer(first.text)["input_ids"][2]
    monkeypatch.setattr(demo.model.generation_config, "eos_token_id", [third])
    seen = []
    (base,) = demo.run([], seen.append)
    assert base.new_tokens <= 3
    assert sum(seen) == demo.tokens_per_answer
    assert third not in demo._forced_ids([1, 2, third]).tolist()[:3]


def test_a_short_context_is_refused(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", PAGES)
    with pytest.raises(InputError, match=r"needs a context of [\d,]+ tokens, this model's is 2,048"):
        Demo(loaded.model, loaded.tokenizer)


@pytest.fixture
def run(loaded, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: loaded)
    return lambda *arguments: CliRunner().invoke(app, ["demo", "--max-new-tokens", "4", *arguments])


def test_the_verb_prints_json(run):
    done = run("--recipe", "int8,kivi4+sinks=8", "--json")
    data = json.loads(done.stdout)
    assert data["model"] == "tiny"
    assert data["prompt_tokens"] >= PAGES
    assert [row["recipe"] for row in data["rows"]] == [BASELINE, "int8", "kivi4+sinks=8"]
    assert sorted(data["rows"][1]) == sorted([*KEYS, "note"])


def test_the_verb_prints_a_table_and_the_texts(run):
    done = run("--recipe", "int4")
    assert done.exit_code == 0, done.output
    assert f"over {SCORED} tokens" in " ".join(done.stdout.split())
    assert "16 bits are counted at 2 bytes per value" in " ".join(done.stdout.split())
    assert PRESETS["int4"].note in " ".join(done.stdout.split())


def test_the_default_recipes_are_presets_once_each():
    names = _DEFAULT.split(",")
    assert len(names) == len(set(names)) >= 3
    assert PRESETS[names[-1]].fragile, "the last one shows what not to do"


def test_an_empty_list_of_recipes_is_refused(run):
    done = run("--recipe", " , ")
    assert isinstance(done.exception, InputError)
    assert "--recipe is empty" in str(done.exception)
