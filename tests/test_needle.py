"""`eval needle`: where facts are hidden, what counts as found, the summary, and the verb on a model that reads bytes."""

import json
import random

import pytest
from typer.testing import CliRunner

from kvslim.cli.app import app
from kvslim.cli.eval.needle import _colour
from kvslim.errors import InputError, ResultFileError
from kvslim.eval.cases import measure_cases, with_control
from kvslim.eval.haystack import KEYS, Facts, Haystack
from kvslim.eval.needle import Needle, NeedleProtocol, is_found, summarize
from kvslim.eval.results import Results
from kvslim.eval.text import Text, python_docs
from kvslim.integrations.transformers import loading
from kvslim.recipe import Recipe

WORDS = Text("words", " ".join(f"Sentence number {index} ends here." for index in range(300)))
SMALL = NeedleProtocol(lengths=(500, 800), depths=2, keys=3, new_tokens=4)
KEYS_OF_ROW = [
    *(
        "recipe",
        "case",
        "nbytes",
        "bits_per_value",
        "prompt_tokens",
        "mode",
        "tokens",
        "depth",
        "key",
        "expected",
        "found",
    ),
    "answer",
]


@pytest.fixture(scope="module")
def haystack(byte_model) -> Haystack:
    return Haystack(byte_model.tokenizer, WORDS)


def read(haystack: Haystack, facts: Facts, tokens: int) -> str:
    return haystack.tokenizer.decode(haystack.prompt(facts, tokens, random.Random(0)))


def test_the_pieces_are_the_text(byte_model):
    for text in (WORDS, python_docs(), Text("no ends", "word " * 500)):
        pieces = Haystack(byte_model.tokenizer, text).pieces
        assert "".join(pieces).split() == text.content.split()
        assert max(map(len, pieces)) <= 404
    assert Haystack(byte_model.tokenizer, WORDS).pieces[:2] == [
        "Sentence number 0 ends here. ",
        "Sentence number 1 ends here. ",
    ]


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_fact_stands_between_sentences_at_its_depth(haystack, depth):
    facts = Facts(("blue lantern",), ("48213",), (depth,))
    text = read(haystack, facts, 4000)
    sentence = "The access code of the blue lantern is 48213. "
    start, end = text.index("Sentence number"), text.index("\n\nWhat is the access code of the blue lantern?")
    at = text.index(sentence.strip())
    assert text.count("48213") == 1
    assert text[:at].endswith((" ends here. ", "\n\n"))
    assert (at - min(start, at)) / (end - start - len(sentence)) == pytest.approx(depth, abs=0.02)


def test_prompts_fill_their_length_and_end_with_the_answers_first_words(haystack):
    facts = Facts.draw(3, 0.5, random.Random(1))
    for tokens in (600, 1500, 5000):
        ids = haystack.prompt(facts, tokens, random.Random(2))
        assert tokens - 40 < len(ids) <= tokens, "less than a sentence is missing"
    text = haystack.tokenizer.decode(ids)
    assert text.endswith(f"Answer with the code alone.\n\nThe access code of the {facts.keys[0]} is")
    for index in range(3):
        assert text.count(facts.sentence(index).strip()) == 1


def test_the_chat_template_is_used_where_there_is_one(haystack, monkeypatch):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}go {% endif %}"
    monkeypatch.setattr(haystack.tokenizer, "chat_template", template)
    text = read(haystack, Facts(("blue lantern",), ("48213",), (0.5,)), 800)
    assert text.startswith("<Access codes are hidden")
    assert text.endswith("alone.>go The access code of the blue lantern is")


@pytest.mark.parametrize("template", [None, "<{% for m in messages %}{{ m.content }}{% endfor %}>go "])
def test_the_question_is_the_end_of_every_prompt(haystack, monkeypatch, template):
    monkeypatch.setattr(haystack.tokenizer, "chat_template", template)
    task = Needle(haystack, SMALL)
    tails = [haystack.tokenizer.decode(case.ids[-task.question_tokens :]) for case in task.cases]
    assert all("What is the access code of the " in tail and " is " not in tail.split("What is")[0] for tail in tails)
    assert any(tail.startswith("What is the access code of the ") for tail in tails), "the longest one is all of it"


def test_facts_are_different_and_spread():
    facts = Facts.draw(8, 0.3, random.Random(0))
    assert len(set(facts.keys)) == len(set(facts.codes)) == 8
    assert set(facts.keys) <= set(KEYS)
    assert {len(code) for code in facts.codes} == {5}
    assert facts.depths[0] == 0.3
    assert facts.depths[1:] == tuple((index + 0.5) / 7 for index in range(7))
    assert Facts.draw(1, 0.3, random.Random(0)).depths == (0.3,)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (" 48213.", True),
        ("48213", True),
        (" 48213. The code of the red one is 11111.", True),
        (" 11111, or 48213", False),
        (" 482134", False),
        (" 4821", False),
        (" unknown", False),
        ("", False),
    ],
)
def test_an_answer_is_found_if_its_first_number_is_the_code(answer, found):
    assert is_found(answer, "48213") == found


def test_cases_are_the_same_every_time_and_all_different(haystack):
    setup = NeedleProtocol(lengths=(500, 800), depths=3, keys=3, samples=2)
    one, two = Needle(haystack, setup), Needle(haystack, setup)
    assert [case.name for case in one.cases] == [case.name for case in two.cases]
    assert len({tuple(case.ids.tolist()) for case in one.cases}) == len(one.cases) == 2 * 2 * 3 * 2
    assert all(a.ids.tolist() == b.ids.tolist() for a, b in zip(one.cases, two.cases, strict=True))
    assert one.cases[0].name == "single-500-0.167-0"


