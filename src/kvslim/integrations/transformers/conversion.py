"""A dense copy of a GGUF file, made once: unpacking takes a minute, loading the copy takes seconds."""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from kvslim.errors import KVSlimError, ModelFileError
from kvslim.models import CACHE

_FORMAT = 1  # raise when copies made before must not be used any more
_SAMPLES, _SAMPLE_NBYTES = 64, 1 << 16


def converted(path: Path) -> Path | None:
    """Folder with the dense copy of the GGUF file `path`, or None if there is none yet."""
    folder = _folder(path)
    return folder if folder.is_dir() else None


def convert(path: Path) -> Path:
    """Unpack a GGUF file into float16 safetensors with its tokenizer, whole or not at all.

    Returns
    -------
    Path
        The folder, as `converted` will name it from now on.

    Raises
    ------
    ModelFileError
        If transformers cannot read the file or the copy cannot be stored.
    """
    folder = _folder(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        model, tokenizer = _unpack(path)
        model.save_pretrained(making)
        tokenizer.save_pretrained(making)
        if not folder.is_dir():  # another process may have been first
            making.rename(folder)
    except KVSlimError:
        raise
    except Exception as error:  # a broken file may raise anything in its readers
        raise ModelFileError(
            f"{path} cannot be converted: {first_line(error)}. It must be a GGUF file of an architecture that "
            f"transformers reads, and {folder.parent} must have room for its dense copy; get the file again or name "
            "a model folder"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _unpack(path: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    def load(dtype: torch.dtype) -> Any:
        config = GgufConfig(gguf_file=path.name, dequantize=True)
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=config, dtype=dtype
        )

    with redirect_stderr(io.StringIO()):  # one of transformers' bars has no switch
        model = load(torch.float16)
        if not all(torch.isfinite(tensor).all() for tensor in model.parameters()):
            model = load(torch.float32)  # a weight beyond float16's range
        return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _folder(path: Path) -> Path:
    return CACHE / "converted" / _content_key(path)


def _content_key(path: Path) -> str:
    """Key made of the size and of samples spread over the file: reads 4 MB where a whole hash would read gigabytes."""
    nbytes = path.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT} {nbytes}".encode())
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(nbytes - _SAMPLE_NBYTES, 0) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_NBYTES))
    return digest.hexdigest()[:32]


def first_line(error: Exception) -> str:
    """Type and first line of an error, for a message that must stay one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
