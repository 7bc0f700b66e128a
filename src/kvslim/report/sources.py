"""Sources: JSON files of results, told apart by what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvslim.errors import InputError

Row = dict[str, Any]
# kind -> what each of its rows must hold
KINDS: dict[str, tuple[str, ...]] = {
    "quality": ("recipe", "bits_per_value", "bits_per_value_packed", "kl_mean", "top1"),
    "plan": ("recipe", "bits_per_value", "nbytes", "curve"),
    "needle": ("recipe", "mode", "tokens", "depth", "found"),
    "tools": ("recipe",),
    "drift": ("recipe",),
    "bench-decode": ("cache", "context", "batch"),
}
_VERBS = "`kvslim eval ... --json`, `kvslim bench decode --json` or `kvslim plan --json`"


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes
    ----------
    kind : str
        A key of `KINDS`.
    file : str
        Its name without folders.
    model : str
    rows : tuple of dict
    data : dict
        All of it.
    """

    kind: str
    file: str
    model: str
    rows: tuple[Row, ...]
    data: dict[str, Any]

    @property
    def command(self) -> str:
        """The command that made it; empty if it does not say."""
        return str(self.data.get("command") or "")


def read_sources(paths: Iterable[Path]) -> list[Source]:
    """Read files in the given order.

    Raises
    ------
    InputError
        A file cannot be read, or is not a result.
    """
    return [_read(path) for path in paths]


def by_model(sources: Iterable[Source], kind: str) -> dict[str, dict[str, Row]]:
    """Rows of one kind as model -> recipe -> row; later files win."""
    found: dict[str, dict[str, Row]] = {}
    for source in sources:
        if source.kind == kind:
            found.setdefault(source.model, {}).update({row["recipe"]: row for row in source.rows})
    return found


def _read(path: Path) -> Source:
    """Read one file. Its kind stands at the top or in each row; early files of `eval quality` name none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give files printed by {_VERBS}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not JSON ({error}); give files printed by {_VERBS}") from error
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} has no 'rows' of results; give files printed by {_VERBS}")
    kind = data.get("kind") or rows[0].get("kind") or ("quality" if "kl_mean" in rows[0] else "none")
    if kind not in KINDS:
        raise InputError(f"{path} holds results of kind '{kind}'; a report can show {', '.join(KINDS)}")
    for number, row in enumerate(rows, 1):
        missing = [name for name in KINDS[kind] if name not in row]
        if missing:
            raise InputError(f"{path}: row {number} of kind '{kind}' has no '{missing[0]}'; make the file again")
    return Source(kind, path.name, str(data.get("model", "unnamed model")), tuple(rows), data)
