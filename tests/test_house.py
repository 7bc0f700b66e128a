"""House law: who may import whom, what ARCHITECTURE.md says lies on the disk, and what no file may contain."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kvslim"

# From left to right; a place may import itself, its own group and what stands to its left.
ORDER = (
    {
        "errors",
        "layout",
        "bitpack",
        "registry",
        "recipe",
        "presets",
        "calibration",
        "files",
        "header",
        "wheels",
        "models",
    },
    {"transforms"},
    {"codecs"},
    {"kernels"},
    {"store"},
    {"attention"},
    {"policy"},
    {"cache"},
    {"integrations"},
    {"testing"},
    {"eval"},
    {"bench"},
    {"tune"},
    {"report"},
    {"serve"},
    {"cli"},
)
RANK = {place: rank for rank, group in enumerate(ORDER) for place in group}
FACE = {"__init__", "__main__"}  # the public face looks at everything


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def place_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_places(module: Path) -> set[str]:
    """First names below `kvslim` that a module imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "kvslim":
            names = [f"kvslim.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found.update(name.split(".")[1] for name in names if name.startswith("kvslim."))
    return found


def test_every_module_has_its_place_in_the_order():
    unknown = {place_of(module) for module in modules()} - set(RANK) - FACE
    assert not unknown, f"{unknown} stand nowhere in ORDER; put them where ARCHITECTURE.md says"


@pytest.mark.parametrize("module", modules(), ids=lambda module: str(module.relative_to(PACKAGE)))
def test_nothing_imports_to_its_right(module):
    place = place_of(module)
    if place in FACE:
        return
    right = {other for other in imported_places(module) if RANK.get(other, -1) > RANK[place]}
    assert not right, f"{module.relative_to(ROOT)} imports {right}, which stand to the right of '{place}'"


def tree() -> list[str]:
    """Paths of ARCHITECTURE.md's ```tree block, one at the start of each line."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```tree\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks, "ARCHITECTURE.md has no ```tree block"
    return [line.split()[0].rstrip("/") for block in blocks for line in block.splitlines() if line.strip()]


def test_every_path_of_the_tree_exists():
    missing = [path for path in tree() if not (ROOT / path).exists()]
    assert not missing, f"ARCHITECTURE.md's tree lists what is not there: {missing}"


def test_every_module_is_in_the_tree():
    """A folder may stand for its modules, but not once one of them is listed; the package itself stands for none."""
    listed = set(tree())
    spelled_out = {"src/kvslim", *(Path(path).parent.as_posix() for path in listed if path.endswith(".py"))}
    lost = []
    for module in modules():
        path = module.relative_to(ROOT)
        folder = path.parent.as_posix()
        if path.as_posix() in listed or path.name == "__init__.py":
            continue
        if folder in spelled_out or folder not in listed:
            lost.append(path.as_posix())
    assert not lost, f"ARCHITECTURE.md's tree leaves out {lost}"


def repository_files() -> list[Path]:
    """Files git knows or would take, as far as they are text."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


# written in pieces, so that this file does not contain what it forbids
FORBIDDEN = {
    "a package registry's host": re.compile(
        r"(py" + r"pi\.org|python" + r"hosted\.org|npm" + r"js\.org|crates" + r"\.io)"
    ),
    "a path of one machine": re.compile(r"(?<![\w.~-])/(wo" + r"rk|tm" + r"p|ro" + r"ot|home/\w+)/"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in repository_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, f"{what}: {found}"
