"""`kvslim calibrate`: take a model's key and query statistics once, into a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvslim.cli import options


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write (.safetensors).")],
    model: options.Model = options.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option("--text", help="UTF-8 text file; random token ids without, which serve as well.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=256, help="Tokens of the text to use.")] = 1024,
    weights: options.Weights = "none",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    models_dir: options.ModelsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Record means, balance and E[q q^T] of every layer.

    Give the file to `KVCache(model, recipe, calibration=FILE)`. Without a file, kvslim takes the same statistics from
    random token ids when a recipe first needs them, and keeps them for the model.
    """
    from rich.console import Console

    from kvslim.eval.quality import tokenize
    from kvslim.eval.text import load_text
    from kvslim.integrations.transformers import calibrate as statistics
    from kvslim.integrations.transformers.loading import load_model

    content = None if text is None else load_text(text)
    loaded = load_model(model, weights=weights, dtype=dtype, device=device, models_dir=models_dir)
    ids = None if content is None else tokenize(loaded.tokenizer, content)[:tokens]
    source = "random ids" if content is None else content.name
    with Console(stderr=True).status("calibrating") as status:
        found = statistics.calibrate(
            loaded.model, ids, source, progress=lambda what: status.update(f"calibrating: {what}")
        )
    found.save(out)
    layers = len(found.layers)
    rotary = sum("rope_frequency" in each for each in found.layers.values())
    if as_json:
        facts = {"file": str(out), "nbytes": out.stat().st_size, "model": loaded.name, "source": source}
        facts |= {
            "tokens": found.tokens,
            "layers": layers,
            "layers_with_rope": rotary,
            "fingerprint": found.fingerprint,
        }
        typer.echo(json.dumps(facts))
    else:
        typer.echo(
            f"{out}: {layers} layers of {loaded.name} from {found.tokens} tokens ({source}); "
            f"rotary positions understood in {rotary} of {layers}"
        )
