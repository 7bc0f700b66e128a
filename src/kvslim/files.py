"""Files that kvslim keeps state in: safetensors with a version, a JSON header and a digest over everything.

A file is written beside its target and moved there once it is on the disk, so that the target is the old file or the
new one, never a part. What is read is checked first: kernels follow these numbers through memory without looking back.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from kvslim.errors import StateFileError
from kvslim.header import Fields

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_NO_DIGEST = "0" * hashlib.sha256().digest_size * 2
_ALIGNMENT = 64  # bytes; of the first tensor
_LONGEST_HEAD = 100_000_000  # bytes; safetensors reads no longer ones


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes
    ----------
    format : str
        Its mark.
    version : int
        Written and read here.
    what, again : str
        What errors call it, and how to make it again.
    """

    format: str
    version: int
    what: str
    again: str


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made when its turn to be written comes, so that a file never stands in memory as a whole.

    Attributes
    ----------
    shape : tuple of int
    dtype : torch.dtype
    make : callable
        Returns a tensor of that shape and dtype, on any device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Lazy:
        """Wrap a tensor that is there."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def write(path: str | Path, kind: Kind, header: Mapping[str, Any], tensors: Mapping[str, Lazy]) -> None:
    """Write a file, whole or not at all.

    Parameters
    ----------
    path : path
        An existing file is replaced once the new one is on the disk; folders are made.
    kind : Kind
    header : mapping
        JSON-able.
    tensors : mapping of str to Lazy

    Raises
    ------
    StateFileError
        It cannot be written; what was at `path` before is still there, and nothing else.
    """
    metadata = {"digest": _NO_DIGEST, "format": kind.format, "version": str(kind.version)}
    metadata["header"] = json.dumps(header, allow_nan=False)
    order = sorted(tensors, key=lambda name: _place(name, tensors[name].dtype))
    index: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        if tensors[name].dtype not in _NAMES:
            raise StateFileError(f"{path}: tensor '{name}' is {tensors[name].dtype}; files hold {', '.join(_DTYPES)}")
        start, end = end, end + tensors[name].nbytes
        index[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": tensors[name].shape, "data_offsets": (start, end)}
    head = json.dumps(index).encode()
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    if len(head) > _LONGEST_HEAD:
        raise StateFileError(f"{path}: a header of {len(head):,} bytes could not be read again; save fewer sequences")
    digest = _digest(metadata)
    with replacing(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            _write(file, digest, name, tensors[name])
        file.seek(8 + head.index(_NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())


def _write(file: BinaryIO, digest: Any, name: str, tensor: Lazy) -> None:
    made = _bytes(tensor.make())
    _add(digest, name, tensor.dtype, tensor.shape, made)
    file.write(made)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the block ends well; else it vanishes.

    Raises
    ------
    StateFileError
        `path` is no place for a file, or the disk refuses.
    """
    target = check_target(path)
    temporary = target.parent / f".kvslim-{secrets.token_hex(8)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise StateFileError(
            f"{path} cannot be written ({error.strerror or error}); what was there before is untouched. Make room, or "
            "name another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def check_target(path: str | Path) -> Path:
    """Return where `path` leads, links followed; raises StateFileError where no file can be."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise StateFileError(f"{path} is a folder or a device and cannot be replaced by a file; name a file")
    return target


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateFileError(
            f"{folder} cannot be synced ({error.strerror or error}): the new file is whole and in its place, but may "
            "be lost in a power cut; write it again elsewhere if it must not be"
        ) from error


class Contents:
    """A file that was opened, and whose digest is right. Tensors are views of the mapped file.

    Parameters
    ----------
    path : path
    kind : Kind
    verify : bool
        Compare the digest, which reads the whole file.

    Raises
    ------
    StateFileError
        Missing, damaged, foreign, or of another version.
    """

    def __init__(self, path: str | Path, kind: Kind, *, verify: bool = True):
        self.path, self.kind, self.verify = Path(path), kind, verify
        if not self.path.is_file():
            raise StateFileError(f"no {kind.what} file at {path}; {kind.again}")
        try:
            self._file = safe_open(self.path, framework="pt")
            metadata = self._file.metadata() or {}
            names = list(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise StateFileError(f"{path} cannot be read as safetensors ({error}); {kind.again}") from error
        self._check_kind(metadata)
        self._dtypes = {name: self._known_dtype(name) for name in names}
        self._shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        if verify:
            self._check_digest(metadata)
        self.header = Fields.parse(metadata.get("header", ""), f"{path}: header")
        self._left = set(names)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return tensor `name`, a view of the mapped file. Its shape, where -1 is any size, and dtype must be these."""
        if name not in self._dtypes:
            self._damaged(f"tensor '{name}' is missing")
        got = self._shapes[name]
        fits = len(got) == len(shape) and all(want in (-1, size) for want, size in zip(shape, got, strict=True))
        if not fits or self._dtypes[name] != dtype:
            self._damaged(f"tensor '{name}' is {self._dtypes[name]} {got}, expected {dtype} {shape}")
        self._left.discard(name)
        return self._file.get_tensor(name)

    def take_finite(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of tensor `name`, which must have no NaN and no Inf."""
        tensor = self.take(name, shape, dtype)
        self.check_finite(name, tensor)
        return tensor.clone()  # a view would keep the file mapped

    def form(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of tensor `name`; None where it is absent."""
        return (self._shapes[name], self._dtypes[name]) if name in self._dtypes else None

    def named(self, prefix: str) -> list[str]:
        """Names of the tensors that begin so."""
        return [name for name in self._dtypes if name.startswith(prefix)]

    def check_finite(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse NaN and Inf."""
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            self._damaged(f"tensor '{name}' has NaN or Inf, expected finite values")

    def finish(self) -> None:
        """Refuse tensors that nobody took."""
        if self._left:
            self._damaged(f"tensor '{min(self._left)}' does not belong here")

    def _known_dtype(self, name: str) -> torch.dtype:
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            self._damaged(f"tensor '{name}' has the foreign dtype {dtype}")
        return _DTYPES[dtype]

    def _check_kind(self, metadata: Mapping[str, str]) -> None:
        kind, got, version = self.kind, metadata.get("format"), metadata.get("version", "")
        if got != kind.format:
            raise StateFileError(f"{self.path} is not a {kind.what}: its format is '{got}', not '{kind.format}'")
        if version != str(kind.version):
            newer = version.isdecimal() and len(version) < 10 and int(version) > kind.version
            raise StateFileError(
                f"{self.path} has format version '{version}', this kvslim reads {kind.version}; "
                f"{'update kvslim' if newer else kind.again}"
            )

    def _check_digest(self, metadata: Mapping[str, str]) -> None:
        digest = _digest(metadata)
        for name in sorted(self._dtypes, key=lambda name: _place(name, self._dtypes[name])):
            _add(digest, name, self._dtypes[name], self._shapes[name], _bytes(self._file.get_tensor(name)))
        if digest.hexdigest() != metadata.get("digest"):
            self._damaged(
                f"its content has the digest {digest.hexdigest()[:16]}..., its header says "
                f"{metadata.get('digest', 'none')[:16]}..."
            )

    def _damaged(self, what: str) -> NoReturn:
        raise StateFileError(f"{self.path} is damaged or foreign: {what}; {self.kind.again}")


def _place(name: str, dtype: torch.dtype) -> tuple[int, str]:
    """Order in the file: wide dtypes first, so that every tensor lies at a multiple of its item size."""
    return -dtype.itemsize, name


def _digest(metadata: Mapping[str, str]) -> Any:
    named = [metadata.get(name) for name in ("format", "version", "header")]
    return hashlib.sha256(json.dumps(named).encode())


def _add(digest: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...], data: memoryview) -> None:
    digest.update(json.dumps([name, _NAMES[dtype], list(shape)]).encode())
    digest.update(data)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
