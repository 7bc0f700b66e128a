"""Check and measure kvslim on this machine's GPU; under five minutes, one JSON file.

    python tools/gpu_check.py --out gpu-check.json          # parity, attention times, memory of a real model's cache
    python tools/gpu_check.py --dry-run                     # parity alone at tiny sizes, in triton's interpreter

Parity: packed bytes and attention of the Triton kernels against the reference on the same device. Times are the GPU's
own, medians of turns, after each contestant's output was compared with float64. Exit code 1 if parity does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RECIPES = ("slim4", "slim3", "int8", "kivi4", "nvfp4", "fp8", "turbo4", "slim4+immediate+k=rotate/table:4")
TIMED = ("slim4", "slim3", "int8")
TOKENS = (4096, 32768, 131072)
SHAPES = ("14/2x64", "32/8x128", "8/4x256")
CODES_BOUND = 1e-3  # share of bytes that random rotations may move; 0 for all other recipes
ATTEND_BOUND = 5e-3  # of the largest output: products are taken in fp16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and write their results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="file to write (gpu-check.json)")
    parser.add_argument("--model", default="qwen0.5b", help="model whose cache is weighed; none to leave that out")
    parser.add_argument(
        "--dry-run", action="store_true", help="no GPU: parity in triton's interpreter, nothing is timed"
    )
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    device = torch.device("cpu" if options.dry_run else "cuda")
    why_not = "" if options.dry_run else missing()
    if why_not:
        print(f"gpu_check: {why_not}", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"dry_run": options.dry_run, "machine": machine(device)}
    shapes, count = (("2/1x32",), 70) if options.dry_run else (SHAPES, 1000)
    recipes = ("int8+block=32", "turbo4+block=32") if options.dry_run else RECIPES
    found["parity"] = parity(recipes, shapes, count, device)
    if not options.dry_run:
        found["attention"] = attention(device)
        if options.model != "none":
            found["memory"] = memory(options.model)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [row for row in found["parity"] if not row["holds"]]
    for row in wrong:
        print(f"gpu_check: parity fails: {row}", file=sys.stderr)
    print(f"gpu_check: {len(found['parity'])} parity checks, {len(wrong)} fail; written to {options.out}")
    return 1 if wrong else 0


def missing() -> str:
    """What this machine lacks for the checks; empty if nothing."""
    import torch

    from kvslim.kernels.triton.device import device_target

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; run this where one is, with its build of torch, or --dry-run"
    target = device_target(torch.device("cuda"))
    return target if isinstance(target, str) else ""


def machine(device: Any) -> dict[str, Any]:
    """Processor, card, driver and versions."""
    import torch

    from kvslim.bench.machine import machine as processor
    from kvslim.kernels.triton.device import architecture

    found = processor()
    for package in ("kvslim", "torch", "triton", "transformers", "flash_attn"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "architecture": architecture(device),
            "gpu_memory_nbytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "driver": driver(),
        }
    return found


def driver() -> str | None:
    """Version of the GPU's driver, as the vendor's own tool or the kernel module names it."""
    module = Path("/sys/module/amdgpu/version")
    if module.is_file():
        return module.read_text().strip()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def parity(recipes: Sequence[str], shapes: Sequence[str], count: int, device: Any) -> list[dict[str, Any]]:
    """Packed bytes, then attention, of every recipe at every shape."""
    from kvslim.bench.layers import Shape
    from kvslim.recipe import Recipe

    rows = []
    for text in shapes:
        shape = Shape.parse(text)
        for recipe in map(Recipe.parse, recipes):
            rows += encoded(recipe, shape, device)
            rows.append(attended(recipe, shape, count, device))
    return rows


def encoded(recipe: Any, shape: Any, device: Any) -> list[dict[str, Any]]:
    """Compare the bytes of two blocks with the reference's, side by side."""
    import torch

    from kvslim.bench.layers import filled_layer
    from kvslim.kernels.triton import encoder

    layer = filled_layer(recipe, shape, 2 * recipe.block + recipe.sinks + recipe.recent, device=device)
    store, rows = layer.store, []
    sides = dict(zip("kv", recipe.sides(0), strict=True))
    for letter, packer, frozen in zip("kv", store.packers, store.rows[0].frozen, strict=True):
        row = {"check": "append", "recipe": str(recipe), "side": letter, "shape": str(shape)}
        refused = encoder.refusal(packer, frozen)
        if refused:
            rows.append({**row, "holds": True, "refused": refused})
            continue
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(2, shape.kv_heads, recipe.block, shape.head_dim, generator=generator).to(device)
        starts = torch.arange(2, device=device) * recipe.block
        want, got = packer.encode(x, frozen, starts), encoder.encode(packer, x, frozen, starts)
        differing = max(
            float((want.parts[name].view(torch.uint8) != got.parts[name].view(torch.uint8)).float().mean())
            for name in want.parts
        )
        bound = CODES_BOUND if "orthogonal" in str(sides[letter]) else 0.0
        rows.append({**row, "holds": differing <= bound, "share_of_bytes_differing": differing, "bound": bound})
    return rows


