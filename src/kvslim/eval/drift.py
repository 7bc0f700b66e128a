"""Drift: whether the error of a packed cache grows over a long answer.

Two views of the same recipe. Its own greedy answer says when it leaves the 16-bit answer, and whether it ends in a
loop. Fed the 16-bit answer instead, it says how far its predictions are off from one stretch to the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvslim.errors import InputError
from kvslim.eval.answering import Batch, force
from kvslim.eval.cases import CONTROL, Case, Fed, Row
from kvslim.eval.measures import agreement, log_probs, token_kl
from kvslim.eval.repetition import distinct_ngrams, first_divergence, loop_tokens
from kvslim.eval.results import Results
from kvslim.eval.text import Text

_QUESTION = (
    "\n\nExplain the text above to a beginner, section by section and in detail. Write at least a thousand words, with "
    "examples of your own."
)


@dataclass(frozen=True)
class DriftProtocol:
    """How drift is measured.

    Attributes
    ----------
    prompts : int
        Passages, spread evenly over the text.
    prompt_tokens : int
        Tokens of a passage; a question is added where the tokenizer has a chat template.
    new_tokens : int
        Length of an answer at most.
    window : int
        Tokens per stretch along the answer.
    chunk : int
        Tokens per pass while the 16-bit answer is fed; attention among them is exact.
    """

    prompts: int = 3
    prompt_tokens: int = 1024
    new_tokens: int = 400
    window: int = 100
    chunk: int = 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InputError(f"{name}={value} is out of range; use 1 or more")


class Drift:
    """The prompts of one tokenizer and text; see `kvslim.eval.cases`.

    Parameters
    ----------
    tokenizer
        A chat template is used where it has one; without, the model goes on with the passage.
    text : Text
    setup : DriftProtocol

    Raises
    ------
    InputError
        The text is too short.
    """

    kind = "drift"
    question_tokens = 0  # the answer is long: what its first token read does not matter
    work_per_token = 2  # answered, then fed
    feeds_control = True

    def __init__(self, tokenizer: Any, text: Text, setup: DriftProtocol):
        self.tokenizer, self.text, self.setup, self.new_tokens = tokenizer, text, setup, setup.new_tokens
        ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
        self._tokens = len(ids)
        needed = setup.prompts * setup.prompt_tokens
        if self._tokens < needed:
            raise InputError(
                f"the text {text.name} has {self._tokens:,} tokens, {setup.prompts} prompts of {setup.prompt_tokens:,} "
                f"need {needed:,}; give a longer --text, or lower --prompts or --prompt-tokens"
            )
        starts = [self._tokens * index // setup.prompts for index in range(setup.prompts)]
        self.cases = [Case(f"at-{start}", self._prompt(ids[start : start + setup.prompt_tokens])) for start in starts]

    def _prompt(self, passage: list[int]) -> torch.Tensor:
        if self.tokenizer.chat_template is None:
            return torch.tensor(passage, dtype=torch.long)
        messages = [{"role": "user", "content": self.tokenizer.decode(passage) + _QUESTION}]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return torch.tensor(encoded["input_ids"], dtype=torch.long)

    def protocol(self) -> dict[str, Any]:
        """Settings, text and tokens of it."""
        about = {"name": self.text.name, "sha256": self.text.sha256, "tokens": self._tokens}
        return {**asdict(self.setup), "text": about}

    def measure(self, fed: Fed, missing: Sequence[str], results: Results) -> Iterator[Row]:
        """Feed all recipes the control's answer side by side, then let each answer for itself."""
        base = self._control_answers(fed, results)
        # a fork shares the prompt's blocks, and what follows does not reach the cache it came from
        forks = {recipe: cache.fork() for recipe, cache in fed.caches.items()}
        kl = _forced_kl(fed, forks, base, self.setup, missing)
        for recipe in missing:
            answers = base if recipe == CONTROL else fed.answers(recipe, self.new_tokens)
            for index, row in enumerate(fed.rows_of(recipe)):
                yield {**row, **self._scores(base[index], answers[index], kl[recipe][index])}

    def _control_answers(self, fed: Fed, results: Results) -> list[list[int]]:
        known = [results.get(CONTROL, case.name) for case in fed.cases]
        if all(known):
            return [row["ids"] for row in known if row]
        return fed.answers(CONTROL, self.new_tokens)

    def _scores(self, base: list[int], ids: list[int], along: _Along) -> Row:
        windows = [along.kl[start : start + self.setup.window] for start in range(0, len(along.kl), self.setup.window)]
        return {
            "new_tokens": len(ids),
            "first_divergence": first_divergence(base, ids),
            "distinct_4grams": distinct_ngrams(ids),
            "loop_tokens": loop_tokens(ids),
            "kl_mean": statistics.fmean(along.kl) if along.kl else 0.0,
            "top1": statistics.fmean(along.agrees) if along.agrees else 1.0,
            "kl_windows": [statistics.fmean(window) for window in windows],
            "window_tokens": [len(window) for window in windows],
            "answer": self.tokenizer.decode(ids, skip_special_tokens=True),
            "ids": ids,
        }


