"""What a compiled kernel costs, read from its machine code: registers, spills, shared memory, main loop."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

_WORD = 4  # bytes of a spilled register
_SHORT = 16  # instructions of a loop around a single load

# label definition, branch to a label, instruction
_SASS = re.compile(r"^(\.L_x_\d+):"), re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)"), re.compile(r"^\s+/\*[0-9a-f]+\*/\s")
_AMDGCN = re.compile(r"^(\.LBB\w+):"), re.compile(r"^\s+s_c?branch\w*\s+(\.LBB\w+)"), re.compile(r"^\s+[a-z]")


@dataclass(frozen=True)
class Figures:
    """Costs of one compiled kernel.

    Attributes
    ----------
    registers : int
        Of one thread.
    spills : int
        Registers of one thread that went to memory because there were too few.
    shared_bytes : int
        Of one program.
    loop_instructions : int
        Instructions of the main loop: the longest one that has no loop inside; 0 where there is no loop.
    """

    registers: int
    spills: int
    shared_bytes: int
    loop_instructions: int


def nvidia_figures(cubin: bytes, shared_bytes: int, tools: Path) -> Figures:
    """Read a cubin with cuobjdump and nvdisasm out of the folder `tools`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(tools / "cuobjdump", "-res-usage", path)
        sass = _run(tools / "nvdisasm", "-c", path)
    found = re.search(r"REG:(\d+)\s+STACK:(\d+).*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump names no resources: {usage[-200:]}")
    registers, stack, local = map(int, found.groups())
    return Figures(registers, (stack + local) // _WORD, shared_bytes, main_loop(sass, *_SASS))


def amd_figures(amdgcn: str, shared_bytes: int) -> Figures:
    """Read AMD's assembly text with its metadata."""
    registers, spilled, scratch = (
        _metadata(amdgcn, key) for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    )
    return Figures(registers, max(spilled, scratch // _WORD), shared_bytes, main_loop(amdgcn, *_AMDGCN))


def _run(program: Path, *arguments: str | Path) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def _metadata(amdgcn: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", amdgcn)
    if found is None:
        raise RuntimeError(f"the assembly has no .{key}")
    return int(found[1])


def main_loop(text: str, label: re.Pattern[str], branch: re.Pattern[str], instruction: re.Pattern[str]) -> int:
    """Count the instructions of the longest loop with no other inside: from a label to the last branch back to it.

    Loops of a few instructions count as part of what is around them: AMD compilers put one around a load whose base
    address they cannot prove to be the same in all lanes, and it runs once.
    """
    labels: dict[str, int] = {}
    ends: dict[int, int] = {}
    count = 0
    for line in text.splitlines():
        if found := label.match(line):
            labels[found[1]] = count
        elif instruction.match(line):
            count += 1
            if (found := branch.search(line)) and found[1] in labels:
                ends[labels[found[1]]] = count
    loops = [(start, stop) for start, stop in ends.items() if stop - start > _SHORT]
    innermost = [
        stop - start
        for start, stop in loops
        if not any((start, stop) != other and start <= other[0] and other[1] <= stop for other in loops)
    ]
    return max(innermost, default=0)
