"""Gauge: wall time, CPU time and memory of one contestant, measured only while it is its turn."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Gauge:
    """What one contestant's turns took.

    Attributes
    ----------
    device : torch.device
    wall_s, cpu_s : list of float
        Per lap; CPU time is that of all threads of the process.
    filled_nbytes, peak_nbytes : int or None
        Memory that the first turn left behind, and the most that any added at once on top of it: of the process on CPU,
        of the allocator on CUDA. None where the system does not say.
    """

    device: torch.device
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    filled_nbytes: int | None = None
    peak_nbytes: int | None = None

    @contextmanager
    def first_turn(self) -> Iterator[None]:
        """Count what filling the cache takes; freed memory goes back to the system before and after."""
        _trim(self.device)
        before = _memory(self.device)
        _reset_peak(self.device)
        yield
        peak = _peak(self.device)
        _trim(self.device)
        after = _memory(self.device)
        if before is not None and after is not None and peak is not None:
            self.filled_nbytes, self.peak_nbytes = after - before, peak - before

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Count the peak of a later turn. Freed memory stays, since fetching it again would take time."""
        before = _memory(self.device)
        _reset_peak(self.device)
        yield
        peak = _peak(self.device)
        if self.filled_nbytes is None or self.peak_nbytes is None or before is None or peak is None:
            return
        self.peak_nbytes = max(self.peak_nbytes, self.filled_nbytes + peak - before)

    @contextmanager
    def lap(self, *, timed: bool = True) -> Iterator[None]:
        """Take the time while entered, work on the GPU included; an untimed lap only waits for that."""
        _wait(self.device)
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        _wait(self.device)
        if timed:
            self.wall_s.append(time.perf_counter() - wall)
            self.cpu_s.append(time.process_time() - cpu)

    @property
    def median_s(self) -> float:
        """Wall time of the median lap."""
        return statistics.median(self.wall_s)

    def quartiles_s(self) -> tuple[float, float]:
        """Wall time that a quarter, and that three quarters of the laps stay within."""
        low, _, high = statistics.quantiles(
            self.wall_s * 2 if len(self.wall_s) == 1 else self.wall_s, method="inclusive"
        )
        return low, high


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _trim(device: torch.device) -> None:
    if device.type == "cuda":
        return
    # only glibc keeps freed memory and knows how to return it
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _memory(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # where this is not allowed the peak is that of the whole run so far, which is no less true of it
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int | None:
    """A size out of the process's status; only Linux has it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
