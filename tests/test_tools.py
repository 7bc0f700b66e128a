"""`eval tools`: the fixed prompts, what counts as right and valid, what counts as broken, and the verb."""

import json

import pytest
from typer.testing import CliRunner

from kvslim.cli.app import app
from kvslim.errors import InputError
from kvslim.eval.cases import measure_cases, with_control
from kvslim.eval.records import RECORDS, TABLES, exercises
from kvslim.eval.results import Results
from kvslim.eval.tools import Broken, Tools, Verdict, judge, summarize
from kvslim.integrations.transformers import loading
from kvslim.recipe import Recipe

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}go{% endif %}"
CALL = {"name": "assign_ticket", "arguments": {"ticket": "T-1", "votes": 3}}
RIGHT, VALID, WRONG = Verdict(True, True), Verdict(True, False), Verdict(False, False)


def test_there_are_at_least_forty_prompts_the_same_every_time():
    tasks = exercises()
    assert len({task.name for task in tasks}) == len(tasks) >= 40
    assert len({task.prompt for task in tasks}) == len(tasks)
    assert tasks == exercises()


@pytest.mark.parametrize("task", exercises(), ids=lambda task: task.name)
def test_the_expected_answer_follows_from_the_prompt(task):
    """Read the records back out of the prompt and solve the task from its words."""
    records = [json.loads(line) for line in task.prompt.splitlines() if line.startswith("{")]
    kind, noun, _ = task.name.split("-")
    (table,) = [each for each in TABLES if each.noun == noun]
    assert len(records) == RECORDS
    assert len({record[noun] for record in records}) == len({record[table.person] for record in records}) == RECORDS
    question = task.prompt.split("\n\n", 2)[2]
    named = [record for record in records if record[noun] in question or record[table.person] in question]
    if kind == "pair":
        named.sort(key=lambda record: question.index(record[noun]))
        assert task.expected == [
            {key: record[key] for key in each} for record, each in zip(named, task.expected, strict=True)
        ]
        assert len(named) == 2
        return
    (record,) = named
    if kind == "call":
        assert task.expected["name"] == table.tool
        assert f"{table.tool}({', '.join(task.expected['arguments'])})" in question
        assert all(each.tool in question for each in TABLES)
    wanted = task.expected["arguments"] if kind == "call" else task.expected
    assert wanted == {key: record[key] for key in wanted}
    if kind != "call":
        assert f"with the keys {', '.join(wanted)}." in question


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (json.dumps(CALL), RIGHT),
        ('{"arguments": {"votes": 3, "ticket": "T-1"}, "name": "assign_ticket"}', RIGHT),
        (f"```json\n{json.dumps(CALL, indent=2)}\n```", RIGHT),
        (f"```\n{json.dumps(CALL)}\n```\nThis calls the tool.", RIGHT),
        (json.dumps({**CALL, "name": "other"}), VALID),
        ('{"name": "assign_ticket", "arguments": {"ticket": "T-1", "votes": "3"}}', VALID),
        ('{"name": "assign_ticket", "arguments": {"ticket": "T-1", "votes": 3.0}}', VALID),
        ('{"name": "assign_ticket", "arguments": {"ticket": "T-1", "votes": true}}', VALID),
        ('{"name": "assign_ticket", "arguments": {"ticket": "T-1"}}', WRONG),
        ('{"name": "assign_ticket", "arguments": {"ticket": "T-1", "votes": 3, "more": 1}}', WRONG),
        (f"[{json.dumps(CALL)}]", WRONG),
        ('{"name": "assign_ticket", "arguments": {"ticket": "T-1", "vo', WRONG),
        (f"Here it is: {json.dumps(CALL)}", WRONG),
        ("", WRONG),
        ("null", WRONG),
    ],
)
def test_verdicts(text, verdict):
    assert judge(text, CALL) == verdict


