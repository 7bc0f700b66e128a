"""KVCache on tiny models: with recipe `none` every way to generate equals transformers' own cache; bad use is refused."""

from __future__ import annotations

import copy
import hashlib
import queue

import pytest
import torch
from transformers import DeepseekV3Config, DynamicCache, GPT2Config, MambaConfig, T5Config

import kvslim
from kvslim.errors import InputError, PackedCacheError, RecipeError, StateError, UnsupportedModelError
from kvslim.integrations.transformers import compat
from kvslim.layout import TOKEN_PARTS
from kvslim.recipe import Recipe
from tiny_models import FAMILIES, LINEAR, WINDOWED, build, config_of, left_padded, pair, prompt

SMALL = "none+block=8+sinks=2+recent=5"  # blocks are sealed within a few tokens
TOLERANCE = 2e-4
PACKED = (
    "int8",
    "kivi4",
    "int8+block=8+sinks=2+recent=5",
    "k=affine:4:scale=16+v=affine:4:scale=16+immediate+block=16",
)
FEW = ("llama", "gemma3", "gpt-oss", "qwen3-next")  # one of each kind of layer
CROPPABLE = [family for family in FEW if family not in LINEAR]


def generate(model, ids, cache, **settings):
    """Sequences and logits of `generate`; greedy unless told otherwise."""
    settings = {"max_new_tokens": 10, "do_sample": False, **settings}
    settings.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, **{compat.CACHE_ARGUMENT: cache}, return_dict_in_generate=True, output_logits=True, **settings
    )


def assert_same(packed, stock):
    assert torch.equal(packed.sequences, stock.sequences)
    assert len(packed.logits) == len(stock.logits)
    for got, want in zip(packed.logits, stock.logits, strict=True):
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def both(family, ids, recipe=SMALL, **settings):
    """Generate with a packed cache and with transformers' own; the same seed for both."""
    packed, stock = pair(family)
    results = []
    for model, cache in ((packed, kvslim.KVCache(packed, recipe)), (stock, DynamicCache(config=stock.config))):
        torch.manual_seed(7)
        results.append(generate(model, ids, cache, **settings))
    assert_same(*results)
    return results[0]


def forward(model, ids, cache=None, mask=None):
    """Logits of a plain forward call."""
    arguments = {} if cache is None else {compat.CACHE_ARGUMENT: cache}
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=cache is not None, **arguments).logits


def state_hash(cache) -> str:
    """Hash of every byte that the packed layers hold in use, and of their counts."""
    digest = hashlib.sha256()
    for layer in cache.layers:
        if not hasattr(layer, "core"):
            for states in (layer.keys, layer.values):
                digest.update(states.contiguous().numpy().tobytes())
            continue
        store = layer.core.store
        digest.update(f"{store.length} {[(row.sinks, row.packed, row.tail, row.holes) for row in store.rows]}".encode())
        for index, entries in enumerate(cache.table.rows):
            view = store.view(index)
            digest.update(view.key.contiguous().numpy().tobytes() + view.value.contiguous().numpy().tobytes())
            for entry in entries:
                for side in "kv":
                    for name, part in store.pool.read(side, [entry.block]).parts.items():
                        used = part[:, :, : entry.valid] if name in TOKEN_PARTS else part
                        digest.update(used.contiguous().numpy().tobytes())
    return digest.hexdigest()


# -- recipe none equals transformers' own cache --------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family):
    result = both(family, prompt(2, 45), max_new_tokens=16)
    assert len(set(result.sequences[0, 45:].tolist())) > 3  # a model that repeats one token would prove nothing


@pytest.mark.parametrize("recipe", ["none", "none+immediate+block=8", "none+block=8+sinks=0+recent=0"])
def test_greedy_with_other_windows(recipe):
    both("llama", prompt(2, 45), recipe, max_new_tokens=16)


@pytest.mark.parametrize("family", FEW)
def test_sampling_three_returns(family):
    result = both(family, prompt(1, 30), do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in result.sequences.tolist()}) > 1


@pytest.mark.parametrize("family", FEW)
def test_beam_search(family):
    both(family, prompt(1, 30), num_beams=3, num_return_sequences=2)


@pytest.mark.parametrize("family", FEW)
def test_beam_search_with_left_padding(family):
    ids, mask = left_padded([5, 33, 20])
    both(family, ids, attention_mask=mask, num_beams=3)


@pytest.mark.parametrize("family", CROPPABLE)
def test_prompt_lookup(family):
    ids = prompt(1, 9).repeat(1, 5)
    result = both(family, ids, prompt_lookup_num_tokens=4, max_new_tokens=24)
    assert torch.equal(result.sequences, generate(pair(family)[1], ids, None, max_new_tokens=24).sequences)


@pytest.mark.parametrize("family", CROPPABLE)
def test_assistant_model(family):
    assistant = pair("mistral")[1]
    ids = prompt(1, 30)
    result = both(family, ids, assistant_model=assistant, max_new_tokens=20)
    assert torch.equal(result.sequences, generate(pair(family)[1], ids, None, max_new_tokens=20).sequences)


