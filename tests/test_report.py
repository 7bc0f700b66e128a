"""The report: what stands in the page, that it needs nothing from outside, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from kvslim.errors import InputError
from kvslim.report.figures import draw
from kvslim.report.sources import read_sources
from kvslim.report.tables import sheets

KL = {"slim4": (4.5, 0.002), "int8": (8.1, 0.001), "int4": (4.6, 0.2), "none": (16.0, 0.0)}
QUALITY = {
    "model": "small/model <1>",
    "command": "kvslim eval quality --recipe 'slim4,int8'",
    "versions": {"kvslim": "1.2.3"},
    "rows": [
        {"recipe": name, "bits_per_value": bits, "bits_per_value_packed": bits - 0.2, "kl_mean": kl, "top1": 0.97}
        for name, (bits, kl) in KL.items()
    ],
}
PLAN = {
    "kind": "plan",
    "model": "small",
    "command": "kvslim plan",
    "rows": [
        {
            "recipe": name,
            "bits_per_value": 4,
            "nbytes": nbytes << 20,
            "longest_context": None,
            "curve": [{"context": context, "nbytes": nbytes * context} for context in (256, 1024)],
        }
        for name, nbytes in (("16 bit", 16), ("slim4", 4))
    ],
}
NEEDLE = {
    "kind": "needle",
    "model": "small",
    "rows": [
        {"recipe": recipe, "mode": mode, "tokens": tokens, "depth": depth, "found": recipe == "none" or depth < 0.5}
        for recipe in ("none", "slim2")
        for mode in ("single", "multi")
        for tokens in (1024, 2048)
        for depth in (0.25, 0.75)
    ],
}
BENCH = {
    "model": "small",
    "rows": [
        {
            "kind": "bench-decode",
            "cache": cache,
            "context": context,
            "batch": batch,
            "decode_tokens_per_s": speed,
            "peak_nbytes": 5 << 20,
        }
        for cache, speed in (("16 bit", 9.5), ("slim4", 7.25), ("withheld", None))
        for context in (256, 1024)
        for batch in (1, 4)
    ],
}
TOOLS = {"kind": "tools", "model": "small", "rows": [{"recipe": "slim4", "valid": 39, "share": 0.975, "broken": [1]}]}
DRIFT = {"kind": "drift", "model": "small", "summary": [{"recipe": "slim3", "first": 17}], "rows": [{"recipe": "x"}]}
ALL = {"quality": QUALITY, "plan": PLAN, "needle": NEEDLE, "bench": BENCH, "tools": TOOLS, "drift": DRIFT}
FIGURES = [
    "quality-small-model-1--held",
    "quality-small-model-1--packed",
    "plan-small",
    "needle-small-single",
    "needle-small-multi",
    "decode-small-batch1",
    "decode-small-batch4",
]


@pytest.fixture
def files(tmp_path):
    paths = []
    for name, data in ALL.items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(data))
    return paths


@pytest.fixture
def page(run, files, tmp_path):
    code, _, _ = run("report", *map(str, files), "-o", str(tmp_path / "report.html"))
    assert code == 0
    return tmp_path / "report.html"


class Page(HTMLParser):
    """Figures, texts per element, and everything that an element refers to."""

    def __init__(self, text):
        super().__init__()
        self.figures, self.references, self.ids, self.open, self.texts = [], [], [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.figures += [found["data-name"]] if "data-name" in found else []
        self.references += [found[name] for name in ("src", "href", "xlink:href", "srcset", "data") if name in found]

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def test_the_page_has_every_figure_table_and_command_and_needs_nothing_from_outside(page):
    text = page.read_text()
    found = Page(text)
    assert found.figures == FIGURES
    assert text.count("<svg") == text.count("</svg>") == len(FIGURES)
    assert all(reference.startswith(("#", "data:")) for reference in found.references)
    assert not re.search(r"https?:|@import|<script|url\((?!#)", text)
    assert len(set(found.ids)) == len(found.ids)
    assert {reference[1:] for reference in found.references if reference[0] == "#"} <= set(found.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(found.ids)
    assert "kvslim eval quality --recipe 'slim4,int8'" in found.texts["pre"]
    assert any("does not name its command" in line for line in found.texts["pre"])
    assert "small/model <1>" in found.texts["caption"]
    assert {"0.00200", "97.0%", "7.25", "39", "17", "4 of 4", "2 of 4"} <= set(found.texts["td"])
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text


def test_every_recipe_is_a_labelled_point_and_those_that_nothing_beats_are_joined(files):
    picture = draw(read_sources(files[:1]))[0]
    axes = picture.figure.axes[0]
    assert {label.get_text() for label in axes.texts} == set(KL)
    front = axes.lines[0].get_xydata()[:, 0]
    assert [float(bits) for bits in front] == [4.5, 8.1, 16.0], "int4 is beaten by slim4 in both"
    packed = draw(read_sources(files[:1]))[1].figure.axes[0]
    assert packed.lines[0].get_xydata()[0, 0] == pytest.approx(4.3)
    lowest = min(line.get_ydata()[0] for line in axes.lines[1:])
    assert 0 < lowest < 0.001, "what is exact stands at the foot of a logarithmic axis"


def test_lines_and_cells_show_the_numbers_of_the_files(files):
    pictures = {picture.name: picture.figure for picture in draw(read_sources(files))}
    lines = pictures["plan-small"].axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[16 * 256 / 2**20, 16 / 1024], [4 * 256 / 2**20, 4 / 1024]]
    speeds = pictures["decode-small-batch4"].axes[0].lines
    assert {line.get_label(): list(line.get_ydata()) for line in speeds} == {
        "16 bit": [9.5, 9.5],
        "slim4": [7.25, 7.25],
    }
    exact, lossy = pictures["needle-small-multi"].axes
    assert (exact.get_title(), lossy.get_title()) == ("none", "slim2")
    assert lossy.images[0].get_array().tolist() == [[1, 1], [0, 0]]


def test_the_same_results_give_the_same_bytes(files, tmp_path):
    once, again = draw(read_sources(files)), draw(read_sources(files))
    assert [picture.svg() for picture in once] == [picture.svg() for picture in again]
    (tmp_path / "once").mkdir()
    (tmp_path / "again").mkdir()
    for one, other in zip(once, again, strict=True):
        assert one.png(tmp_path / "once").read_bytes() == other.png(tmp_path / "again").read_bytes()


def test_images_are_written_beside_the_page(run, files, tmp_path):
    out, folder = tmp_path / "page.html", tmp_path / "deep" / "images"
    code, text, _ = run("report", *map(str, files), "-o", str(out), "--png", str(folder), "--json")
    found = json.loads(text)
    assert code == 0
    assert found["figures"] == FIGURES
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.png" for name in FIGURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_later_files_win_and_columns_without_numbers_are_left_out(files, tmp_path):
    newer = json.loads(json.dumps(QUALITY))
    newer["rows"] = [{**QUALITY["rows"][0], "kl_mean": 0.5}]
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    table = sheets(read_sources([files[0], tmp_path / "newer.json"]))[0]
    assert table.headings == ("recipe", "bits held", "bits packed", "KL", "top-1")
    assert [row[3] for row in table.rows] == ["0.50000", "0.00100", "0.20000", "0.00000"]


def test_two_runs_of_a_benchmark_are_two_figures(files):
    pictures = draw(read_sources([files[3], files[3]]))
    assert [picture.name for picture in pictures] == [
        "decode-small-batch1",
        "decode-small-batch4",
        "decode-small-batch1-2",
        "decode-small-batch4-2",
    ]


BAD = {
    "no JSON": ("{", "is not JSON"),
    "not text": (b"\xff\xfe", "is not JSON"),
    "a list": ("[1]", "has no 'rows'"),
    "no rows": ('{"kind": "plan", "rows": []}', "has no 'rows'"),
    "foreign rows": ('{"rows": [{"a": 1}]}', "kind 'none'"),
    "unknown kind": ('{"kind": "weather", "rows": [{"a": 1}]}', "kind 'weather'"),
    "a key missing": (
        '{"kind": "needle", "rows": [{"recipe": "a", "mode": "b"}]}',
        "row 1 of kind 'needle' has no 'tokens'",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_foreign_files_are_refused_by_name(run, tmp_path, content, message):
    path = tmp_path / "foreign.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run("report", str(path), "-o", str(tmp_path / "report.html"))
    assert (code, out) == (2, "")
    assert "foreign.json" in err
    assert message in err
    assert not (tmp_path / "report.html").exists()


def test_missing_files_and_places_that_cannot_be_written_are_named(run, files, tmp_path):
    assert "absent.json" in run("report", str(tmp_path / "absent.json"))[2]
    code, _, err = run("report", str(files[0]), "-o", str(tmp_path / "nowhere" / "report.html"))
    assert code == 2
    assert "nowhere" in err


def test_without_matplotlib_the_message_names_the_extra(monkeypatch, files):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"kvslim\[plots\]"):
        draw(read_sources(files))


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed on this machine")
def test_a_browser_opens_the_page_without_a_word(page, tmp_path):
    def opened(path):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        return subprocess.run(
            [*command, profile, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )

    broken = tmp_path / "broken.html"
    broken.write_text("<script>nothing()</script>")
    assert "CONSOLE" in opened(broken).stderr, "else the line below would say nothing"
    done = opened(page)
    assert "CONSOLE" not in done.stderr
    assert Page(done.stdout).figures == FIGURES
