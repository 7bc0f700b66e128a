"""Figures of a report, drawn with matplotlib (the extra ``plots``) without any of its global state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from kvslim.errors import InputError
from kvslim.report.sources import Source, by_model

_INK = "#1a2b3c"  # text and axes; in the page it gives way to the colour of the text around it
_BITS = (  # name, key, label
    ("held", "bits_per_value", "bits per value, everything held"),
    ("packed", "bits_per_value_packed", "bits per value, sealed blocks alone"),
)
_LINES = ("-", "--", ":", "-.")  # after ten colours
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvslim",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "figure.dpi": 100,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "axes.facecolor": "none",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.color": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Picture:
    """One figure.

    Attributes
    ----------
    kind : str
        Of the results it shows.
    name : str
        Unique in a report; file name of the PNG.
    caption : str
    figure : matplotlib.figure.Figure
    """

    kind: str
    name: str
    caption: str
    figure: Any

    def svg(self) -> str:
        """Markup to put into a page: no prolog, no links, ids of its own, ink in the page's text colour."""
        text = StringIO()
        with _style():
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        markup = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue()[text.getvalue().index("<svg") :], flags=re.S)
        root, rest = markup.split(">", 1)
        root = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", root)
        rest = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{self.name}-", rest)
        return f'{root} role="img">{rest}'.replace(_INK, "currentColor").rstrip()

    def png(self, folder: Path) -> Path:
        """Write a PNG and return its path; the same figure gives the same bytes."""
        path, content = folder / f"{self.name}.png", BytesIO()
        with _style():
            self.figure.savefig(content, format="png", dpi=150, facecolor="white", metadata={"Software": None})
        path.write_bytes(content.getvalue())
        return path


def draw(sources: Iterable[Source]) -> list[Picture]:
    """Draw all figures that the results are good for.

    Raises
    ------
    InputError
        matplotlib is not installed.
    """
    found = list(sources)
    with _style():
        pictures = [
            *(one for model, rows in by_model(found, "quality").items() for one in _paretos(model, rows)),
            *(_memory(model, rows) for model, rows in by_model(found, "plan").items()),
            *(picture for source in found if source.kind == "needle" for picture in _needles(source)),
            *(picture for source in found if source.kind == "bench-decode" for picture in _speeds(source)),
        ]
    names = Counter[str]()
    for index, picture in enumerate(pictures):  # two runs of a benchmark are two figures
        names[picture.name] += 1
        if names[picture.name] > 1:
            pictures[index] = replace(picture, name=f"{picture.name}-{names[picture.name]}")
    return pictures


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError(
            "figures are drawn with matplotlib, which is not installed; run `pip install 'kvslim[plots]'`"
        ) from error
    with mpl.rc_context(_STYLE):
        yield


def _axes(width: float = 7.0, height: float = 4.2) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.add_subplot()


def _slug(text: str) -> str:
    """A name that may stand in an id and in a file name."""
    return re.sub(r"[^\w.+=-]+", "-", text)


