"""Compile the CPU kernels. Standard library only: the package's build hook loads this file before kvslim is installed.

One shared object per instruction set; which one runs is decided by the processor (`library.py`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "native"
_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno"),
    # encoders must round as the reference does: no product may be fused with a sum behind our back
    "-ffp-contract=off",
]
_X86 = {"x86_64", "amd64"}
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512"]
_ISA_FLAGS: dict[str, list[str]] = {"portable": [], "avx2": _AVX2, "avx512": _AVX2 + _AVX512}


class BuildError(Exception):
    """The kernels could not be compiled here; the text says why."""


def isas() -> tuple[str, ...]:
    """Instruction sets that are built on this kind of processor."""
    return tuple(_ISA_FLAGS) if platform.machine().lower() in _X86 else ("portable",)


def file_name(isa: str) -> str:
    """Name of the shared object of one instruction set."""
    return f"libkvslim-{isa}.so"


def digest() -> str:
    """Short hash of the sources and flags: what a compiled library belongs to."""
    total = hashlib.sha256(repr((_FLAGS, _ISA_FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            total.update(source.name.encode() + source.read_bytes())
    return total.hexdigest()[:16]


def compiler() -> str | None:
    """Path of a C++ compiler: ``CXX`` or the first of g++, clang++, c++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(folder: Path, extra: tuple[str, ...] = ()) -> list[Path]:
    """Compile all instruction sets into `folder`, at once.

    Parameters
    ----------
    folder : Path
        Made if it is not there. Files appear in it only when complete.
    extra : tuple of str
        Further compiler flags, for sanitizers.

    Returns
    -------
    list of Path

    Raises
    ------
    BuildError
        There is no compiler, or it failed.
    """
    program = compiler()
    if program is None:
        raise BuildError("no C++ compiler found; install g++ or clang++, or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda isa: _compile(program, isa, folder, extra), isas()))


def _compile(program: str, isa: str, folder: Path, extra: tuple[str, ...]) -> Path:
    target = folder / file_name(isa)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [program, *_FLAGS, *_ISA_FLAGS[isa], *extra, f"-DKVS_NS=kvs_{isa}"]
        done = subprocess.run(
            [*command, str(SOURCES / "library.cpp"), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            first = next((line for line in lines if "error" in line), lines[-1])
            raise BuildError(f"{program} failed on the {isa} kernels: {first}")
        made.replace(target)
    return target
