"""What `plan` says a cache will hold against what caches of real classes do hold, to the byte."""

import json

import pytest
import torch
from transformers import BertConfig, T5Config

import kvslim
from kvslim.errors import InputError, RecipeError, UnsupportedModelError
from kvslim.eval.budget import Memory, ask, default_feed
from kvslim.eval.plan import Plan
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.loading import load_config
from kvslim.integrations.transformers.shapes import Parameters, model_shape, plain_shape
from kvslim.recipe import Recipe
from kvslim.store.sizes import Feed, packed_tokens, pool_blocks
from tiny_models import build, config_of, prompt

FAMILIES = ("llama", "gemma3", "gpt-oss", "qwen3-next", "lfm2", "gemma3n")  # GQA, windows, both linear kinds, shared KV
RECIPES = ("slim4", "slim4p", "kivi4", "fp8", "turbo4-qjl", "none", "int8+layer.1=slim3", "slim2+sinks=0")


def held(model, recipe, feed):
    """Run `feed` through a cache of the real classes."""
    cache = kvslim.KVCache(model, recipe)
    ids, done = prompt(feed.batch, feed.context), 0
    with torch.no_grad():
        for length in feed.lengths():
            model(input_ids=ids[:, done:length], logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
            done = length
    return cache.report()


def check(shape, model, recipe, feed):
    size, report = Plan(shape, Recipe.parse(recipe)).size(feed), held(model, recipe, feed)
    assert (size.nbytes, size.nbytes_16bit) == (report.nbytes, report.nbytes_16bit), (recipe, feed)
    assert size.bits_per_value == pytest.approx(report.bits_per_value)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_every_kind_of_layer_are_exact(family):
    shape, model = model_shape(family, config_of(family), torch.float32), build(family)
    for feed in (Feed(300), Feed(300, batch=2, chunk=70)):
        check(shape, model, "slim4", feed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_of_every_kind_of_recipe_are_exact(recipe):
    shape, model = model_shape("gemma3", config_of("gemma3"), torch.float32), build("gemma3")
    for feed in (Feed(20), Feed(400, batch=3, chunk=90), Feed(330, batch=2, new_tokens=3)):
        check(shape, model, recipe, feed)


def test_slack_of_a_pool_that_grew_while_decoding_is_counted():
    """Blocks of 8 tokens, 64 in the prompt: the next slab has room for four, and one is used."""
    recipe = "kivi4+block=8+recent=0+sinks=0"
    feed = Feed(520, new_tokens=8)
    assert packed_tokens(Recipe.parse(recipe), 520) == 65 * 8
    assert pool_blocks(Recipe.parse(recipe), feed) == 68
    changes = {"num_hidden_layers": 1}
    shape = model_shape("llama", config_of("llama", **changes), torch.float32)
    check(shape, build("llama", **changes), recipe, feed)


def check_real(name, loaded):
    """From the short name alone, without its file."""
    shape = model_shape(*load_config(name), torch.float32)
    assert shape == model_shape(name, loaded.model.config, torch.float32)
    for recipe, feed in (("slim4", Feed(300)), ("slim4p", Feed(200, chunk=120)), ("none", Feed(60))):
        check(shape, loaded.model, recipe, feed)


def test_bytes_of_a_real_model_are_exact(qwen05b):
    check_real("qwen0.5b", qwen05b)


def test_bytes_of_a_real_model_with_windows_are_exact(gemma270m):
    check_real("gemma270m", gemma270m)


def test_the_16_bit_row_is_what_the_numbers_make_by_hand():
    plan = Plan(plain_shape(32, 8, 128, 64, torch.bfloat16), None)
    assert plan.size(Feed(1000, batch=2)).nbytes == 2 * 1000 * 32 * 8 * (128 + 64) * 2
    assert plan.size(Feed(1000)).bits_per_value == 16


def test_values_may_have_another_head_dim():
    plain, wide = (
        Plan(plain_shape(2, 1, 128, dim, torch.float16), Recipe.parse("int8")).size(Feed(1024)) for dim in (64, 128)
    )
    assert plain.nbytes_blocks < wide.nbytes_blocks
    assert plain.nbytes_exact / wide.nbytes_exact == (128 + 64) / (128 + 128)


@pytest.mark.parametrize("recipe", [None, "slim4", "slim2", "slim4p"])
@pytest.mark.parametrize("feed", [Feed(1), Feed(1, batch=5, chunk=256), Feed(41, new_tokens=40)])
def test_the_longest_context_fits_and_the_next_does_not(recipe, feed):
    from dataclasses import replace

    plan = Plan(plain_shape(4, 2, 64, None, torch.bfloat16), None if recipe is None else Recipe.parse(recipe))
    room = 30 << 20
    longest = plan.longest(room, feed)
    assert plan.most(replace(feed, context=longest)) <= room < plan.most(replace(feed, context=longest + 1))


def test_the_longest_context_ends_where_the_model_does_and_may_be_none():
    shape = model_shape("llama", config_of("llama"), torch.bfloat16)
    plan = Plan(shape, Recipe.parse("slim4"))
    assert plan.longest(1 << 40, Feed(1)) == shape.context == 1024
    assert plan.longest(1000, Feed(1)) == 0


def test_parameters_are_those_of_the_model_and_quantized_ones_those_of_its_linear_layers():
    for family in ("llama", "gemma3"):
        model = build(family)
        counted = model_shape(family, config_of(family), torch.float32).parameters
        assert counted.total == model.num_parameters()
        inner = [part.weight.numel() for name, part in model.named_modules() if name.endswith("_proj")]
        assert counted.linear == sum(inner)
    assert Parameters(1000, 640, 10).nbytes("16bit") == 2000
    assert Parameters(1000, 640, 10).nbytes("int8") == 720 + 640 + 40
    assert Parameters(1000, 640, 10).nbytes("nf4") == 720 + 320 + 40


def test_what_cannot_be_planned_is_refused():
    shape = model_shape("llama", config_of("llama"), torch.bfloat16)
    with pytest.raises(InputError, match=r"2,000 tokens is past the 1,024"):
        ask(shape, [], Feed(2000), None)
    with pytest.raises(InputError, match="--weights nf4"):
        Memory.of(1000, shape, "16bit")
    with pytest.raises(InputError, match="layers 0 to 2"):
        Plan(shape, Recipe.parse("slim4+layer.7=int8"))
    with pytest.raises(RecipeError, match="head_dim=20"):
        Plan(plain_shape(1, 1, 20, None, torch.float16), Recipe.parse("k=table:4:scale=8+v=none"))
    with pytest.raises(InputError, match="kv_heads=0"):
        plain_shape(1, 0, 64, None, torch.float16)
    with pytest.raises(InputError, match="--context or --memory"):
        default_feed(plain_shape(1, 1, 64, None, torch.float16), Feed(1), None)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        model_shape("t5", T5Config(), torch.float16)
    with pytest.raises(UnsupportedModelError, match="--kv-heads"):
        model_shape("broken", BertConfig(hidden_size=30, num_attention_heads=4), torch.float16)


# -- the command


def test_the_command_answers_for_a_folder_in_both_forms(run, tiny_folder):
    arguments = ("plan", "-m", str(tiny_folder), "-r", "slim4,int8", "--memory", "1MiB", "--dtype", "float32")
    code, out, _ = run(*arguments, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["kind"], found["model"], found["context"], found["context_limit"]) == ("plan", "tiny", 256, 256)
    assert [row["recipe"] for row in found["rows"]] == ["16 bit", "slim4", "int8"]
    assert found["rows"][1]["longest_context"] == 256
    assert found["rows"][0]["curve"] == [{"context": 256, "nbytes": 2 * 2 * 256 * 2 * 32}]
    assert found["command"] == "kvslim plan --model tiny --recipe slim4,int8 --memory 1MiB --dtype float32 --json"
    code, out, _ = run(*arguments)
    assert code == 0
    assert "256*" in out
    assert "estimated" in out


def test_the_command_answers_for_bare_numbers(run):
    numbers = ("plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    code, out, _ = run(*numbers, "--memory", "8G", "-r", "slim4", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert rows[0]["longest_context"] == json.loads(out)["context"] == 65536
    code, out, _ = run(*numbers, "--memory", "8G", "-r", "slim4")
    assert "65,536" in out


BAD = {
    "unknown model": (["-m", "qwen05b"], "Did you mean 'qwen0.5b'?"),
    "past the context": (["-c", "40000"], "past the 32,768"),
    "half a shape": (["--layers", "4"], "one is missing"),
    "model and shape": (["-m", "qwen0.5b", "--layers", "4"], "give one"),
    "no end": (["--layers", "4", "--kv-heads", "1", "--head-dim", "64"], "give --context or --memory"),
    "impossible shape": (["--layers", "4", "--kv-heads", "0", "--head-dim", "64", "-c", "9"], "kv_heads=0"),
    "malformed memory": (["--memory", "12Gb/s"], "is no size"),
    "memory without unit": (["--memory", "12"], "write a number and a unit"),
    "no memory": (["--memory", "0G"], "no memory at all"),
    "too small for the weights": (["-m", "gemma270m", "--memory", "100MB"], "take 536,196,352 bytes"),
    "unknown weights": (["--weights", "nf3"], "Did you mean 'nf4'?"),
    "no tokens": (["-c", "0"], "context=0"),
    "no sequences": (["-c", "9", "--batch", "0"], "batch=0"),
    "nothing but new tokens": (["-c", "9", "--new-tokens", "9"], "use 0 to 8"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_ends_with_code_2_and_one_message(run, arguments, message):
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("12GiB", 12 << 30), ("8G", 8 << 30), ("512MB", 512 * 10**6), ("1.5 TiB", 3 << 39)]
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    from kvslim.cli.sizes import parse_size

    assert parse_size(text, "--memory") == nbytes
