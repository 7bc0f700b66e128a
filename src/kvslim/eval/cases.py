"""Cases, recipes and a file of results: what is still missing is measured batch by batch, and kept at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvslim.errors import InputError
from kvslim.eval.answering import Batch, answer, ask, prefill
from kvslim.eval.results import Results
from kvslim.eval.versions import versions
from kvslim.integrations.transformers import KVCache, compat
from kvslim.integrations.transformers.fingerprint import fingerprint
from kvslim.integrations.transformers.report import Report
from kvslim.recipe import Recipe

CONTROL = "none"
Row = dict[str, Any]
OnTokens = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """A prompt under a name that no other case of the evaluation has; `ids` has shape (tokens,)."""

    name: str
    ids: torch.Tensor


@dataclass(frozen=True)
class Fed:
    """A batch of cases whose prompts are in one cache per recipe.

    Attributes
    ----------
    model
    cases : tuple of Case
    batch : Batch
    logits : dict of str to Tensor of shape (cases, vocabulary)
        After the prompts, by recipe label.
    caches : dict of str to KVCache
        Likewise.
    on_tokens : callable
    """

    model: Any
    cases: tuple[Case, ...]
    batch: Batch
    logits: dict[str, torch.Tensor]
    caches: dict[str, KVCache]
    on_tokens: OnTokens

    @classmethod
    def of(
        cls, model: Any, cases: Sequence[Case], recipes: Sequence[Recipe], question: int, on_tokens: OnTokens
    ) -> Fed:
        """Feed the prompts, all but the last `question` tokens once for all recipes.

        Those go through each packed cache: in one pass with the text before it, a question would read that exactly.
        """
        batch = Batch.of([case.ids for case in cases], model.device)
        caches = {label(recipe): KVCache(model, recipe) for recipe in recipes}
        exact = prefill(model, list(caches.values()), batch.without_last(question))
        logits = {name: ask(model, cache, batch, question) if question else exact for name, cache in caches.items()}
        on_tokens(int(batch.lengths.sum()))
        return cls(model, tuple(cases), batch, logits, caches, on_tokens)

    def answers(self, recipe: str, new_tokens: int) -> list[list[int]]:
        """Answer every prompt greedily; token ids per case. The cache still holds the prompts alone afterwards."""
        fork = self.caches[recipe].fork()  # shares the prompts' blocks
        return answer(
            self.model, fork, self.batch, self.logits[recipe], new_tokens=new_tokens, on_tokens=self.on_tokens
        )

    def rows_of(self, recipe: str) -> list[Row]:
        """Begin a row per case, with what the cache holds of the prompts; a case's bytes are its share by tokens."""
        report = self.caches[recipe].report()
        return [
            {"recipe": recipe, "case": case.name, "prompt_tokens": len(case.ids), **_held(report, share)}
            for case, share in zip(self.cases, (self.batch.lengths / self.batch.lengths.sum()).tolist(), strict=True)
        ]


class Task(Protocol):
    """What differs from one evaluation to the next."""

    kind: str
    cases: list[Case]
    new_tokens: int
    question_tokens: int  # at the end of every prompt, read through the packed caches
    work_per_token: int  # passes over every new token, for the progress bar
    feeds_control: bool  # whether other recipes are measured with the control's cache at hand

    def protocol(self) -> dict[str, Any]:
        """Everything that decides the figures, as plain values."""

    def measure(self, fed: Fed, missing: Sequence[str], results: Results) -> Iterator[Row]:
        """Yield the rows of the recipes named in `missing`, the control's first."""


def label(recipe: Recipe) -> str:
    """The recipe as it was asked for."""
    return recipe.label or str(recipe)


def with_control(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Put the 16-bit control first, and drop what stands there twice."""
    return list({label(recipe): recipe for recipe in (Recipe.parse(CONTROL), *recipes)}.values())


def check_context(config: Any, cases: Sequence[Case], new_tokens: int, advice: str) -> None:
    """Refuse prompts that do not fit into the model's context together with their answers.

    Raises
    ------
    InputError
        Naming both lengths.
    """
    limit = compat.context_limit(config)
    longest = max(len(case.ids) for case in cases)
    if limit is not None and longest + new_tokens > limit:
        raise InputError(
            f"a prompt of {longest:,} tokens and {new_tokens:,} new ones make {longest + new_tokens:,}, the model's "
            f"context is {limit:,} tokens; {advice}"
        )


def header(task: Task, name: str, model: Any, recipes: Sequence[Recipe], batch: int) -> dict[str, Any]:
    """What the rows of a run belong to; a file of results with another header is refused."""
    return {
        "kind": task.kind,
        "model": name,
        "fingerprint": fingerprint(model),
        "device": model.device.type,
        "protocol": {**task.protocol(), "batch": batch},
        "recipes": {label(recipe): str(recipe) for recipe in recipes},
        "versions": versions(),
    }


def missing_batches(
    task: Task, recipes: Sequence[Recipe], results: Results, batch: int
) -> Iterator[tuple[list[Case], list[Recipe]]]:
    """Batches with the recipes that are not finished there.

    Batches are cut the same way whatever is finished, since the last bits of a sum depend on the batch.
    """
    for start in range(0, len(task.cases), batch):
        cases = task.cases[start : start + batch]
        missing = [recipe for recipe in recipes if any((label(recipe), case.name) not in results for case in cases)]
        if missing:
            yield cases, missing


def total_tokens(task: Task, recipes: Sequence[Recipe], results: Results, batch: int) -> int:
    """Tokens that `measure_cases` will report to `on_tokens`."""
    return sum(
        sum(len(case.ids) for case in cases) + len(cases) * len(missing) * task.new_tokens * task.work_per_token
        for cases, missing in missing_batches(task, recipes, results, batch)
    )


def measure_cases(
    task: Task,
    model: Any,
    recipes: Sequence[Recipe],
    results: Results,
    *,
    batch: int = 1,
    on_tokens: OnTokens = lambda _: None,
) -> list[Row]:
    """Measure what is missing in `results`, and return all rows.

    Parameters
    ----------
    task : Task
    model : PreTrainedModel
        Already on kvslim's attention.
    recipes : sequence of Recipe
        See `with_control`.
    results : Results
        Takes in every row as soon as it is finished.
    batch : int
        Prompts per forward pass.
    on_tokens : callable
        Called with the number of tokens done, now and then; see `total_tokens`.
    """
    for cases, missing in missing_batches(task, recipes, results, batch):
        fed_recipes = with_control(missing) if task.feeds_control else missing
        fed = Fed.of(model, cases, fed_recipes, task.question_tokens, on_tokens)
        for row in task.measure(fed, [label(recipe) for recipe in missing], results):
            results.add(row)
    return results.rows([label(recipe) for recipe in recipes], [case.name for case in task.cases])


def _held(report: Report, share: float) -> dict[str, Any]:
    return {"nbytes": round(report.nbytes * share), "bits_per_value": report.bits_per_value}
