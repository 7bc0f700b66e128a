"""tools/gpu_check.py and the GPU bench, as far as they run without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvslim.bench import gpu
from kvslim.bench.layers import Shape
from kvslim.recipe import Recipe

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[1] / "tools" / "gpu_check.py"


def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_checks_parity_in_the_interpreter(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["check"] for row in found["parity"]} == {"append", "attend"}
    assert all(row["holds"] and "refused" not in row for row in found["parity"])
    assert {"dry_run", "machine", "parity"} == set(found), "nothing is timed or weighed"
    assert found["machine"]["triton"]


def test_wrong_bytes_fail_the_check(tmp_path, monkeypatch, capsys):
    from kvslim.kernels.triton import encoder

    right = encoder.encode

    def wrong(*arguments):
        packed = right(*arguments)
        packed.parts["code"][0, 0, 0, 0] ^= 1
        return packed

    monkeypatch.setattr(encoder, "encode", wrong)
    assert script().main(["--dry-run", "--out", str(tmp_path / "found.json")]) == 1
    assert "parity fails: {'check': 'append', 'recipe': 'k=affine:8" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses(tmp_path, capsys):
    assert script().main(["--out", str(tmp_path / "found.json")]) == 2
    assert "sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()


def test_contestants_are_checked_then_timed_in_turns(monkeypatch):
    """On a CPU with a clock that counts: flash attention runs there too, and the C++ kernels stand in for Triton's."""
    called = []

    def clock(call):
        called.append(call)
        call()
        return float(len(called))

    recipes = [Recipe.parse("slim4"), Recipe.parse("int8")]
    rows = gpu.measure_gpu_attention(recipes, [Shape(4, 2, 64)], [300], torch.device("cpu"), rounds=3, clock=clock)
    assert [row.contestant for row in rows] == ["torch flash fp16", "slim4", "int8"]
    assert called[:3] == called[3:6] == called[6:]
    assert [row.latency_ms for row in rows] == [4.0, 5.0, 6.0], "medians of the three turns"
    assert rows[1].speedup_vs_flash_fp16 == 4.0 / 5.0
    assert rows[0].nbytes_read == 2 * 2 * 300 * 64 * 2
    assert rows[1].nbytes_read < rows[0].nbytes_read
    monkeypatch.setattr(gpu.dispatch, "attend", lambda query, *_: torch.zeros_like(query))
    rows = gpu.measure_gpu_attention(recipes[:1], [Shape(4, 2, 64)], [300], torch.device("cpu"), rounds=1, clock=clock)
    assert rows[1].latency_ms is None
    assert "past 5e-03" in rows[1].withheld
