"""How much each GPU family takes on at a time: one table, chosen from compilations for every target, not at first use.

More tokens per step mean more loads in flight and fewer reductions, until registers spill; `rows` above 16 are for
chunks of queries. docs/gpu.md says how the table was found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One compilation of the attention kernel.

    Attributes
    ----------
    rows : int
        Query rows of a program; matrix units take 16 at least.
    tokens, exact_tokens : int
        Packed and exact tokens per step.
    warps, stages : int
    lanes : int
        Channels of an exact key that are multiplied at a time.
    reload : bool
        Whether queries are read again in every step rather than held in registers.
    """

    rows: int
    tokens: int
    exact_tokens: int
    warps: int
    stages: int
    lanes: int = 256
    reload: bool = False


@dataclass(frozen=True)
class Family:
    """What a family takes.

    Attributes
    ----------
    decode, chunk : dict of int to Config
        By the widest row of channels, padded to a power of two: of few query rows, and of many.
    lookup : str
        How a code becomes a table's value: ``load``, or ``gather`` through shared memory.
    arithmetic : bool
        Whether codes of up to four bits become values by 16-bit arithmetic where they can; else all are looked up.
    widest : int
        Packed channels that are multiplied at a time at most.
    share : int
        Fewest packed tokens worth a program of their own.
    waves : int
        Programs per multiprocessor that hide each other's loads.
    registers : int
        Of a thread at most, an option of the compiler; 0 leaves it to that. NVIDIA's assembler else stores a value or
        two to memory so that one more program fits beside the others (sm_120: slim4, slim4p and turbo4).
    """

    decode: dict[int, Config]
    chunk: dict[int, Config]
    lookup: str
    arithmetic: bool = True
    widest: int = 1024
    share: int = 256
    waves: int = 4
    registers: int = 0


_NVIDIA = Family(
    decode={
        64: Config(16, 64, 64, 4, 3),
        128: Config(16, 64, 32, 4, 3),
        256: Config(16, 32, 32, 4, 2),
        512: Config(16, 32, 16, 8, 2),
        1024: Config(16, 16, 16, 8, 1),
    },
    chunk={
        64: Config(64, 64, 64, 4, 2),
        128: Config(64, 64, 32, 8, 2),
        256: Config(32, 32, 32, 8, 2),
        512: Config(32, 32, 16, 8, 1),
        1024: Config(16, 16, 16, 8, 1),
    },
    lookup="gather",
    registers=255,
)
_CDNA = Family(
    decode={
        64: Config(16, 64, 64, 4, 1),
        128: Config(16, 64, 32, 4, 1),
        256: Config(16, 32, 32, 4, 1),
        512: Config(16, 16, 16, 8, 1),
        1024: Config(16, 16, 16, 8, 1),
    },
    chunk={
        64: Config(64, 64, 64, 4, 1),
        128: Config(32, 32, 32, 4, 1),
        256: Config(32, 32, 16, 8, 1),
        512: Config(16, 16, 16, 8, 1),
        1024: Config(16, 16, 16, 8, 1),
    },
    lookup="load",
)
_RDNA = Family(
    decode={
        64: Config(16, 32, 32, 4, 1, 64),
        128: Config(16, 16, 16, 4, 1, 64, True),
        256: Config(16, 16, 16, 8, 1, 64, True),
        512: Config(16, 16, 16, 8, 1, 64, True),
        1024: Config(16, 16, 16, 16, 1, 64, True),
    },
    chunk={
        64: Config(32, 32, 32, 4, 1, 64),
        128: Config(32, 16, 16, 8, 1, 64, True),
        256: Config(16, 16, 16, 8, 1, 64, True),
        512: Config(16, 16, 16, 8, 1, 64, True),
        1024: Config(16, 16, 16, 16, 1, 64, True),
    },
    lookup="load",
    arithmetic=False,
    widest=128,
)

FAMILIES = {
    "ampere": _NVIDIA,
    "hopper": _NVIDIA,
    "blackwell": _NVIDIA,
    "cdna": _CDNA,
    "rdna3": _RDNA,
    "rdna4": _RDNA,
}


def config(family: str, width: int, rows: int) -> Config:
    """Return the configuration for a widest row of `width` channels and so many query rows per kv head."""
    own = FAMILIES[family]
    table = own.decode if rows <= 16 else own.chunk
    return table[next(size for size in table if size >= width)]


def compiler_options(family: str, own: Config) -> dict[str, int]:
    """What triton's compiler is told, in a launch and ahead of one."""
    options = {"num_warps": own.warps, "num_stages": own.stages}
    registers = FAMILIES[family].registers
    return {**options, "maxnreg": registers} if registers else options


def splits(family: str, tokens: int, programs: int, multiprocessors: int) -> int:
    """Shares to cut `tokens` packed tokens into, where one share each makes `programs` programs."""
    own = FAMILIES[family]
    wanted = -(-own.waves * multiprocessors // programs)
    return max(1, min(wanted, tokens // own.share))