@pytest.mark.parametrize("family", CROPPABLE)
def test_assisted_by_itself_accepts_drafts(family):
    both(family, prompt(1, 30), assistant_model=pair(family)[1], max_new_tokens=20)


@pytest.mark.parametrize("family", FEW)
def test_chunked_prefill_by_generate(family):
    both(family, prompt(2, 50), prefill_chunk_size=11)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(20, 21), (1, 40)])
def test_chunked_prefill_by_hand(family, cuts):
    packed, stock = pair(family)
    ids = prompt(2, 50)
    caches = kvslim.KVCache(packed, SMALL), DynamicCache(config=stock.config)
    for start, stop in zip((0, *cuts), (*cuts, 50), strict=True):
        got, want = (forward(m, ids[:, start:stop], c) for m, c in zip((packed, stock), caches, strict=True))
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
        assert caches[0].get_seq_length() == stop


@pytest.mark.parametrize(
    ("family", "lengths"),
    [*((family, [3, 17, 64, 130]) for family in FAMILIES), ("llama", [64, 3]), ("gemma3", [1, 40, 41])],
)
def test_left_padded_batch_equals_solo_runs(family, lengths):
    """Whatever the padding rows contain: their embeddings are made huge, and no real token changes."""
    packed, _ = pair(family)
    ids, mask = left_padded(lengths)
    embeddings = packed.get_input_embeddings().weight
    kept = embeddings[0].clone()
    with torch.no_grad():
        embeddings[0] = 100.0
    try:
        batch = generate(packed, ids, kvslim.KVCache(packed, SMALL), attention_mask=mask, suppress_tokens=[0])
    finally:
        with torch.no_grad():
            embeddings[0] = kept
    for row, length in enumerate(lengths):
        alone = ids[row : row + 1, ids.shape[1] - length :]
        solo = generate(packed, alone, kvslim.KVCache(packed, SMALL), suppress_tokens=[0])
        assert torch.equal(batch.sequences[row, ids.shape[1] :], solo.sequences[0, length:])
        for got, want in zip(batch.logits, solo.logits, strict=True):
            torch.testing.assert_close(got[row], want[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", CROPPABLE)
def test_right_padding_between_turns(family):
    """Padding in the middle: a right-padded first turn, then more text."""
    packed, stock = pair(family)
    ids, more = prompt(2, 30), prompt(2, 6, seed=3)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    caches = kvslim.KVCache(packed, SMALL), DynamicCache(config=stock.config)
    for model, cache in zip((packed, stock), caches, strict=True):
        forward(model, ids, cache, mask)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    got, want = (forward(m, more, c, mask) for m, c in zip((packed, stock), caches, strict=True))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama"])
def test_streamer(family):
    class Tokens:
        def __init__(self):
            self.seen = queue.Queue()

        def put(self, value):
            for token in value.flatten().tolist():
                self.seen.put(token)

        def end(self):
            self.seen.put(None)

    streamer = Tokens()
    packed, _ = pair(family)
    ids = prompt(1, 30)
    result = generate(packed, ids, kvslim.KVCache(packed, SMALL), streamer=streamer)
    assert [*iter(streamer.seen.get, None)] == result.sequences[0].tolist()


@pytest.mark.parametrize("family", FEW)
def test_turns_reuse_the_cache(family):
    packed, stock = pair(family)
    caches = kvslim.KVCache(packed, SMALL), DynamicCache(config=stock.config)
    ids = prompt(1, 25)
    for turn in range(3):
        results = [generate(m, ids, c, max_new_tokens=9) for m, c in zip((packed, stock), caches, strict=True)]
        assert_same(*results)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == results[0].sequences.shape[1] - 1
        ids = torch.cat([results[0].sequences, prompt(1, 7, seed=turn)], dim=1)


@pytest.mark.parametrize("family", FEW)
def test_copies_of_a_prefix(family):
    """One prefix, three continuations on copies, in any order: each as if the prefix had been fed for it alone."""
    packed, stock = pair(family)
    prefix = prompt(1, 37)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prefix, cache)
    for number in (2, 0, 1):
        ids = torch.cat([prefix, prompt(1, 5 + number, seed=number)], dim=1)
        copied = copy.deepcopy(cache) if number else cache.fork()
        assert_same(generate(packed, ids, copied), generate(stock, ids, DynamicCache(config=stock.config)))
    assert cache.get_seq_length() == 37


@pytest.mark.parametrize("skip", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_skipped_layers(skip):
    packed, stock = pair("llama")
    cache = kvslim.KVCache(packed, SMALL, skip_layers=skip)
    ids = prompt(2, 40)
    assert_same(generate(packed, ids, cache), generate(stock, ids, DynamicCache(config=stock.config)))
    report = cache.report()
    assert report.layers_packed == 3 - len(skip)
    assert [layer.layer for layer in report.layers if not layer.packed] == list(skip)
    assert "skipped on request" in str(report)
    assert_same(
        generate(packed, ids[:1], kvslim.KVCache(packed, SMALL, skip_layers=skip), num_beams=3),
        generate(stock, ids[:1], DynamicCache(config=stock.config), num_beams=3),
    )


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_both_names_of_the_argument():
    packed, _ = pair("llama")
    ids = prompt(1, 20)
    texts = []
    for name in {"past_key_values", compat.CACHE_ARGUMENT}:
        cache = kvslim.KVCache(packed, SMALL)
        texts.append(packed.generate(ids, **{name: cache}, max_new_tokens=8, do_sample=False).tolist())
        assert cache.get_seq_length() == 27
        cache = kvslim.KVCache(packed, SMALL)
        packed(ids, **{name: cache})
        assert cache.get_seq_length() == 20
    assert texts == [texts[0]] * len(texts)


# -- operations equal a fresh cache ------------------------------------------------------------------------------------

RECENT = 5


@pytest.mark.parametrize("remove", [1, RECENT - 1, RECENT, RECENT + 1, 3 * RECENT, 3 * RECENT + 8, 39, 40])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_crop(family, remove):
    packed, _ = pair(family)
    ids, more = prompt(2, 40), prompt(2, 12, seed=5)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, ids, cache)
    cache.crop(-remove)
    assert cache.get_seq_length() == 40 - remove
    fresh = kvslim.KVCache(packed, SMALL)
    if remove < 40:
        forward(packed, ids[:, : 40 - remove], fresh)
    for start, stop in ((0, 9), (9, 10), (10, 12)):
        got, want = (forward(packed, more[:, start:stop], c) for c in (cache, fresh))
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("remove", [1, 6, 20])
@pytest.mark.parametrize("family", WINDOWED)
def test_crop_with_recorded_windows(family, remove):
    """Past its window a sliding layer can only go back if it was told to record."""
    packed, _ = pair(family)
    ids, more = prompt(1, 40), prompt(1, 4, seed=5)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, ids, cache)
    before = state_hash(cache) if family != "gemma3n" else cache.get_seq_length()
    with pytest.raises(StateError, match="window of 12 keeps no older tokens"):
        cache.crop(-remove)
    assert (state_hash(cache) if family != "gemma3n" else cache.get_seq_length()) == before
    cache = kvslim.KVCache(packed, SMALL)
    cache.activate_past_recording()
    forward(packed, ids, cache)
    cache.crop(-remove)
    fresh = kvslim.KVCache(packed, SMALL)
    forward(packed, ids[:, : 40 - remove], fresh)
    for at in range(4):
        got, want = (forward(packed, more[:, at : at + 1], c) for c in (cache, fresh))
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_crop_beyond_what_a_window_recorded():
    packed, _ = pair("gemma3")
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(1, 40), cache)
    cache.activate_past_recording()
    forward(packed, prompt(1, 3, seed=1), cache)
    before = state_hash(cache)
    with pytest.raises(StateError, match="recorded only 14 tokens"):
        cache.crop(-4)
    assert state_hash(cache) == before
    cache.crop(-3)
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("family", LINEAR)
def test_crop_of_a_recurrent_state_is_refused(family):
    packed, _ = pair(family)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(1, 30), cache)
    with pytest.raises(StateError, match="layer 0: .*nothing was removed"):
        cache.crop(-3)
    assert cache.get_seq_length() == 30


