"""`kvslim demo`: what packing the cache saves and costs, on one long prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options
from kvslim.presets import DEFAULT_RECIPE, PRESETS

if TYPE_CHECKING:
    from rich.console import Console

    from kvslim.eval.demo import Answer

_SHOWN = (DEFAULT_RECIPE, "slim3", "kivi4", "turbo4")  # the last one as what not to do
_DEFAULT = ",".join(name for name in dict.fromkeys(_SHOWN) if name in PRESETS)
_UNUSABLE_TOP1 = 0.5
_COLUMNS = (
    *("bits per\nvalue", "held\nMiB", "of\n16 bits", "peak\nMiB"),
    *("prefill\ntok/s", "decode\ntok/s", "KL", "top-1"),
)


def demo(
    model: options.Model = options.DEFAULT_MODEL,
    recipe: options.Recipes = _DEFAULT,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Length of the answers.")] = 48,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer one long prompt with the 16-bit cache and with several recipes, and compare them.

    The prompt is 2,000 tokens of Python's own documentation with a question about it. Takes two to three minutes on two
    CPU cores with the default model.
    """
    from kvslim.cli.compare import progress_bar, read_recipes

    recipes = read_recipes(recipe)
    from kvslim.eval.demo import Demo
    from kvslim.integrations.transformers.loading import load_model

    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    run = Demo(loaded.model, loaded.tokenizer, max_new_tokens=max_new_tokens)
    with progress_bar("answering", (1 + len(recipes)) * run.tokens_per_answer) as advance:
        answers = run.run(recipes, advance)
    prompt_tokens = len(run.prompt.ids)
    if as_json:
        rows = [{**answer.to_dict(), "note": _verdict(answer)} for answer in answers]
        typer.echo(json.dumps({"model": loaded.name, "prompt_tokens": prompt_tokens, "rows": rows}, ensure_ascii=False))
    else:
        _show(f"{loaded.name}, a prompt of {prompt_tokens:,} tokens", str(loaded.model.dtype), answers, run.scored)


def _verdict(answer: Answer) -> str:
    """Say what is wrong with an answer, from what was measured and from the presets' table."""
    from kvslim.cli.compare import note_of

    if answer.top1 >= _UNUSABLE_TOP1:
        return note_of(answer.recipe)
    return ": ".join(part for part in ("unusable on this model", note_of(answer.recipe)) if part)


def _show(title: str, dtype: str, answers: list[Answer], scored: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=title, title_justify="left")
    table.add_column("recipe", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for answer in answers:
        table.add_row(answer.recipe, *_cells(answer))
    console.print(table)
    console.print(
        f"Bits per value: everything held, exact tokens included. 16 bits are counted at 2 bytes per value; the model "
        f"computes in {dtype.removeprefix('torch.')}, and a peak counts the one layer that is dense during prefill at "
        f"that width. KL and top-1 agreement: against 16 bits, over {scored} tokens (the 16-bit answer, then more of "
        "the text).",
        highlight=False,
    )
    for answer in answers:
        _show_text(console, answer)


def _show_text(console: Console, answer: Answer) -> None:
    verdict = _verdict(answer)
    console.print(f"\n{answer.recipe}", style="bold", markup=False, highlight=False, end="")
    console.print(f"  ({verdict})" if verdict else "", style="yellow", markup=False, highlight=False)
    console.print(answer.text.strip(), markup=False, highlight=False)


def _cells(answer: Answer) -> tuple[str, ...]:
    holding = answer.holding
    return (
        f"{holding.bits_per_value:.2f}",
        f"{holding.nbytes / 2**20:.2f}",
        f"{holding.nbytes / holding.nbytes_16bit:.0%}",
        f"{holding.peak_nbytes / 2**20:.2f}",
        f"{answer.prefill_tokens_per_s:,.0f}",
        f"{answer.decode_tokens_per_s:.1f}",
        f"{answer.kl_mean:.4f}",
        f"{answer.top1:.1%}",
    )
