"""Memory, measured at torch's own allocator: the peak of a prefill against the 16-bit cache's, and no slope over requests."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from transformers import DynamicCache

import kvslim
from kvslim.integrations.transformers import compat
from tiny_models import build, pair, prompt

TOKENS, CHUNK = 2048, 512


@functools.cache
def models():
    """Six layers in bf16 whose keys and values outweigh everything else, on kvslim's attention and on sdpa."""
    sizes = {"num_hidden_layers": 6, "head_dim": 64, "max_position_embeddings": 4096, "intermediate_size": 16}
    packed = build("llama", **sizes).to(torch.bfloat16)
    stock = copy.deepcopy(packed)
    stock.set_attn_implementation("sdpa")
    return packed, stock


def allocated_peak(run) -> int:
    """Most bytes that torch's CPU allocator had handed out at once during `run()`, above what it had before."""
    gc.collect()  # what an earlier test left must not be freed while this one is measured
    gc.disable()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    gc.enable()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert len(events) > 100
    del kept
    return peak


def prefill(model, cache, chunk: int):
    ids = prompt(1, TOKENS)
    with torch.no_grad():
        for start in range(0, TOKENS, chunk):
            model(ids[:, start : start + chunk], use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    return cache


@functools.cache
def peak_of_16_bits(chunk: int) -> int:
    _, stock = models()
    return allocated_peak(lambda: prefill(stock, DynamicCache(config=stock.config), chunk))


@pytest.mark.parametrize("chunk", [TOKENS, CHUNK])
@pytest.mark.parametrize("recipe", ["none", "int8", "kivi4", "slim4", "slim2"])
def test_the_peak_of_a_prefill(recipe, chunk):
    packed, _ = models()
    cache = kvslim.KVCache(packed, recipe)  # its calibration is not part of a prefill
    plain = peak_of_16_bits(chunk)
    dense = 6 * 2 * 2 * 64 * TOKENS * 2
    assert dense < plain < 2.2 * dense, "the keys and values must be what the peak consists of"
    peak = allocated_peak(lambda: prefill(packed, cache, chunk))
    assert peak <= 1.05 * plain, f"{peak / plain:.3f} of the 16-bit cache's peak"
    if chunk < TOKENS and recipe != "none":
        assert peak <= 0.8 * plain
    assert cache.report().peak_nbytes <= peak, "the report counts what the cache holds, and no more"


def live_nbytes() -> int:
    """Bytes of all tensors that Python can reach; storage that several share counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live_tensors()}.values())


def live_tensors() -> list[torch.Tensor]:
    """Tensors with memory; those of torch.compile's tracing have none."""
    gc.collect()
    return [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]


def test_a_hundred_requests_leave_no_slope():
    """Generate, fork, crop, and let go, a hundred times in one process: the live tensors are the same after each."""
    packed, _ = pair("llama")
    parent = kvslim.KVCache(packed, "slim4+block=16")
    with torch.no_grad():
        packed(prompt(1, 60), use_cache=True, **{compat.CACHE_ARGUMENT: parent})
    live, _earlier = [], live_tensors()  # what earlier tests left is not freed while this one counts
    for number in range(100):
        for cache in (parent.fork(), kvslim.KVCache(packed, "kivi4")):
            with torch.no_grad():
                packed(prompt(1, 40, seed=number), use_cache=True, **{compat.CACHE_ARGUMENT: cache})
            cache.crop(-7)
            cache.batch_repeat_interleave(2)
        del cache
        if number % 10 == 9:
            live.append(live_nbytes())
    assert len(set(live[1:])) == 1, live
