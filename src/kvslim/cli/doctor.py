"""`kvslim doctor`: what this machine has, what runs here, what is missing and how to get it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from kvslim.bench.machine import machine
from kvslim.cli import options
from kvslim.cli.gpu_targets import compile_for_gpus, print_table, to_json
from kvslim.errors import InputError
from kvslim.models import MODELS, model_path


def doctor(
    models_dir: options.ModelsDir = None,
    compile_gpu: Annotated[
        bool, typer.Option("--compile-gpu", help="Compile the GPU kernels for every target, without a GPU.")
    ] = False,
    targets: Annotated[str, typer.Option("--targets", help="With --compile-gpu: sm_90,gfx1100; by default all.")] = "",
    kernels: Annotated[str, typer.Option("--kernels", help="With --compile-gpu: attend,append; by default all.")] = "",
    head_dims: Annotated[str, typer.Option("--head-dims", help="With --compile-gpu: 64,128; by default all.")] = "",
    layouts: Annotated[str, typer.Option("--layouts", help="With --compile-gpu: slim4,int8; by default all.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="With --compile-gpu: processes that compile.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Show machine, packages, backends and models; exit code 1 if a required package is missing or too old.

    With --compile-gpu the GPU kernels are compiled instead, and what each needs is listed; exit code 1 if one does not
    compile or spills registers.
    """
    if compile_gpu:
        rows = compile_for_gpus(targets=targets, kernels=kernels, head_dims=head_dims, layouts=layouts, processes=jobs)
        if as_json:
            typer.echo(json.dumps({"triton": _installed("triton"), "gpu_targets": to_json(rows)}, ensure_ascii=False))
        else:
            print_table(rows)
        raise typer.Exit(1 if any(row.failed for row in rows) else 0)
    if targets or kernels or head_dims or layouts:
        raise InputError("--targets, --kernels, --head-dims and --layouts choose what --compile-gpu compiles; add it")
    found = diagnose(models_dir)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    else:
        _print(found)
    if not all(package["supported"] for package in found["required"]):
        raise typer.Exit(1)


def diagnose(models_dir: Path | None) -> dict[str, Any]:
    """Everything `doctor` knows, as plain values."""
    required, extras = _packages()
    return {
        "machine": machine(),
        "required": required,
        "extras": extras,
        "backends": _backends(),
        "models": [_model(name, models_dir) for name in MODELS],
    }


def _packages() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Required packages and extras as kvslim's own metadata lists them, each with what is installed."""
    from packaging.requirements import Requirement

    if _installed("kvslim") is None:
        raise InputError(
            "kvslim runs from a folder that is not installed; run `pip install -e .` in it, then this again"
        )
    required: list[dict[str, Any]] = []
    extras: dict[str, list[str]] = {extra: [] for extra in metadata.metadata("kvslim").get_all("Provides-Extra") or ()}
    for text in metadata.requires("kvslim") or ():
        requirement = Requirement(text)
        version = _installed(requirement.name)
        supported = version is not None and requirement.specifier.contains(version, prereleases=True)
        if requirement.marker is None:
            needs = str(requirement.specifier)
            required.append({"name": requirement.name, "version": version, "needs": needs, "supported": supported})
            continue
        for extra, missing in extras.items():
            if requirement.marker.evaluate({"extra": extra}) and not supported:
                missing.append(requirement.name)
    return required, [
        {"name": extra, "missing": missing, "install": f"pip install 'kvslim[{extra}]'" if missing else ""}
        for extra, missing in extras.items()
    ]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _backends() -> list[dict[str, Any]]:
    """What can read packed bytes here; first the reference, which defines what is correct."""
    gpus, why_not = _gpus()
    return [
        {"name": "reference", "available": True, "note": "torch, any device"},
        _native(),
        _triton(len(gpus)),
        {"name": "cuda", "available": bool(gpus), "note": ", ".join(gpus) or why_not},
    ]


def _native() -> dict[str, Any]:
    """Name the CPU kernels: which instruction set runs here, from where, or why there are none."""
    from kvslim.kernels.cpu.build import compiler
    from kvslim.kernels.cpu.library import PACKAGED, native, why_not

    library = native()
    if library is None:
        return {"name": "native", "available": False, "note": f"{why_not()}; attention runs on torch, slower"}
    origin = "built at installation" if library.path.parent == PACKAGED else "built at first use, in the user's cache"
    note = f"CPU kernels for {library.isa}, {origin}, {library.threads} threads; compiler: {compiler() or 'none'}"
    return {"name": "native", "available": True, "note": note, "isa": library.isa}


def _triton(gpus: int) -> dict[str, Any]:
    """Name the GPU kernels: what each GPU here is to them, or why they do not run."""
    version = _installed("triton")
    if version is None:
        note = "triton is not installed: pip install 'kvslim[triton]'"
        return {"name": "triton", "available": False, "note": note}
    if not gpus:
        note = f"triton {version}, but no GPU; `kvslim doctor --compile-gpu` compiles the kernels all the same"
        return {"name": "triton", "available": False, "note": note}
    import torch

    from kvslim.kernels.triton.device import device_target
    from kvslim.kernels.triton.targets import Target

    targets = [device_target(torch.device("cuda", index)) for index in range(gpus)]
    served = [target for target in targets if isinstance(target, Target)]
    notes = [target if isinstance(target, str) else f"kernels of {target.name}" for target in targets]
    return {"name": "triton", "available": bool(served), "note": f"triton {version}: {', '.join(notes)}"}


def _gpus() -> tuple[list[str], str]:
    try:
        import torch
    except ImportError as error:
        return [], f"torch cannot be imported: {error}"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return names, f"torch {torch.__version__} sees no GPU"


def _model(name: str, models_dir: Path | None) -> dict[str, Any]:
    path = model_path(name, models_dir)
    nbytes = path.stat().st_size if path.is_file() else 0
    return {"name": name, "title": MODELS[name].title, "path": str(path), "nbytes": nbytes, "terms": MODELS[name].terms}


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    machine = found["machine"]
    console.print(f"Python {machine['python']} on {machine['system']}", highlight=False)
    memory = f"{machine['memory_nbytes'] / 2**30:.0f} GiB" if machine["memory_nbytes"] else "unknown memory"
    flags = " ".join(machine["processor_flags"])
    console.print(f"{machine['processor']}, {machine['cores']} cores, {memory}  {flags}", highlight=False)
    table = Table("what", "state", "note", show_lines=False)
    for package in found["required"]:
        state = package["version"] or "missing"
        note = "" if package["supported"] else f"needs {package['needs']}: pip install -U kvslim"
        table.add_row(package["name"], state, note, style=None if package["supported"] else "red")
    table.add_section()
    for backend in found["backends"]:
        table.add_row(backend["name"], "yes" if backend["available"] else "no", backend["note"])
    table.add_section()
    for extra in found["extras"]:
        note = f"missing {', '.join(extra['missing'])}: {extra['install']}" if extra["missing"] else ""
        table.add_row(escape(f"[{extra['name']}]"), "no" if extra["missing"] else "yes", escape(note))
    table.add_section()
    for model in found["models"]:
        state = f"{model['nbytes'] / 1e6:,.0f} MB" if model["nbytes"] else "not fetched"
        table.add_row(model["name"], state, f"{model['title']}, {model['terms'].split('(')[0].strip()}")
    console.print(table)
