"""Numbers on the command line that are more than one number: lists of counts, and sizes of memory."""

from __future__ import annotations

import re

from kvslim.errors import InputError

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def read_counts(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers from 1 with commas between them.

    Raises
    ------
    InputError
        Naming the option and the part that is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    bad = next((part for part in parts if not part.isdecimal() or not int(part)), None)
    if bad is not None or not parts:
        raise InputError(f"{option} {text!r}: expected whole numbers from 1, got {bad or 'none'!r}; write {option} 1,4")
    return tuple(int(part) for part in parts)


def read_nbytes(option: str, text: str) -> int:
    """Read a size of memory such as ``8GiB``.

    Raises
    ------
    InputError
        Naming the option and the units.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise InputError(f"{option} {text!r}: expected a number with MiB, GiB, MB or GB; write {option} 8GiB")
    return int(float(found[1]) * _UNITS[found[2]])
