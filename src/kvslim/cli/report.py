"""`kvslim report`: one HTML page out of the JSON of other verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvslim.cli import options
from kvslim.errors import InputError


def report(
    files: Annotated[list[Path], typer.Argument(help="JSON of eval, bench decode and plan.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="Folder for the figures as PNG files, too.")] = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "kvslim report",
    as_json: options.AsJson = False,
) -> None:
    """Draw results and put them into one self-contained HTML page, with the commands that make them again."""
    from kvslim.report.figures import draw
    from kvslim.report.page import build_page
    from kvslim.report.sources import read_sources
    from kvslim.report.tables import sheets

    sources = read_sources(files)
    pictures = draw(sources)
    page = build_page(title, sources, pictures, sheets(sources))
    try:
        out.write_text(page, encoding="utf-8")
        if png is not None:
            png.mkdir(parents=True, exist_ok=True)
        images = [] if png is None else [picture.png(png) for picture in pictures]
    except OSError as error:
        raise InputError(f"cannot write {error.filename}: {error.strerror}; name another file or folder") from error
    if as_json:
        figures = [picture.name for picture in pictures]
        typer.echo(json.dumps({"out": str(out), "figures": figures, "images": [str(image) for image in images]}))
    else:
        typer.echo(f"{out}: {len(sources)} results, {len(pictures)} figures, {out.stat().st_size:,} bytes")
        for image in images:
            typer.echo(str(image))
