"""`kvslim recipes`: the presets, from the same table that `--recipe` reads."""

from __future__ import annotations

import dataclasses
import json

import typer

from kvslim.cli import options
from kvslim.presets import DEFAULT_RECIPE, PRESETS


def recipes(as_json: options.AsJson = False) -> None:
    """List the presets: what each does, where it comes from, and what was measured."""
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(preset) for preset in PRESETS.values()], ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("name", "what it does", "measured", "source", expand=False)
    for preset in PRESETS.values():
        name = f"{preset.name} *" if preset.name == DEFAULT_RECIPE else preset.name
        about = f"{preset.summary}\n{preset.note}" if preset.note else preset.summary
        table.add_row(name, about, preset.figures, preset.source)
    console.print(table)
    console.print(
        f"* default. A pair such as k8v4 packs K at 8 bits and V at 4; a recipe may also be written out, for example\n"
        f"{PRESETS[DEFAULT_RECIPE].recipe}",
        highlight=False,
        soft_wrap=True,
    )
