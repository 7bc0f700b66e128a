"""What a user may name as a model (short name, folder, .gguf file or hub id), told apart before anything loads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvslim.errors import InputError, ModelFileError, did_you_mean
from kvslim.models import MODELS, fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+$")


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes
    ----------
    name : str
        Short name to show.
    place : str
        Local folder or hub id; for a GGUF file the folder it lies in.
    gguf : Path or None
        The GGUF file, if the model comes from one.
    is_hub : bool
        Whether `place` is a hub id.
    """

    name: str
    place: str
    gguf: Path | None = None
    is_hub: bool = False


def find_source(text: str, *, models_dir: Path | None = None, progress: bool = True) -> Source:
    """Tell what `text` names; a short name is fetched if it is not there yet.

    Raises
    ------
    ModelFileError
        If a path does not exist or holds no model.
    InputError
        If the text is neither a path, a short name nor a hub id.
    FetchError
        If a short name cannot be fetched.
    """
    if text in MODELS:
        path = fetch(text, models_dir, progress)
        return Source(text, str(path.parent), gguf=path)
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if text.endswith(".gguf") or text.startswith((".", "~", "/")) or "\\" in text:
        raise ModelFileError(f"{text} does not exist; name a model folder, a .gguf file, a hub id or {_short_names()}")
    if _HUB_ID.match(text):
        return Source(text.split("/")[1], text, is_hub=True)
    raise InputError(
        f"'{text}' is no model: there is no such file or folder, and it is neither a short name ({', '.join(MODELS)}) "
        f"nor a hub id (owner/name).{did_you_mean(text, MODELS)}"
    )


def _folder(path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(path.resolve().name, str(path))
    inside = sorted(file.name for file in path.glob("*.gguf"))
    step = f"name the file itself: {path / inside[0]}" if inside else "name a folder that save_pretrained wrote"
    raise ModelFileError(f"{path} has no config.json, so it is no model folder; {step}")


def _file(path: Path) -> Source:
    if path.suffix != ".gguf":
        raise ModelFileError(
            f"{path} is no .gguf file; name a model folder, a .gguf file, a hub id or {_short_names()}"
        )
    name = path.resolve().parent.name if path.stem == "model" else path.stem
    return Source(name, str(path.parent), gguf=path)


def _short_names() -> str:
    return f"a short name ({', '.join(MODELS)})"
