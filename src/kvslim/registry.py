"""A table of names that resolve lazily to objects: ``"module:attribute"`` until first asked for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvslim.errors import RecipeError, did_you_mean


class Registry(Mapping[str, Any]):
    """Read-only mapping of short names to objects that are imported on first use.

    Parameters
    ----------
    kind : str
        What the names stand for, as it should read in an error message ("codec", "transform").
    entries : dict of str to str
        Name -> ``"package.module:attribute"``.
    """

    def __init__(self, kind: str, entries: dict[str, str]):
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise RecipeError(
                f"unknown {self.kind} '{name}'; known: {', '.join(self._entries)}.{did_you_mean(name, self._entries)}"
            )
        module, attribute = self._entries[name].split(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def instantiate(cls: Any, name: str, args: tuple[str, ...]) -> Any:
    """Build the frozen dataclass `cls` from a recipe step's textual arguments.

    A bare word sets a boolean field; a bare number sets ``bits``; ``field=value`` sets any field. Field types decide
    how the text is read, a field's ``choices`` metadata says what is allowed.

    Raises
    ------
    RecipeError
        Naming the step, the argument and what is allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for arg in args:
        key, has_value, text = arg.partition("=")
        if not has_value:
            key, text = ("bits", arg) if arg.isdigit() else (arg, "true")
        if key not in fields:
            allowed = ", ".join(fields) or "none"
            raise RecipeError(f"'{name}' has no argument '{key}'; it takes: {allowed}.{did_you_mean(key, fields)}")
        values[key] = _read(name, fields[key], text)
    try:
        return cls(**values)
    except TypeError as error:  # a required field is missing
        missing = [key for key, field in fields.items() if key not in values and field.default is dataclasses.MISSING]
        raise RecipeError(f"'{name}' needs {', '.join(missing)}, for example '{name}:4'") from error


def _read(name: str, field: Any, text: str) -> Any:
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": _read_bool}
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    try:
        value = kinds[kind](text)
    except (ValueError, KeyError) as error:
        raise RecipeError(f"'{name}:{field.name}={text}': expected {kind}, got '{text}'") from error
    choices = field.metadata.get("choices")
    if choices is not None and value not in choices:
        allowed = ", ".join(str(choice) for choice in choices)
        raise RecipeError(f"'{name}:{field.name}={text}': use one of {allowed}.{did_you_mean(text, map(str, choices))}")
    return value


def _read_bool(text: str) -> bool:
    return {"true": True, "false": False}[text]


def choice(default: Any, *choices: Any) -> Any:
    """Declare a dataclass field with a default and the values it may take."""
    return dataclasses.field(default=default, metadata={"choices": choices or (default,)})
