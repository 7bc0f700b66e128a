"""Sizes of memory as people write them, and back."""

from __future__ import annotations

import re

from kvslim.errors import InputError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)(B?)", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str, option: str) -> int:
    """Bytes of ``12GiB``, ``8G`` (both binary) or ``512MB`` (decimal).

    Raises
    ------
    InputError
        It is none of these, or nothing.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{option} '{text}' is no size; write a number and a unit: 12GiB, 8G, 512MB or 1.5TiB")
    number, letter, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    nbytes = int(float(number) * base ** _POWERS[letter.upper()])
    if not nbytes:
        raise InputError(f"{option} '{text}' is no memory at all; write for example 12GiB")
    return nbytes


def show_size(nbytes: int) -> str:
    """``512.00 MiB``, ``1.50 GiB``."""
    return f"{nbytes / 2**20:,.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