def test_crop_of_more_than_there_is():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(1, 10), cache)
    with pytest.raises(StateError, match="holds only 10 tokens"):
        cache.crop(-11)
    with pytest.raises(InputError, match="negative count"):
        cache.crop(3)
    cache.crop(0)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("family", FEW)
def test_two_reorders_in_a_row(family):
    packed, _ = pair(family)
    ids, more = prompt(3, 40), prompt(3, 3, seed=9)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, ids, cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    forward(packed, more[:, :1], cache)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    got = forward(packed, more[:, 1:], cache)
    text = torch.cat([ids[[2, 2, 0]], more[:, :1]], dim=1)[[1, 0, 2]]
    want = forward(packed, torch.cat([text, more[:, 1:]], dim=1))[:, -2:]
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", CROPPABLE)
def test_repeat_and_select(family):
    packed, _ = pair(family)
    ids = prompt(2, 40)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, ids, cache)
    cache.batch_repeat_interleave(2)
    more = prompt(4, 3, seed=2)
    got = forward(packed, more, cache)
    whole = torch.cat([ids.repeat_interleave(2, dim=0), more], dim=1)
    torch.testing.assert_close(got, forward(packed, whole)[:, -3:], atol=TOLERANCE, rtol=0)
    for indices in (torch.tensor([3, 1]), torch.tensor([True, False])):
        cache.batch_select_indices(indices)
        whole = whole[indices]
        token = prompt(len(whole), 1, seed=4)
        whole = torch.cat([whole, token], dim=1)
        got = forward(packed, token, cache)
        torch.testing.assert_close(got, forward(packed, whole)[:, -1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", LINEAR)
def test_repeat_that_a_layer_does_not_know_changes_nothing(family):
    packed, _ = pair(family)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(2, 20), cache)
    for operation, argument in (("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))):
        with pytest.raises(StateError, match=f"{operation}.*nothing was changed"):
            getattr(cache, operation)(argument)
    forward(packed, prompt(2, 1), cache)
    assert len(cache.table.rows) == 2


def test_rows_that_do_not_exist():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(2, 30), cache)
    before = state_hash(cache)
    with pytest.raises(InputError, match="sequence 2 does not exist; the cache holds 2"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert state_hash(cache) == before


def test_operations_on_an_empty_cache():
    packed, stock = pair("llama")
    cache = kvslim.KVCache(packed, SMALL)
    cache.crop(0)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.reset()
    assert cache.fork().get_seq_length() == 0
    ids = prompt(2, 30)
    assert_same(generate(packed, ids, copy.deepcopy(cache)), generate(stock, ids, DynamicCache(config=stock.config)))
    assert cache.get_seq_length() == 0
    assert cache.report().nbytes < 64


@pytest.mark.parametrize("family", FEW)
def test_reset_makes_it_new(family):
    packed, _ = pair(family)
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(2, 40), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = prompt(2 if family in LINEAR else 3, 20, seed=4)  # transformers' recurrent layers keep their batch size
    got = forward(packed, ids, cache)
    torch.testing.assert_close(got, forward(packed, ids), atol=TOLERANCE, rtol=0)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("recipe", [SMALL, *PACKED])
def test_a_fork_leaves_its_parent_unchanged(recipe):
    packed, _ = pair("llama")
    parent = kvslim.KVCache(packed, recipe)
    forward(packed, prompt(2, 70), parent)
    before = state_hash(parent)
    forks = [parent.fork() for _ in range(3)]
    for number, fork in enumerate(forks):
        forward(packed, prompt(2, 50, seed=number), fork)
        fork.crop(-60)
        fork.reorder_cache(torch.tensor([1, 1]))
        forward(packed, prompt(2, 50, seed=number), fork)
    forks[0].reset()
    forward(packed, prompt(1, 90), forks[0])
    assert state_hash(parent) == before
    token = prompt(2, 1, seed=8)
    fresh = kvslim.KVCache(packed, recipe)
    forward(packed, prompt(2, 70), fresh)
    assert torch.equal(forward(packed, token, parent), forward(packed, token, fresh))


def test_forks_of_a_prefix_cost_one_prefix():
    packed, _ = pair("llama")
    parent = kvslim.KVCache(packed, "int8+block=16")
    forward(packed, prompt(1, 400), parent)
    pools = sum(layer.core.store.pool.nbytes for layer in parent.layers)
    forks = [parent.fork() for _ in range(20)]
    assert sum(layer.core.store.pool.nbytes for layer in parent.layers) == pools
    for fork in forks:
        assert {layer.core.store.pool for layer in fork.layers} == {layer.core.store.pool for layer in parent.layers}


def test_requests_one_after_the_other_leave_no_slope():
    """Copies of a prefix that come and go, and copies of an empty cache."""
    packed, _ = pair("llama")
    parent, empty = (kvslim.KVCache(packed, "int8+block=8") for _ in range(2))
    forward(packed, prompt(1, 100), parent)
    held = []
    for number in range(30):
        for start in (parent, empty):
            cache = copy.deepcopy(start)
            forward(packed, prompt(1, 60, seed=number), cache)
            held.append(cache.nbytes)
            del cache
    assert set(held[2::2]) == {held[0]}
    assert set(held[3::2]) == {held[1]}


# -- packed recipes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("family", FEW)
def test_packed_generation_is_that_of_a_cache_fed_identically(family, recipe):
    """Greedy text, then the same tokens one by one into a fresh cache: the same bytes in the end."""
    packed, _ = pair(family)
    ids = prompt(2, 60)
    first, again = (kvslim.KVCache(packed, recipe) for _ in range(2))
    result = generate(packed, ids, first)
    logits = forward(packed, ids, again)[:, -1]
    for step, got in enumerate(result.logits):
        torch.testing.assert_close(got, logits, atol=1e-5, rtol=0)
        if step < len(result.logits) - 1:  # generate() does not feed the last token either
            logits = forward(packed, result.sequences[:, 60 + step, None], again)[:, -1]
    if family not in LINEAR:
        assert state_hash(first) == state_hash(again)


@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 13},
    ],
    ids=str,
)
def test_packed_generation_matrix(recipe, settings):
    """Runs, and gives the same tokens a second time and under padding."""
    packed, _ = pair("llama")
    ids = prompt(1, 9).repeat(1, 6)
    texts = []
    for padding in (0, 0, 11):
        if padding and "num_beams" not in settings:  # lookup wants none, and it would shift where a prefill is cut
            continue
        padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
        torch.manual_seed(3)
        cache = kvslim.KVCache(packed, recipe)
        result = generate(packed, padded, cache, attention_mask=(padded > 0).long(), **settings)
        texts.append(result.sequences[:, padded.shape[1] :].tolist())
    assert texts == [texts[0]] * len(texts)


