"""`kvslim eval tools`: tool calls and JSON out of long lists of records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from kvslim.eval.tools import ToolsSummary

_SHOWN = 3  # broken answers per recipe


def tools(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    recipe: options.Recipes = options.RECIPE,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="Length of an answer at most.")] = 128,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many prompts.")] = None,
    batch: options.Batch = 1,
    resume: options.Resume = None,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask for JSON objects and tool calls that only a long list of records can fill.

    The records are stored, then the question is read through the packed cache. The same fixed prompts for every recipe
    and for the 16-bit cache (recipe `none`): answers that are right, that have the right shape, and that are letter for
    letter those of the 16-bit cache.
    """
    from kvslim.cli.compare import read_recipes

    asked = read_recipes(recipe)
    from kvslim.cli.eval.run import as_dict, measure
    from kvslim.eval.cases import with_control
    from kvslim.eval.tools import Tools, summarize
    from kvslim.integrations.transformers.loading import load_model

    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    task = Tools(loaded.tokenizer, loaded.name, new_tokens=new_tokens, limit=limit)
    about, rows = measure(
        task,
        loaded,
        with_control(asked),
        batch=batch,
        resume=resume,
        advice="use a model with a longer context, or lower --new-tokens",
    )
    found = summarize(rows)
    if as_json:
        typer.echo(json.dumps(as_dict(context, about, rows, found), ensure_ascii=False))
    else:
        _show(f"{loaded.name}, {len(task.cases)} prompts", found)


def _show(title: str, found: list[ToolsSummary]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=title, title_justify="left")
    table.add_column("recipe", overflow="fold")
    for name in ("bits held", "right", "valid", "equal to 16 bits", "broken"):
        table.add_column(name, justify="right")
    for row in found:
        counts = (row.right, row.valid, row.equal, len(row.broken))
        table.add_row(row.recipe, f"{row.bits_per_value:.2f}", *(f"{count}" for count in counts))
    console.print(table)
    console.print(
        "Right: the expected value. Valid: JSON of the expected shape. Broken: right with 16 bits and not here.",
        highlight=False,
    )
    for row in found:
        _show_broken(console, row)


def _show_broken(console: Console, row: ToolsSummary) -> None:
    for broken in row.broken[:_SHOWN]:
        console.print(f"\n{row.recipe} broke {broken.case}", style="bold", markup=False, highlight=False)
        expected = json.dumps(broken.expected, ensure_ascii=False)
        for name, text in (("expected", expected), ("16 bits", broken.control), (row.recipe, broken.answer)):
            console.print(f"{name}: {' '.join(text.split())}", markup=False, highlight=False)
    if len(row.broken) > _SHOWN:
        console.print(f"\nand {len(row.broken) - _SHOWN} more; --json lists them all", highlight=False)
