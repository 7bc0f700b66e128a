"""The table of verbs. A verb's module imports torch and transformers inside its functions: `--help` loads them all."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

import kvslim

# verb -> "module:function", or "module:app" for a verb with verbs of its own
VERBS = {
    "demo": "kvslim.cli.demo:demo",
    "generate": "kvslim.cli.generate:generate",
    "chat": "kvslim.cli.chat:chat",
    "eval": "kvslim.cli.eval:app",
    "plan": "kvslim.cli.plan:plan",
    "report": "kvslim.cli.report:report",
    "bench": "kvslim.cli.bench:app",
    "calibrate": "kvslim.cli.calibrate:calibrate",
    "recipes": "kvslim.cli.recipes:recipes",
    "doctor": "kvslim.cli.doctor:doctor",
}

app = typer.Typer(
    help="Packed key-value caches for transformers: less memory for long contexts, measured on your model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a defect shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvslim {kvslim.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _register(verb: str, where: str) -> None:
    module, name = where.split(":")
    target = getattr(import_module(module), name)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=verb)
    else:
        app.command(verb)(target)


for _verb, _where in VERBS.items():
    _register(_verb, _where)
