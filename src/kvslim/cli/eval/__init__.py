"""`kvslim eval`: how good is a recipe on a model. One file per kind of evaluation."""

from __future__ import annotations

import typer

from kvslim.cli.eval.drift import drift
from kvslim.cli.eval.needle import needle
from kvslim.cli.eval.quality import quality
from kvslim.cli.eval.table import table
from kvslim.cli.eval.tools import tools

app = typer.Typer(help="Measure recipes on a model.", no_args_is_help=True)
for _verb in (quality, needle, tools, drift, table):
    app.command()(_verb)
