"""The command that was run, to stand in a result: options as given, files and folders by their last name."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import typer


def command_of(context: typer.Context) -> str:
    """Rebuild the command line of a verb from what was given on it."""
    words = ["kvslim", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        source = context.get_parameter_source(name)
        # by name: typer brings its own copy of click, whose enum is not click's
        if source is None or source.name != "COMMANDLINE" or value is None:
            continue
        flag = max(parameter.opts, key=len)
        if value is True:
            words.append(flag)
        else:
            text = str(value)
            words += [flag, _without_folder(text)]
    return shlex.join(words)


def _without_folder(text: str) -> str:
    """Last name of a path of this machine; anything else, such as a hub id or 32/8x128, as it is."""
    path = Path(text)
    return path.name if path.is_absolute() or (os.sep in text and path.exists()) else text
