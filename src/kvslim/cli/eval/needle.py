"""`kvslim eval needle`: a fact hidden in a long text, found through a packed cache or not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options
from kvslim.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kvslim.eval.needle import NeedleSummary


def needle(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    recipe: options.Recipes = options.RECIPE,
    text: options.TextFile = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Prompt lengths in tokens, with commas between.")
    ] = "1024,2048,4096",
    depths: Annotated[int, typer.Option("--depths", min=1, help="Places of the fact per length.")] = 5,
    keys: Annotated[int, typer.Option("--keys", min=2, help="Facts in a prompt with several.")] = 16,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Prompts per length, depth and mode.")] = 1,
    batch: options.Batch = 1,
    resume: options.Resume = None,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Hide access codes in a long text and ask for one.

    Mode "single" hides one, mode "multi" several with similar names, which is harder. Each at several depths and prompt
    lengths; the question is read through the packed cache. The 16-bit cache (recipe `none`) answers the same prompts.
    """
    from kvslim.cli.compare import read_recipes
    from kvslim.eval.text import load_text

    sizes, asked, content = _read_lengths(lengths), read_recipes(recipe), load_text(text)
    from kvslim.cli.eval.run import as_dict, measure
    from kvslim.eval.cases import with_control
    from kvslim.eval.haystack import Haystack
    from kvslim.eval.needle import Needle, NeedleProtocol, summarize
    from kvslim.integrations.transformers.loading import load_model

    setup = NeedleProtocol(sizes, depths, keys, samples)
    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    task = Needle(Haystack(loaded.tokenizer, content), setup)
    about, rows = measure(task, loaded, with_control(asked), batch=batch, resume=resume, advice="use shorter --lengths")
    found = summarize(rows)
    if as_json:
        typer.echo(json.dumps(as_dict(context, about, rows, found), ensure_ascii=False))
    else:
        _show(f"{loaded.name} on {content.name}", found)


def _read_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InputError(f"cannot read --lengths '{text}'; write numbers with commas, for example 1024,2048") from error


def _show(title: str, found: list[NeedleSummary]) -> None:
    from rich.columns import Columns
    from rich.console import Console

    console = Console()
    console.print(f"{title}: share found, depth in the text down, prompt length in tokens across", highlight=False)
    for mode in dict.fromkeys(each.mode for each in found):
        console.print(f"\n{mode}", style="bold")
        console.print(Columns([_heat_map(each) for each in found if each.mode == mode], padding=(0, 3)))


def _heat_map(summary: NeedleSummary) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    title = f"{summary.recipe}: {summary.found} of {summary.cases}, {summary.bits_per_value:.2f} bits"
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=0)
    depths = list(dict.fromkeys(depth for depth, _ in summary.grid))
    lengths = list(dict.fromkeys(length for _, length in summary.grid))
    table.add_column("depth ", justify="right")
    for length in lengths:
        table.add_column(f" {length:,} ", justify="center")
    for depth in depths:
        shares = [summary.grid[depth, length] for length in lengths]
        table.add_row(f"{depth:.0%} ", *(Text(f"{share:.0%}".center(7), style=_colour(share)) for share in shares))
    return table


def _colour(share: float) -> str:
    """Red for nothing found, over yellow, to green for all."""
    red, green = min(1.0, 2 - 2 * share), min(1.0, 2 * share)
    return f"black on rgb({round(90 + 150 * red)},{round(90 + 130 * green)},90)"
