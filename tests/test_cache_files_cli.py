"""`--save-cache` and `--load-cache`: an answer goes on in another call as it would have in one."""

import json

import pytest
import torch

import kvslim


@pytest.fixture
def generate(run, tiny_folder):
    """`generate(prompt, *options)` gives what --json printed, and standard error."""

    def call(prompt: str, *options: str) -> tuple[dict, str]:
        code, out, err = run("generate", "-m", str(tiny_folder), "-p", prompt, "-n", "6", "--json", *options)
        assert code == 0, err
        return json.loads(out), err

    return call


def test_plain_text_goes_on_where_it_ended(generate, tmp_path):
    file = str(tmp_path / "c.safetensors")
    first, err = generate("a b w1 w2", "--raw", "--save-cache", file, "-r", "none")
    assert first["loaded_cache"] is None
    assert first["saved_cache"] == {"file": file, "nbytes": (tmp_path / "c.safetensors").stat().st_size, "tokens": 9}
    assert "saved 9 tokens" in err
    then, _ = generate("w3 w4", "--raw", "--load-cache", file)
    assert then["loaded_cache"] == {"file": file, "tokens": 9}
    assert then["saved_cache"] is None
    assert then["recipe"] == first["recipe"]  # the file's, not the default
    whole, _ = generate(f"a b w1 w2 {first['text']} w3 w4", "--raw", "-r", "none")
    assert then["prompt_tokens"] == whole["prompt_tokens"] == 12
    assert then["text"] == whole["text"]


def test_a_conversation_goes_on_with_its_messages(generate, run, tiny_folder, tmp_path):
    files = [str(tmp_path / f"{number}.safetensors") for number in range(3)]
    first, _ = generate("a b", "--save-cache", files[0])
    second, _ = generate("w5", "--load-cache", files[0], "--save-cache", files[1])
    talk = run("chat", "-m", str(tiny_folder), "-n", "6", stdin="a b\nw5\n")[1].splitlines()
    assert [first["text"], second["text"]] == talk
    code, out, err = run(
        "chat", "-m", str(tiny_folder), "-n", "6", "--load-cache", files[1], "--save-cache", files[2], stdin="w6 w7\n"
    )
    assert code == 0, err
    third = run("chat", "-m", str(tiny_folder), "-n", "6", stdin="a b\nw5\nw6 w7\n")[1].splitlines()[2]
    assert out.splitlines() == [third]
    assert "were new" in err
    roles = [each["role"] for each in messages(files[2], tiny_folder)]
    assert roles == ["user", "assistant"] * 3


def messages(file: str, folder) -> list[dict]:
    from kvslim.integrations.transformers.loading import load_model

    return kvslim.KVCache.load(file, load_model(str(folder), device="cpu", progress=False).model).saved.notes[
        "messages"
    ]


def test_plain_text_goes_on_without_a_template_and_says_so(generate, run, tiny_folder, tmp_path):
    file = str(tmp_path / "c.safetensors")
    generate("a b w1", "--raw", "--save-cache", file)
    _, err = generate("w3", "--load-cache", file)
    assert "holds plain text: the prompt goes in as it is" in err
    code, _, err = run("chat", "-m", str(tiny_folder), "--load-cache", file, stdin="a\n")
    assert code == 2
    assert "kvslim generate --raw" in err


def test_a_file_that_cannot_be_loaded_or_written_ends_with_code_2(generate, run, tiny_folder, tmp_path):
    file = tmp_path / "c.safetensors"
    common = ("generate", "-m", str(tiny_folder), "-p", "a", "-n", "2")
    bad = {
        ("--load-cache", str(file)): "no saved cache file at",
        ("--load-cache", __file__): "cannot be read as safetensors",
        ("--save-cache", str(tmp_path)): "cannot be replaced by a file",
    }
    for options, message in bad.items():
        code, out, err = run("generate", "-m", "no-such-model", "-p", "a", *options)  # before a model is looked for
        assert (code, out) == (2, "")
        assert message in err
    generate("a b", "--save-cache", str(file))
    for options, message in {
        ("-r", "int8"): "is packed by recipe",
        ("--key", "int8"): "is packed by recipe",
        ("--dtype", "bfloat16"): "was saved with another model",
    }.items():
        code, out, err = run(*common, "--load-cache", str(file), *options)
        assert (code, out) == (2, "")
        assert message in err
        assert "Traceback" not in err


def test_a_cache_of_several_sequences_or_without_ids_is_refused(run, tiny_folder, tmp_path):
    from kvslim.integrations.transformers.loading import load_model

    model = load_model(str(tiny_folder), device="cpu", progress=False).model
    cache = kvslim.KVCache(model)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for given, message in ((ids, "holds 2 sequences"), (None, "holds no token ids")):
        cache.save(tmp_path / "c", ids=given)
        code, _, err = run("generate", "-m", str(tiny_folder), "-p", "a", "--load-cache", str(tmp_path / "c"))
        assert code == 2
        assert message in err
