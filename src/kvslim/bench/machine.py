"""What a speed was measured on: processor, threads, memory, GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm", "bf16", "sve")


def machine() -> dict[str, Any]:
    """Python, system, processor with the instruction sets that matter here, cores and memory."""
    name, flags = _processor()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": name,
        "processor_flags": flags,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
    }


def machine_of(model: Any) -> dict[str, Any]:
    """The same, with what the model runs on: threads of torch, or the GPU."""
    import torch

    on_gpu = model.device.type == "cuda"
    gpu = torch.cuda.get_device_name(model.device) if on_gpu else None
    dtype = str(model.dtype).removeprefix("torch.")
    return {**machine(), "threads": torch.get_num_threads(), "device": str(model.device), "gpu": gpu, "dtype": dtype}


def _processor() -> tuple[str, list[str]]:
    """Name and the instruction sets that matter here; only Linux says."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        field, _, text = line.partition(":")
        if field.strip() == "model name":
            name = text.strip()
        elif field.strip().lower() in ("flags", "features"):
            flags.update(text.split())
    return name, [flag for flag in _CPU_FLAGS if flag in flags]
