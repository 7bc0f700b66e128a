"""Figures in the documents and the presets: those of docs/results and of the layouts, and links that lead somewhere."""

import json
import math
import re
from pathlib import Path

import pytest

from kvslim.codecs.side import SidePacker
from kvslim.eval.compare import markdown, read_rows
from kvslim.integrations.transformers import compat
from kvslim.layout import bits_per_value
from kvslim.presets import PRESETS
from kvslim.recipe import Recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "recipes").glob("*.md"))
MODELS = {"qwen0.5b": "Qwen 0.5B", "qwen1.5b": "Qwen 1.5B", "gemma270m": "Gemma 270M"}
ROWS = {
    model: {row["recipe"]: row for row in json.loads((DOCS / f"results/quality-{model}.json").read_text())["rows"]}
    for model in MODELS
}


def short(kl: float) -> str:
    """Two significant digits, four decimals at most: .0019, .078, 1.4."""
    decimals = min(4, max(1, 1 - math.floor(math.log10(kl))))
    return f"{kl:.{decimals}f}".lstrip("0")


def bits(name: str, head_dim: int) -> float:
    recipe = Recipe.parse(name)
    sides = [SidePacker(side, head_dim, recipe.block, "fp16") for side in (recipe.key, recipe.value)]
    return sum(bits_per_value(side.layout) for side in sides) / 2


def row(name: str) -> str:
    """The row of a preset on its family's page."""
    found = [ROWS[model].get(name) for model in MODELS]
    cells = (
        [f"{bits(name, head_dim):.2f}" for head_dim in (64, 128, 256)],
        [short(measured["kl_mean"]) if measured else "-" for measured in found],
        [f"{measured['top1']:.3f}".lstrip("0") if measured else "-" for measured in found],
    )
    return f"| `{name}` | " + " | ".join(" / ".join(cell) for cell in cells) + " |"


def test_the_table_is_what_the_command_beside_it_makes():
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    marked = re.search(r"<!-- table: made by `kvslim eval table (.*)` -->\n\n(.*)\n<!-- /table -->", text, re.DOTALL)
    assert marked
    assert marked[2] == markdown(read_rows(ROOT / name for name in marked[1].split()))


def test_every_preset_has_its_row_on_a_family_page():
    lines = [
        line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+\d", line)
    ]
    assert sorted(lines) == sorted(row(name) for name in [*PRESETS, "k8v4"] if name != "none")


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
def test_figures_of_presets_are_those_measured(name):
    measured = [
        f"{short(ROWS[model][name]['kl_mean'])} {label}" for model, label in MODELS.items() if name in ROWS[model]
    ]
    assert PRESETS[name].figures == "KL " + ", ".join(measured)


def gpu_table() -> str:
    """What docs/gpu.md says of the compiled kernels: registers by vendor, and the main loop where it reads KV elements."""
    rows = json.loads((DOCS / "results/gpu-compile.json").read_text())["gpu_targets"]
    lines = [
        "| kernel | layout | head_dim | targets | registers NVIDIA | AMD | spills | shared KiB | sm_90 | gfx942 | gfx1100 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys((row["kernel"], row["layout"], row["head_dim"]) for row in rows):
        group = {row["target"]: row for row in rows if (row["kernel"], row["layout"], row["head_dim"]) == kind}
        registers = [
            [row["registers"] for target, row in group.items() if target.startswith(vendor)]
            for vendor in ("sm_", "gfx")
        ]
        loop = [group.get(target, {}).get("instructions_per_element") for target in ("sm_90", "gfx942", "gfx1100")]
        cells = (
            *kind,
            len(group),
            *(f"{min(each)}-{max(each)}" for each in registers),
            sum(row["spills"] for row in group.values()),
            f"{max(row['shared_bytes'] for row in group.values()) / 1024:.0f}",
            *("" if figure is None else f"{figure:.1f}" for figure in loop),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def test_the_table_of_compiled_kernels_is_that_of_the_file():
    assert gpu_table() in (DOCS / "gpu.md").read_text(encoding="utf-8")


def anchors(document: Path) -> set[str]:
    """Names of a document's headings in links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere():
    lost = []
    for document in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8")):
            path = document.parent / target if target else document
            if not path.exists() or (anchor and anchor not in anchors(path)):
                lost.append(f"{document.relative_to(ROOT)}: {target}#{anchor}")
    assert not lost


def test_every_kind_of_fault_names_tests_that_exist():
    rows = [line for line in (DOCS / "faults.md").read_text(encoding="utf-8").splitlines() if "tests/" in line]
    assert len(rows) == 17, "a row for each kind"
    for line in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", line)
        assert named, line
        for file, name in named:
            assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.M), (file, name)


def test_the_oldest_transformers_is_the_same_everywhere():
    project, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "Makefile"))
    stated = re.search(r"transformers>=([\d.]+)", project)[1]
    tested = re.search(r"OLDEST_TRANSFORMERS := ([\d.]+)", makefile)[1]
    assert stated == compat.OLDEST
    assert tested == f"{stated}.0"
