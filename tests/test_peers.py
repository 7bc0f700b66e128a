"""Peers: other projects' quantized caches on the same model, with their bytes counted like everyone's."""

import json
from importlib import metadata

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, QuantizedCache
from typer.testing import CliRunner

from kvslim.cli.app import app
from kvslim.errors import InputError
from kvslim.eval import shelf
from kvslim.eval.contestants import Contestant, Held
from kvslim.eval.forced import feed
from kvslim.eval.ggml import GGMLLayer, dequantize, quantize
from kvslim.eval.peer_cache import PeerCache
from kvslim.eval.peers import PEERS, Peer, read_peers
from kvslim.eval.protocol import Protocol
from kvslim.eval.quality import measure_quality
from kvslim.integrations.transformers import loading
from kvslim.integrations.transformers.loading import LoadedModel, load_model
from kvslim.integrations.transformers.report import storage_nbytes
from kvslim.recipe import Recipe
from tiny_models import build, prompt

SMALL = Protocol(prefill=96, score=64, chunk=16, prefixes=2)
# K and V of a Llama of tiny_models: 3 layers, 2 kv heads, 32 channels
VALUES_PER_TOKEN = 2 * 3 * 2 * 32
QUANTIZED_CACHE = {
    "hf-quanto4": {"backend": "quanto", "nbits": 4},
    "hf-quanto2": {"backend": "quanto", "nbits": 2},
    "hf-hqq8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "hf-hqq4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hf-hqq2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "hf-fp8": {"backend": "fp8"},
}


def needed(name: str):
    """The peer, or a skipped test where its package is missing."""
    try:
        PEERS[name].check()
    except InputError as missing:
        pytest.skip(str(missing))
    return PEERS[name]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return prompt(1, 400)[0]


def test_an_unknown_peer_is_refused_with_what_there_is():
    with pytest.raises(InputError, match=r"unknown peer 'hf-quanto3'; known: hf-quanto4, .*Did you mean 'hf-quanto4'"):
        read_peers("hf-fp8,hf-quanto3")


