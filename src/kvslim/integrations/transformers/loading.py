"""Loads a model and its tokenizer from wherever the user says, ready for a packed cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GgufConfig
from transformers.utils import logging as transformers_logging

from kvslim.errors import FetchError, InputError, KVSlimError, ModelFileError, did_you_mean
from kvslim.integrations.transformers.conversion import convert, converted, first_line
from kvslim.integrations.transformers.gguf_header import check_gguf
from kvslim.integrations.transformers.known_configs import CONFIGS
from kvslim.integrations.transformers.source import Source, find_source

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GGUF_PACKAGES = ("gguf", "accelerate")
_WEIGHT_PACKAGES = {
    "none": (),
    "nf4": ("bitsandbytes", "accelerate"),
    "int8": ("bitsandbytes", "accelerate"),
    "gguf": ("kernels", *_GGUF_PACKAGES),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes
    ----------
    model, tokenizer
        As transformers makes them.
    name : str
        Short name to show.
    source : str
        What the user named.
    """

    model: Any
    tokenizer: Any
    name: str
    source: str


def load_model(
    source: str,
    *,
    dtype: str | torch.dtype = "auto",
    weights: str = "none",
    attn_implementation: str = "kvslim",
    device: str | None = None,
    models_dir: Path | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Load a model by short name, local folder, ``.gguf`` file or hub id.

    Parameters
    ----------
    source : str
        A short name (see `kvslim.models`) is fetched if need be; a ``.gguf`` file is unpacked once, which takes about a
        minute, and its dense copy kept for the next start.
    dtype : str or torch.dtype, default "auto"
        ``auto`` is float32 on CPUs and 16 bits elsewhere: the checkpoint's own type, or bfloat16.
    weights : {"none", "nf4", "int8", "gguf"}, default "none"
        Weight quantization: transformers' own, independent of the cache's. ``gguf`` keeps GGUF weights packed.
    attn_implementation : str, default "kvslim"
        Attention implementation; only ``kvslim`` takes packed caches.
    device : str, optional
        ``cuda`` if there is one, else ``cpu``.
    models_dir : Path, optional
        Folder of the fetched models.
    progress : bool, default True
        Say on standard error what takes long.

    Raises
    ------
    ModelFileError
        If the file or folder is missing, broken or not a model.
    FetchError
        If it cannot be downloaded.
    InputError
        If an argument is not understood or needs a package that is missing.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked = named_dtype(dtype)
    _check_weights(weights)
    found = find_source(source, models_dir=models_dir, progress=progress)
    if weights == "gguf" and found.gguf is None:
        raise InputError(f"weights='gguf' needs a .gguf file, but '{source}' is none; use none, nf4 or int8")
    console = Console(file=sys.stderr, quiet=not progress)  # the file as it is now, see conversion.py
    with _quiet_transformers(found), _named_errors(found):
        where = _whereabouts(found, weights, console)
        with console.status(f"loading {found.name}"):
            config = AutoConfig.from_pretrained(**where)
            compute = asked or _auto_dtype(device, None if found.gguf else config.dtype)
            attention = {} if attn_implementation == "kvslim" else {"attn_implementation": attn_implementation}
            model, info = AutoModelForCausalLM.from_pretrained(
                **where,
                **attention,
                **_weight_quantization(weights, compute, device, found),
                dtype=compute,
                output_loading_info=True,
            )
            _check_complete(found, info)
            tokenizer = AutoTokenizer.from_pretrained(**where)
    if weights == "none":
        model.to(device)
    elif weights == "gguf" and model.hf_quantizer.quantization_config.dequantize:
        raise InputError(
            f"weights='gguf': transformers has no kernel to keep the weights of {found.name} packed on {device}; "
            "use weights='none'"
        )
    if attn_implementation == "kvslim":
        from kvslim.integrations.transformers import enable  # the package imports this module's siblings

        enable(model)
    return LoadedModel(model, tokenizer, found.name, source)


def load_config(source: str) -> tuple[str, Any]:
    """Name and config of a model, without its weights; a short name needs no file, a hub id only ``config.json``.

    Raises
    ------
    ModelFileError, FetchError, InputError
        As `load_model`.
    """
    if source in CONFIGS:
        values = dict(CONFIGS[source])
        return source, AutoConfig.for_model(values.pop("model_type"), **values)
    found = find_source(source)
    with _quiet_transformers(found), _named_errors(found):
        if found.gguf is None or (folder := converted(found.gguf)):
            place = found.place if found.gguf is None else str(folder)
            return found.name, AutoConfig.from_pretrained(place, local_files_only=not found.is_hub)
        _need(_GGUF_PACKAGES, f"{found.gguf.name} is a GGUF file, which")
        check_gguf(found.gguf)
        with Console(file=sys.stderr).status(f"reading the header of {found.gguf.name}"):
            return found.name, AutoConfig.from_pretrained(found.place, gguf_file=found.gguf.name)


def named_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype of that name; None for ``auto``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        allowed = ("auto", *DTYPES)
        raise InputError(f"unknown dtype '{dtype}'; use {', '.join(allowed)}.{did_you_mean(dtype, allowed)}")
    return DTYPES[dtype]


def _auto_dtype(device: str, checkpoint: torch.dtype | None) -> torch.dtype:
    if torch.device(device).type == "cpu":
        return torch.float32  # without 16-bit units in the CPU, bfloat16 prefill is three times slower
    return checkpoint if checkpoint in (torch.float16, torch.bfloat16) else torch.bfloat16


def _check_weights(weights: str) -> None:
    if weights not in _WEIGHT_PACKAGES:
        allowed = ", ".join(_WEIGHT_PACKAGES)
        raise InputError(f"unknown weights '{weights}'; use {allowed}.{did_you_mean(weights, _WEIGHT_PACKAGES)}")
    _need(_WEIGHT_PACKAGES[weights], f"weights='{weights}'")


def _need(packages: tuple[str, ...], what: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise InputError(f"{what} needs {' and '.join(missing)}; install with `pip install {' '.join(missing)}`")


def _weight_quantization(weights: str, compute: torch.dtype, device: str, found: Source) -> dict[str, Any]:
    """Arguments that make transformers itself quantize the weights, or keep them packed."""
    if weights == "none":
        return {}
    config: Any
    if weights == "gguf" and found.gguf is not None:
        config = GgufConfig(gguf_file=found.gguf.name)
    elif weights == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
        # it warns in every layer of every step that int8 rounds through float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return {"quantization_config": config, "device_map": {"": device}}


def _whereabouts(found: Source, weights: str, console: Console) -> dict[str, Any]:
    """Arguments that tell transformers where the model lies; a GGUF file is unpacked first unless it stays packed."""
    if found.gguf is None:
        return {"pretrained_model_name_or_path": found.place, "local_files_only": not found.is_hub}
    _need(_GGUF_PACKAGES, f"{found.gguf.name} is a GGUF file, which")
    if weights == "gguf":
        check_gguf(found.gguf)
        return {"pretrained_model_name_or_path": found.place, "gguf_file": found.gguf.name}
    folder = converted(found.gguf)
    if folder is None:
        check_gguf(found.gguf)
        console.print(f"unpacking {found.name} once, which takes about a minute; the next start is quick")
        with console.status("unpacking"):
            folder = convert(found.gguf)
    return {"pretrained_model_name_or_path": str(folder), "local_files_only": True}


def _check_complete(found: Source, info: dict[str, Any]) -> None:
    """Refuse a checkpoint with missing tensors, which transformers would fill with random numbers."""
    for problem in ("missing_keys", "mismatched_keys"):
        if info.get(problem):
            names = sorted(map(str, info[problem]))
            raise ModelFileError(
                f"{found.place} is incomplete: {len(names)} tensors are {problem.split('_')[0]}, the first is "
                f"{names[0]}; get the model again"
            )


@contextmanager
def _named_errors(found: Source) -> Iterator[None]:
    """Turn whatever a reader raises on a foreign or broken file into one message that names the model."""
    try:
        yield
    except KVSlimError:
        raise
    except Exception as error:  # readers of broken files raise anything
        reason = first_line(error)
        if found.is_hub:
            raise FetchError(
                f"cannot load '{found.place}' from the hub: {reason}. Check the id and the network, or name a local "
                "folder, a .gguf file or a short name"
            ) from error
        raise ModelFileError(
            f"{found.gguf or found.place} cannot be loaded: {reason}. It must hold a causal language model that this "
            "transformers reads; get it again or name another"
        ) from error


@contextmanager
def _quiet_transformers(found: Source) -> Iterator[None]:
    """Silence transformers' bars and warnings while a local model loads; a download from the hub keeps its bars."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not found.is_hub:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
