"""Calibration: taken from a model, kept in a file, refused where it does not belong."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvslim
from kvslim.calibration import Calibration
from kvslim.errors import InputError
from kvslim.integrations.transformers import calibrate as statistics
from kvslim.integrations.transformers.fingerprint import fingerprint


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
    )
    return kvslim.enable(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def calibration(model) -> Calibration:
    return statistics.calibrate(model)


def test_every_layer_is_measured_and_its_rotation_understood(model, calibration):
    assert sorted(calibration.layers) == [0, 1, 2]
    assert calibration.tokens == statistics.TOKENS
    wanted = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    for layer in calibration.layers.values():
        assert layer["query_moment"].shape == (2, 16, 16)
        torch.testing.assert_close(layer["rope_frequency"], wanted, rtol=0, atol=1e-6)


def test_statistics_are_those_of_the_keys(model, calibration):
    """Layer 0 sees nothing but embeddings: its keys before RoPE can be worked out by hand."""
    ids = statistics._random_ids(model)
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        plain = attention.k_proj(hidden).view(-1, 2, 16).transpose(0, 1)
    torch.testing.assert_close(calibration.layers[0]["plain_mean"], plain.mean(1), rtol=0, atol=1e-5)


def test_a_file_gives_back_what_was_saved(calibration, tmp_path):
    path = tmp_path / "deep" / "model.safetensors"
    calibration.save(path)
    assert [each.name for each in path.parent.iterdir()] == ["model.safetensors"]
    again = Calibration.load(path, calibration.fingerprint)
    assert (again.source, again.tokens) == ("random ids", statistics.TOKENS)
    for layer, tensors in calibration.layers.items():
        for name, tensor in tensors.items():
            assert torch.equal(again.layers[layer][name], tensor)


def test_another_models_file_is_refused_and_named(calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    other = tiny_llama(seed=1)
    with pytest.raises(InputError, match="another model") as refusal:
        kvslim.KVCache(other, "slim4", calibration=path)
    assert calibration.fingerprint in str(refusal.value)
    assert fingerprint(other) in str(refusal.value)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing"])
def test_broken_files_are_refused(calibration, tmp_path, damage):
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "foreign":
        from safetensors.torch import save_file

        save_file({"0.key_mean": torch.zeros(1)}, str(path), metadata={"format": "something else"})
    else:
        path.unlink()
    words = {"truncated": "cannot be read", "foreign": "not a calibration", "missing": "no calibration file"}
    with pytest.raises(InputError, match=words[damage]):
        Calibration.load(path)


def test_too_few_tokens_are_refused(model):
    with pytest.raises(InputError, match="255 tokens are too few"):
        statistics.calibrate(model, torch.zeros(255, dtype=torch.long))


def test_it_is_taken_once_per_model_and_kept_on_disk(tmp_path, monkeypatch):
    model, runs = tiny_llama(seed=2), []
    original = statistics.calibrate
    monkeypatch.setattr(statistics, "calibrate", lambda model: runs.append(1) or original(model))
    first = statistics.calibration_of(model, tmp_path)
    assert statistics.calibration_of(model, tmp_path) is first
    statistics._known.clear()  # as a new process would be
    assert statistics.calibration_of(model, tmp_path).fingerprint == first.fingerprint
    assert len(runs) == 1


def test_the_calibration_is_not_billed_to_a_cache(model, calibration):
    cache = kvslim.KVCache(model, "slim4", calibration=calibration)
    ids = torch.randint(99, (1, 400), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    own = sum(layer.core.store.nbytes for layer in cache.layers)
    assert cache.nbytes == pytest.approx(own, rel=0.01)  # tables of codes are shared between layers


def test_a_recipe_that_needs_one_is_refused_on_a_config_alone(model):
    with pytest.raises(InputError, match="needs a calibration"):
        kvslim.KVCache(model.config, "slim4p")
