"""Files of state: replaced whole or not at all, and refused unless every byte is as it was written."""

import errno
import json
import os
import stat
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvslim import files
from kvslim.errors import StateFileError
from kvslim.files import Contents, Kind, Lazy, write

KIND = Kind("kvslim-test", 3, "test", "write it again")
HEADER = {"count": 3, "text": 'a\u00e9\n"', "list": [1, 2]}
TENSORS = {
    "byte": torch.arange(7, dtype=torch.uint8),
    "half": torch.tensor([[1.5, -2.0], [0.0, 6e-8]], dtype=torch.float16),
    "brain": torch.tensor([3.0]).bfloat16(),
    "single": torch.linspace(-1, 1, 5),
    "double": torch.tensor(2.5, dtype=torch.float64),
    "long": torch.tensor([1 << 60, -1]),
    "none": torch.zeros(0, 4),
    "truth": torch.tensor([True, False]),
}


def put(path: Path, header=HEADER, tensors=TENSORS, kind=KIND) -> bytes:
    write(path, kind, header, {name: Lazy.of(tensor) for name, tensor in tensors.items()})
    return path.read_bytes()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.safetensors"


def test_what_was_written_comes_back(path):
    put(path)
    contents = Contents(path, KIND)
    assert contents.header.value == HEADER
    for name, tensor in TENSORS.items():
        got = contents.take(name, tuple(tensor.shape), tensor.dtype)
        assert torch.equal(got, tensor)
        assert got.dtype == tensor.dtype
    contents.finish()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_any_safetensors_reader_reads_it(path):
    put(path)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_the_same_state_makes_the_same_bytes(path):
    assert put(path) == put(path, tensors=dict(reversed(TENSORS.items())))


def test_tensors_lie_at_multiples_of_their_item_size(path):
    content = put(path)
    start = 8 + struct.unpack("<Q", content[:8])[0]
    assert start % 64 == 0
    index = json.loads(content[8:start])
    for name, tensor in TENSORS.items():
        assert index[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


def test_a_view_is_the_files_own_memory_and_writing_to_it_leaves_the_file_alone(path):
    before = put(path)
    view = Contents(path, KIND).take("long", (2,), torch.int64)
    assert str(path) in Path("/proc/self/maps").read_text()
    view[0] = 5
    assert path.read_bytes() == before
    assert Contents(path, KIND).take("long", (2,), torch.int64)[0] == 1 << 60


def test_tensors_are_made_one_by_one_as_they_are_written(path):
    made, alive = [], []

    def make() -> torch.Tensor:
        alive.append(sum(each() is not None for each in made))
        tensor = torch.zeros(1000)
        made.append(weakref.ref(tensor))
        return tensor

    write(path, KIND, {}, {str(at): Lazy((1000,), torch.float32, make) for at in range(5)})
    assert alive == [0] * 5


# -- atomic ------------------------------------------------------------------------------------------------------------


def full_disk(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("there", [True, False], ids=["replacing", "new"])
@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(path, monkeypatch, where, there):
    before = put(path) if there else None
    if where == "fsync":
        monkeypatch.setattr(files.os, "fsync", full_disk)
    elif where == "rename":
        monkeypatch.setattr(Path, "replace", full_disk)
    tensors = {name: Lazy.of(tensor) for name, tensor in TENSORS.items()}
    if where == "write":
        tensors["late"] = Lazy((1,), torch.uint8, full_disk)
    with pytest.raises(StateFileError, match="No space left on device.*untouched"):
        write(path, KIND, {"count": 4}, tensors)
    assert [each.name for each in path.parent.iterdir()] == ([path.name] if there else [])
    assert not there or path.read_bytes() == before


def test_a_disk_that_stops_halfway_leaves_the_old_file(path):
    """The kernel itself cuts the write off, at a limit on file sizes."""
    before = put(path)
    script = (
        "import resource, signal, sys, torch; from kvslim.files import *; from kvslim.errors import StateFileError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try: write(sys.argv[1], Kind('kvslim-test', 3, '', ''), {}, {'a': Lazy.of(torch.zeros(100000))})\n"
        "except StateFileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert "cannot be written (File too large)" in done.stdout
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_interruption_leaves_the_old_file(path):
    before = put(path)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, KIND, {}, {"a": Lazy((1,), torch.uint8, interrupt)})
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_data_is_on_the_disk_before_the_name_changes(path, monkeypatch):
    done = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        files.os,
        "fsync",
        lambda fd: (done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), fsync(fd)),
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append("rename"), replace(self, to)))
    put(path)
    assert done == ["file", "rename", "folder"]


