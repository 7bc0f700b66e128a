"""Real models: recipe `none` equals transformers' own cache, packed recipes carry every way to generate."""

from __future__ import annotations

import copy
import gc
import types
import weakref

import pytest
import torch
from transformers import DynamicCache

import kvslim
from kvslim.integrations.transformers import compat
from kvslim.presets import PRESETS

TOLERANCE = 2e-4
PACKED = ("int8", "kivi4")
TEXT = """\
The library keeps its opening hours on a board beside the door. On Monday it opens at nine and closes at five. On Tuesday it
opens at nine and closes at five. On Wednesday it opens at nine and closes at one, because the staff meet in the afternoon.
On Thursday it opens at eleven and closes at eight. On Friday it opens at nine and closes at five. On Saturday it opens at
ten and closes at four. On Sunday it stays shut. A reader may borrow six books at once, and keeps them for three weeks; after
that each day costs ten pence. Maps, atlases and newspapers cannot be borrowed at all, but there is a copier on the second
floor. The reading room has forty seats, and every seat has a lamp of its own. Dogs wait outside, except for those that
guide their owners.
"""
LIST = "one, two, three, four, five, six, seven, eight, nine, ten, " * 12


def encode(loaded, text: str, length: int | None = None) -> torch.Tensor:
    """Ids of `text`, repeated and cut to `length` tokens."""
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    if length is None:
        return ids
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def generate(model, ids, cache, new_tokens=8, **settings):
    """Sequences and logits of `generate` without early stops; greedy unless told otherwise."""
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(
        ids,
        **{compat.CACHE_ARGUMENT: cache},
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
        repetition_penalty=1.0,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )


def forward(model, ids, cache, keep=0, **arguments):
    """Logits of the last `keep` tokens (0: all)."""
    with torch.no_grad():
        return model(ids, **{compat.CACHE_ARGUMENT: cache}, logits_to_keep=keep, **arguments).logits


def assert_same(packed, stock):
    assert torch.equal(packed.sequences, stock.sequences)
    for got, want in zip(packed.logits, stock.logits, strict=True):
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def stock_cache(model) -> DynamicCache:
    # on its plain tensors kvslim's attention function is transformers' own sdpa
    return DynamicCache(config=model.config)


# -- identity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen05b", "gemma270m"])
def test_greedy_and_prompt_lookup(name, request):
    model = request.getfixturevalue(name).model
    ids = encode(request.getfixturevalue(name), LIST, 200)
    stock = generate(model, ids, stock_cache(model), 16)
    assert_same(generate(model, ids, kvslim.KVCache(model, "none+block=32"), 16), stock)
    lookup = {"prompt_lookup_num_tokens": 5}
    assert_same(
        generate(model, ids, kvslim.KVCache(model, "none+block=32"), 16, **lookup),
        generate(model, ids, stock_cache(model), 16, **lookup),
    )


@pytest.mark.parametrize("name", ["qwen05b", "gemma270m"])
def test_chunked_prefill(name, request):
    model = request.getfixturevalue(name).model
    ids = encode(request.getfixturevalue(name), TEXT, 230)
    caches = kvslim.KVCache(model, "none+block=32"), stock_cache(model)
    for start, stop in ((0, 100), (100, 101), (101, 230)):
        got, want = (forward(model, ids[:, start:stop], cache, keep=32) for cache in caches)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen05b", "gemma270m"])
def test_left_padded_batch(name, request):
    loaded = request.getfixturevalue(name)
    ids = encode(loaded, TEXT, 150).repeat(2, 1)
    mask = torch.ones_like(ids)
    ids[1, :90], mask[1, :90] = 0, 0
    results = [
        generate(loaded.model, ids, cache, 6, attention_mask=mask)
        for cache in (kvslim.KVCache(loaded.model, "none+block=32"), stock_cache(loaded.model))
    ]
    assert_same(*results)


