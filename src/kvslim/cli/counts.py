"""Lists of counts as people write them."""

from __future__ import annotations

from kvslim.errors import InputError


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
