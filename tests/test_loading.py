"""Loading: what may be named as a model, and one clear error for each thing that cannot be."""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from kvslim.errors import FetchError, InputError, KVSlimError, ModelFileError
from kvslim.integrations.transformers import conversion, loading
from kvslim.integrations.transformers.gguf_header import check_gguf
from kvslim.integrations.transformers.loading import load_model
from kvslim.integrations.transformers.source import find_source


def write_gguf(path: Path, *, data_nbytes: int = 128, version: int = 3) -> Path:
    """A GGUF file with one fp32 tensor of 4 x 8 numbers and as much of its data as asked for."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    header = b"GGUF" + struct.pack("<IQQ", version, 1, 3)
    header += string("general.architecture") + struct.pack("<I", 8) + string("nothing")
    header += string("some.words") + struct.pack("<IIQ", 9, 8, 2) + string("one") + string("two")
    header += string("general.alignment") + struct.pack("<II", 4, 64)
    header += string("weight") + struct.pack("<IQQIQ", 2, 4, 8, 0, 0)
    path.write_bytes(header + b"\0" * (-len(header) % 64) + b"\0" * data_nbytes)
    return path


def test_a_local_folder_loads_on_kvslims_attention(tiny_folder):
    loaded = load_model(str(tiny_folder), device="cpu", progress=False)
    assert (loaded.name, loaded.source) == ("tiny", str(tiny_folder))
    assert loaded.model.dtype == torch.float32  # CPUs without 16-bit units
    assert loaded.model.config._attn_implementation == "kvslim"
    assert loaded.tokenizer("a b")["input_ids"] == [3, 4]


def test_dtype_and_attention_can_be_chosen(tiny_folder):
    loaded = load_model(str(tiny_folder), dtype="float16", attn_implementation="sdpa", device="cpu", progress=False)
    assert loaded.model.dtype == torch.float16
    assert loaded.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("device", "checkpoint", "expected"),
    [
        ("cpu", torch.bfloat16, torch.float32),
        ("cuda", torch.float16, torch.float16),
        ("cuda:1", torch.float32, torch.bfloat16),
        ("cuda", None, torch.bfloat16),
    ],
)
def test_auto_dtype(device, checkpoint, expected):
    assert loading._auto_dtype(device, checkpoint) == expected


def test_transformers_bars_and_warnings_come_back(tiny_folder):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(tiny_folder), device="cpu", progress=False)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "does not exist"),
        ("./missing", "does not exist"),
        ("qwen05b", r"is no model.*Did you mean 'qwen0.5b'\?"),
        ("two words", "is no model"),
    ],
)
def test_what_names_no_model_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        find_source(name)


def test_folders_and_files_without_a_model_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match="no config.json.*save_pretrained"):
        find_source(str(tmp_path))
    write_gguf(tmp_path / "inside.gguf")
    with pytest.raises(ModelFileError, match=r"name the file itself: .*inside\.gguf"):
        find_source(str(tmp_path))
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(ModelFileError, match=r"no \.gguf file"):
        find_source(str(tmp_path / "text.txt"))


def test_a_gguf_file_is_named_after_itself_or_its_folder(tmp_path):
    assert find_source(str(write_gguf(tmp_path / "some-model.gguf"))).name == "some-model"
    assert find_source(str(write_gguf(tmp_path / "model.gguf"))).name == tmp_path.name


def test_a_whole_gguf_passes(tmp_path):
    check_gguf(write_gguf(tmp_path / "whole.gguf"))


@pytest.mark.parametrize("nbytes", [0, 3, 4, 20, 60, 150, 200])
def test_a_gguf_cut_in_its_header_is_refused(tmp_path, nbytes):
    path = write_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is (broken|no GGUF file)"):
        check_gguf(path)


def test_a_gguf_cut_in_its_data_is_refused_with_both_sizes(tmp_path):
    path = write_gguf(tmp_path / "cut.gguf", data_nbytes=127)
    promised, got = path.stat().st_size + 1, path.stat().st_size
    with pytest.raises(ModelFileError, match=f"truncated.*promises {promised} bytes, the file has {got}"):
        check_gguf(path)


def test_foreign_files_and_versions_are_refused(tmp_path):
    path = tmp_path / "foreign.gguf"
    path.write_bytes(b"PK\3\4 a zip file")
    with pytest.raises(ModelFileError, match="no GGUF file.*b'PK"):
        load_model(str(path), progress=False)
    with pytest.raises(ModelFileError, match="version 9"):
        check_gguf(write_gguf(path, version=9))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + b"\xff" * 500)
    with pytest.raises(ModelFileError, match="broken"):
        check_gguf(path)


def test_an_architecture_transformers_does_not_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "CACHE", tmp_path / "cache")
    with pytest.raises(ModelFileError, match=r"odd\.gguf cannot be converted"):
        load_model(str(write_gguf(tmp_path / "odd.gguf")), progress=False)
    assert list((tmp_path / "cache" / "converted").iterdir()) == []


def test_a_gguf_is_converted_once(tmp_path, monkeypatch, tiny_folder):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(conversion, "CACHE", tmp_path / "cache")
    dense = load_model(str(tiny_folder), attn_implementation="sdpa", device="cpu", progress=False)
    calls = []
    monkeypatch.setattr(conversion, "_unpack", lambda path: calls.append(path) or (dense.model, dense.tokenizer))
    for _ in range(2):
        loaded = load_model(str(path), device="cpu", progress=False)
        assert loaded.name == "tiny"
        assert loaded.tokenizer("b a")["input_ids"] == [4, 3]
    assert calls == [path]
    path.write_bytes(path.read_bytes()[:-1] + b"\1")  # other content, same size: not the same model
    load_model(str(path), device="cpu", progress=False)
    assert len(calls) == 2


def test_a_folder_with_a_torn_or_incomplete_checkpoint_is_refused(tmp_path, tiny_folder):
    torn = shutil.copytree(tiny_folder, tmp_path / "torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="torn cannot be loaded"):
        load_model(str(torn), device="cpu", progress=False)
    partial = shutil.copytree(tiny_folder, tmp_path / "partial")
    tensors = load_file(tiny_folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match="partial is incomplete: 1 tensors are missing.*k_proj"):
        load_model(str(partial), device="cpu", progress=False)
    (partial / "config.json").write_text("{ not json")
    with pytest.raises(ModelFileError, match="partial cannot be loaded"):
        load_model(str(partial), device="cpu", progress=False)


def test_an_unreachable_hub_id_is_refused_with_the_next_step(monkeypatch):
    def unreachable(**kwargs):
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(FetchError, match="owner/name.*couldn't connect. Check the id and the network"):
        load_model("owner/name", progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float3"}, r"unknown dtype 'float3'.*Did you mean 'float32'\?"),
        ({"weights": "nf5"}, r"unknown weights 'nf5'.*Did you mean 'nf4'\?"),
        ({"weights": "nf4"}, "needs bitsandbytes.*pip install"),
        ({"weights": "int8"}, "needs bitsandbytes.*pip install"),
        ({"weights": "gguf"}, "needs kernels.*pip install"),
    ],
)
def test_options_that_cannot_be_met_are_refused(tiny_folder, monkeypatch, options, message):
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name in ("bitsandbytes", "kernels") else name)
    with pytest.raises(KVSlimError, match=message):
        load_model(str(tiny_folder), progress=False, **options)


def test_gguf_weights_need_a_gguf_file(tiny_folder, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: name)
    with pytest.raises(InputError, match="needs a .gguf file"):
        load_model(str(tiny_folder), weights="gguf", progress=False)


def test_weights_are_quantized_by_transformers_itself(tmp_path):
    gguf = find_source(str(write_gguf(tmp_path / "x.gguf")))
    nf4 = loading._weight_quantization("nf4", torch.float32, "cpu", gguf)["quantization_config"]
    assert (nf4.load_in_4bit, nf4.bnb_4bit_quant_type, nf4.bnb_4bit_compute_dtype) == (True, "nf4", torch.float32)
    assert loading._weight_quantization("int8", torch.float32, "cpu", gguf)["quantization_config"].load_in_8bit
    packed = loading._weight_quantization("gguf", torch.float32, "cpu", gguf)["quantization_config"]
    assert (packed.gguf_file, packed.dequantize) == ("x.gguf", False)
    assert loading._weight_quantization("none", torch.float32, "cpu", gguf) == {}


def test_a_real_model_comes_with_its_tokenizer(qwen05b):
    assert qwen05b.name == "qwen0.5b"
    assert qwen05b.model.dtype == torch.float32
    assert qwen05b.model.config._attn_implementation == "kvslim"
    assert qwen05b.tokenizer.chat_template is not None
