"""Reads a GGUF header only far enough to say whether the whole file is there.

transformers would find a broken file too, but after a minute and with a message about numpy buffers.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from kvslim.errors import ModelFileError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_NBYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MOST_ITEMS = 1 << 26  # no real header counts this far; a broken one does


def check_gguf(path: Path) -> None:
    """Make sure that `path` is a GGUF file with all its tensor data.

    Raises
    ------
    ModelFileError
        If it is something else, or ends before its header says so.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != _MAGIC:
            raise ModelFileError(
                f"{path} is no GGUF file: it starts with {magic!r}, expected {_MAGIC!r}; name a .gguf file, a model "
                "folder, a short name or a hub id"
            )
        try:
            promised = _promised_nbytes(file, path)
        except (EOFError, struct.error, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{path} is broken: its header ends or makes no sense within {nbytes:,} bytes; get the file again"
            ) from error
    if nbytes < promised:
        raise ModelFileError(
            f"{path} is truncated: its header promises {promised:,} bytes, the file has {nbytes:,}; get the file again"
        )


def _promised_nbytes(file: BinaryIO, path: Path) -> int:
    """Size the file must have at least for all tensors its header lists."""
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    version, tensors, entries = _unpack(file, "<IQQ")
    if version not in _VERSIONS:
        raise ModelFileError(
            f"{path} is GGUF version {version}; readable are {_VERSIONS}; convert it with a newer tool"
        )
    alignment = 32  # the format's default
    for _ in range(_sane(entries)):
        key = _string(file)
        (kind,) = _unpack(file, "<I")
        if key == b"general.alignment" and kind == _UINT32:
            (alignment,) = _unpack(file, "<I")
        else:
            _skip_value(file, kind)
    end = 0
    for _ in range(_sane(tensors)):
        _string(file)
        (dims,) = _unpack(file, "<I")
        count = 1
        for size in _unpack(file, f"<{_sane(dims)}Q"):
            count *= size
        kind, offset = _unpack(file, "<IQ")
        block, block_nbytes = sizes.get(kind, (1, 0))  # an unknown kind is for transformers to refuse
        end = max(end, offset + count // block * block_nbytes)
    return -(-file.tell() // max(alignment, 1)) * alignment + end


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, _read(file, struct.calcsize(layout)))


def _read(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(_sane(nbytes))
    if len(data) < nbytes:
        raise EOFError
    return data


def _string(file: BinaryIO) -> bytes:
    return _read(file, _unpack(file, "<Q")[0])


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        item, count = _unpack(file, "<IQ")
        if item in _SCALAR_NBYTES:
            _read(file, _SCALAR_NBYTES[item] * _sane(count))
        else:
            for _ in range(_sane(count)):
                _skip_value(file, item)
    elif kind in _SCALAR_NBYTES:
        _read(file, _SCALAR_NBYTES[kind])
    else:
        raise EOFError  # not a kind of value: whatever follows cannot be trusted


def _sane(count: int) -> int:
    if count > _MOST_ITEMS:
        raise EOFError
    return count