def test_lists_have_a_length():
    assert judge('[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]) == RIGHT
    assert judge('[{"a": 2}, {"a": 1}]', [{"a": 1}, {"a": 2}]) == VALID
    assert judge('[{"a": 1}]', [{"a": 1}, {"a": 2}]) == WRONG


def row(recipe: str, case: str, answer: str, verdict: Verdict) -> dict:
    scores = {"valid": verdict.valid, "right": verdict.right}
    return {"recipe": recipe, "case": case, "answer": answer, "expected": 1, "bits_per_value": 4.0, **scores}


def test_broken_is_what_the_16_bit_cache_gets_right():
    rows = [
        row("none", "a", "1", RIGHT),
        row("int4", "a", "2", VALID),
        row("none", "b", "x", WRONG),
        row("int4", "b", "x", WRONG),
        row("none", "c", "1", RIGHT),
        row("int4", "c", " 1", RIGHT),
        row("none", "d", "3", VALID),
        row("int4", "d", "1", RIGHT),
    ]
    none, int4 = summarize(rows)
    assert (none.recipe, none.cases, none.right, none.valid, none.equal, none.broken) == ("none", 4, 2, 3, 4, ())
    assert (int4.right, int4.valid, int4.equal) == (2, 3, 1)
    assert int4.broken == (Broken("a", 1, "1", "2"),)
    assert int4.to_dict()["broken"] == [{"case": "a", "expected": 1, "control": "1", "answer": "2"}]


@pytest.fixture
def tokenizer(byte_model, monkeypatch):
    monkeypatch.setattr(byte_model.tokenizer, "chat_template", TEMPLATE)
    return byte_model.tokenizer


def test_a_model_without_chat_template_is_refused(byte_model):
    with pytest.raises(InputError, match="tiny has no chat template, .* `kvslim eval needle`"):
        Tools(byte_model.tokenizer, "tiny")


def test_the_prompts_are_in_the_chat_template(tokenizer):
    task, other = Tools(tokenizer, "tiny", limit=3), Tools(tokenizer, "tiny", limit=2)
    text = tokenizer.decode(task.cases[0].ids)
    assert text == f"<{exercises()[0].prompt}>go"
    tails = [tokenizer.decode(case.ids[-task.question_tokens :]) for case in task.cases]
    assert all(tail.endswith(f"{each.question}>go") for tail, each in zip(tails, exercises(), strict=False))
    assert any(tail == f"{each.question}>go" for tail, each in zip(tails, exercises(), strict=False))
    assert [case.name for case in task.cases] == [each.name for each in exercises()[:3]]
    assert task.protocol()["sha256"] != other.protocol()["sha256"]
    for changes in ({"limit": 0}, {"new_tokens": 0}):
        with pytest.raises(InputError, match="=0 is out of range"):
            Tools(tokenizer, "tiny", **changes)


@pytest.fixture
def run(byte_model, tokenizer, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: byte_model)
    return lambda *arguments: CliRunner().invoke(app, ["eval", "tools", "--limit", "2", "-n", "4", *arguments])


def test_the_verb_prints_json(run):
    done = run("--recipe", "int8,int4", "--json", "--batch", "2")
    data = json.loads(done.stdout)
    assert (data["kind"], data["protocol"]["prompts"], data["protocol"]["batch"]) == ("tools", 2, 2)
    assert [row["recipe"] for row in data["rows"]] == ["none", "int8", "int4"] * 2
    assert {"case", "answer", "expected", "valid", "right", "nbytes", "bits_per_value"} <= set(data["rows"][0])
    control, int8, int4 = data["summary"]
    assert (control["equal"], control["right"], control["broken"]) == (2, 0, [])
    assert int4["bits_per_value"] < int8["bits_per_value"] < control["bits_per_value"]


def test_the_verb_prints_a_table_and_what_broke(run, monkeypatch):
    from kvslim.eval import tools

    judged = iter([RIGHT, RIGHT, WRONG, WRONG])
    monkeypatch.setattr(tools, "judge", lambda *_: next(judged))
    done = run("--recipe", "int4", "--batch", "2")
    assert done.exit_code == 0, done.output
    assert "tiny, 2 prompts" in done.stdout
    assert "int4 broke extract-order-0" in done.stdout
    assert 'expected: {"order": "A-' in done.stdout


def test_the_verb_refuses_a_model_without_chat_template(run, monkeypatch, tokenizer):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert "has no chat template" in str(run().exception)


def test_real_answers_are_valid_json(qwen05b):
    """One prompt: what the judge reads is what a real model writes, with 16 bits and with slim4."""
    task = Tools(qwen05b.tokenizer, "qwen0.5b", limit=1)
    with Results(None, {}) as results:
        rows = measure_cases(task, qwen05b.model, with_control([Recipe.parse("slim4")]), results)
    assert [each["valid"] for each in rows] == [True, True]
