"""Fields: JSON out of a file, read value by value. Whatever is not as expected is refused with its place and value."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from kvslim.errors import StateFileError

LARGEST = 1 << 40  # no count in a file reaches it, and sums of such counts stay far below 2**63


class Fields:
    """A JSON object of which nothing is known yet.

    Parameters
    ----------
    value : object
        What JSON gave.
    where : str
        How errors call it: the file, then the way to this object.
    """

    def __init__(self, value: Any, where: str):
        self.where = where
        if not isinstance(value, dict):
            self._refuse(where, value, "an object")
        self.value: dict[str, Any] = value

    @classmethod
    def parse(cls, text: str, where: str) -> Fields:
        """Read JSON text. NaN and Infinity, which Python's reader would take, are refused."""
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise StateFileError(f"{where} is not JSON ({error}); the file is damaged, write it again") from error
        return cls(value, where)

    def has(self, name: str) -> bool:
        """Whether there is a value other than null."""
        return self.value.get(name) is not None

    def integer(self, name: str, low: int = 0, high: int = LARGEST) -> int:
        """Whole number from `low` to `high`."""
        return self._integer(self.value.get(name), self._at(name), low, high)

    def number(self, name: str) -> float:
        """Finite number."""
        value = self.value.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self._refuse(self._at(name), value, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.value.get(name)
        if not isinstance(value, bool):
            self._refuse(self._at(name), value, "true or false")
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        value = self.value.get(name)
        if not isinstance(value, str):
            self._refuse(self._at(name), value, "text")
        return value

    def integers(self, name: str, low: int = 0, high: int = LARGEST) -> list[int]:
        """List of whole numbers from `low` to `high`."""
        return [self._integer(each, where, low, high) for each, where in self._items(name)]

    def pairs(self, name: str, high: int = LARGEST) -> list[tuple[int, int]]:
        """List of pairs of whole numbers from 0 to `high`."""
        return [self._pair(each, where, high) for each, where in self._items(name)]

    def lists_of_pairs(self, name: str, high: int = LARGEST) -> list[list[tuple[int, int]]]:
        """List of lists of pairs of whole numbers from 0 to `high`."""
        return [Fields({"": each}, where).pairs("", high) for each, where in self._items(name)]

    def fields(self, name: str) -> Fields:
        """Object within this one."""
        return Fields(self.value.get(name), self._at(name))

    def each(self, name: str) -> list[Fields]:
        """List of objects."""
        return [Fields(each, where) for each, where in self._items(name)]

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise StateFileError: the value `name` is not what it must be."""
        self._refuse(self._at(name), self.value.get(name), expected)

    def _items(self, name: str) -> list[tuple[Any, str]]:
        value = self.value.get(name)
        if not isinstance(value, list):
            self._refuse(self._at(name), value, "a list")
        return [(each, f"{self._at(name)}[{index}]") for index, each in enumerate(value)]

    def _pair(self, value: Any, where: str, high: int) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != 2:
            self._refuse(where, value, "a pair of whole numbers")
        return self._integer(value[0], where, 0, high), self._integer(value[1], where, 0, high)

    def _integer(self, value: Any, where: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(where, value, f"a whole number from {low} to {high}")
        return value

    def _at(self, name: str) -> str:
        return f"{self.where}, {name}" if name else self.where

    @staticmethod
    def _refuse(where: str, got: Any, expected: str) -> NoReturn:
        text = repr(got)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise StateFileError(f"{where} is {shown}, expected {expected}; the file is damaged or foreign, write it again")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
