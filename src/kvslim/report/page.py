"""The page: one HTML file that needs nothing else, readable on light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from kvslim.report.figures import Picture
from kvslim.report.sources import KINDS, Source
from kvslim.report.tables import Sheet

_HEADINGS = {
    "quality": ("Quality against bits", "Divergence of the next-token distribution from that of the 16-bit cache."),
    "plan": ("Memory", "What caches hold, counted from shapes; activations come on top."),
    "needle": ("Needles", "Facts hidden in a prompt and asked for: share of exact answers by depth and length."),
    "tools": ("Tools", "Answers that must be JSON, against those of the 16-bit cache."),
    "drift": ("Drift", "Long greedy answers against those of the 16-bit cache."),
    "bench-decode": ("Speed", "Decoding, end to end."),
}
_CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --faint: #8883; }
@media (prefers-color-scheme: dark) { :root { --ink: #d8dee6; --paper: #14181d; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; max-width: 48rem; height: auto; }
figcaption, .from { opacity: .8; font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; } th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--faint); }
td:not(:first-child), th:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
th:first-child { text-align: left; } pre { background: var(--faint); padding: .7rem; overflow-x: auto; }
"""


def build_page(title: str, sources: list[Source], pictures: list[Picture], tables: list[Sheet]) -> str:
    """Put everything into one page, a section per kind of result."""
    kinds = [kind for kind in KINDS if any(source.kind == kind for source in sources)]
    sections = "\n".join(
        _section(
            kind,
            [source for source in sources if source.kind == kind],
            [picture for picture in pictures if picture.kind == kind],
            [table for table in tables if table.kind == kind],
        )
        for kind in kinds
    )
    # the empty icon keeps browsers from asking for one
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{sections}\n</body>\n</html>\n"
    )


def _section(kind: str, sources: list[Source], pictures: list[Picture], tables: list[Sheet]) -> str:
    heading, about = _HEADINGS[kind]
    parts = [f'<section id="{kind}">', f"<h2>{heading}</h2>", f"<p>{about}</p>"]
    parts += map(_figure, pictures)
    parts += map(_table, tables)
    parts += _origin(sources)
    return "\n".join([*parts, "</section>"])


def _figure(picture: Picture) -> str:
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    return f'<figure data-name="{escape(picture.name)}">\n{picture.svg()}\n{caption}\n</figure>'


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in sheet.headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows)
    caption = f"<caption>{escape(sheet.title)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _origin(sources: Iterable[Source]) -> Iterator[str]:
    """Commands that make the results again, and what they were made with."""
    for source in sources:
        versions = source.data.get("versions")
        made = [source.file]
        if isinstance(versions, dict):
            made += [f"{name} {version}" for name, version in versions.items()]
        yield f'<p class="from">{escape(", ".join(made))}</p>'
        yield f"<pre>{escape(source.command or 'this file does not name its command')}</pre>"
