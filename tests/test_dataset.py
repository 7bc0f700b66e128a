"""Texts by name: what is fetched, that it is checked, and what a machine without network is told."""

import hashlib
import zipfile
from dataclasses import replace

import huggingface_hub
import pytest

from kvslim.errors import FetchError
from kvslim.eval import dataset as module
from kvslim.eval.dataset import DATASETS, load_dataset


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has the archive with the text it is given; returns what was asked of it."""
    asked = []

    def serve(text, expected=None):
        known = DATASETS["wikitext"]
        digest = hashlib.sha256((text if expected is None else expected).encode()).hexdigest()
        monkeypatch.setitem(module.DATASETS, "wikitext", replace(known, sha256=digest))
        with zipfile.ZipFile(tmp_path / known.file, "w") as archive:
            archive.writestr(known.member, text)

        def download(*arguments, **options):
            asked.append((arguments, options))
            return str(tmp_path / known.file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return asked

    return serve


def test_a_known_text_comes_from_its_pinned_place(hub):
    asked = hub("some words \u00e9")
    text = load_dataset("wikitext")
    assert (text.name, text.content) == ("WikiText-2 raw, test", "some words \u00e9")
    assert asked == [
        (
            ("ggml-org/ci", "wikitext-2-raw-v1.zip"),
            {"repo_type": "dataset", "revision": DATASETS["wikitext"].revision},
        )
    ]


def test_another_text_than_the_known_one_is_refused(hub):
    hub("some words", expected="other words")
    with pytest.raises(FetchError, match="arrived damaged"):
        load_dataset("wikitext")


def test_without_network_the_message_says_what_to_do(run, monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError("We couldn't connect.\nA long story.")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    code, out, err = run("eval", "quality", "--dataset", "wikitext")
    assert (code, out) == (2, "")
    assert "We couldn't connect. It needs the network once" in err
    assert "--text" in err
    assert "Traceback" not in err
    assert "long story" not in err


def test_unknown_names_and_two_texts_are_refused(run):
    assert "Did you mean 'wikitext'?" in run("eval", "quality", "--dataset", "wikitxt")[2]
    assert "both given" in run("eval", "quality", "--dataset", "wikitext", "--text", "a.txt")[2]