@pytest.mark.parametrize("recipe", PACKED[2:])
def test_beams_cost_little_more_than_their_own_tokens(recipe):
    """Beams part at almost every step; what they share stays shared, and no step leaves a part-filled block behind."""
    packed, _ = pair("llama")
    caches = [kvslim.KVCache(packed, recipe) for _ in range(2)]
    generate(packed, prompt(1, 100), caches[0], max_new_tokens=24)
    generate(packed, prompt(1, 100), caches[1], max_new_tokens=24, num_beams=4)
    one, four = (cache.table.allocator.in_use for cache in caches)
    own = 24 // caches[0].recipe.block + 2
    assert four <= one + 3 * own


@pytest.mark.parametrize("recipe", PACKED)
def test_packed_caches_come_close_to_the_exact_one(recipe):
    packed, stock = pair("llama")
    ids = prompt(1, 150)
    cache = kvslim.KVCache(packed, recipe)
    forward(packed, ids[:, :140], cache)
    got = forward(packed, ids[:, 140:], cache).log_softmax(-1)
    want = forward(stock, ids)[:, 140:].log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum(-1).mean()
    assert 0 < float(divergence) < (0.02 if "int8" in recipe else 0.5)
    assert cache.report().bits_per_value_packed < (9.5 if "int8" in recipe else 6)


