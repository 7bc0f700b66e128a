"""Find, build and load the CPU kernels, or say why there are none.

Looked for beside this file (a wheel, an installed source tree), then in the user's cache; where neither holds a library
that belongs to these sources, it is compiled into the cache once, which takes some ten seconds.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvslim.errors import InputError, PackingWarning
from kvslim.kernels.cpu import abi
from kvslim.kernels.cpu.build import BuildError, build, digest, file_name, isas

PACKAGED = Path(__file__).parent / "lib"


@dataclass(frozen=True)
class Library:
    """The kernels of one instruction set.

    Attributes
    ----------
    isa : str
        ``avx512``, ``avx2`` or ``portable``.
    path : Path
    attend, encode : callable
        (address of an abi.Attend or abi.Encode, threads) -> 0, or 1 if memory ran out.
    threads : str
        Whose threads it runs on.
    """

    isa: str
    path: Path
    attend: Callable[[int, int], int]
    encode: Callable[[int, int], int]
    threads: str


def native(isa: str | None = None) -> Library | None:
    """Return the kernels for `isa`, by default the best one this processor runs, or None; `why_not` says why."""
    return _found(isa or _chosen[0])[0]


def why_not() -> str:
    """Why there are no native kernels; empty if there are."""
    return _found(_chosen[0])[1]


_chosen = [""]


def use(isa: str) -> None:
    """Choose what `native` returns from now on: an instruction set, ``off``, or "" for the best one.

    Raises
    ------
    InputError
        This processor cannot run it.
    """
    allowed = ("", "off", *isas())
    if isa not in allowed or (isa not in ("", "off") and native(isa) is None):
        raise InputError(f"instruction set '{isa}' does not run here; use one of {', '.join(filter(None, allowed))}")
    _chosen[0] = isa


@lru_cache
def _found(isa: str) -> tuple[Library | None, str]:
    if isa == "off":
        return None, "native kernels were switched off"
    try:
        folder = _folder()
    except (BuildError, OSError) as error:
        reason = f"native kernels are not built: {error}"
        warnings.warn(f"{reason}; attention runs on torch, several times slower", PackingWarning, stacklevel=4)
        return None, reason
    best = ctypes.CDLL(str(folder / file_name("portable"))).kvs_best_isa
    best.restype = ctypes.c_char_p
    order = isas()
    top = best().decode()
    if isa and order.index(isa) > order.index(top):
        return None, f"this processor has no {isa}"
    return _load(folder, isa or top), ""


def _folder() -> Path:
    """Folder with a library of these sources; compiled if there is none."""
    own = digest()
    if (PACKAGED / "digest").is_file() and (PACKAGED / "digest").read_text().strip() == own:
        return PACKAGED
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvslim" / "native" / own
    if not all((cache / file_name(isa)).is_file() for isa in isas()):
        build(cache)
    return cache


def _load(folder: Path, isa: str) -> Library:
    path = folder / file_name(isa)
    library = ctypes.CDLL(str(path))
    if library.kvs_abi() != abi.ABI:
        raise InputError(f"{path} has interface {library.kvs_abi()}, this kvslim wants {abi.ABI}; reinstall kvslim")
    for function in (library.kvs_attend_run, library.kvs_encode_run):
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
    threads = "own"
    # torch's OpenMP runtime is in the process already; a second one beside it would fight it for the cores
    openmp = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if openmp is not None:
        library.kvs_set_parallel(ctypes.cast(openmp, ctypes.c_void_p))
        threads = "torch's OpenMP"
    return Library(isa, path, library.kvs_attend_run, library.kvs_encode_run, threads)