@pytest.mark.parametrize("length", [300, 511, 512, 513, 1500])
def test_gemma_round_its_window(gemma270m, length):
    """The window is 512: what the last sliding token sees must not shift by one, in a chunk nor in a step."""
    model = gemma270m.model
    ids = encode(gemma270m, TEXT, length + 33)
    caches = kvslim.KVCache(model, "none"), stock_cache(model)
    for cache in caches:
        forward(model, ids[:, :length], cache, keep=1)
    for start, stop in ((length, length + 32), (length + 32, length + 33)):
        got, want = (forward(model, ids[:, start:stop], cache) for cache in caches)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


# -- the generation matrix on packed recipes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefixes(qwen05b):
    """Per recipe, a cache that holds all but the last 8 tokens of the prompt; every test takes a copy."""
    ids = encode(qwen05b, TEXT, 180)
    ids = torch.cat([ids, encode(qwen05b, LIST, 108)], dim=1)
    caches = {}
    for recipe in (*PACKED, "none"):
        caches[recipe] = kvslim.KVCache(qwen05b.model, recipe)
        forward(qwen05b.model, ids[:, :-8], caches[recipe], keep=1)
    return ids, caches


@pytest.fixture(scope="module")
def exact_text(qwen05b, prefixes):
    ids, caches = prefixes
    return generate(qwen05b.model, ids, caches["none"].fork()).sequences


@pytest.mark.parametrize("recipe", PACKED)
class TestMatrix:
    def test_greedy(self, qwen05b, prefixes, exact_text, recipe):
        """The list goes on as it does with the exact cache, from a copy and from a cache fed anew in the same way."""
        ids, caches = prefixes
        assert torch.equal(generate(qwen05b.model, ids, caches[recipe].fork()).sequences, exact_text)
        fresh = kvslim.KVCache(qwen05b.model, recipe)
        forward(qwen05b.model, ids[:, :-8], fresh, keep=1)
        one, other = (generate(qwen05b.model, ids, cache, 3) for cache in (fresh, caches[recipe].fork()))
        assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))

    def test_sampling_three_returns(self, qwen05b, prefixes, recipe):
        ids, caches = prefixes
        texts = []
        for _ in range(2):
            cache = copy.deepcopy(caches[recipe])
            cache.batch_repeat_interleave(3)
            torch.manual_seed(5)
            settings = {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "top_k": 50, "top_p": 1.0}
            texts.append(generate(qwen05b.model, ids, cache, **settings).sequences)
        assert torch.equal(texts[0], texts[1])
        assert len({tuple(row) for row in texts[0].tolist()}) > 1

    def test_beam_search_with_and_without_left_padding(self, qwen05b, prefixes, recipe):
        ids, _ = prefixes
        ids = ids[:, -100:]
        alone = generate(qwen05b.model, ids, kvslim.KVCache(qwen05b.model, recipe), num_beams=3)
        padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), ids], dim=1)
        other = generate(
            qwen05b.model,
            padded,
            kvslim.KVCache(qwen05b.model, recipe),
            num_beams=3,
            attention_mask=(torch.arange(130) >= 30).long()[None],
        )
        assert torch.equal(alone.sequences[:, 100:], other.sequences[:, 130:])

    def test_prompt_lookup(self, qwen05b, prefixes, exact_text, recipe):
        ids, caches = prefixes
        result = generate(qwen05b.model, ids, caches[recipe].fork(), prompt_lookup_num_tokens=4)
        assert torch.equal(result.sequences, exact_text)

    def test_assistant_model(self, qwen05b, prefixes, exact_text, recipe):
        ids, caches = prefixes
        result = generate(qwen05b.model, ids, caches[recipe].fork(), 6, assistant_model=qwen05b.model)
        assert torch.equal(result.sequences, exact_text[:, : ids.shape[1] + 6])

    def test_streamer(self, qwen05b, prefixes, exact_text, recipe):
        class Tokens:
            def __init__(self):
                self.seen, self.ended = [], False

            def put(self, value):
                self.seen += value.flatten().tolist()

            def end(self):
                self.ended = True

        ids, caches = prefixes
        streamer = Tokens()
        generate(qwen05b.model, ids, caches[recipe].fork(), 4, streamer=streamer)
        assert streamer.ended
        assert streamer.seen == exact_text[0, : ids.shape[1] + 4].tolist()

    def test_turns_and_copies_of_a_prefix(self, qwen05b, prefixes, recipe):
        """Two turns on one copy; then the first again on another copy: as if the second had never been."""
        ids, caches = prefixes
        question = encode(qwen05b, " On Sunday the library")
        cache = copy.deepcopy(caches[recipe])
        first = generate(qwen05b.model, ids, cache, 4)
        assert cache.get_seq_length() == ids.shape[1] + 3
        second = generate(qwen05b.model, torch.cat([first.sequences, question], dim=1), cache, 4)
        assert cache.get_seq_length() == second.sequences.shape[1] - 1
        again = generate(qwen05b.model, ids, copy.deepcopy(caches[recipe]), 4)
        assert all(torch.equal(a, b) for a, b in zip(first.logits, again.logits, strict=True))
        assert caches[recipe].get_seq_length() == ids.shape[1] - 8

    def test_skipped_layers(self, qwen05b, prefixes, exact_text, recipe):
        ids, _ = prefixes
        cache = kvslim.KVCache(qwen05b.model, recipe, skip_layers=(0, 23))
        result = generate(qwen05b.model, ids, cache, 4)
        assert torch.equal(result.sequences, exact_text[:, : ids.shape[1] + 4])
        report = cache.report()
        assert (report.layers_packed, report.layers_total) == (22, 24)
        assert "not packed     0, 23: skipped on request" in str(report)