def test_padding_does_not_change_packed_bytes():
    packed, _ = pair("llama")
    ids, mask = left_padded([40, 150])
    cache = kvslim.KVCache(packed, "kivi4")
    forward_mask = {"attention_mask": mask, compat.CACHE_ARGUMENT: cache}
    with torch.no_grad():
        packed(ids, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), **forward_mask)
    for row, length in enumerate((40, 150)):
        solo = kvslim.KVCache(packed, "kivi4")
        forward(packed, ids[row : row + 1, 150 - length :], solo)
        layer, alone = cache.layers[0].core.store, solo.layers[0].core.store
        assert (layer.rows[row].sinks, layer.rows[row].packed, layer.rows[row].tail) == (
            alone.rows[0].sinks,
            alone.rows[0].packed,
            alone.rows[0].tail,
        )
        torch.testing.assert_close(layer.view(row).key, alone.view(0).key, atol=2e-3, rtol=2e-3)
        for one, other in zip(cache.table.rows[row], solo.table.rows[0], strict=True):
            scales = (
                layer.pool.read("k", [one.block]).parts["channel"],
                alone.pool.read("k", [other.block]).parts["channel"],
            )
            torch.testing.assert_close(*scales, atol=2e-3, rtol=2e-3)


# -- reports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_report_counts_every_tensor(family):
    packed, _ = pair(family)
    recipe = "kivi4"
    cache = kvslim.KVCache(packed, recipe)
    assert cache.report().nbytes < 64 * len(cache.layers)
    generate(packed, prompt(2, 100), cache, max_new_tokens=3)
    report = cache.report()
    assert report.nbytes == cache.nbytes
    held = {}
    for layer in cache.layers:
        tensors = list(layer.core.store.tensors()) if hasattr(layer, "core") else []
        if not hasattr(layer, "core"):
            for item in vars(layer).values():
                tensors += item.values() if isinstance(item, dict) else [item]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert report.nbytes == pytest.approx(sum(held.values()), rel=0.02)
    assert report.peak_nbytes >= report.nbytes
    assert report.layers_total == len(cache.layers)
    assert report.layers_packed == sum(hasattr(layer, "core") for layer in cache.layers)


def test_report_of_a_full_cache_comes_to_the_formula():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, "int8+block=32+recent=0+sinks=0")
    forward(packed, prompt(1, 32 * 30), cache)
    report = cache.report()
    assert report.bits_per_value_packed == pytest.approx(8 + 16 / (32 * 32))
    tail = 8 * 3 * 2 * 2 * 32 * 32 * 2  # one block of fp16 slots per layer, K and V
    assert report.bits_per_value == pytest.approx(8 + 16 / (32 * 32) + tail / (3 * 2 * 2 * 32 * 960), rel=0.05)
    assert report.nbytes_16bit == 2 * 3 * 2 * 2 * 32 * 960
    assert report.to_dict()["layers_packed"] == 3


def test_report_names_what_packs_each_side(native_kernels):
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, "k=rotate/table:4+v=rotate/kvarn:4+block=32+recent=0")
    assert "packed by" not in str(cache.report()), "nothing was"
    forward(packed, prompt(1, 100), cache)
    report = cache.report()
    assert report.layers[0].encoders == (f"k native {native_kernels.isa}", "v reference (codec KVarNCodec)")
    assert f"packed by      k native {native_kernels.isa}; v reference (codec KVarNCodec)" in str(report)


