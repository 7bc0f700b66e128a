"""Tables of a report: which columns each kind of result has, and how its numbers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvslim.report.sources import Row, Source, by_model

Column = tuple[str, str, Callable[[Any], str]]  # heading, key, format


@dataclass(frozen=True)
class Sheet:
    """One table: headings, and rows of texts."""

    kind: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.2f}"


def _count(value: float) -> str:
    return f"{value:,}"


def _digits(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "quality": (
        ("recipe", "recipe", str),
        ("bits held", "bits_per_value", _digits(2)),
        ("bits packed", "bits_per_value_packed", _digits(2)),
        ("KL", "kl_mean", _digits(5)),
        ("KL p99", "kl_p99", _digits(4)),
        ("KL trimmed", "kl_trimmed", _digits(5)),
        ("top-1", "top1", _percent),
        ("perplexity", "ppl", _digits(2)),
    ),
    "plan": (
        ("recipe", "recipe", str),
        ("bits per value", "bits_per_value", _digits(2)),
        ("MiB held", "nbytes", _mib),
        ("while decoding", "decoding_nbytes", _mib),
        ("longest context", "longest_context", _count),
    ),
    "bench-decode": (
        ("cache", "cache", str),
        ("context", "context", _count),
        ("batch", "batch", _count),
        ("tokens/s", "decode_tokens_per_s", _digits(2)),
        ("first token, ms", "first_token_ms", _digits(0)),
        ("MiB held", "nbytes", _mib),
        ("MiB at most", "peak_nbytes", _mib),
        ("KL", "kl", _digits(5)),
        ("withheld", "withheld", str),
    ),
}


def sheets(sources: Iterable[Source]) -> list[Sheet]:
    """Make the tables of all results; a column that no row fills is left out."""
    found = list(sources)
    tables = [
        _sheet(kind, model, list(rows.values()), _COLUMNS[kind])
        for kind in ("quality", "plan")
        for model, rows in by_model(found, kind).items()
    ]
    for source in found:
        if source.kind == "bench-decode":
            tables.append(_sheet(source.kind, source.model, list(source.rows), _COLUMNS[source.kind]))
        elif source.kind == "needle":
            tables.append(_needle(source))
        elif source.kind in ("tools", "drift"):
            rows = source.data.get("summary") or source.rows
            tables.append(_sheet(source.kind, source.model, list(rows), _plain_columns(rows[0])))
    return tables


def _sheet(kind: str, title: str, rows: list[Row], columns: tuple[Column, ...]) -> Sheet:
    used = [column for column in columns if any(row.get(column[1]) not in (None, "") for row in rows)]
    cells = tuple(tuple(_cell(row.get(key), show) for _, key, show in used) for row in rows)
    return Sheet(kind, title, tuple(heading for heading, _, _ in used), cells)


def _cell(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


def _plain_columns(row: Row) -> tuple[Column, ...]:
    """A column for each single value of a row, named after its key."""
    return tuple(
        (key.replace("_", " "), key, _plain) for key, value in row.items() if not isinstance(value, (list, dict))
    )


def _plain(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _needle(source: Source) -> Sheet:
    """Facts found per recipe and mode."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in source.rows:
        counts = found.setdefault((row["recipe"], row["mode"]), [0, 0])
        counts[0] += row["found"]
        counts[1] += row.get("cases", 1)
    rows = tuple((recipe, mode, f"{right} of {cases}") for (recipe, mode), (right, cases) in found.items())
    return Sheet("needle", source.model, ("recipe", "mode", "found"), rows)
