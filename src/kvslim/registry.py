"""A table of names that resolve lazily to objects: ``"module:attribute"`` until first asked for.

Other packages add names through an entry point. What they offer is imported, and judged, only when its name is asked
for: a broken package costs nothing to those who do not use it.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
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
    group : str, optional
        Entry point group through which other packages add names.
    base : str, optional
        ``"package.module:attribute"`` of the class that what they add must derive from.
    """

    def __init__(self, kind: str, entries: dict[str, str], *, group: str = "", base: str = ""):
        self.kind, self.group = kind, group
        self._entries, self._base = dict(entries), base
        self._searched: tuple[str, ...] = ()
        self._offered: Mapping[str, tuple[EntryPoint, ...]] = {}

    def __getitem__(self, name: str) -> Any:
        offered = self.offered().get(name, ())
        if len(offered) + (name in self._entries) > 1:
            packages = ", ".join(_package(point) for point in offered)
            raise RecipeError(
                f"{self.kind} '{name}' is {'built in and ' if name in self._entries else ''}offered by {packages}; "
                "uninstall what you do not need, or have its author choose another name"
            )
        if offered:
            return self._load(offered[0])
        if name not in self._entries:
            raise RecipeError(f"unknown {self.kind} '{name}'; known: {', '.join(self)}.{did_you_mean(name, self)}")
        return _resolve(self._entries[name])

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.offered()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._entries, *self.offered())))

    def __len__(self) -> int:
        return len(set(self))

    def offered(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        """Name -> entry points of other packages; nothing of theirs is imported."""
        path = tuple(sys.path)
        if self.group and path != self._searched:  # an installed package lies somewhere on it
            self._searched, self._offered = path, _offered(self.group)
        return self._offered

    def _load(self, point: EntryPoint) -> Any:
        try:
            loaded = point.load()
        except Exception as error:  # a package's code may raise anything
            raise RecipeError(
                f"{self.kind} '{point.name}' of {_package(point)} ({point.value}) failed to import: "
                f"{type(error).__name__}: {error}; repair that package or uninstall it"
            ) from error
        base = _resolve(self._base)
        if not (isinstance(loaded, type) and issubclass(loaded, base) and dataclasses.is_dataclass(loaded)):
            raise RecipeError(
                f"{self.kind} '{point.name}' of {_package(point)} ({point.value}) is no {self.kind}: expected a frozen "
                f"dataclass that derives from {self._base.replace(':', '.')}, got {loaded!r}"
            )
        return loaded


def _offered(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of a group by name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def _package(point: EntryPoint) -> str:
    return "an unnamed package" if point.dist is None else f"package {point.dist.name} {point.dist.version}"


def _resolve(target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)


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
    except TypeError as error:
        missing = [key for key, field in fields.items() if key not in values and field.default is dataclasses.MISSING]
        if not missing:  # a class of another package that lacks a method, say
            raise RecipeError(f"'{name}' cannot be made: {error}; mend {cls.__module__}") from error
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