def test_peak_counts_the_dense_chunk_and_is_reset():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, "kivi4")
    forward(packed, prompt(1, 600), cache)
    chunk = 2 * 600 * 2 * 32 * 4
    report = cache.report()
    assert report.peak_nbytes > chunk
    assert report.peak_nbytes < report.nbytes + 1.2 * chunk
    cache.reset()
    forward(packed, prompt(1, 5), cache)
    assert cache.report().peak_nbytes < report.peak_nbytes / 4


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_a_model_on_another_attention():
    _, stock = pair("llama")
    with pytest.raises(PackedCacheError, match=r"runs on attention 'eager'.*kvslim\.enable\(model\)"):
        kvslim.KVCache(stock, "int8")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cache_built_from_a_config_that_reaches_another_attention(family, implementation):
    model = build(family)
    model.set_attn_implementation(implementation)
    cache = kvslim.KVCache(model.config, "int8")
    ids = prompt(1, 20)
    with pytest.raises(PackedCacheError, match=r"does not run on kvslim's attention.*kvslim\.enable\(model\)"):
        forward(model, ids, cache)
    kvslim.enable(model)
    if family == "qwen3-next":  # its recurrent state has moved on
        with pytest.raises(StateError, match=r"layers \[0\] keep no earlier state.*reset"):
            forward(model, ids, cache)
        cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(forward(model, ids, cache), forward(model, ids), atol=TOLERANCE, rtol=0)


def test_what_a_handle_refuses():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, "int8")
    states = torch.randn(1, 2, 5, 32)
    for use in (
        lambda key, _: key[:, :, 0],
        lambda key, _: key.transpose(1, 2),
        lambda key, _: torch.matmul(states, key),
        lambda key, _: torch.cat([states, key]),
        lambda key, _: key + 1,
        lambda key, _: states @ key,
        lambda key, value: torch.nn.functional.scaled_dot_product_attention(states, key, value),
    ):
        key, value = cache.update(states, states, 0)
        assert (key.shape, key.dtype, key.device, key.ndim) == (states.shape, states.dtype, states.device, 4)
        assert (key.size(2), tuple(key.size())) == (5, (1, 2, 5, 32))
        with pytest.raises((PackedCacheError, TypeError)):
            use(key, value)
    assert cache.get_seq_length() == 0


def test_one_plain_and_one_packed_side():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, "int8")
    states = torch.randn(1, 2, 5, 32)
    key, _ = cache.update(states, states, 0)
    with pytest.raises(PackedCacheError, match="same packed layer"):
        kvslim.integrations.transformers.attention.attention(
            packed.model.layers[0].self_attn, torch.randn(1, 4, 5, 32), key, states, None
        )


def poison(model, layer: int, side: str, value: float):
    """A hook that puts `value` into the last token's keys or values of one layer."""

    def hook(module, args, out):
        out = out.clone()
        out[-1, -1, 0] = value
        return out

    attention = model.model.layers[layer].self_attn
    return getattr(attention, f"{side}_proj").register_forward_hook(hook)


@pytest.mark.parametrize("recipe", [SMALL, "kivi4", "int8+block=8+sinks=2+recent=5", PACKED[-1]])
@pytest.mark.parametrize(("layer", "side", "value"), [(0, "k", torch.nan), (2, "v", torch.inf)])
@pytest.mark.parametrize("chunk", [1, 70])
def test_nan_is_refused_and_the_cache_is_as_before(recipe, layer, side, value, chunk):
    """Layers before the one that failed may have sealed blocks by then; they take that back."""
    packed, _ = pair("llama")
    for length in (0, 66, 67, 68):  # whatever the fill of the tail
        cache, other = (kvslim.KVCache(packed, recipe) for _ in range(2))
        if length:
            for each in (cache, other):
                forward(packed, prompt(2, length), each)
            before = state_hash(cache)
        hook = poison(packed, layer, side, value)
        name = {"k": "keys", "v": "values"}[side]
        try:
            with pytest.raises(
                InputError,
                match=f"layer {layer}: {name} contain NaN or Inf at position {length + chunk - 1} of sequence 1",
            ):
                forward(packed, prompt(2, chunk, seed=3), cache)
        finally:
            hook.remove()
        assert cache.get_seq_length() == length
        if length:
            assert state_hash(cache) == before
            assert cache.table.rows == other.table.rows
        for seed in (4, 5):
            ids = prompt(2, 11, seed=seed)
            assert torch.equal(forward(packed, ids, cache), forward(packed, ids, other))
        assert cache.table.allocator.in_use == other.table.allocator.in_use


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(("family", "layer"), [("gemma3", 1), ("gpt-oss", 2)])
def test_nan_behind_a_sliding_layer(family, layer, length):
    """The framework's own layers are set back as well, past their window too."""
    packed, _ = pair(family)
    for recording in (False, True):
        cache, other = (kvslim.KVCache(packed, SMALL) for _ in range(2))
        for each in (cache, other):
            if recording:
                each.activate_past_recording()
            forward(packed, prompt(2, length), each)
        before = state_hash(cache)
        hook = poison(packed, layer, "v", torch.nan)
        try:
            with pytest.raises(InputError, match=f"layer {layer}: values contain NaN"):
                forward(packed, prompt(2, 7, seed=3), cache)
        finally:
            hook.remove()
        assert state_hash(cache) == before
        for seed in (4, 5):
            ids = prompt(2, 11, seed=seed)
            assert torch.equal(forward(packed, ids, cache), forward(packed, ids, other))


