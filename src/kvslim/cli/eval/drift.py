"""`kvslim eval drift`: does the error grow over a long answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options

if TYPE_CHECKING:
    from kvslim.eval.drift import DriftProtocol, DriftSummary


def drift(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    recipe: options.Recipes = options.RECIPE,
    text: options.TextFile = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Passages of the text.")] = 3,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of a passage.")] = 1024,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="Length of an answer at most.")] = 400,
    window: Annotated[int, typer.Option("--window", min=1, help="Tokens per stretch along the answer.")] = 100,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Tokens per pass of the 16-bit answer.")] = 20,
    batch: options.Batch = 1,
    resume: options.Resume = None,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Follow long greedy answers: when they leave the 16-bit answer, whether they loop, and whether the error grows.

    KL is measured on the answer of the 16-bit cache (recipe `none`), fed to every recipe, one stretch after the other.
    """
    from kvslim.cli.compare import read_recipes
    from kvslim.eval.text import load_text

    asked, content = read_recipes(recipe), load_text(text)
    from kvslim.cli.eval.run import as_dict, measure
    from kvslim.eval.cases import with_control
    from kvslim.eval.drift import Drift, DriftProtocol, summarize
    from kvslim.integrations.transformers.loading import load_model

    setup = DriftProtocol(prompts, prompt_tokens, new_tokens, window, chunk)
    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    task = Drift(loaded.tokenizer, content, setup)
    about, rows = measure(
        task,
        loaded,
        with_control(asked),
        batch=batch,
        resume=resume,
        advice="lower --prompt-tokens or --new-tokens",
    )
    found = summarize(rows)
    if as_json:
        typer.echo(json.dumps(as_dict(context, about, rows, found), ensure_ascii=False))
    else:
        _show(f"{loaded.name} on {content.name}", setup, found)


def _show(title: str, setup: DriftProtocol, found: list[DriftSummary]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    about = f"{setup.prompts} x ({setup.prompt_tokens} + up to {setup.new_tokens}) tokens"
    table = Table(title=f"{title}, {about}", title_justify="left")
    table.add_column("recipe", overflow="fold")
    for name in ("bits held", "differs from", "equal", "distinct 4-grams", "loops", "top-1"):
        table.add_column(name, justify="right")
    for index in range(len(found[0].kl_windows)):
        table.add_column(f"KL {index * setup.window}-", justify="right")
    for row in found:
        cells = (f"{row.bits_per_value:.2f}", f"{row.divergence_tokens:g}", f"{row.equal}")
        more = (f"{row.distinct_4grams:.1%}", f"{row.looping}", f"{row.top1:.1%}")
        table.add_row(row.recipe, *cells, *more, *(f"{kl:.4f}" for kl in row.kl_windows))
    console.print(table)
    console.print(
        "Differs from: median of the tokens up to the first that is not the 16-bit answer's. Equal and loops: answers. "
        "KL and top-1: on the 16-bit answer, by stretches of it.",
        highlight=False,
    )
