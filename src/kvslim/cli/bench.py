"""`kvslim bench`: how fast is a recipe on this machine. A table of its verbs."""

from __future__ import annotations

from importlib import import_module

import typer

# verb -> "module:function"
BENCHES = {
    "decode": "kvslim.cli.bench_decode:decode",
    "attention": "kvslim.cli.bench_kernels:attention",
    "append": "kvslim.cli.bench_kernels:append",
}

app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@app.callback()
def _verbs() -> None:
    """Without this, typer would turn a group of one verb into the verb itself."""


for _verb, _where in BENCHES.items():
    _module, _name = _where.split(":")
    app.command(_verb)(getattr(import_module(_module), _name))
