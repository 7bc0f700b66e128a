"""The GPUs that every kernel is compiled for, and what each allows one program to use. Plain data, no triton needed.

Sources: NVIDIA's CUDA C++ programming guide (compute capabilities: shared memory per thread block), AMD's instruction
set references and the LLVM AMDGPU guide (wavefront size, local data share per workgroup).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    Attributes
    ----------
    name : str
        As people write it: ``sm_90``, ``gfx1100``.
    backend : str
        ``cuda`` or ``hip``, as triton calls them.
    arch : int or str
        As triton's GPUTarget wants it: 90, "gfx1100".
    warp_size : int
        Threads that run in step.
    shared_bytes : int
        Shared memory that one program may have.
    family : str
        Architectures that take the same kernel configurations.
    cards : str
        Cards of this architecture by the names they are sold under.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    family: str
    cards: str


def _cuda(arch: int, shared_kib: int, family: str, cards: str) -> Target:
    return Target(f"sm_{arch}", "cuda", arch, 32, shared_kib * 1024, family, cards)


def _hip(arch: str, warp_size: int, shared_kib: int, family: str, cards: str) -> Target:
    return Target(arch, "hip", arch, warp_size, shared_kib * 1024, family, cards)


TARGETS = {
    target.name: target
    for target in (
        _cuda(80, 163, "ampere", "A100, A30"),
        _cuda(86, 99, "ampere", "RTX 3060-3090, A10, A40, RTX A2000-A6000"),
        _cuda(89, 99, "ampere", "RTX 4060-4090, L4, L40S, RTX 6000 Ada"),
        _cuda(90, 227, "hopper", "H100, H200, GH200"),
        _cuda(100, 227, "blackwell", "B200, GB200"),
        _cuda(120, 99, "blackwell", "RTX 5060-5090, RTX PRO 6000 Blackwell"),
        _hip("gfx90a", 64, 64, "cdna", "Instinct MI210, MI250, MI250X"),
        _hip("gfx942", 64, 64, "cdna", "Instinct MI300X, MI300A, MI325X"),
        _hip("gfx950", 64, 160, "cdna", "Instinct MI350X, MI355X"),
        _hip("gfx1100", 32, 64, "rdna3", "Radeon RX 7900 XT/XTX, PRO W7900"),
        _hip("gfx1103", 32, 64, "rdna3", "Radeon 780M, 760M (Ryzen 7040, 8040)"),
        _hip("gfx1151", 32, 64, "rdna3", "Radeon 8060S, 8050S (Ryzen AI Max)"),
        _hip("gfx1201", 32, 64, "rdna4", "Radeon RX 9070, 9070 XT, AI PRO R9700"),
    )
}