def test_a_folder_that_cannot_be_synced_is_named_and_the_new_file_is_there(path, monkeypatch):
    put(path)
    fsync = os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda fd: full_disk() if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync(fd))
    with pytest.raises(StateFileError, match="cannot be synced .*: the new file is whole and in its place"):
        put(path, header={"count": 4})
    assert Contents(path, KIND).header.integer("count") == 4


def test_a_header_that_no_reader_takes_is_not_written(path, monkeypatch):
    before = put(path)
    monkeypatch.setattr(files, "_LONGEST_HEAD", 100)
    with pytest.raises(StateFileError, match="could not be read again; save fewer sequences"):
        put(path)
    assert path.read_bytes() == before


def test_a_mapped_file_survives_being_replaced(path):
    put(path)
    view = Contents(path, KIND).take("single", (5,), torch.float32)
    put(path, tensors={"single": torch.zeros(5)})
    assert torch.equal(view, TENSORS["single"])


def test_folders_and_devices_are_not_replaced_and_links_are_followed(path):
    with pytest.raises(StateFileError, match="cannot be replaced by a file; name a file"):
        put(path.parent)
    with pytest.raises(StateFileError, match="a device"):
        put(Path("/dev/null"))
    real = path.parent / "real"
    real.write_text("old")
    path.symlink_to(real)
    put(path)
    assert path.is_symlink()
    assert Contents(real, KIND).header.integer("count") == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(path):
    path.parent.chmod(0o500)
    with pytest.raises(StateFileError, match="Permission denied"):
        put(path)


