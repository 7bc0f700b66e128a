"""Needle in a haystack: whether a model still finds a fact through a packed cache, and tells it from facts like it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvslim.errors import InputError
from kvslim.eval.cases import Case, Fed, Row
from kvslim.eval.haystack import KEYS, Facts, Haystack
from kvslim.eval.results import Results

MODES = ("single", "multi")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class NeedleProtocol:
    """How a fact is hidden.

    Attributes
    ----------
    lengths : tuple of int
        Prompt lengths in tokens.
    depths : int
        Places per length: the middles of as many equal parts of the text.
    keys : int
        Facts in a prompt of mode "multi", one of which is asked for; mode "single" has one.
    samples : int
        Prompts per length, depth and mode, each with other facts in another passage.
    new_tokens : int
        Length of an answer at most.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: int = 5
    keys: int = 16
    samples: int = 1
    new_tokens: int = 12

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or len(set(self.lengths)) != len(self.lengths):
            raise InputError(f"lengths={self.lengths} are out of range; name one or more, each once, 1 or above")
        for name in ("depths", "samples", "new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is out of range; use 1 or more")
        if not 2 <= self.keys <= len(KEYS):
            raise InputError(f"keys={self.keys} is out of range; use 2 to {len(KEYS)}")


@dataclass(frozen=True)
class _Place:
    """What a case asks: mode, nominal length, depth, the key asked for, and the code that is right."""

    mode: str
    tokens: int
    depth: float
    key: str
    expected: str


class Needle:
    """The cases of one tokenizer and text; see `kvslim.eval.cases`.

    Parameters
    ----------
    haystack : Haystack
    setup : NeedleProtocol

    Raises
    ------
    InputError
        The text is too short for a length, or a length too short for the facts.
    """

    kind = "needle"
    work_per_token = 1
    feeds_control = False

    def __init__(self, haystack: Haystack, setup: NeedleProtocol):
        self.haystack, self.setup, self.new_tokens = haystack, setup, setup.new_tokens
        self.cases: list[Case] = []
        self._places: dict[str, _Place] = {}
        for tokens in setup.lengths:
            for mode in MODES:
                for index in range(setup.depths):
                    for sample in range(setup.samples):
                        self._add(mode, tokens, (index + 0.5) / setup.depths, sample)
        self.question_tokens = haystack.question_tokens(place.key for place in self._places.values())

    def _add(self, mode: str, tokens: int, depth: float, sample: int) -> None:
        name = f"{mode}-{tokens}-{depth:.3g}-{sample}"
        rng = random.Random(name)
        facts = Facts.draw(self.setup.keys if mode == "multi" else 1, depth, rng)
        self.cases.append(Case(name, self.haystack.prompt(facts, tokens, rng)))
        self._places[name] = _Place(mode, tokens, depth, facts.keys[0], facts.codes[0])

    def protocol(self) -> dict[str, Any]:
        """Settings, text and tokens of it."""
        text = self.haystack.text
        about = {"name": text.name, "sha256": text.sha256, "tokens": self.haystack.tokens}
        return {
            **asdict(self.setup),
            "lengths": list(self.setup.lengths),
            "question_tokens": self.question_tokens,
            "text": about,
        }

    def measure(self, fed: Fed, missing: Sequence[str], results: Results) -> Iterator[Row]:
        """Answer every question with each recipe."""
        for recipe in missing:
            for row, ids in zip(fed.rows_of(recipe), fed.answers(recipe, self.new_tokens), strict=True):
                text = self.haystack.tokenizer.decode(ids, skip_special_tokens=True)
                place = self._places[row["case"]]
                yield {**row, **asdict(place), "found": is_found(text, place.expected), "answer": text.strip()}


def is_found(text: str, expected: str) -> bool:
    """Whether the first number of an answer is exactly the expected one."""
    number = _NUMBER.search(text)
    return number is not None and number.group() == expected


@dataclass(frozen=True)
class NeedleSummary:
    """One recipe in one mode.

    Attributes
    ----------
    recipe, mode : str
    found, cases : int
    bits_per_value : float
        Mean over the prompts.
    grid : dict
        (depth, length) -> share found.
    """

    recipe: str
    mode: str
    found: int
    cases: int
    bits_per_value: float
    grid: dict[tuple[float, int], float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values without the grid, which the rows hold."""
        values = asdict(self)
        del values["grid"]
        return values


def summarize(rows: Iterable[Row]) -> list[NeedleSummary]:
    """Sum up rows per recipe and mode, in the order they come."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["recipe"], row["mode"]), []).append(row)
    return [_summary(recipe, mode, group) for (recipe, mode), group in groups.items()]


def _summary(recipe: str, mode: str, rows: list[Row]) -> NeedleSummary:
    cells: dict[tuple[float, int], list[bool]] = {}
    for row in rows:
        cells.setdefault((row["depth"], row["tokens"]), []).append(row["found"])
    return NeedleSummary(
        recipe=recipe,
        mode=mode,
        found=sum(row["found"] for row in rows),
        cases=len(rows),
        bits_per_value=sum(row["bits_per_value"] for row in rows) / len(rows),
        grid={place: sum(found) / len(found) for place, found in cells.items()},
    )