def test_nan_behind_a_recurrent_layer_asks_for_a_reset():
    packed, _ = pair("qwen3-next")
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(1, 20), cache)
    hook = poison(packed, 3, "v", torch.nan)
    try:
        with pytest.raises(InputError, match="layer 3: values contain NaN"):
            forward(packed, prompt(1, 3), cache)
    finally:
        hook.remove()
    with pytest.raises(StateError, match=r"layers \[0, 2\] keep no earlier state.*reset"):
        forward(packed, prompt(1, 3), cache)
    cache.reset()
    ids = prompt(1, 20)
    torch.testing.assert_close(forward(packed, ids, cache), forward(packed, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_forward_that_broke_off(family, layer):
    """Out of memory or Ctrl-C inside the model: the cache goes back, and says so once where positions were wrong."""
    packed, _ = pair(family)

    def stop(module, args, out):
        raise KeyboardInterrupt

    def interrupted(cache):
        hook = packed.model.layers[layer].mlp.register_forward_hook(stop)
        try:
            with pytest.raises(KeyboardInterrupt):
                forward(packed, prompt(1, 13, seed=2), cache)
        finally:
            hook.remove()

    cache, other = (kvslim.KVCache(packed, SMALL) for _ in range(2))
    for each in (cache, other):
        forward(packed, prompt(1, 44), each)
    ids = prompt(1, 9, seed=3)
    if layer == 2:  # every layer was through
        interrupted(cache)
        assert cache.get_seq_length() == 57
        return
    interrupted(cache)
    assert cache.get_seq_length() == 44
    with pytest.raises(StateError, match="the cache holds 44 tokens as before. Call the model again"):
        forward(packed, ids, cache)
    assert torch.equal(forward(packed, ids, cache), forward(packed, ids, other))
    for operation in (lambda: None, cache.fork, lambda: cache.reorder_cache(torch.tensor([0]))):
        interrupted(cache)
        if operation() is None and cache.step.open:  # else the operation has taken it back without a word
            with pytest.raises(StateError, match="the cache holds"):
                forward(packed, ids, cache)
        assert torch.equal(forward(packed, ids, cache), forward(packed, ids, other))


def test_a_cache_of_another_model():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(1, 40), cache)
    before = state_hash(cache)
    others = {
        "narrow": build("llama", num_key_value_heads=1),
        "deep": build("llama", num_hidden_layers=4),
        "twin": build("llama", seed=5),
    }
    says = {"narrow": r"\(1, 1, 32, 32.*new cache", "deep": "another model|model of 3 layers", "twin": "another model"}
    for name, model in others.items():
        with pytest.raises(InputError, match=says[name]):
            forward(model, prompt(1, 3), cache)
        assert state_hash(cache) == before
    shallow = build("llama", num_hidden_layers=2)
    with pytest.raises(InputError, match="another model"):
        forward(shallow, prompt(1, 3), cache)
    assert state_hash(cache) == before
    cache.reset()
    ids = prompt(1, 12)
    torch.testing.assert_close(
        forward(others["narrow"], ids, cache), forward(others["narrow"], ids), atol=TOLERANCE, rtol=0
    )


def test_a_cache_for_more_layers_than_the_model_has():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(config_of("llama", num_hidden_layers=5), SMALL)
    forward(packed, prompt(1, 12), cache)
    with pytest.raises(StateError, match=r"layers \[0, 1, 2\] of 5.*made for another model"):
        forward(packed, prompt(1, 1), cache)


def test_a_cache_for_fewer_layers_than_the_model_has():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(config_of("llama", num_hidden_layers=2), SMALL)
    with pytest.raises(InputError, match="layer 2 .*model of 2 layers"):
        forward(packed, prompt(1, 12), cache)


@pytest.mark.parametrize("skip", [[3], [-1], [0, 9]])
def test_layers_to_skip_that_do_not_exist(skip):
    packed, _ = pair("llama")
    with pytest.raises(InputError, match=r"skip_layers names \[.*layers 0 to 2"):
        kvslim.KVCache(packed, SMALL, skip_layers=skip)


def test_an_override_past_the_last_layer():
    packed, _ = pair("llama")
    with pytest.raises(InputError, match=r"layer\.2-3\.k=.*layers 0 to 2"):
        kvslim.KVCache(packed, "int8+layer.2-3=none")


@pytest.mark.parametrize("family", FAMILIES)
def test_strict(family):
    packed, _ = pair(family)
    report = kvslim.KVCache(packed, SMALL).report()
    if report.layers_packed == report.layers_total:
        kvslim.KVCache(packed, SMALL, strict=True)
    else:
        first = next(layer for layer in report.layers if not layer.packed)
        with pytest.raises(UnsupportedModelError, match=rf"strict: layer {first.layer} .*{first.reason}"):
            kvslim.KVCache(packed, SMALL, strict=True)


def test_strict_lets_layers_be_skipped_on_request():
    packed, _ = pair("gemma3")
    cache = kvslim.KVCache(packed, SMALL, strict=True, skip_layers=[0, 2])
    assert cache.report().layers_packed == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DeepseekV3Config(), "deepseek_v3: .*latent"),
        (T5Config(), "t5: encoder-decoder"),
    ],
)
def test_families_refused_by_name(config, says):
    with pytest.raises(UnsupportedModelError, match=says):
        kvslim.KVCache(config, "int8")


