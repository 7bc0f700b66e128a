"""Codecs and transforms of other packages, found by their entry points: the worked example, and what goes wrong."""

import runpy
from pathlib import Path

import pytest
import torch

import kvslim
from kvslim.codecs import CODECS, build_codec
from kvslim.errors import RecipeError
from kvslim.integrations.transformers import compat
from kvslim.recipe import Side
from kvslim.testing import check_codec, check_recipe
from kvslim.transforms import TRANSFORMS
from tiny_models import config_of, pair, prompt

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "kvslim-midrise"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package where Python looks for installed ones: its modules, and its entry points as an installer writes them."""

    def call(package: str, points: dict[str, dict[str, str]], **modules: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    return call


@pytest.fixture
def midrise(install):
    """The example, installed."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(project["name"], project["entry-points"], kvslim_midrise=(EXAMPLE / "kvslim_midrise.py").read_text())


def test_the_example_is_found_and_conforms(midrise):
    assert "midrise" in CODECS
    assert list(CODECS)[-1] == "midrise"
    codec = build_codec(Side.parse("midrise:3"))
    assert (type(codec).__name__, codec.bits) == ("MidriseCodec", 3)
    with pytest.raises(RecipeError, match="Did you mean 'midrise'"):
        build_codec(Side.parse("midris:3"))


def test_the_examples_own_tests_pass(midrise):
    tests = runpy.run_path(str(EXAMPLE / "test_midrise.py"))
    for bits in (2, 3, 4, 8):
        tests["test_codec"](bits)
    tests["test_recipe"]()


def test_the_example_packs_a_model(midrise):
    packed, stock = pair("llama")
    cache = kvslim.KVCache(packed, "k=rotate/midrise:8+v=midrise:8+block=16+recent=0")
    ids = prompt(1, 60)
    with torch.no_grad():
        packed(ids[:, :50], **{compat.CACHE_ARGUMENT: cache})
        got = packed(ids[:, 50:], **{compat.CACHE_ARGUMENT: cache}).logits
        want = stock(ids).logits[:, 50:]
    assert float((got - want).abs().max()) < 0.5
    assert cache.report().bits_per_value_packed == pytest.approx(8.5)


def test_the_page_shows_the_examples_files():
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for name in ("kvslim_midrise.py", "test_midrise.py"):
        assert (EXAMPLE / name).read_text() in page, name
    assert '[project.entry-points."kvslim.codecs"]\nmidrise = "kvslim_midrise:MidriseCodec"' in page


def test_without_the_package_its_codec_is_unknown():
    with pytest.raises(RecipeError, match="unknown codec 'midrise'"):
        check_recipe("k=midrise:4+v=none")


TRANSFORM = """
from dataclasses import dataclass
from kvslim.transforms.base import Fitted, Transform

@dataclass(frozen=True)
class Double(Transform):
    by: int = 2
    def fit(self, sample):
        return Doubled(self.by)
    def restore(self, saved):
        return Doubled(self.by)

class Doubled(Fitted):
    def __init__(self, by):
        self.by = by
    def forward(self, x, starts=None):
        return x * self.by
    def query(self, q):
        return q / self.by, None
    def output(self, acc, mass):
        return acc / self.by
"""


def test_a_transform_of_another_package(install):
    install("doubling", {"kvslim.transforms": {"double": "doubling:Double"}}, doubling=TRANSFORM)
    assert "double" in TRANSFORMS and "double" not in CODECS
    check_recipe("k=double/affine:4+v=double:by=4/rotate/affine:4")


def test_a_transform_that_lacks_a_method_is_named_with_it(install):
    text = TRANSFORM.replace("def restore", "def restored").replace("Double", "Doubler")
    install("unfinished", {"kvslim.transforms": {"doubler": "unfinished:Doubler"}}, unfinished=text)
    with pytest.raises(RecipeError, match="'doubler' cannot be made.*restore"):
        check_recipe("k=doubler/affine:4+v=none")


def test_a_package_that_does_not_import_is_an_error_only_where_it_is_asked_for(install):
    install("broken", {"kvslim.codecs": {"crash": "crashing:Codec"}}, crashing="import no_such_module_anywhere")
    check_codec("affine:4")
    kvslim.KVCache(config_of("llama"), "int8")
    with pytest.raises(
        RecipeError, match=r"codec 'crash' of package broken 1\.0 \(crashing:Codec\) failed to import: Mod.*repair"
    ) as caught:
        check_codec("crash:4")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    "target", ["harmless:MissingName", "harmless:number", "harmless:NoCodec", "harmless:NoDataclass"]
)
def test_something_else_in_place_of_a_codec(install, target):
    module = "from kvslim.codecs.base import Codec\nnumber = 4\nclass NoCodec: pass\nclass NoDataclass(Codec): pass\n"
    install("harmless", {"kvslim.codecs": {"other": target}}, harmless=module)
    with pytest.raises(
        RecipeError,
        match=r"codec 'other' of package harmless.*(is no codec: expected a frozen dataclass|AttributeError)",
    ):
        check_codec("other")


def test_a_name_that_is_built_in(install):
    install("grabby", {"kvslim.codecs": {"affine": "kvslim_midrise:MidriseCodec"}})
    check_recipe("kvarn4")
    with pytest.raises(RecipeError, match=r"codec 'affine' is built in and offered by package grabby 1\.0; uninstall"):
        check_codec("affine:4")


def test_a_name_that_two_packages_offer(install, midrise):
    install("second", {"kvslim.codecs": {"midrise": "nowhere:Codec"}})
    with pytest.raises(
        RecipeError, match=r"codec 'midrise' is offered by package second 1\.0, package kvslim-midrise 1\.0"
    ):
        check_codec("midrise")