def row(recipe: str, mode: str, depth: float, tokens: int, found: bool) -> dict:
    return {"recipe": recipe, "mode": mode, "depth": depth, "tokens": tokens, "found": found, "bits_per_value": 4.0}


def test_the_summary_counts_by_place():
    rows = [
        row("none", "single", 0.1, 500, True),
        row("int4", "single", 0.1, 500, False),
        row("int4", "single", 0.1, 500, True),
        row("int4", "single", 0.9, 500, True),
        row("int4", "multi", 0.1, 500, False),
    ]
    none, single, multi = summarize(rows)
    assert (none.recipe, none.mode, none.found, none.cases) == ("none", "single", 1, 1)
    assert (single.found, single.cases, single.grid) == (2, 3, {(0.1, 500): 0.5, (0.9, 500): 1.0})
    assert (multi.found, multi.grid) == (0, {(0.1, 500): 0.0})
    assert single.to_dict() == {"recipe": "int4", "mode": "single", "found": 2, "cases": 3, "bits_per_value": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths"),
        ({"lengths": (500, 500)}, "each once"),
        ({"depths": 0}, "depths=0"),
        ({"keys": 1}, "keys=1 is out of range; use 2 to 64"),
        ({"keys": 65}, "use 2 to 64"),
    ],
)
def test_a_protocol_of_nothing_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        NeedleProtocol(**changes)


def test_texts_and_lengths_that_do_not_fit_are_refused(byte_model, haystack):
    short = Haystack(byte_model.tokenizer, Text("short.txt", "One sentence. Another one."))
    with pytest.raises(InputError, match=r"the text short.txt has 26 tokens, a prompt of 500 needs \d+"):
        Needle(short, SMALL)
    with pytest.raises(InputError, match="100 tokens do not hold 1 facts and a question"):
        Needle(haystack, NeedleProtocol(lengths=(100,)))


def test_every_recipe_answers_every_prompt(byte_model, haystack):
    recipes = with_control([Recipe.parse("int8"), Recipe.parse("int4")])
    task = Needle(haystack, SMALL)
    with Results(None, {}) as results:
        rows = measure_cases(task, byte_model.model, recipes, results, batch=4)
    assert len(rows) == 3 * 8
    assert all(sorted(each) == sorted(KEYS_OF_ROW) for each in rows)
    assert {each["tokens"] for each in rows} == {500, 800}
    bits = {each["recipe"]: each["bits_per_value"] for each in rows if each["tokens"] == 800}
    assert bits["none"] == pytest.approx(32, rel=0.1)
    assert bits["int4"] < bits["int8"] < 16


@pytest.fixture
def run(byte_model, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: byte_model)
    file = tmp_path / "words.txt"
    file.write_text(WORDS.content)
    small = ("--text", str(file), "--lengths", "600", "--depths", "2", "--keys", "3")
    return lambda *arguments: CliRunner().invoke(app, ["eval", "needle", *small, *arguments])


def test_the_verb_prints_json(run):
    done = run("--recipe", "int8", "--json")
    data = json.loads(done.stdout)
    assert (data["kind"], data["model"]) == ("needle", "tiny")
    assert {"protocol", "versions", "command", "rows", "summary"} <= set(data)
    assert data["protocol"]["text"]["name"] == "words.txt"
    assert [(each["recipe"], each["mode"], each["cases"]) for each in data["summary"]] == [
        ("none", "single", 2),
        ("int8", "single", 2),
        ("none", "multi", 2),
        ("int8", "multi", 2),
    ]
    assert len(data["rows"]) == 8


def test_the_verb_goes_on_from_its_file(run, tmp_path):
    path = tmp_path / "out.jsonl"
    first = run("--recipe", "int8", "--resume", str(path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:10])
    again = run("--recipe", "int8", "--resume", str(path))
    assert again.stdout == first.stdout
    assert path.read_bytes().splitlines(keepends=True) == lines
    done = run("--recipe", "int4", "--resume", str(path))
    assert isinstance(done.exception, ResultFileError)
    assert "recipes is" in str(done.exception)


def test_the_verb_prints_a_heat_map_per_recipe_and_mode(run):
    done = run("--recipe", "int8,int4")
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    for recipe in ("none", "int8", "int4"):
        assert words.count(f"{recipe}: 0 of 2, ") == 2
    assert words.count("25%") == words.count("75%") == 6
    assert "single" in words and "multi" in words


def test_the_verb_refuses_bad_lengths_and_a_short_context(run):
    done = run("--lengths", "1k")
    assert "cannot read --lengths '1k'" in str(done.exception)
    done = run("--lengths", "8190")
    assert "context is 8,192 tokens; use shorter --lengths" in str(done.exception)


def test_colours_run_from_red_to_green():
    assert _colour(0.0) == "black on rgb(240,90,90)"
    assert _colour(0.5) == "black on rgb(240,220,90)"
    assert _colour(1.0) == "black on rgb(90,220,90)"


def test_qwen_finds_one_fact(qwen05b):
    """One short prompt per mode: the 16-bit cache and slim4 find the fact, and tell it from another."""
    task = Needle(Haystack(qwen05b.tokenizer, python_docs()), NeedleProtocol((512,), depths=1, keys=2, new_tokens=8))
    recipes = with_control([Recipe.parse("slim4+recent=0")])
    with Results(None, {}) as results:
        rows = measure_cases(task, qwen05b.model, recipes, results, batch=2)
    assert [(each["mode"], each["recipe"], each["found"]) for each in rows] == [
        ("single", "none", True),
        ("single", "slim4+recent=0", True),
        ("multi", "none", True),
        ("multi", "slim4+recent=0", True),
    ]