@pytest.mark.parametrize("config", [MambaConfig(num_hidden_layers=2)], ids=["mamba"])
def test_models_without_anything_to_pack(config):
    """Nothing but recurrent state: accepted and reported, refused under strict."""
    with pytest.raises(UnsupportedModelError):
        kvslim.KVCache(config, "int8", strict=True)


def test_models_without_the_attention_interface():
    from transformers import MptConfig, MptForCausalLM

    model = MptForCausalLM(MptConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_seq_len=32))
    with pytest.raises(UnsupportedModelError, match=r"MptForCausalLM .*attention interface"):
        kvslim.enable(model)


def test_gpt2_is_packed():
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3, eos_token_id=None
    )
    stock = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    packed = kvslim.enable(copy.deepcopy(stock))
    ids = prompt(2, 40)
    results = [
        generate(packed, ids, kvslim.KVCache(packed, SMALL), pad_token_id=0),
        generate(stock, ids, DynamicCache(config=config), pad_token_id=0),
    ]
    assert_same(*results)


def test_something_that_is_no_model():
    with pytest.raises(UnsupportedModelError, match="expected a transformers model or config, got str"):
        kvslim.KVCache("llama", "int8")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("kivi5", "Did you mean 'kivi4'"),
        ("k=afine:4+v=none", "Did you mean 'affine'"),
        ("k=affine:4:scale=24+v=none", "group=24 does not divide head_dim=32"),
        ("int8+immediate", "block statistics"),
        ("int8+layer.1.v=affine:4:scale=12", "group=12 does not divide head_dim=32"),
    ],
)
def test_recipes_are_refused_at_construction(recipe, says):
    packed, _ = pair("llama")
    with pytest.raises(RecipeError) as caught:
        kvslim.KVCache(packed, recipe)
    assert says in str(caught.value)


def test_a_recipe_may_be_an_object():
    packed, _ = pair("llama")
    recipe = Recipe.parse(SMALL)
    assert kvslim.KVCache(packed, recipe).recipe is recipe


def test_gradients_are_refused():
    model = build("llama")
    model.requires_grad_(True)
    cache = kvslim.KVCache(model, SMALL)
    with pytest.raises(StateError, match="layer 0: .*gradients"):
        model(prompt(1, 5), **{compat.CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0
    forward(model, prompt(1, 5), cache)
    with torch.inference_mode():
        model(prompt(1, 5), **{compat.CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("operation", ["crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_operations_on_one_layer_are_refused(operation):
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, SMALL)
    with pytest.raises(StateError, match=rf"{operation}\(\) on one layer.*KVCache"):
        getattr(cache.layers[0], operation)(0)


def test_batch_that_changes_between_calls():
    packed, _ = pair("llama")
    cache = kvslim.KVCache(packed, SMALL)
    forward(packed, prompt(2, 30), cache)
    before = state_hash(cache)
    with pytest.raises(InputError, match=r"\(3, 2, 32, 32.*the cache holds \(2, 2, 32, 32"):
        forward(packed, prompt(3, 1), cache)
    assert state_hash(cache) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    packed, stock = (copy.deepcopy(model).to(dtype) for model in pair("llama"))
    ids = prompt(1, 60)
    caches = kvslim.KVCache(packed, SMALL), DynamicCache(config=stock.config)
    got, want = (
        torch.cat([forward(m, ids[:, :50], c), forward(m, ids[:, 50:], c)], 1).float()
        for m, c in zip((packed, stock), caches, strict=True)
    )
    mean, largest = (0.05, 0.6) if dtype == torch.bfloat16 else (0.006, 0.08)
    assert float((got - want).abs().mean()) < mean
    assert float((got - want).abs().max()) < largest
    assert caches[0].layers[0].core.store.key.dtype == dtype
