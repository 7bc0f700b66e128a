"""`kvslim plan`: what fits in memory, from a model's config or bare numbers; nothing is loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvslim.cli import options
from kvslim.cli.command import command_of
from kvslim.cli.sizes import parse_size, show_size
from kvslim.errors import InputError, did_you_mean
from kvslim.presets import DEFAULT_RECIPE

if TYPE_CHECKING:
    from kvslim.eval.budget import Memory, Planned
    from kvslim.integrations.transformers.shapes import ModelShape
    from kvslim.store.sizes import Feed

_DEFAULT = ",".join(dict.fromkeys((DEFAULT_RECIPE, "slim3", "slim2", "int8")))


def plan(
    run: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Short name, folder, .gguf file or hub id; only its config is read."),
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Full-attention layers, instead of a model.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Key-value heads of each.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Channels of a head.")] = None,
    value_head_dim: Annotated[int | None, typer.Option("--value-head-dim", help="Of V, where it differs.")] = None,
    recipe: options.Recipes = _DEFAULT,
    context: Annotated[int | None, typer.Option("--context", "-c", help="Tokens per sequence.")] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences.")] = 1,
    chunk: Annotated[int | None, typer.Option("--chunk", help="Tokens per pass of the prompt; all in one.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=0, help="Those of the context that are decoded.")] = 0,
    memory: Annotated[str | None, typer.Option("--memory", help="Room for weights and cache, such as 12GiB.")] = None,
    weights: Annotated[str, typer.Option("--weights", help="Of the model: 16bit, int8 or nf4.")] = "16bit",
    dtype: Annotated[
        str, typer.Option("--dtype", help="That the model computes in: auto (16 bits), float32, float16, bfloat16.")
    ] = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Say what caches take, and how long a context fits in memory.

    Counted exactly as `cache.report()` would count after a prompt of --context tokens; with --memory also the longest
    context that leaves room for the weights. Activations come on top.
    """
    from kvslim.cli.compare import read_recipes

    recipes, budget = read_recipes(recipe), None if memory is None else parse_size(memory, "--memory")
    from kvslim.eval.budget import Memory, ask, default_feed, result
    from kvslim.store.sizes import Feed

    shape = _shape(model, (layers, kv_heads, head_dim, value_head_dim), weights, dtype)
    left = None if budget is None else Memory.of(budget, shape, weights)
    feed = (
        default_feed(shape, Feed(new_tokens + 1, batch, chunk, new_tokens), left)
        if context is None
        else Feed(context, batch, chunk, new_tokens)
    )
    rows = ask(shape, recipes, feed, left)
    if as_json:
        typer.echo(json.dumps({**result(shape, feed, weights, left, rows), "command": command_of(run)}))
    else:
        _show(shape, feed, weights, left, rows)


def _shape(
    model: str | None, numbers: tuple[int | None, int | None, int | None, int | None], weights: str, dtype: str
) -> ModelShape:
    """Shape of the model that is named or described."""
    import torch

    from kvslim.integrations.transformers.loading import load_config, named_dtype
    from kvslim.integrations.transformers.shapes import WEIGHTS, model_shape, plain_shape

    if weights not in WEIGHTS:
        raise InputError(f"unknown weights '{weights}'; use {', '.join(WEIGHTS)}.{did_you_mean(weights, WEIGHTS)}")
    chosen = named_dtype(dtype)
    layers, kv_heads, head_dim, value_head_dim = numbers
    if any(number is not None for number in numbers):
        if model is not None:
            raise InputError("--model and bare numbers (--layers ...) are both given; give one")
        if layers is None or kv_heads is None or head_dim is None:
            raise InputError("bare numbers must be --layers, --kv-heads and --head-dim together; one is missing")
        return plain_shape(layers, kv_heads, head_dim, value_head_dim, chosen or torch.bfloat16)
    name, config = load_config(model or options.DEFAULT_MODEL)
    own = config.get_text_config(decoder=True).dtype
    return model_shape(name, config, chosen or (own if own == torch.float16 else torch.bfloat16))


def _show(shape: ModelShape, feed: Feed, weights: str, memory: Memory | None, rows: list[Planned]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    sequences = f", {feed.batch} sequences" if feed.batch > 1 else ""
    table = Table(title=f"{shape.name}, {feed.context:,} tokens{sequences}", title_justify="left")
    table.add_column("recipe", overflow="fold")
    slides = any(layer.window is not None for layer in shape.layers)
    columns = [
        ("bits per value", lambda row: f"{row.size.bits_per_value:.2f}"),
        ("held", lambda row: show_size(row.size.nbytes)),
        ("of 16 bits", lambda row: _share(row, rows[0])),
        *([("held while decoding", lambda row: show_size(row.decoding_nbytes))] if slides else []),
        *([("longest context", lambda row: _longest(row.longest, shape))] if memory else []),
    ]
    for name, _ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.recipe, *(cell(row) for _, cell in columns))
    console.print(table)
    for line in _notes(shape, feed, weights, memory, rows):
        console.print(line, highlight=False, markup=False)


def _share(row: Planned, base: Planned) -> str:
    return f"{row.size.nbytes / base.size.nbytes:.0%}" if base.size.nbytes else ""


def _longest(tokens: int | None, shape: ModelShape) -> str:
    if not tokens:
        return "none"
    return f"{tokens:,}*" if tokens == shape.context else f"{tokens:,}"


def _notes(shape: ModelShape, feed: Feed, weights: str, memory: Memory | None, rows: list[Planned]) -> Iterator[str]:
    """What the table's figures rest on."""
    packed = sum(not layer.reason for layer in shape.layers)
    dtype = str(shape.dtype).removeprefix("torch.")
    yield (
        f"{packed} of {len(shape.layers)} layers packed; the model computes in {dtype}. Counted as cache.report() "
        "counts, exact tokens and parameters included; activations come on top."
    )
    reasons = Counter(layer.reason for layer in shape.layers if layer.reason)
    if reasons:
        yield "Not packed: " + "; ".join(f"{count} layers, {reason}" for reason, count in reasons.items()) + "."
    if memory is not None:
        yield _budget(shape, weights, memory)
        if any(row.longest == shape.context for row in rows):
            yield f"* the model's own context; more would fit, but it was made for {shape.context:,} tokens."
    if not feed.new_tokens and any(layer.window is not None for layer in shape.layers):
        yield (
            "Sliding layers keep the last pass of the prompt whole until the first token is decoded; --chunk says what "
            "feeding the prompt in pieces saves."
        )


def _budget(shape: ModelShape, weights: str, memory: Memory) -> str:
    counted = shape.parameters
    if counted is None:
        return f"All of {show_size(memory.nbytes)} for the cache: bare numbers name no weights."
    return (
        f"{show_size(memory.room_nbytes)} of {show_size(memory.nbytes)} for the cache: the {weights} weights take "
        f"{show_size(memory.weights_nbytes)}, estimated from {counted.total:,} parameters that the config makes, "
        f"{counted.linear:,} of them in linear layers."
    )
