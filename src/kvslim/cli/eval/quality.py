"""`kvslim eval quality`: how far recipes take a model away from its 16-bit cache."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options
from kvslim.cli.command import command_of
from kvslim.errors import InputError

if TYPE_CHECKING:
    from kvslim.eval.quality import Quality


def quality(
    run: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    recipe: options.Recipes = options.RECIPE,
    against: options.Against = None,
    text: options.TextFile = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="A known text from the hub instead: wikitext.")
    ] = None,
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Tokens stored in one pass.")] = 1024,
    score: Annotated[int, typer.Option("--score", min=1, help="Tokens scored after them.")] = 512,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Tokens per pass while scoring.")] = 32,
    prefixes: Annotated[int, typer.Option("--prefixes", min=1, help="Passages of the text.")] = 3,
    offset_positions: Annotated[int, typer.Option("--offset-positions", min=0, help="Added to every position.")] = 0,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how far recipes take a model away from its 16-bit cache.

    Passages of a text are stored in the cache, and the tokens after them are scored through it: divergence (KL) of the
    next-token distribution, agreement on the first token, perplexity, and the bytes held. Rank by KL and top-1.
    """
    from kvslim.cli.compare import progress_bar, read_recipes
    from kvslim.eval.dataset import load_dataset
    from kvslim.eval.peers import read_peers
    from kvslim.eval.text import load_text

    if text is not None and dataset is not None:
        raise InputError("--text and --dataset are both given; give one")
    recipes, peers = read_recipes(recipe), read_peers(against)
    content = load_text(text) if dataset is None else load_dataset(dataset)
    from kvslim.eval.quality import Protocol, Shelf, measure_quality, result, tokenize, total_tokens
    from kvslim.integrations.transformers.loading import load_model

    protocol = Protocol(prefill, score, chunk, prefixes, offset_positions)
    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    ids = tokenize(loaded.tokenizer, content)
    with progress_bar("measuring", total_tokens(protocol, len(recipes) + len(peers))) as advance:
        rows = measure_quality(loaded.model, ids, recipes, protocol, peers=peers, shelf=Shelf(), on_tokens=advance)
    if as_json:
        found = result(loaded.name, content, len(ids), protocol, rows, peers)
        typer.echo(json.dumps({"kind": "quality", **found, "command": command_of(run)}))
    else:
        _show(loaded.name, f"{content.name}, {prefixes} x ({prefill} + {score}) tokens", rows)


def _show(model: str, text: str, rows: list[Quality]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvslim.cli.compare import note_of

    console = Console()
    table = Table(title=f"{model} on {text}", title_justify="left")
    table.add_column("recipe", overflow="fold")
    for name in ("bits held", "bits packed", "KL", "KL p99", "KL trimmed", "top-1", "perplexity", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.recipe, *_cells(row))
    console.print(table)
    console.print(
        "KL(16 bits || recipe) in nats per token; trimmed: without the top 1 % of tokens. Bits per value: everything "
        "held at the end of a passage, and sealed blocks alone.",
        highlight=False,
    )
    for row in rows:
        if note_of(row.recipe):
            console.print(f"{row.recipe}: {note_of(row.recipe)}", style="yellow", markup=False, highlight=False)


def _cells(row: Quality) -> tuple[str, ...]:
    return (
        f"{row.bits_per_value:.2f}",
        f"{row.bits_per_value_packed:.2f}",
        f"{row.kl_mean:.4f}",
        f"{row.kl_p99:.3f}",
        f"{row.kl_trimmed:.4f}",
        f"{row.top1:.1%}",
        f"{row.ppl:.2f}",
        f"{row.ppl_ratio:.4f}",
    )
