"""One decode step's attention on a GPU: kvslim's kernel against flash attention on fp16, by the GPU's own clock.

Contestants take turns in one process; each is compared with float64 on what it was given before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvslim.attention import dispatch
from kvslim.attention.reference import Score
from kvslim.bench.attention import bytes_read
from kvslim.bench.layers import Shape, filled_layer, float64_attention, question
from kvslim.recipe import Recipe

BOUND = 5e-3  # of the largest output: the kernels multiply in fp16, flash attention in the model's dtype
_WARM_UP = 3
Call = Callable[[], torch.Tensor]
Clock = Callable[[Callable[[], object]], float]  # takes one call, returns its milliseconds


@dataclass(frozen=True)
class GPUAttentionRow:
    """One contestant at one shape and length.

    Attributes
    ----------
    shape, contestant, kernel : str
    tokens : int
    rel_error : float
        Against float64 on the same keys and values, over the largest output.
    nbytes_read : int
        Keys and values that a call reads.
    latency_ms : float or None
        Median; None where the result is wrong.
    speedup_vs_flash_fp16 : float or None
        Against torch's flash attention at the same shape and length.
    withheld : str or None
        Why there is no time.
    """

    shape: str
    tokens: int
    contestant: str
    kernel: str
    rel_error: float
    nbytes_read: int
    latency_ms: float | None = None
    speedup_vs_flash_fp16: float | None = None
    withheld: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure_gpu_attention(
    recipes: Sequence[Recipe],
    shapes: Sequence[Shape],
    lengths: Sequence[int],
    device: torch.device,
    *,
    rounds: int = 21,
    clock: Clock | None = None,
    on_cell: Callable[[int], object] = lambda _: None,
) -> list[GPUAttentionRow]:
    """Measure every recipe and flash attention at every shape and length.

    Parameters
    ----------
    recipes, shapes, lengths : sequence
    device : torch.device
    rounds : int
        Turns of each contestant.
    clock : callable, optional
        Milliseconds of one call; by default CUDA events (of ROCm as well).
    on_cell : callable
        Called with the number of cells finished since the last call.
    """
    rows = []
    for shape in shapes:
        for tokens in lengths:
            rows += _cell(recipes, shape, tokens, device, rounds, clock or event_ms)
            on_cell(1)
    return rows


def event_ms(call: Callable[[], object]) -> float:
    """Milliseconds that a call keeps the GPU busy, by its events."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def medians_ms(contestants: Mapping[str, Callable[[], object]], rounds: int, clock: Clock) -> dict[str, float]:
    """Median milliseconds of each, measured in turns after a few untimed ones."""
    for call in contestants.values():
        for _ in range(_WARM_UP):  # the first one compiles
            call()
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            taken[name].append(clock(call))
    return {name: statistics.median(times) for name, times in taken.items()}


def _cell(
    recipes: Sequence[Recipe], shape: Shape, tokens: int, device: torch.device, rounds: int, clock: Clock
) -> list[GPUAttentionRow]:
    contestants, rows = {}, []
    for name, call, want, nbytes in _flash(shape, tokens, device):
        error = _error(call().transpose(1, 2) if name == "flash_attn fp16" else call(), want)
        rows.append(GPUAttentionRow(str(shape), tokens, name, name, error, nbytes))
        contestants[name] = call
    for recipe in recipes:
        row, call = _packed(recipe, shape, tokens, device)
        rows.append(row)
        contestants[row.contestant] = call
    right = {row.contestant for row in rows if row.rel_error <= BOUND}
    taken = medians_ms({name: call for name, call in contestants.items() if name in right}, rounds, clock)
    return [_timed(row, taken) for row in rows]


def _packed(recipe: Recipe, shape: Shape, tokens: int, device: torch.device) -> tuple[GPUAttentionRow, Call]:
    layer = filled_layer(recipe, shape, tokens, device=device, dtype=torch.float16)
    store = layer.store
    assert store is not None
    score = Score(shape.head_dim**-0.5)
    query, chunk = question(shape, device=device, dtype=torch.float16)

    call = partial(dispatch.attend, query, store, chunk, None, score)
    want = float64_attention(store, query, chunk, score.scaling)
    row = GPUAttentionRow(
        str(shape), tokens, recipe.label, dispatch.explain(store)[0], _error(call(), want), bytes_read(store)
    )
    return row, call


def _flash(shape: Shape, tokens: int, device: torch.device) -> list[tuple[str, Call, torch.Tensor, int]]:
    """Flash attention of torch, and of flash-attn where it is installed: name, call, float64 result, bytes read."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, shape.heads, 1, shape.head_dim, generator=generator).to(device, torch.float16)
    size = (1, shape.kv_heads, tokens, shape.head_dim)
    key, value = (torch.randn(size, generator=generator).to(device, torch.float16) for _ in range(2))
    group = shape.heads // shape.kv_heads
    # the query heads of a kv head are rows of one query: nothing is read twice
    folded = query.view(1, shape.kv_heads, group, shape.head_dim)
    scores = folded.double() @ key.double().mT * shape.head_dim**-0.5
    want = (torch.softmax(scores, -1) @ value.double()).reshape(1, shape.heads, 1, -1)

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(folded, key, value).reshape(1, shape.heads, 1, -1)

    nbytes = 2 * key.numel() * key.element_size()
    found: list[tuple[str, Call, torch.Tensor, int]] = [("torch flash fp16", sdpa, want, nbytes)]
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_with_kvcache

        cache = tuple(states.transpose(1, 2).contiguous() for states in (key, value))
        rows = query.transpose(1, 2).contiguous()
        found.append(("flash_attn fp16", lambda: flash_attn_with_kvcache(rows, *cache), want, nbytes))
    return found


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def _timed(row: GPUAttentionRow, taken: Mapping[str, float]) -> GPUAttentionRow:
    values = asdict(row)
    if row.contestant in taken:
        values["latency_ms"] = taken[row.contestant]
        flash = taken.get("torch flash fp16")
        values["speedup_vs_flash_fp16"] = None if flash is None else flash / taken[row.contestant]
    else:
        values["withheld"] = f"error {row.rel_error:.1e} is past {BOUND:.0e}"
    return GPUAttentionRow(**values)
