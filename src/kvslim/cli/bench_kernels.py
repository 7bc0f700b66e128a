"""`kvslim bench attention` and `kvslim bench append`: the kernels alone, checked before they are timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvslim.cli import options

Shapes = Annotated[
    str, typer.Option("--shapes", help="Query heads/kv heads x head_dim of a layer, with commas between.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Turns of every contestant.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads; by default torch's.")]
Isa = Annotated[str, typer.Option("--isa", help="avx512, avx2, portable; off: the reference. By default the best.")]

_SHAPES = "32/8x128,12/2x128,14/2x64"


def attention(
    context: typer.Context,
    recipe: options.Recipes = options.RECIPE,
    shapes: Shapes = _SHAPES,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens in the layer, with commas between.")] = "4096,16384",
    rounds: Rounds = 9,
    threads: Threads = None,
    isa: Isa = "",
    reference: Annotated[bool, typer.Option("--reference", help="Time the reference as well.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure one decode step's attention over a packed layer.

    Against torch's scaled_dot_product_attention on bf16 and fp32 keys and values, the query heads of a kv head folded
    into rows: what transformers runs. CPU time, in turns, median. The output is compared with float64 first.
    """
    from kvslim.cli.compare import progress_bar, read_recipes
    from kvslim.cli.counts import read_counts

    recipes, lengths = read_recipes(recipe), read_counts("--tokens", tokens)
    from kvslim.bench.attention import measure_attention
    from kvslim.bench.layers import Shape

    layers = [Shape.parse(text) for text in shapes.split(",")]
    _set_up(threads, isa)
    with progress_bar("attending", len(layers) * len(lengths)) as advance:
        rows = measure_attention(recipes, layers, lengths, rounds=rounds, with_reference=reference, on_cell=advance)
    columns = ("shape", "tokens", "recipe", "kernel", "cpu_ms", "speedup_vs_torch_bf16", "speedup_vs_torch_fp32")
    _finish("bench-attention", context, [row.to_dict() for row in rows], (*columns, "rel_error"), as_json)


def append(
    context: typer.Context,
    recipe: options.Recipes = options.RECIPE,
    shapes: Shapes = _SHAPES,
    blocks: Annotated[str, typer.Option("--blocks", help="Blocks encoded at once, with commas between.")] = "1,16",
    rounds: Rounds = 9,
    threads: Threads = None,
    isa: Isa = "",
    as_json: options.AsJson = False,
) -> None:
    """Measure packing: rotate, scale, search, pack, per token and kv head. Bytes are compared with the reference's."""
    from kvslim.cli.compare import progress_bar, read_recipes
    from kvslim.cli.counts import read_counts

    recipes, counts = read_recipes(recipe), read_counts("--blocks", blocks)
    from kvslim.bench.append import measure_append
    from kvslim.bench.layers import Shape

    layers = [Shape.parse(text) for text in shapes.split(",")]
    _set_up(threads, isa)
    with progress_bar("packing", len(layers) * len(recipes) * len(counts)) as advance:
        rows = measure_append(recipes, layers, counts, rounds=rounds, on_cell=advance)
    columns = ("shape", "recipe", "side", "kernel", "blocks", "ns_per_vector", "speedup_vs_reference", "equal")
    _finish("bench-append", context, [row.to_dict() for row in rows], columns, as_json)


def _set_up(threads: int | None, isa: str) -> None:
    import torch

    from kvslim.kernels.cpu import library

    if threads is not None:
        torch.set_num_threads(threads)
    library.use(isa)


def _finish(
    kind: str, context: typer.Context, rows: list[dict[str, Any]], columns: Sequence[str], as_json: bool
) -> None:
    import torch

    from kvslim.bench.machine import machine
    from kvslim.cli.command import command_of
    from kvslim.eval.versions import versions

    where = {**machine(), "threads": torch.get_num_threads()}
    if as_json:
        found = {"kind": kind, "machine": where, "versions": versions(), "command": command_of(context), "rows": rows}
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name.replace("_", "\n", 1).replace("_", " "), justify="left" if name == "recipe" else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    console.print(table)
    for row in rows:
        if row.get("withheld"):
            console.print(
                f"{row['recipe']} at {row['shape']}: no time: {row['withheld']}", style="yellow", highlight=False
            )
    console.print(f"{where['processor']}, threads: {where['threads']}; CPU time, median of turns", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:,.2f}"
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)