def attended(recipe: Any, shape: Any, count: int, device: Any) -> dict[str, Any]:
    """Compare attention with the reference's."""
    import torch

    from kvslim.attention import reference
    from kvslim.attention.reference import Score
    from kvslim.attention.triton import TritonLayer
    from kvslim.bench.layers import filled_layer, question
    from kvslim.kernels.triton.device import device_target
    from kvslim.kernels.triton.form import NoTritonFormError

    row = {"check": "attend", "recipe": str(recipe), "shape": str(shape)}
    store = filled_layer(recipe, shape, count, device=device, dtype=torch.float16).store
    query, chunk = question(shape, device=device, dtype=torch.float16)
    target = device_target(device)
    family = "ampere" if isinstance(target, str) else target.family  # the interpreter has none
    processors = 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    score = Score(shape.head_dim**-0.5)
    try:
        got = TritonLayer(store, family, processors).attend(query, store, chunk, None, score)
    except NoTritonFormError as refused:
        return {**row, "holds": True, "refused": str(refused)}
    want = reference.attend(query, store, chunk, None, score)
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    return {**row, "holds": error <= ATTEND_BOUND, "rel_error": error, "bound": ATTEND_BOUND}


def attention(device: Any) -> list[dict[str, Any]]:
    """Times of one decode step's attention, beside flash attention on fp16."""
    from kvslim.bench.gpu import measure_gpu_attention
    from kvslim.bench.layers import Shape
    from kvslim.recipe import Recipe

    shapes = [Shape.parse(text) for text in SHAPES]
    rows = measure_gpu_attention([Recipe.parse(name) for name in TIMED], shapes, TOKENS, device)
    return [row.to_dict() for row in rows]


def memory(name: str, tokens: int = 4096) -> list[dict[str, Any]]:
    """Bytes of a real model's cache, counted by the cache and by the GPU's allocator, against `kvslim plan`."""
    import torch

    import kvslim
    from kvslim.eval.plan import Plan
    from kvslim.integrations.transformers.compat import CACHE_ARGUMENT
    from kvslim.integrations.transformers.loading import load_model
    from kvslim.integrations.transformers.shapes import model_shape
    from kvslim.recipe import Recipe
    from kvslim.store.sizes import Feed

    loaded = load_model(name, device="cuda", dtype="float16")
    shape = model_shape(loaded.name, loaded.model.config, torch.float16)
    ids = torch.randint(1000, 2000, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    rows = []
    for recipe in TIMED:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        cache = kvslim.KVCache(loaded.model, recipe)
        with torch.no_grad():
            loaded.model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
        report, planned = cache.report(), Plan(shape, Recipe.parse(recipe)).size(Feed(tokens, 1, tokens, 0)).nbytes
        rows.append(
            {
                "model": loaded.name,
                "recipe": recipe,
                "tokens": tokens,
                "nbytes": report.nbytes,
                "planned_nbytes": planned,
                "allocated_nbytes": torch.cuda.memory_allocated() - before,
                "over_plan": report.nbytes / planned - 1,
                "kernel": report.kernel,
            }
        )
        del cache
    return rows


if __name__ == "__main__":
    sys.exit(main())
