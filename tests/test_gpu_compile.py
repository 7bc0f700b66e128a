"""Kernels compiled for every GPU target without a GPU: `kvslim doctor --compile-gpu`, and what is read from machine code."""

import json
import os
import subprocess
import sys

import pytest

from kvslim.kernels.triton import assembly
from kvslim.kernels.triton import compile as compiling
from kvslim.kernels.triton.compile import Row
from kvslim.kernels.triton.targets import TARGETS

pytest.importorskip("triton")

# instructions of the attention's main loop per KV element
CEILINGS = {("sm_90", "int4"): 7.0, ("sm_90", "slim4"): 10.0, ("gfx1100", "int4"): 20.5, ("gfx1100", "slim4"): 33.0}
VECTOR_ADD = "\tv_add_f32_e32 v1, v1, v2\n"
ADD = "        /*0020*/                   FADD R1, R1, R2 ;\n"
SASS = f"""
.L_x_0:
{30 * ADD}
.L_x_1:
{20 * ADD}
.L_x_2:
        /*0030*/                   LDG.E R1, [R2] ;
        /*0040*/               @P2 BRA `(.L_x_2) ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3);
"""
AMDGCN = f"""
.LBB0_1:                                ; =>This Inner Loop Header
{18 * VECTOR_ADD}
	s_waitcnt vmcnt(0)
	; a comment
	s_cbranch_scc1 .LBB0_1
	s_endpgm
    .private_segment_fixed_size: 24
    .vgpr_count:     148
    .vgpr_spill_count: 4
"""


def doctor(*arguments: str, cache: object) -> tuple[int, list[dict], str]:
    """Run the command in a process of its own, where triton compiles: exit code, rows, standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvslim", "doctor", "--compile-gpu", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**environment, "XDG_CACHE_HOME": str(cache)}
    )
    return done.returncode, json.loads(done.stdout)["gpu_targets"] if done.stdout else [], done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rows(cache) -> list[dict]:
    """What CI compiles: attention on a table's and on uniform codes, and their encoders, on all targets."""
    code, found, errors = doctor("--layouts", "slim4,int4,slim4 v", "--head-dims", "128", "--jobs", "2", cache=cache)
    assert found, errors
    assert code == 0
    return found


def test_all_targets_compile_without_spills(rows):
    kinds = {("attend", "slim4"), ("attend", "int4"), ("append", "slim4 v"), ("append", "int4")}
    assert {(row["target"], row["kernel"], row["layout"]) for row in rows} == {
        (t, *kind) for t in TARGETS for kind in kinds
    }
    assert [row for row in rows if "error" in row] == []
    assert [row for row in rows if row["spills"]] == []
    assert all(0 < row["registers"] <= 512 for row in rows)
    assert all(row["shared_bytes"] <= TARGETS[row["target"]].shared_bytes for row in rows)


@pytest.mark.parametrize(("target", "layout"), CEILINGS)
def test_the_main_loop_stays_short(target, layout, rows):
    wanted = {"target": target, "kernel": "attend", "layout": layout}
    found = [row["instructions_per_element"] for row in rows if wanted.items() <= row.items()]
    assert found
    assert max(found) <= CEILINGS[target, layout]


def test_a_second_run_compiles_nothing(rows, cache):
    before = sorted(path.stat().st_mtime_ns for path in cache.rglob("*.json"))
    code, again, _ = doctor("--layouts", "slim4 v", "--head-dims", "128", "--targets", "sm_90,gfx1100", cache=cache)
    assert code == 0
    assert again == [row for row in rows if row["layout"] == "slim4 v" and row["target"] in ("sm_90", "gfx1100")]
    assert sorted(path.stat().st_mtime_ns for path in cache.rglob("*.json")) == before


def test_the_innermost_loop_is_counted():
    assert assembly.main_loop(SASS, *assembly._SASS) == 23, "the loop around one load is part of it"
    figures = assembly.amd_figures(AMDGCN, 512)
    assert figures == assembly.Figures(registers=148, spills=6, shared_bytes=512, loop_instructions=20)


@pytest.mark.parametrize(
    ("option", "name", "meant"),
    [
        ("--targets", "sm90", "sm_90"),
        ("--kernels", "atend", "attend"),
        ("--head-dims", "100", ""),
        ("--layouts", "slim5", "slim"),
    ],
)
def test_unknown_names_are_refused(option, name, meant, run, monkeypatch):
    monkeypatch.setattr(compiling, "require_triton", lambda: None)
    code, out, errors = run("doctor", "--compile-gpu", option, name)
    assert code == 2
    assert not out
    assert f"'{name}'; known: " in errors
    assert f"Did you mean '{meant}" in errors or not meant


def test_without_triton_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    code, _, errors = run("doctor", "--compile-gpu")
    assert code == 2
    assert "pip install 'kvslim[triton]'" in errors


def test_the_interpreter_compiles_nothing(run):
    code, _, errors = run("doctor", "--compile-gpu")
    assert code == 2
    assert "TRITON_INTERPRET=1" in errors


def test_selections_without_the_switch_are_refused(run):
    code, _, errors = run("doctor", "--targets", "sm_90")
    assert code == 2
    assert "--compile-gpu" in errors


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"registers": 256, "spills": 12, "shared_bytes": 0}, "12 registers spilled"),
        ({"error": "needs 70000 bytes of shared memory"}, "needs 70000 bytes of shared memory"),
    ],
)
def test_spills_and_failures_are_errors_that_name_the_row(wrong, words, run, monkeypatch):
    good = Row(
        "sm_90", "attend", 128, "slim4", registers=110, spills=0, shared_bytes=8192, instructions_per_element=6.2
    )
    monkeypatch.setattr(compiling, "plan", lambda *_: [])
    monkeypatch.setattr(compiling, "sweep", lambda *_, **__: [good, Row("gfx1103", "append", 256, "int8", **wrong)])
    code, out, _ = run("doctor", "--compile-gpu")
    assert code == 1
    assert f"append int8 head_dim 256 on gfx1103: {words}" in out
    code, out, _ = run("doctor", "--compile-gpu", "--json")
    assert code == 1
    first = json.loads(out)["gpu_targets"][0]
    assert first == {
        "target": "sm_90",
        "kernel": "attend",
        "head_dim": 128,
        "layout": "slim4",
        "registers": 110,
        "spills": 0,
        "shared_bytes": 8192,
        "instructions_per_element": 6.2,
    }
