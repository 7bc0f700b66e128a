"""Tool calls and JSON out of long lists of records: what a packed cache gets right, and what it breaks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvslim.errors import InputError
from kvslim.eval.cases import CONTROL, Case, Fed, Row
from kvslim.eval.haystack import encode_question, question_tokens
from kvslim.eval.records import exercises
from kvslim.eval.results import Results

_FENCE = re.compile(r"\A```\w*\s*\n(.*?)\n?```", re.DOTALL)


class Tools:
    """The fixed prompts in a tokenizer's chat template; see `kvslim.eval.cases`.

    Parameters
    ----------
    tokenizer
    name : str
        The model's, for the error.
    new_tokens : int, optional
        Length of an answer at most.
    limit : int, optional
        Only the first so many prompts.

    Raises
    ------
    InputError
        The tokenizer has no chat template, or a number is out of range.
    """

    kind = "tools"
    work_per_token = 1
    feeds_control = False

    def __init__(self, tokenizer: Any, name: str, *, new_tokens: int = 128, limit: int | None = None):
        if tokenizer.chat_template is None:
            raise InputError(
                f"{name} has no chat template, and a base model does not answer in JSON; use an instruct model, for "
                "example --model qwen1.5b, or measure this one with `kvslim eval needle`"
            )
        for option, value in (("new_tokens", new_tokens), ("limit", limit)):
            if value is not None and value < 1:
                raise InputError(f"{option}={value} is out of range; use 1 or more")
        self.tokenizer, self.new_tokens = tokenizer, new_tokens
        self._exercises = {task.name: task for task in exercises()[:limit]}
        tasks = self._exercises.values()
        self.cases = [Case(task.name, torch.tensor(encode_question(tokenizer, task.prompt))) for task in tasks]
        self.question_tokens = max(question_tokens(tokenizer, task.question) for task in tasks)

    def protocol(self) -> dict[str, Any]:
        """Number and hash of the prompts, and the length of an answer."""
        content = json.dumps([asdict(task) for task in self._exercises.values()])
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        return {
            "prompts": len(self.cases),
            "sha256": digest,
            "new_tokens": self.new_tokens,
            "question_tokens": self.question_tokens,
        }

    def measure(self, fed: Fed, missing: Sequence[str], results: Results) -> Iterator[Row]:
        """Answer every prompt with each recipe."""
        for recipe in missing:
            for row, ids in zip(fed.rows_of(recipe), fed.answers(recipe, self.new_tokens), strict=True):
                text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
                expected = self._exercises[row["case"]].expected
                yield {**row, **asdict(judge(text, expected)), "answer": text, "expected": expected}


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is JSON of the expected shape (`valid`), and whether it is the expected value (`right`)."""

    valid: bool
    right: bool


def judge(text: str, expected: Any) -> Verdict:
    """Score one answer: JSON alone, in a Markdown fence or not."""
    fenced = _FENCE.match(text)
    try:
        value = json.loads(fenced.group(1) if fenced else text)
    except ValueError:
        return Verdict(valid=False, right=False)
    return Verdict(valid=_shape(value) == _shape(expected), right=_exact(value) == _exact(expected))


def _shape(value: Any) -> Any:
    """Keys and lengths without what they hold."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    return [_shape(each) for each in value] if isinstance(value, list) else None


def _exact(value: Any) -> str:
    """A value as text, so that 1, 1.0 and true are told apart; the order of keys does not matter."""
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Broken:
    """An answer that is right with the 16-bit cache and wrong with a recipe."""

    case: str
    expected: Any
    control: str
    answer: str


@dataclass(frozen=True)
class ToolsSummary:
    """One recipe.

    Attributes
    ----------
    recipe : str
    cases, right, valid, equal : int
        Prompts; answers that are right, of the right shape, and letter for letter those of the 16-bit cache.
    bits_per_value : float
        Mean over the prompts.
    broken : tuple of Broken
    """

    recipe: str
    cases: int
    right: int
    valid: int
    equal: int
    bits_per_value: float
    broken: tuple[Broken, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "broken": [asdict(each) for each in self.broken]}


def summarize(rows: Iterable[Row]) -> list[ToolsSummary]:
    """Sum up rows per recipe, in the order they come; the control's must be among them."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["recipe"], []).append(row)
    control = {row["case"]: row for row in groups[CONTROL]}
    return [_summary(recipe, group, control) for recipe, group in groups.items()]


def _summary(recipe: str, rows: list[Row], control: dict[str, Row]) -> ToolsSummary:
    broken = [
        Broken(row["case"], row["expected"], control[row["case"]]["answer"], row["answer"])
        for row in rows
        if control[row["case"]]["right"] and not row["right"]
    ]
    return ToolsSummary(
        recipe=recipe,
        cases=len(rows),
        right=sum(row["right"] for row in rows),
        valid=sum(row["valid"] for row in rows),
        equal=sum(row["answer"] == control[row["case"]]["answer"] for row in rows),
        bits_per_value=sum(row["bits_per_value"] for row in rows) / len(rows),
        broken=tuple(broken),
    )
