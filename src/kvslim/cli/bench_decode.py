"""`kvslim bench decode`: tokens per second, time to the first token and memory of several caches."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvslim.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from kvslim.bench.decode import DecodeRow

_COLUMNS = (
    *("decode\ntok/s", "spread", "vs\n16 bit", "CPU ms\n/token", "first\ns"),
    *("held\nMiB", "peak\nMiB", "KL", "largest\nbatch"),
)


def decode(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    recipe: options.Recipes = options.RECIPE,
    against: options.Against = None,
    contexts: Annotated[str, typer.Option("--contexts", help="Tokens in the cache, with commas between.")] = "256,1024",
    batches: Annotated[str, typer.Option("--batches", help="Sequences at once, with commas between.")] = "1",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of one turn.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of every cache.")] = 5,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Tokens per pass while a cache is filled.")] = 512,
    fill: Annotated[
        str, typer.Option("--fill", help="text; or random-kv, which fills caches without running the model.")
    ] = "text",
    memory: Annotated[
        str | None, typer.Option("--memory", help="Also work out the largest batch for so much memory, such as 8GiB.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="UTF-8 text file; by default the documentation inside Python.")
    ] = None,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure decoding with several caches, transformers' own at 16 bits first.

    Every cache is filled once per context, then all take turns of a few steps in one process. Outputs are compared with
    those of the 16-bit cache; a cache that fails this gets no speed.
    """
    from kvslim.cli.command import command_of
    from kvslim.cli.compare import progress_bar, read_recipes
    from kvslim.cli.counts import read_counts
    from kvslim.cli.sizes import parse_size
    from kvslim.eval.peers import read_peers
    from kvslim.eval.text import load_text

    recipes, peers, content = read_recipes(recipe), read_peers(against), load_text(text)
    lengths, widths = read_counts("--contexts", contexts), read_counts("--batches", batches)
    memory_nbytes = None if memory is None else parse_size(memory, "--memory")
    from kvslim.bench.decode import measure_decode, result
    from kvslim.bench.plan import Plan
    from kvslim.eval.contestants import Contestant
    from kvslim.eval.quality import tokenize
    from kvslim.integrations.transformers.loading import load_model

    plan = Plan(lengths, widths, steps, rounds, chunk, fill)
    contestants = [*map(Contestant.of_recipe, recipes), *map(Contestant.of_peer, peers)]
    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    ids = tokenize(loaded.tokenizer, content)
    with progress_bar("decoding", plan.total_tokens(1 + len(contestants))) as advance:
        rows = measure_decode(loaded.model, ids, contestants, plan, memory_nbytes=memory_nbytes, on_tokens=advance)
    found = result(
        loaded.name,
        loaded.model,
        content,
        plan,
        rows,
        peers=peers,
        memory_nbytes=memory_nbytes,
        command=command_of(context),
    )
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    else:
        _show(found, rows)


def _show(found: dict[str, Any], rows: list[DecodeRow]) -> None:
    from rich.console import Console

    console = Console()
    for (context, batch), cell in groupby(rows, key=lambda row: (row.context, row.batch)):
        title = f"{found['model']}, {found['machine']['dtype']}, context {context:,}, batch {batch}"
        console.print(_table(title, list(cell), with_batch=found["memory"] is not None))
    for line in _notes(found, rows):
        console.print(line, markup=False, highlight=False)
    for row in rows:
        if row.withheld:
            where = f"{row.cache}, context {row.context:,}, batch {row.batch}"
            console.print(f"{where}: speed withheld: {row.withheld}", style="yellow", markup=False, highlight=False)


def _table(title: str, rows: list[DecodeRow], *, with_batch: bool) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # without frames all columns fit into 80 characters
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cache", overflow="fold", min_width=10)
    for name in _COLUMNS if with_batch else _COLUMNS[:-1]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = _cells(row)
        table.add_row(row.cache, *(cells if with_batch else cells[:-1]))
    return table


def _cells(row: DecodeRow) -> list[str]:
    return [
        _number(row.decode_tokens_per_s, ".1f"),
        _number(row.spread, ".0%"),
        _number(row.speedup_vs_16bit, ".2f"),
        _number(row.decode_cpu_ms_per_token, ".1f"),
        _number(row.first_token_ms, ".2f", 1000),
        _number(row.nbytes, ".2f", 2**20),
        _number(row.peak_nbytes, ".0f", 2**20),
        _number(row.kl, ".4f"),
        _number(row.largest_batch, ",.0f"),
    ]


def _number(value: float | None, form: str, unit: int = 1) -> str:
    return "-" if value is None else format(value / unit, form)


def _notes(found: dict[str, Any], rows: list[DecodeRow]) -> list[str]:
    """What the table's figures mean, what reads each cache, and what it was measured on."""
    machine, plan = found["machine"], found["plan"]
    notes = [
        f"Caches in turns, median of {plan['rounds']} x {plan['steps']} steps; spread: half the quartiles' distance.",
        (
            f"Held: every tensor of the cache; '16 bit' keeps the model's {machine['dtype']}. Peak: what the cache's "
            "turns added to the process at most, activations included. KL against 16 bit, nats per token."
        ),
    ]
    if plan["fill"] == "random-kv":
        notes.append("Filled with random keys and values, not by the model: there is no time to the first token.")
    if found["memory"] is not None:
        notes.append(f"Largest batch: {found['memory']['rule']}.")
    kernels = {row.cache: f"{row.kernel} ({row.kernel_reason})" for row in rows if row.kernel}
    notes += [f"{name}: {kernel}" for name, kernel in kernels.items()]
    where = machine["gpu"] or f"{machine['processor']}, threads: {machine['threads']}"
    notes.append(f"{where}; " + ", ".join(f"{package} {version}" for package, version in found["versions"].items()))
    return notes