def test_a_file_gets_the_usual_permissions(path):
    mask = os.umask(0o027)
    try:
        put(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


# -- refused -----------------------------------------------------------------------------------------------------------


def read_all(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    contents = Contents(path, KIND)
    return contents.header.value, {
        name: contents.take(name, tuple(tensor.shape), tensor.dtype).clone() for name, tensor in TENSORS.items()
    }


def test_every_flipped_byte_is_refused(path):
    content = put(path)
    padding = range(8 + content[8:].index(b"  "), 8 + struct.unpack("<Q", content[:8])[0])
    for at in range(len(content)):
        for flip in (1, 0x20, 0x80) if at not in padding else (1,):
            damaged = bytearray(content)
            damaged[at] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(StateFileError):
                read_all(path)


def test_every_truncation_is_refused(path):
    content = put(path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(StateFileError):
            Contents(path, KIND)
    path.write_bytes(content + b"\0")
    with pytest.raises(StateFileError):
        Contents(path, KIND)


@pytest.mark.parametrize("length", [0, 1, 1 << 31, 100_000_001, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_wrong_header_lengths_are_refused(path, length):
    content = put(path)
    path.write_bytes(struct.pack("<Q", length) + content[8:])
    with pytest.raises(StateFileError, match="cannot be read as safetensors.*write it again"):
        Contents(path, KIND)


def foreign_files(folder: Path):
    save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    save_file({"w": torch.zeros(3)}, folder / "other.safetensors", metadata={"format": "pt"})
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "text.safetensors").write_text("hello " * 20)
    return {
        "model.safetensors": "its format is 'None', not 'kvslim-test'",
        "other.safetensors": "its format is 'pt', not 'kvslim-test'",
        "empty.safetensors": "cannot be read as safetensors",
        "text.safetensors": "cannot be read as safetensors",
        "missing.safetensors": "no test file at",
        ".": "no test file at",
    }


def test_foreign_files_are_refused(tmp_path):
    for name, message in foreign_files(tmp_path).items():
        with pytest.raises(StateFileError, match=message):
            Contents(tmp_path / name, KIND)


@pytest.mark.parametrize(("version", "step"), [(4, "update kvslim"), (2, "write it again")])
def test_other_versions_are_refused(path, version, step):
    put(path, kind=Kind("kvslim-test", version, "", ""))
    with pytest.raises(StateFileError, match=f"format version '{version}', this kvslim reads 3; {step}"):
        Contents(path, KIND)


def test_the_digest_is_skipped_only_on_request(path):
    content = bytearray(put(path))
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StateFileError, match="its content has the digest .*, its header says .*write it again"):
        Contents(path, KIND)
    assert Contents(path, KIND, verify=False).header.integer("count") == 3


def test_tensors_of_another_form_are_refused_and_named(path):
    put(path)
    contents = Contents(path, KIND)
    for name, shape, dtype in (
        ("single", (4,), torch.float32),
        ("single", (5,), torch.float16),
        ("single", (1, 5), torch.float32),
    ):
        with pytest.raises(StateFileError, match=r"tensor 'single' is torch.float32 \(5,\), expected"):
            contents.take(name, shape, dtype)
    with pytest.raises(StateFileError, match="tensor 'other' is missing"):
        contents.take("other", (1,), torch.float32)
    assert contents.take("half", (-1, 2), torch.float16).shape == (2, 2)
    with pytest.raises(StateFileError, match="tensor 'brain' does not belong here"):
        contents.finish()


def test_nan_is_refused_where_it_is_looked_for(path):
    put(path, tensors={"a": torch.tensor([1.0, float("nan")])})
    contents = Contents(path, KIND)
    assert contents.take("a", (2,), torch.float32)[1].isnan()
    with pytest.raises(StateFileError, match="tensor 'a' has NaN or Inf"):
        contents.take_finite("a", (2,), torch.float32)


BAD_HEADERS = {
    "not JSON": "{",
    "NaN": '{"count": NaN}',
    "a list": "[1]",
    "a huge number": '{"count": ' + "9" * 5000 + "}",
    "endless nesting": "[" * 100_000,
    "empty": "",
}


@pytest.mark.parametrize("text", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_are_no_object_are_refused(path, monkeypatch, text):
    monkeypatch.setattr(
        files.json,
        "dumps",
        lambda value, **options: text if value == {"bad": 1} else json.JSONEncoder(**options).encode(value),
    )
    put(path, header={"bad": 1})
    monkeypatch.undo()
    with pytest.raises(StateFileError, match="header"):
        Contents(path, KIND)


FIELDS = {
    "i": 5,
    "f": 0.5,
    "s": "x",
    "b": True,
    "o": {"i": 1},
    "l": [1, 2],
    "p": [[1, 2]],
    "n": None,
    "d": [{"i": "x"}],
}
BAD_FIELDS = {
    "too large": (lambda f: f.integer("i", 0, 4), "i is 5, expected a whole number from 0 to 4"),
    "negative": (lambda f: f.integer("i", 6), "from 6"),
    "a truth is no number": (lambda f: f.integer("b"), "b is True, expected a whole number"),
    "a fraction is not whole": (lambda f: f.integer("f"), "f is 0.5, expected a whole number"),
    "absent": (lambda f: f.integer("z"), "z is None"),
    "text is no number": (lambda f: f.number("s"), "s is 'x', expected a finite number"),
    "number is no text": (lambda f: f.text("i"), "i is 5, expected text"),
    "number is no truth": (lambda f: f.flag("i"), "expected true or false"),
    "text is no list": (lambda f: f.integers("s"), "expected a list"),
    "pairs in a list of numbers": (lambda f: f.integers("p"), r"p\[0\] is \[1, 2\]"),
    "numbers in a list of pairs": (lambda f: f.pairs("l"), r"l\[0\] is 1, expected a pair"),
    "pair past the end": (lambda f: f.pairs("p", 1), r"p\[0\] is 2"),
    "no object": (lambda f: f.fields("l"), "expected an object"),
    "deep": (lambda f: f.each("d")[0].integer("i"), r"file, d\[0\], i is 'x'"),
}


@pytest.mark.parametrize(("read", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_fields_that_are_not_as_expected_are_named(read, message):
    with pytest.raises(StateFileError, match=message):
        read(files.Fields(FIELDS, "file"))


def test_fields_that_are_as_expected():
    fields = files.Fields(FIELDS, "file")
    assert (fields.integer("i"), fields.number("f"), fields.number("i"), fields.text("s")) == (5, 0.5, 5.0, "x")
    assert (fields.flag("b"), fields.integers("l"), fields.pairs("p")) == (True, [1, 2], [(1, 2)])
    assert fields.fields("o").integer("i") == 1
    assert (fields.has("n"), fields.has("z"), fields.has("b")) == (False, False, True)