def _line(index: int) -> dict[str, Any]:
    return {"color": f"C{index % 10}", "linestyle": _LINES[index // 10 % len(_LINES)], "marker": "o", "markersize": 3.5}


def _paretos(model: str, rows: dict[str, dict[str, Any]]) -> Iterator[Picture]:
    """Bits against divergence, counted in two ways: a short context or a window layer hides what packing does."""
    for name, key, axis in _BITS:
        caption = f"{model}: KL against bits {name}; lower and further left is better, the best stand in blue"
        yield Picture("quality", _slug(f"quality-{model}-{name}"), caption, _pareto(rows, key, axis))


def _pareto(rows: dict[str, dict[str, Any]], key: str, axis: str) -> Any:
    """One of them. What is exact has no place on a logarithmic axis and stands at its foot."""
    figure, axes = _axes()
    foot = min((row["kl_mean"] for row in rows.values() if row["kl_mean"] > 0), default=1e-6) / 3
    points = {name: (row[key], max(row["kl_mean"], foot)) for name, row in rows.items()}
    front = [name for name in points if not any(_beats(other, points[name]) for other in points.values())]
    ordered = sorted(points[name] for name in front)
    axes.set(yscale="log", xlabel=axis, ylabel="KL to 16 bits, nats per token")
    axes.step(*zip(*ordered, strict=True), where="post", color="C0", alpha=0.5, linewidth=1)
    for name, point in points.items():
        axes.plot(*point, "o", markersize=5, color="C0" if name in front else "C1", gid=f"point-{name}")
    axes.margins(x=0.15, y=0.12)
    _label(figure, axes, points)
    return figure


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _label(figure: Any, axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Name every point to its right, moved up where a name below it is in the way."""
    figure.draw_without_rendering()
    taken: list[tuple[float, float]] = []
    for name, point in sorted(points.items(), key=lambda item: item[1][1]):
        x, y = axes.transData.transform(point)
        height = y
        for left, low in sorted(taken, key=lambda place: place[1]):
            if abs(left - x) < 70 and abs(low - height) < 10:
                height = low + 10
        taken.append((x, height))
        axes.annotate(
            name,
            point,
            xytext=(5, (height - y) * 72 / figure.dpi + 2),
            textcoords="offset points",
            fontsize=7,
        )


def _memory(model: str, rows: dict[str, dict[str, Any]]) -> Picture:
    """Bytes held against context."""
    figure, axes = _axes()
    for index, (name, row) in enumerate(rows.items()):
        contexts = [point["context"] for point in row["curve"]]
        axes.plot(contexts, [point["nbytes"] / 2**20 for point in row["curve"]], label=name, **_line(index))
    axes.set(xlabel="tokens per sequence", ylabel="MiB held at most")
    _log_scales(axes)
    axes.legend()
    return Picture("plan", _slug(f"plan-{model}"), f"{model}: memory of the cache against context", figure)


def _log_scales(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _speeds(source: Source) -> Iterator[Picture]:
    """Decode speed against context, one figure per batch. Withheld figures are left out."""
    measured = [row for row in source.rows if row.get("decode_tokens_per_s") is not None]
    for batch in sorted({row["batch"] for row in measured}):
        figure, axes = _axes()
        rows = [row for row in measured if row["batch"] == batch]
        for index, name in enumerate(dict.fromkeys(row["cache"] for row in rows)):
            line = sorted((row["context"], row["decode_tokens_per_s"]) for row in rows if row["cache"] == name)
            axes.plot(*zip(*line, strict=True), label=name, **_line(index))
        axes.set(xlabel="tokens in the cache", ylabel="decoded tokens per second")
        axes.set_ylim(bottom=0)
        axes.legend()
        caption = f"{source.model}: decode speed, batch {batch}"
        yield Picture("bench-decode", _slug(f"decode-{source.model}-batch{batch}"), caption, figure)


def _needles(source: Source) -> Iterator[Picture]:
    """Heat maps of depth against length, one per recipe, one figure per mode."""
    from matplotlib.figure import Figure

    recipes = list(dict.fromkeys(row["recipe"] for row in source.rows))
    columns = min(len(recipes), 3)
    lines = -(-len(recipes) // columns)
    for mode in dict.fromkeys(row["mode"] for row in source.rows):
        figure = Figure((2.6 * columns + 0.6, 2.3 * lines + 0.3), layout="constrained")
        for index, recipe in enumerate(recipes):
            axes = figure.add_subplot(lines, columns, index + 1)
            _heat(axes, [row for row in source.rows if row["recipe"] == recipe and row["mode"] == mode])
            axes.set_title(recipe, fontsize=8)
        figure.supxlabel("prompt tokens", fontsize=9)
        figure.supylabel("depth of the fact", fontsize=9)
        yield Picture("needle", _slug(f"needle-{source.model}-{mode}"), f"{source.model}: facts found, {mode}", figure)


def _heat(axes: Any, rows: list[dict[str, Any]]) -> None:
    lengths, depths = sorted({row["tokens"] for row in rows}), sorted({row["depth"] for row in rows})
    shares = [[_share(rows, length, depth) for length in lengths] for depth in depths]
    axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    for line, values in enumerate(shares):
        for column, share in enumerate(values):
            if share == share:  # not measured is not a number
                color = "black" if share > 0.5 else "white"
                axes.text(column, line, f"{share:.0%}", ha="center", va="center", fontsize=7, color=color)


def _share(rows: list[dict[str, Any]], length: int, depth: float) -> float:
    here = [row for row in rows if row["tokens"] == length and row["depth"] == depth]
    cases = sum(row.get("cases", 1) for row in here)
    return sum(row["found"] for row in here) / cases if cases else float("nan")
