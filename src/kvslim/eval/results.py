"""Rows of an evaluation as they come, one JSON line per finished case, so that an interrupted run can go on.

The first line says what the rows belong to. Every line is written whole and flushed; a line that was torn by a crash or
a full disk is the last one and has no end, so it is cut off and its case measured again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from kvslim.errors import ResultFileError

_NEXT = "name another file with --resume"


class Results:
    """Finished rows by recipe and case, kept in a file where one is named.

    Parameters
    ----------
    path : Path or None
        None keeps them in memory alone.
    header : dict
        What the rows belong to: model, protocol, recipes, versions.

    Raises
    ------
    ResultFileError
        The file belongs to something else, is damaged before its last line, or cannot be read or written.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]):
        self.path = path
        self._header = json.dumps({"header": header})
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Results:
        if self.path is not None:
            try:
                self._open(self.path)
            except OSError as error:
                raise ResultFileError(f"cannot use {self.path}: {error.strerror}; {_NEXT}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: dict[str, Any]) -> None:
        """Take in the row of a finished case; one that is there already stays as it is.

        Raises
        ------
        ResultFileError
            It cannot be written; what was finished before is in the file.
        """
        line = json.dumps(row, ensure_ascii=False)
        row = json.loads(line)  # as it will be read again
        key = row["recipe"], row["case"]
        if key in self._rows:
            return
        if self._file is not None:
            self._write(line)
        self._rows[key] = row

    def get(self, recipe: str, case: str) -> dict[str, Any] | None:
        """Return the row of a case, or None if it is not finished."""
        return self._rows.get((recipe, case))

    def rows(self, recipes: Iterable[str], cases: Iterable[str]) -> list[dict[str, Any]]:
        """Return the rows case by case, recipes in the given order: the same however often the run was interrupted."""
        names = list(recipes)
        return [self._rows[recipe, case] for case in cases for recipe in names]

    # -- the file

    def _open(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not self._header.encode().startswith(content):
            raise ResultFileError(f"{path} does not hold results of an evaluation; {_NEXT}")
        if whole:
            self._read(path, whole)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(len(whole))
        if not whole:
            self._write(self._header)

    def _read(self, path: Path, content: bytes) -> None:
        for number, line in enumerate(content.splitlines(), 1):
            try:
                data = json.loads(line)
                if number == 1:
                    self._check(path, data["header"])
                else:
                    self._rows[data["recipe"], data["case"]] = data
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, ResultFileError):
                    raise
                raise ResultFileError(f"line {number} of {path} is not a result of an evaluation; {_NEXT}") from error

    def _check(self, path: Path, found: dict[str, Any]) -> None:
        wanted = json.loads(self._header)["header"]
        for name in (*wanted, *found):
            if wanted.get(name) != found.get(name):
                raise ResultFileError(
                    f"{path} holds results of another evaluation: {name} is {_short(found.get(name))} there, "
                    f"{_short(wanted.get(name))} here; repeat its settings, or {_NEXT}"
                )

    def _write(self, line: str) -> None:
        assert self._file is not None
        data = line.encode() + b"\n"
        try:
            while data:  # a nearly full disk takes a part, then refuses the rest
                data = data[self._file.write(data) :]
        except OSError as error:
            raise ResultFileError(
                f"cannot write to {self.path}: {error.strerror}; the {len(self._rows)} finished cases are kept there. "
                "Make room and run the same command again to go on"
            ) from error


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
