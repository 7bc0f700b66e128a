"""Options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvslim.eval.peers import PEERS
from kvslim.models import MODELS
from kvslim.presets import DEFAULT_RECIPE

DEFAULT_MODEL = next(iter(MODELS))
_SHORT = ", ".join(MODELS)

Model = Annotated[
    str, typer.Option("--model", "-m", help=f"Short name ({_SHORT}), folder, .gguf file or hub id.", show_default=True)
]
Recipe = Annotated[
    str, typer.Option("--recipe", "-r", help="Preset, pair such as k8v4, or recipe string; see `kvslim recipes`.")
]
Recipes = Annotated[
    str, typer.Option("--recipe", "-r", help="One or more of these, with commas between: preset, pair, recipe string.")
]
Against = Annotated[
    str | None,
    typer.Option("--against", help=f"Quantized caches of other projects, with commas between: {', '.join(PEERS)}."),
]
Key = Annotated[str | None, typer.Option("--key", help="Pack keys as another preset, bit count or side string.")]
Value = Annotated[str | None, typer.Option("--value", help="Pack values as another preset, bit count or side string.")]
Weights = Annotated[str, typer.Option("--weights", help="Weight quantization by transformers: none, nf4, int8, gguf.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.")]
ModelsDir = Annotated[
    Path | None,
    typer.Option("--models-dir", envvar="KVSLIM_MODELS", help="Folder of the fetched models.", show_default=False),
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", min=0.0, help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed for sampling.")]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="UTF-8 text file; by default the documentation inside Python.")
]
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Prompts per forward pass.")]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume", "--out", "-o", help="File (JSON lines) that keeps every finished case; run again with it to go on."
    ),
]
LoadCache = Annotated[
    Path | None, typer.Option("--load-cache", help="Go on from a cache that --save-cache wrote, with its recipe.")
]
SaveCache = Annotated[
    Path | None, typer.Option("--save-cache", help="Write the packed cache, with its tokens, to a file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]

RECIPE = DEFAULT_RECIPE
