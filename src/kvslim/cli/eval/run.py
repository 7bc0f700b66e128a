"""What the evaluations on cases share: measuring with a progress bar into a file of results, and the whole as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvslim.cli.command import command_of

if TYPE_CHECKING:
    from kvslim.eval.cases import Row, Task
    from kvslim.integrations.transformers.loading import LoadedModel
    from kvslim.recipe import Recipe


def measure(
    task: Task, loaded: LoadedModel, recipes: Sequence[Recipe], *, batch: int, resume: Path | None, advice: str
) -> tuple[dict[str, Any], list[Row]]:
    """Measure what is missing in the file `resume`; returns what the rows belong to, and all rows.

    `advice` says what to lower where a prompt is too long for the model.
    """
    from kvslim.cli.compare import progress_bar
    from kvslim.eval.cases import check_context, header, measure_cases, total_tokens
    from kvslim.eval.results import Results

    check_context(loaded.model.config, task.cases, task.new_tokens, advice)
    about = header(task, loaded.name, loaded.model, recipes, batch)
    with Results(resume, about) as results:
        total = total_tokens(task, recipes, results, batch)
        with progress_bar("measuring", total) as advance:
            rows = measure_cases(task, loaded.model, recipes, results, batch=batch, on_tokens=advance)
    return about, rows


def as_dict(context: typer.Context, about: dict[str, Any], rows: list[Row], summaries: Sequence[Any]) -> dict[str, Any]:
    """All of an evaluation for programs, with the command that repeats it."""
    summary = [each.to_dict() for each in summaries]
    return {**about, "command": command_of(context), "rows": rows, "summary": summary}
