"""What the verbs that compare recipes share: reading a list of them, and a progress bar counted in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvslim.errors import InputError
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe


def read_recipes(text: str) -> list[Recipe]:
    """Read recipes with commas between them, each by its own rules.

    Raises
    ------
    InputError
        The list is empty; also RecipeError, naming the part that is not understood.
    """
    recipes = [Recipe.parse(part.strip()) for part in text.split(",") if part.strip()]
    if not recipes:
        raise InputError("--recipe is empty; name one or more, for example --recipe kivi4,int8 (see `kvslim recipes`)")
    return recipes


def note_of(recipe: str) -> str:
    """What the presets' table warns of for a recipe, options included; empty if nothing."""
    preset = PRESETS.get(recipe.split("+")[0])
    return preset.note if preset else ""


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar with the time left on standard error; yields a function that advances it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda tokens: bar.advance(task, tokens)
