"""One table out of the JSON files of several evaluations: recipes down, models across, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvslim.errors import InputError


def read_rows(paths: Iterable[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Read results of `kvslim eval quality --json`: model -> recipe -> row. Later files win.

    Raises
    ------
    InputError
        A file is missing, or not such a result.
    """
    models: dict[str, dict[str, dict[str, Any]]] = {}
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            rows = {row["recipe"]: row for row in data["rows"]}
            models.setdefault(data["model"], {}).update(rows)
        except OSError as error:
            raise InputError(
                f"cannot read {path}: {error.strerror}; give files written by `kvslim eval quality --json`"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a result of `kvslim eval quality --json`") from error
    return models


def markdown(models: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table; per model: bits of everything held / of sealed blocks, KL, KL without the top 1 %, top-1."""
    names = list(models)
    recipes = list(dict.fromkeys(recipe for rows in models.values() for recipe in rows))
    header = (
        "| recipe | " + " | ".join(f"{name}: bits held / packed | KL | KL trimmed | top-1" for name in names) + " |"
    )
    lines = [header, "|---|" + "---:|" * (4 * len(names))]
    for recipe in recipes:
        cells = [f"`{recipe}`"]
        for name in names:
            cells += _cells(models[name].get(recipe))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["", "", "", ""]
    bits = f"{row['bits_per_value']:.2f} / {row['bits_per_value_packed']:.2f}"
    return [bits, f"{row['kl_mean']:.4f}", f"{row['kl_trimmed']:.4f}", f"{row['top1']:.3f}"]
