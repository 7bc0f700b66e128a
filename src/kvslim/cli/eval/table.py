"""`kvslim eval table`: results of several quality evaluations side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def table(
    files: Annotated[list[Path], typer.Argument(help="Files written by `kvslim eval quality --json`.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; standard output without.")] = None,
) -> None:
    """Put the results of several evaluations into one Markdown table."""
    from kvslim.eval.compare import markdown, read_rows

    text = markdown(read_rows(files))
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
