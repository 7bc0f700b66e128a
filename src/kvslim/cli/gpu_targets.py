"""`kvslim doctor --compile-gpu`: every GPU kernel compiled for every target, on a machine that needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvslim.cli.compare import progress_bar
from kvslim.cli.counts import read_counts

if TYPE_CHECKING:
    from kvslim.kernels.triton.compile import Row


def compile_for_gpus(*, targets: str, kernels: str, head_dims: str, layouts: str, processes: int) -> list[Row]:
    """Compile what the options name, with commas between names; an empty option means all.

    Raises
    ------
    InputError
        A name is not known, or triton is not installed.
    """
    from kvslim.kernels.triton.compile import plan, sweep

    sizes = read_counts("--head-dims", head_dims) if head_dims else ()
    jobs = plan(_names(kernels), _names(targets), sizes, _names(layouts))
    with progress_bar("compiling", len(jobs)) as advance:
        return sweep(jobs, processes=processes, on_row=advance)


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values; what a row does not have is left out."""
    return [{name: value for name, value in asdict(row).items() if value is not None} for row in rows]


def print_table(rows: Sequence[Row]) -> None:
    """Print the worst of each kernel and target, then every row that failed."""
    from rich.console import Console
    from rich.table import Table

    from kvslim.kernels.triton.targets import TARGETS

    table = Table("target", "cards", "kernel", "variants", "registers", "spills", "shared KiB", "instructions/element")
    for target, kernel in dict.fromkeys((row.target, row.kernel) for row in rows):
        group = [row for row in rows if (row.target, row.kernel) == (target, kernel)]
        per_element = [row.instructions_per_element for row in group if row.instructions_per_element is not None]
        table.add_row(
            target,
            TARGETS[target].cards,
            kernel,
            str(len(group)),
            f"to {max(row.registers or 0 for row in group)}",
            str(sum(row.spills or 0 for row in group)),
            f"to {max(row.shared_bytes or 0 for row in group) / 1024:.0f}",
            f"{min(per_element):.1f}-{max(per_element):.1f}" if per_element else "-",
            style="red" if any(row.failed for row in group) else None,
        )
    console = Console()
    console.print(table)
    for row in rows:
        if row.failed:
            what = row.error or f"{row.spills} registers spilled"
            console.print(
                f"{row.kernel} {row.layout} head_dim {row.head_dim} on {row.target}: {what}", style="red", markup=False
            )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