# -- bytes -------------------------------------------------------------------------------------------------------------


def reachable_tensors(root) -> list[torch.Tensor]:
    """Every tensor that the garbage collector can reach from `root`; modules, classes and models are not entered."""
    closed = (types.ModuleType, types.FunctionType, type, torch.nn.Module, weakref.ReferenceType)
    found, seen, stack = [], set(), [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, closed):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        else:
            stack.extend(gc.get_referents(item))
    return found


def held_bytes(cache) -> int:
    """Bytes of all storages reachable from the cache."""
    storages = [tensor.untyped_storage() for tensor in reachable_tensors(cache)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.filterwarnings("ignore::UserWarning")  # presets that these keys are too much for say so
@pytest.mark.parametrize("preset", PRESETS)
def test_report_counts_every_byte(gemma270m, preset):
    """And what is packed is not held dense as well: outside the exact slots no float tensor has the history's length."""
    cache = kvslim.KVCache(gemma270m.model, preset)
    forward(gemma270m.model, encode(gemma270m, TEXT, 700), cache, keep=1)
    forward(gemma270m.model, encode(gemma270m, LIST, 1), cache, keep=1)
    report = cache.report()
    assert report.nbytes == pytest.approx(held_bytes(cache), rel=0.02)
    stores = [layer.core.store for layer in cache.layers if hasattr(layer, "core")]
    assert len(stores) == report.layers_packed == 3
    for store in stores:
        packed = store.rows[0].packed
        assert packed >= 512
        if preset != "none":
            dense = packed * store.kv_heads * store.head_dims[0]
            exact = {store.key.data_ptr(), store.value.data_ptr()}
            own = [tensor for tensor in store.tensors() if tensor.is_floating_point()]
            assert not [tensor for tensor in own if tensor.numel() >= dense and tensor.data_ptr() not in exact]
        assert store.nbytes == sum(tensor.nbytes for tensor in store.tensors())


@pytest.mark.parametrize("recipe", ["kivi4", "int8", "slim4"])
def test_qwen_holds_what_the_formula_says(qwen05b, recipe):
    cache = kvslim.KVCache(qwen05b.model, recipe)
    forward(qwen05b.model, encode(qwen05b, TEXT, 420), cache, keep=1)
    report = cache.report()
    assert report.nbytes == pytest.approx(held_bytes(cache), rel=0.02)
    assert (report.layers_packed, report.layers_total) == (24, 24)
    assert report.bits_per_value_packed < {"kivi4": 5.01, "int8": 8.01, "slim4": 4.5}[recipe]
    assert report.nbytes_16bit == 2 * 24 * 2 * 2 * 64 * 420
    assert report.nbytes < report.nbytes_16bit
    assert report.peak_nbytes < report.nbytes_16bit