@dataclass(frozen=True)
class _Along:
    """Divergence and agreement at each token of the 16-bit answer."""

    kl: list[float]
    agrees: list[bool]


def _forced_kl(
    fed: Fed, forks: dict[str, Any], base: list[list[int]], setup: DriftProtocol, missing: Sequence[str]
) -> dict[str, list[_Along]]:
    """Feed the control's answers to all caches in step, so that one chunk's logits are in memory at a time."""
    along = {recipe: [_Along([], []) for _ in base] for recipe in missing}
    ids = _right_padded(base, fed.batch)
    streams = {recipe: force(fed.model, cache, fed.batch, ids, setup.chunk) for recipe, cache in forks.items()}
    for start in range(0, ids.shape[1], setup.chunk):
        logits = {recipe: next(stream) for recipe, stream in streams.items()}
        before = log_probs(logits[CONTROL])
        for recipe in missing:
            after = log_probs(logits[recipe])
            kl, agrees = token_kl(before, after), agreement(before, after)
            for index, answered in enumerate(base):
                real = max(len(answered) - start, 0)
                along[recipe][index].kl.extend(kl[index, :real].tolist())
                along[recipe][index].agrees.extend(agrees[index, :real].tolist())
    fed.on_tokens(len(missing) * len(base) * setup.new_tokens)
    return along


def _right_padded(rows: list[list[int]], batch: Batch) -> torch.Tensor:
    """Answers of shape (prompts, longest); what pads comes after a row's last scored token and cannot reach it."""
    ids = batch.ids.new_zeros(len(rows), max(len(row) for row in rows))
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
    return ids


@dataclass(frozen=True)
class DriftSummary:
    """One recipe.

    Attributes
    ----------
    recipe : str
    prompts, equal, looping : int
        Answers; those that are the 16-bit answer to the end; those that end in a loop.
    divergence_tokens : float
        Median of the tokens up to the first that differs; an equal answer counts whole.
    distinct_4grams, top1, kl_mean : float
        Means over the answers, and over the tokens of the 16-bit answers.
    kl_windows : tuple of float
        Mean KL from one stretch of the 16-bit answers to the next.
    bits_per_value : float
        Mean over the prompts.
    """

    recipe: str
    prompts: int
    equal: int
    looping: int
    divergence_tokens: float
    distinct_4grams: float
    top1: float
    kl_mean: float
    kl_windows: tuple[float, ...]
    bits_per_value: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "kl_windows": list(self.kl_windows)}


def summarize(rows: Iterable[Row]) -> list[DriftSummary]:
    """Sum up rows per recipe, in the order they come."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["recipe"], []).append(row)
    return [_summary(recipe, group) for recipe, group in groups.items()]


def _summary(recipe: str, rows: list[Row]) -> DriftSummary:
    reached = [row["new_tokens"] if row["first_divergence"] is None else row["first_divergence"] for row in rows]
    tokens = [sum(row["window_tokens"]) for row in rows]
    longest = max(len(row["kl_windows"]) for row in rows)
    windows = []
    for index in range(longest):
        found = [row for row in rows if len(row["kl_windows"]) > index]
        windows.append(
            _weighted([row["kl_windows"][index] for row in found], [row["window_tokens"][index] for row in found])
        )
    return DriftSummary(
        recipe=recipe,
        prompts=len(rows),
        equal=sum(row["first_divergence"] is None for row in rows),
        looping=sum(row["loop_tokens"] > 0 for row in rows),
        divergence_tokens=statistics.median(reached),
        distinct_4grams=statistics.fmean(row["distinct_4grams"] for row in rows),
        top1=_weighted([row["top1"] for row in rows], tokens),
        kl_mean=_weighted([row["kl_mean"] for row in rows], tokens),
        kl_windows=tuple(windows),
        bits_per_value=statistics.fmean(row["bits_per_value"] for row in rows),
    )


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    """Mean of `values` by `weights`; 0 where there is no weight."""
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