def test_a_peer_that_is_not_installed_is_refused_with_how_to_get_it(monkeypatch):
    def absent(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(InputError, match=r"'hf-hqq4' needs hqq, .* pip install 'kvslim\[peers\]'"):
        read_peers("hf-hqq4")
    assert [peer.name for peer in read_peers("hf-fp8, gguf-q4_0")] == ["hf-fp8", "gguf-q4_0"]


def test_a_peer_that_cannot_hold_the_model_says_so(model, ids):
    class Picky(DynamicLayer):
        def update(self, *args, **kwargs):
            raise ValueError("group size 64 must divide 32")

    with pytest.raises(
        InputError, match=r"peer 'picky' failed in layer 0 with ValueError: group size 64 must divide 32; "
    ):
        measure_quality(model, ids, [], SMALL, peers=[Peer("picky", "", Picky)])


def test_no_peers_are_none():
    assert read_peers(None) == read_peers("") == []


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_bytes_are_those_of_gguf(kind):
    quants = pytest.importorskip("gguf.quants")
    qtype = quants.GGMLQuantizationType[kind.upper()]
    x = torch.randn(5, 3, 7, 64, generator=torch.Generator().manual_seed(0)) * 10
    x[0, 0, 0] = 0
    x[0, 0, 1, :32] = torch.arange(-16, 16) / 2  # halves, and a largest value of either sign
    blocks = quantize(x, kind)
    assert np.array_equal(blocks.numpy(), quants.quantize(x.numpy(), qtype))
    assert np.array_equal(dequantize(blocks, kind).numpy(), quants.dequantize(blocks.numpy(), qtype))


@pytest.mark.parametrize(("kind", "bits"), [("q4_0", 4.5), ("q8_0", 8.5)])
def test_a_ggml_layer_grows_without_packing_anything_twice(kind, bits):
    key, value = torch.randn(2, 2, 3, 50, 64, generator=torch.Generator().manual_seed(0))
    whole, pieces = GGMLLayer(kind), GGMLLayer(kind)
    expected = whole.update(key, value)
    for part in (slice(0, 20), slice(20, 21), slice(21, 50)):
        found = pieces.update(key[:, :, part], value[:, :, part])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert pieces.get_seq_length() == 50
    assert 8 * storage_nbytes(pieces) / (2 * key.numel()) == bits
    pieces.reorder_cache(torch.tensor([1, 1]))
    grown = pieces.update(key[:, :, :1], value[:, :, :1])
    assert torch.equal(grown[0][0, :, :50], expected[0][1])
    pieces.reset()
    assert pieces.get_seq_length() == 0
    assert storage_nbytes(pieces) == 0


def test_a_head_that_ggml_cannot_hold_is_refused():
    with pytest.raises(InputError, match="head_dim=48 is no multiple of 32"):
        GGMLLayer("q4_0").update(*torch.randn(2, 1, 1, 4, 48))


@pytest.mark.parametrize("name", QUANTIZED_CACHE)
def test_it_is_transformers_own_cache(name, ids):
    """Where QuantizedCache takes the model, the peer computes the very same, and holds the same bytes."""
    peer, model = needed(name), build("llama", head_dim=64)
    own, ours = QuantizedCache(config=model.config, **QUANTIZED_CACHE[name]), PeerCache(model, peer)
    for part, position in ((ids[:100], 0), (ids[100:110], 100), (ids[110:260], 110), (ids[260:261], 260)):
        expected = feed(model, own, part, position, keep=1)
        assert torch.equal(feed(model, ours, part, position, keep=1), expected)
    assert storage_nbytes(ours) == storage_nbytes(own) > 0


@pytest.mark.parametrize(
    ("name", "bits"), [("hf-quanto4", 5.0), ("hf-hqq4", 5.0), ("hf-fp8", 8.0), ("gguf-q4_0", 4.5), ("gguf-q8_0", 8.5)]
)
def test_bits_are_those_of_the_stored_tensors(name, bits, ids):
    """Groups of 64 with scale and zero in fp32 are one bit per value."""
    peer, model = needed(name), build("llama", head_dim=64)
    cache = PeerCache(model, peer)
    feed(model, cache, ids[:200], 0, keep=1)
    held = Held.of(cache)
    assert held.nbytes_16bit == 2 * 2 * VALUES_PER_TOKEN * 200
    assert held.bits_per_value_packed == pytest.approx(bits, rel=1e-3)
    assert held.bits_per_value == pytest.approx(bits, rel=1e-3)
    feed(model, cache, ids[200:201], 200, keep=1)
    more = Held.of(cache)
    assert more.bits_per_value_packed == pytest.approx(bits, rel=1e-3)
    recent = 32 * 2 * VALUES_PER_TOKEN if hasattr(cache.layers[0], "residual_length") else bits * 2 * VALUES_PER_TOKEN
    assert 8 * (more.nbytes - held.nbytes) == pytest.approx(recent, rel=1e-3), "one token, exact where it is recent"


class Wrapper(torch.Tensor):
    """Looks like a tensor and holds two."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, (64, 64), dtype=torch.float32)

    def __init__(self, codes, scales):
        super().__init__()
        self.codes, self.scales = codes, scales

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)

    def __tensor_flatten__(self):
        return ["codes", "scales"], None


def test_a_tensor_made_of_tensors_counts_as_these():
    codes, scales = torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(64)
    assert storage_nbytes([Wrapper(codes, scales), scales]) == 64 * 32 + 4 * 64


def test_a_tensor_of_quanto_counts_as_its_codes_and_scales():
    layer = needed("hf-quanto4").layer()
    layer.update(*torch.randn(2, 1, 2, 64, 64))
    codes, scales = 2 * 64 * 64 // 2, 2 * 2 * 64 * 4
    assert storage_nbytes(layer) == 2 * (codes + scales)


def test_sliding_layers_stay_with_transformers(ids):
    model = build("gemma3")
    with pytest.raises(ValueError, match="sliding_attention"):
        QuantizedCache("fp8", model.config)
    cache, stock = PeerCache(model, PEERS["gguf-q8_0"]), DynamicCache(config=model.config)
    assert [type(layer).__name__ for layer in cache.layers] == [
        "DynamicSlidingWindowLayer",
        "GGMLLayer",
        "DynamicSlidingWindowLayer",
    ]
    for start in range(0, 60, 20):
        found = feed(model, cache, ids[start : start + 20], start, keep=1)
        expected = feed(model, stock, ids[start : start + 20], start, keep=1)
    assert 0 < (found - expected).abs().max() < 0.2 * expected.std()
    assert Held.of(cache).nbytes_16bit == Held.of(stock).nbytes_16bit
    assert Held.of(cache).nbytes < Held.of(stock).nbytes


def test_rows_of_peers_stand_after_those_of_recipes(model, ids):
    peers = [PEERS["gguf-q4_0"], PEERS["gguf-q8_0"]]
    none, four, eight = measure_quality(model, ids, ["none"], SMALL, peers=peers)
    assert [row.recipe for row in (none, four, eight)] == ["none", "gguf-q4_0", "gguf-q8_0"]
    assert abs(none.kl_mean) < eight.kl_mean < four.kl_mean / 10
    assert four.bits_per_value == four.bits_per_value_packed == pytest.approx(4.5)
    assert four.nbytes < eight.nbytes < eight.nbytes_16bit == none.nbytes_16bit
    assert measure_quality(model, ids, [], SMALL, peers=peers[:1]) == [four]


@pytest.mark.parametrize(
    ("recipe", "exact"),
    [("none", True), ("none+layer.1=int8", False), ("none+exact=fp16", False), ("int8+layer.0=none", False)],
)
def test_only_what_quantizes_nothing_is_exact(recipe, exact):
    assert Contestant.of_recipe(Recipe.parse(recipe)).exact == exact


def test_the_verb_measures_against_peers(tiny_folder, monkeypatch, tmp_path):
    loaded = load_model(str(tiny_folder), dtype="float32", device="cpu")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: LoadedModel(loaded.model, loaded.tokenizer, "t", "t"))
    monkeypatch.setattr(shelf, "FOLDER", tmp_path / "baselines")
    monkeypatch.setenv("COLUMNS", "120")
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"w{index * index % 58}" for index in range(300)))
    small = ("--text", str(text), "--prefill", "96", "--score", "48", "--prefixes", "1")
    command = ["eval", "quality", *small, "-r", "int8", "--against", "gguf-q4_0,hf-fp8"]
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [row["recipe"] for row in data["rows"]] == ["int8", "gguf-q4_0", "hf-fp8"]
    assert "gguf-q4_0" in CliRunner().invoke(app, command).stdout
    done = CliRunner().invoke(app, ["eval", "quality", *small, "--against", "hf"])
    assert isinstance(done.exception, InputError)


def test_packages_of_peers_stand_in_the_versions():
    from kvslim.eval.versions import versions

    assert set(versions([PEERS["gguf-q4_0"]])) == {"kvslim", "torch", "transformers", "python"}
    assert versions([needed("hf-quanto4")])["optimum-quanto"] == metadata.version("optimum-quanto")
