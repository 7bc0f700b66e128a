"""Known texts by name, fetched from the hub once as plain files in a zip, pinned and checked by SHA-256."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass

from kvslim.errors import FetchError, InputError, did_you_mean
from kvslim.eval.text import Text


@dataclass(frozen=True)
class Dataset:
    """Where a text lies.

    Attributes
    ----------
    title : str
        Its name in results.
    repo, revision, file : str
        Dataset repository on the hub, its commit, and the zip there.
    member : str
        The text in the zip.
    sha256 : str
        Of the text.
    """

    title: str
    repo: str
    revision: str
    file: str
    member: str
    sha256: str


DATASETS = {
    "wikitext": Dataset(
        title="WikiText-2 raw, test",
        repo="ggml-org/ci",
        revision="927b3642933080f1b0e811e2f916e14c292992f9",
        file="wikitext-2-raw-v1.zip",
        member="wikitext-2-raw/wiki.test.raw",
        sha256="173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    ),
}


def load_dataset(name: str) -> Text:
    """Return the text called `name`; the hub's own cache keeps it for the next time.

    Raises
    ------
    InputError
        There is no such name.
    FetchError
        It cannot be fetched, or is not what it should be.
    """
    if name not in DATASETS:
        raise InputError(
            f"unknown dataset '{name}'; known: {', '.join(DATASETS)}; for any other text give a file with --text."
            f"{did_you_mean(name, DATASETS)}"
        )
    dataset = DATASETS[name]
    content = _fetch(name, dataset)
    found = hashlib.sha256(content).hexdigest()
    if found != dataset.sha256:
        raise FetchError(
            f"dataset '{name}' arrived damaged: SHA-256 {found}, expected {dataset.sha256}; remove {dataset.file} from "
            "the hub's cache and run the same command again"
        )
    return Text(dataset.title, content.decode("utf-8"))


def _fetch(name: str, dataset: Dataset) -> bytes:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(dataset.repo, dataset.file, repo_type="dataset", revision=dataset.revision)
        with zipfile.ZipFile(path) as archive:
            return archive.read(dataset.member)
    except Exception as error:  # no network, no room, no such file: the hub's client has errors of several libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(
            f"cannot fetch dataset '{name}' from the hub ({dataset.repo}): {reason} It needs the network once; without "
            "it, give a file with --text, or leave both out for Python's own documentation"
        ) from error
