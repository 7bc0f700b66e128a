"""Compile kernels for GPUs that are not there, and say what each compilation costs.

A row is kept in the user's cache under the digest of what it follows from (the kernel's source with everything it
calls, triton's version, the target, the variant), so that a second sweep takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvslim.errors import InputError, did_you_mean
from kvslim.kernels.triton.assembly import Figures, amd_figures, nvidia_figures
from kvslim.kernels.triton.targets import TARGETS, Target
from kvslim.kernels.triton.variant import Variant

# kernel -> module with `variants(target)`
KERNELS = {"attend": "kvslim.kernels.triton.attend_variants", "append": "kvslim.kernels.triton.append_variants"}
_FORMAT = 1  # of a kept row; raised when figures are read otherwise


@dataclass(frozen=True)
class Row:
    """One variant on one target.

    Attributes
    ----------
    target, kernel, layout : str
    head_dim : int
    registers, spills : int or None
        Of one thread; spills are registers that went to memory. None where it does not compile.
    shared_bytes : int or None
        Of one program.
    instructions_per_element : float or None
        Instructions of all threads in the main loop for each KV element that it reads or writes; None without a loop.
    error : str or None
        Why it does not compile, or what it exceeds.
    """

    target: str
    kernel: str
    head_dim: int
    layout: str
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    instructions_per_element: float | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it may not be shipped."""
        return self.error is not None or bool(self.spills)


@dataclass(frozen=True)
class Job:
    """One compilation: `position` counts the variants of `kernel` on `target`."""

    kernel: str
    target: str
    position: int


def plan(
    kernels: Sequence[str] = (), targets: Sequence[str] = (), head_dims: Sequence[int] = (), layouts: Sequence[str] = ()
) -> list[Job]:
    """Jobs for the kernels, targets, head_dims and layouts named; nothing named means all.

    Raises
    ------
    InputError
        A name is not known, naming those that are; or triton is missing.
    """
    require_triton()
    _check("GPU target", targets, TARGETS)
    _check("kernel", kernels, KERNELS)
    found = [
        (Job(kernel, target, position), variant)
        for target in targets or TARGETS
        for kernel in kernels or KERNELS
        for position, variant in enumerate(_variants(kernel, target))
    ]
    _check("head_dim", [str(dim) for dim in head_dims], sorted({str(v.head_dim) for _, v in found}, key=int))
    _check("layout", layouts, sorted({variant.layout for _, variant in found}))
    return [
        job
        for job, variant in found
        if (not head_dims or variant.head_dim in head_dims) and (not layouts or variant.layout in layouts)
    ]


def sweep(jobs: Sequence[Job], *, processes: int = 1, on_row: Callable[[int], object] = lambda _: None) -> list[Row]:
    """Compile `jobs` in so many processes; rows in their order.

    `on_row` is called with the number of jobs finished since the last call.
    """
    rows = {job: row for job in jobs if (row := _kept(job)) is not None}
    on_row(len(rows))
    missing = [job for job in jobs if job not in rows]
    if processes == 1:
        for job in missing:
            rows[job] = _compiled(job)
            on_row(1)
    elif missing:
        # fresh processes: torch's threads do not survive a fork
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(_compiled, job): job for job in missing}
            for done in as_completed(running):
                rows[running[done]] = done.result()
                on_row(1)
    return [rows[job] for job in jobs]


def require_triton() -> None:
    """Raise InputError unless triton is here and compiles."""
    try:
        from triton import knobs
    except ImportError as error:
        raise InputError(
            "kernels for GPUs are compiled by triton, which is not installed; pip install 'kvslim[triton]'"
        ) from error
    if knobs.runtime.interpret:
        raise InputError("TRITON_INTERPRET=1 runs kernels in Python and compiles none; unset it")


def compile_variant(variant: Variant, target: Target) -> Row:
    """Compile one variant; what goes wrong stands in the row."""
    own: dict[str, Any] = {
        "target": target.name,
        "kernel": variant.kernel,
        "head_dim": variant.head_dim,
        "layout": variant.layout,
    }
    try:
        figures = _figures(variant, target)
    except Exception as error:  # the compiler's own errors have no common base
        text = str(error.__cause__ or error).strip().splitlines() or [""]
        return Row(**own, error=f"{type(error).__name__}: {text[-1]}")
    excess = None
    if figures.shared_bytes > target.shared_bytes:
        excess = f"needs {figures.shared_bytes} bytes of shared memory, {target.name} has {target.shared_bytes}"
    per_element = None
    if figures.loop_instructions and variant.loop_elements:
        per_element = round(
            figures.loop_instructions * variant.options["num_warps"] * target.warp_size / variant.loop_elements, 2
        )
    return Row(**own, **_costs(figures), instructions_per_element=per_element, error=excess)


def _costs(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in asdict(figures).items() if name != "loop_instructions"}


def _figures(variant: Variant, target: Target) -> Figures:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.fn.arg_names
    source = ASTSource(
        fn=variant.fn,
        signature=variant.signature,
        constexprs={(names.index(name),): value for name, value in variant.constexprs.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in variant.signature.items()
            if kind.startswith("*") or name in variant.multiples
        },
    )
    place = GPUTarget(target.backend, target.arch, target.warp_size)
    # triton would keep half a megabyte per compilation; a row is all that is wanted
    with TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = triton.compile(source, target=place, options=variant.options)
        shared = compiled.metadata.shared
        if target.backend == "hip":
            return amd_figures(compiled.asm["amdgcn"], shared)
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        return nvidia_figures(compiled.asm["cubin"], shared, tools)


def _compiled(job: Job) -> Row:
    variant, target = _variants(job.kernel, job.target)[job.position], TARGETS[job.target]
    row = compile_variant(variant, target)
    if row.error is not None:
        return row
    place = _place(variant, target)
    place.parent.mkdir(parents=True, exist_ok=True)
    scratch = place.with_suffix(f".{os.getpid()}")  # files appear only when complete
    scratch.write_text(json.dumps(asdict(row)))
    scratch.replace(place)
    return row


def _kept(job: Job) -> Row | None:
    place = _place(_variants(job.kernel, job.target)[job.position], TARGETS[job.target])
    return Row(**json.loads(place.read_text())) if place.is_file() else None


def _place(variant: Variant, target: Target) -> Path:
    import triton

    own = {**variant.__dict__, "fn": variant.fn.cache_key}
    digest = hashlib.sha256(repr((_FORMAT, triton.__version__, target, sorted(own.items()))).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvslim" / "triton" / f"{digest[:32]}.json"


@lru_cache(maxsize=64)
def _variants(kernel: str, target: str) -> tuple[Variant, ...]:
    return tuple(import_module(KERNELS[kernel]).variants(TARGETS[target]))


def _check(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            raise InputError(f"unknown {what} '{name}'; known: {', '.join(allowed)}.{did_you_mean(name, allowed)}")
