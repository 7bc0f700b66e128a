"""A saved cache goes on in another process as if nothing had happened, or is refused with nothing changed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import golden_cache
import kvslim
from kvslim import calibration, files
from kvslim.calibration import Calibration
from kvslim.codecs.float8 import Float8Codec
from kvslim.codecs.side import shared_table
from kvslim.errors import InputError, KVSlimError, RecipeError, StateError, StateFileError
from kvslim.integrations.transformers import calibrate, fingerprint, saving
from kvslim.integrations.transformers.report import storage_nbytes
from kvslim.store import state
from kvslim.store.table import BlockTable
from test_adapter import forward, state_hash
from tiny_models import FAMILIES, build, left_padded, pair, prompt

SMALL = "slim4+block=16+sinks=2+recent=5"
PAGES = "slim4p+block=16"
RECIPES = ("none+block=8+sinks=2+recent=5", SMALL, PAGES, "k=outlier:count=8/rotate:kind=orthogonal:parts=8/outlier:3:count=8+v=outlier:count=8/outlier:3:count=8+block=8", "turbo4-qjl+block=8", "kvarn4+block=8",
           "nvfp4+block=8", "ultra4+block=8", "fp8", "kivi2+recent=32", "k=equalize:4:window=3+v=equalize:4:predict:window=2+block=8", "int4+layer.1=none", "k=center/rotate:signs/table:3+v=table:4:scale=16+block=8")  # fmt: skip


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache.safetensors"


def fed(family: str, recipe: str = SMALL, lengths=(70, 37)):
    """A model and a cache of sequences of these lengths, with ids and mask."""
    model, _ = pair(family)
    ids, mask = left_padded(list(lengths))
    cache = kvslim.KVCache(model, recipe)
    forward(model, ids, cache, mask)
    return model, cache, ids, mask


def goes_on_alike(model, one, other, mask, steps: int = 8) -> None:
    """Both caches give the same bits for the same tokens, across a block and in one chunk."""
    for step, tokens in enumerate([1] * steps + [20]):
        more = prompt(len(mask), tokens, seed=step)
        mask = torch.cat([mask, torch.ones_like(more)], dim=1)
        assert torch.equal(forward(model, more, one, mask), forward(model, more, other, mask))


@pytest.mark.parametrize("mmap", [False, True], ids=["copied", "mapped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_on_bit_for_bit(family, mmap, path):
    model, cache, ids, mask = fed(family)
    cache.save(path, ids=ids, notes={"name": "x"})
    loaded = kvslim.KVCache.load(path, model, mmap=mmap)
    assert torch.equal(loaded.saved.ids, ids)
    assert loaded.saved.notes == {"name": "x"}
    assert str(loaded.report()).replace("peak", "") != ""
    assert loaded.get_seq_length() == cache.get_seq_length() == 70
    goes_on_alike(model, cache, loaded, mask)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_codec_and_transform_goes_on_bit_for_bit(recipe, path):
    model, cache, _, mask = fed("qwen2", recipe, (90, 90))
    cache.save(path)
    loaded = kvslim.KVCache.load(path, model, recipe=recipe)
    assert str(loaded.recipe) == str(cache.recipe)
    assert loaded.report().label == cache.report().label
    assert state_hash(loaded) == state_hash(cache)
    goes_on_alike(model, cache, loaded, mask, steps=9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype, path):
    model = build("llama").to(dtype)
    cache = kvslim.KVCache(model, SMALL)
    forward(model, prompt(1, 60), cache)
    cache.save(path)
    goes_on_alike(model, cache, kvslim.KVCache.load(path, model), torch.ones(1, 60, dtype=torch.long), steps=3)


@pytest.mark.parametrize("recipe", [SMALL, PAGES])
def test_after_every_operation_it_goes_on_bit_for_bit(recipe, path):
    """Blocks shared by rows and ended inside, rows of different history, a fork, and a pass that broke off."""
    model, cache, _, mask = fed("llama", recipe)
    cache = cache.fork()
    cache.crop(-9)
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    mask = mask[[1, 0, 0], :-9]
    more = prompt(3, 30, seed=3)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    forward(model, more, cache, mask)
    cache.update(torch.zeros(3, 2, 1, 32), torch.zeros(3, 2, 1, 32), 0)  # a pass that never reaches layer 1
    cache.save(path)
    loaded = kvslim.KVCache.load(path, model)
    assert loaded.table.rows[1][0].block == loaded.table.rows[2][0].block
    assert state_hash(loaded) == state_hash(cache)
    goes_on_alike(model, cache, loaded, mask)


@pytest.mark.parametrize("tokens", [0, 1, 2, 6, 7, 21, 22, 23])
def test_short_and_empty_caches(tokens, path):
    """Up to the first seal, parameters are not frozen: what shapes them comes along."""
    model, _ = pair("llama")
    cache = kvslim.KVCache(model, SMALL)
    if tokens:
        forward(model, prompt(1, tokens), cache)
    cache.save(path)
    loaded = kvslim.KVCache.load(path, model)
    assert loaded.get_seq_length() == tokens
    goes_on_alike(model, cache, loaded, torch.ones(1, tokens, dtype=torch.long), steps=30)


def test_a_loaded_cache_saves_to_the_same_bytes(path):
    model, cache, ids, _ = fed("gemma3")
    cache.save(path, ids=ids)
    before = path.read_bytes()
    kvslim.KVCache.load(path, model, mmap=True).save(path, ids=ids)
    assert path.read_bytes() == before


def test_another_process_goes_on(path, tmp_path):
    model, cache, _, _ = fed("gemma3", lengths=(40,))
    cache.save(path)
    want = forward(model, prompt(1, 8, seed=5), cache)
    script = (
        "import sys, torch, kvslim; from tiny_models import build, prompt; from test_adapter import forward\n"
        "model = build('gemma3'); cache = kvslim.KVCache.load(sys.argv[1], model)\n"
        "torch.save(forward(model, prompt(1, 8, seed=5), cache), sys.argv[2])"
    )
    where = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(where), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script, str(path), str(tmp_path / "out.pt")], env=environment, check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), want)


def test_without_native_kernels_it_is_the_same_state(reference_only, path):
    model, cache, _, mask = fed("llama")
    cache.save(path)
    goes_on_alike(model, cache, kvslim.KVCache.load(path, model), mask, steps=3)


# -- what is in the file -----------------------------------------------------------------------------------------------


def test_shared_blocks_are_written_once_and_only_those_in_use(path):
    _model, cache, _, _ = fed("llama", SMALL, (100,))
    cache.save(path)
    one = path.stat().st_size
    blocks = cache.layers[0].core.store.pool.nbytes * len(cache.layers)
    cache.batch_repeat_interleave(8)
    cache.save(path)
    exact = 7 * sum(layer.core.store.key.nbytes + layer.core.store.value.nbytes for layer in cache.layers) // 8
    assert path.stat().st_size - one < exact + 7 * 1500 < blocks + 7 * 1500 + exact  # headers grow by rows
    whole = path.stat().st_size
    cache.crop(-60)
    cache.save(path)
    assert path.stat().st_size < whole - blocks // 2


@pytest.mark.parametrize(("recipe", "count"), [(SMALL, 5), (SMALL, 27), (PAGES, 5)], ids=["tail", "block", "pages"])
def test_removed_tokens_do_not_leave_with_the_rest(recipe, count, path):
    """The file is that of a cache whose removed slots, exact or in blocks, held something else."""
    contents = []
    for poison in (0, 1):
        _, cache, _, _ = fed("llama", recipe)
        cache.crop(-count)
        for layer in cache._packed():
            store = layer.core.store
            for index, (row, entries) in enumerate(zip(store.rows, cache.table.rows, strict=True)):
                store.key[index, :, row.sinks + row.tail :] = 7.0 * poison
                for part in ("code", "token"):
                    for slab, start in zip(store.pool.slabs, store.pool.starts, strict=True):
                        if start <= entries[-1].block < start + len(slab["k"][part]):
                            slab["k"][part][entries[-1].block - start, :, entries[-1].valid :] = poison
        cache.save(path)
        contents.append(path.read_bytes())
    ragged = store.rows[0].tail != store.rows[1].tail
    assert ragged if count == 5 and recipe == SMALL else cache.table.rows[0][-1].valid < 16
    assert contents[0] == contents[1]


def test_it_can_be_read_with_safetensors_alone(path):
    from safetensors import safe_open

    _, cache, ids, _ = fed("llama")
    cache.save(path, ids=ids)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["header"])
        assert file.metadata()["format"] == "kvslim-cache"
        assert torch.equal(file.get_tensor("ids"), ids)
        shape = file.get_slice("1.k.block.code").get_shape()
    assert header["recipe"]["recipe"] == str(cache.recipe)
    assert shape[0] == header["store"]["blocks"]
    assert header["store"]["layers"][1]["rows"][1]["holes"] == [[0, 33]]


def test_mapped_blocks_stay_in_the_file_and_are_never_written_to(path):
    model, cache, _, mask = fed("llama", PAGES, (70, 70))  # token-wise: the last block is written on
    cache.save(path)
    before = path.read_bytes()
    loaded = kvslim.KVCache.load(path, model, mmap=True)
    assert str(path) in Path("/proc/self/maps").read_text()
    goes_on_alike(model, cache, loaded, mask)
    loaded.crop(-80)
    forward(model, prompt(2, 40, seed=2), loaded)
    assert path.read_bytes() == before
    del loaded
    copied = kvslim.KVCache.load(path, model)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert copied.get_seq_length() == 70


def test_no_pickle_anywhere():
    source = Path(kvslim.__file__).parent
    for module in source.rglob("*.py"):
        found = re.search(r"\b(pickle|marshal|shelve|dill|joblib)\b|torch\.(load|save)\b", module.read_text("utf-8"))
        assert not found, f"{module}: {found}"


# -- golden files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(golden_cache.FOLDER.glob("cache-v*.safetensors")), ids=lambda file: file.stem)
def test_files_of_every_version_are_still_understood(file, monkeypatch):
    model = golden_cache.model()
    with pytest.raises(StateFileError, match="another model") if golden_cache_is_foreign(model, file) else no_error():
        kvslim.KVCache.load(file, model)
    # a config's defaults change with transformers, and the fingerprint with them; the bytes must not
    monkeypatch.setattr(saving, "fingerprint", lambda _: fingerprint_in(file))
    monkeypatch.setattr("kvslim.integrations.transformers.adapter.fingerprint", lambda _: fingerprint_in(file))
    for mmap in (False, True):
        cache = kvslim.KVCache.load(file, model, mmap=mmap)
        assert cache.saved.notes == {"by": "golden_cache.py"}
        assert cache.saved.ids.tolist() == [row[:-5] for row in (golden_cache.PROMPT[at] for at in golden_cache.ORDER)]
        want = torch.tensor(json.loads(file.with_suffix(".json").read_text())["logits"])
        torch.testing.assert_close(golden_cache.after(model, cache), want, atol=2e-3, rtol=0)


def fingerprint_in(file: Path) -> str:
    return files.Contents(file, saving.KIND).header.text("fingerprint")


def golden_cache_is_foreign(model, file: Path) -> bool:
    return saving.fingerprint(model) != fingerprint_in(file)


def no_error():
    from contextlib import nullcontext

    return nullcontext()


def test_the_present_version_has_its_golden_file():
    assert (golden_cache.FOLDER / f"cache-v{saving.KIND.version}.safetensors").is_file()


# -- refused -----------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_and_named(path):
    model, cache, _, _ = fed("llama")
    cache.save(path)
    for other in (build("llama", seed=1), build("llama").half(), build("llama", rms_norm_eps=1e-5), build("qwen2")):
        with pytest.raises(
            StateFileError, match=f"another model .fingerprint {saving.fingerprint(model)}, this model's is "
        ):
            kvslim.KVCache.load(path, other)
    with pytest.raises(InputError, match="LlamaConfig, which has no weights"):
        kvslim.KVCache.load(path, model.config)


def test_the_same_model_out_of_another_folder_is_not_another_model(path, tmp_path):
    import transformers

    model = build("llama")
    cache = kvslim.KVCache(model, SMALL)
    forward(model, prompt(1, 40), cache)
    cache.save(path)
    model.save_pretrained(tmp_path / "m")  # writes into the config
    moved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="kvslim")
    for again in (model, moved):
        assert kvslim.KVCache.load(path, again).get_seq_length() == 40
    nested = transformers.Gemma3Config().to_dict()
    assert "_name_or_path" in nested["text_config"]
    assert "_name_or_path" not in fingerprint._telling(nested)["text_config"]


def test_another_recipe_than_asked_for_is_refused(path):
    model, cache, _, _ = fed("llama")
    cache.save(path)
    with pytest.raises(StateFileError, match=r"is packed by recipe 'k=.*', asked for is '.*'; leave the recipe out"):
        kvslim.KVCache.load(path, model, recipe="int8")
    with pytest.raises(RecipeError):
        kvslim.KVCache.load(path, model, recipe="int99")
    assert kvslim.KVCache.load(path, model, recipe=str(cache.recipe)).get_seq_length() == 70


def test_a_calibration_is_no_cache_and_the_other_way_round(path):
    model, cache, _, _ = fed("llama")
    cache.calibration.save(path)
    with pytest.raises(StateFileError, match="is not a saved cache: its format is 'kvslim-calibration'"):
        kvslim.KVCache.load(path, model)
    cache.save(path)
    with pytest.raises(StateFileError, match="is not a calibration: its format is 'kvslim-cache'"):
        Calibration.load(path)


def test_skipped_layers_stay_skipped(path):
    model, _ = pair("llama")
    cache = kvslim.KVCache(model, SMALL, skip_layers=[1])
    forward(model, prompt(1, 40), cache)
    cache.save(path)
    loaded = kvslim.KVCache.load(path, model)
    assert loaded.report().layers_packed == 2
    goes_on_alike(model, cache, loaded, torch.ones(1, 40, dtype=torch.long), steps=3)


def test_a_layer_that_is_not_understood_is_named_and_nothing_is_written(path):
    _model, cache, _, _ = fed("gemma3")

    class Strange(type(cache.layers[0])):
        pass

    cache.layers[0].__class__ = Strange
    with pytest.raises(StateError, match="layer 0: Strange has a state that kvslim does not know.*nothing was written"):
        cache.save(path)
    assert not path.exists()


def test_a_state_that_a_failed_pass_ruined_is_not_saved(path):
    _model, cache, _, _ = fed("qwen3-next")
    cache.update_recurrent_state(torch.zeros_like(cache.layers[0].recurrent_states[0]), 0)
    with pytest.raises(StateError, match="nothing whole to save; call cache.reset"):
        cache.save(path)
    assert not path.exists()


def test_ids_and_notes_that_cannot_be_right_are_refused(path):
    _, cache, ids, _ = fed("llama")
    for bad in (ids[:1], ids[:, :-1], ids[0], ids.float()):
        with pytest.raises(InputError, match=r"the cache holds 70 tokens of 2 sequences"):
            cache.save(path, ids=bad)
    with pytest.raises(InputError, match="notes cannot be written as JSON"):
        cache.save(path, notes={"a": object()})
    assert not path.exists()


def test_a_cache_made_from_a_config_needs_the_model_to_be_saved(path):
    model, _ = pair("llama")
    cache = kvslim.KVCache(model.config, "int8+block=8")
    forward(model, prompt(1, 40), cache)
    with pytest.raises(InputError, match="pass save.path, model=model"):
        cache.save(path)
    cache.save(path, model=model)
    assert kvslim.KVCache.load(path, model).get_seq_length() == 40


def test_a_refused_file_changes_nothing_for_a_cache_that_is_alive(path):
    model, cache, _, _mask = fed("llama", SMALL, (70, 70))
    cache.save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before, held = state_hash(cache), storage_nbytes(cache)
    with pytest.raises(StateFileError, match="digest"):
        kvslim.KVCache.load(path, model)
    loaded = kvslim.KVCache.load(path, model, verify=False)
    forward(model, prompt(2, 50, seed=1), loaded)
    del loaded
    assert (state_hash(cache), storage_nbytes(cache)) == (before, held)


def test_a_full_disk_leaves_the_old_cache_file(path, monkeypatch):
    from test_files import full_disk

    model, cache, _, _mask = fed("llama", SMALL, (70, 70))
    cache.save(path)
    loaded_before = path.read_bytes()
    forward(model, prompt(2, 5), cache)
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(StateFileError, match="No space left on device"):
        cache.save(path)
    assert path.read_bytes() == loaded_before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.fixture
def own_tables():
    """Code levels changed by a test do not stay for the next one."""
    yield
    shared_table.cache_clear()


def test_code_levels_of_another_machine_are_kept_and_other_levels_refused(path, own_tables, monkeypatch):
    """Levels found by iteration may differ in the last bit between machines; these codes stand for the file's."""
    model, cache, _, _ = fed("llama", "fp8+block=8")
    cache.save(path)
    table = Float8Codec.table
    monkeypatch.setattr(saving.state.SidePacker, "__init__", fresh_tables(saving.state.SidePacker.__init__))
    monkeypatch.setattr(Float8Codec, "table", lambda self: table(self) * (1 + 2e-7))
    loaded = kvslim.KVCache.load(path, model)
    assert torch.equal(loaded.layers[0].core.store.rows[0].frozen[0].table, table(Float8Codec()))
    monkeypatch.setattr(Float8Codec, "table", lambda self: table(self) * 1.01)
    with pytest.raises(StateFileError, match="codes were made with other levels than this kvslim's"):
        kvslim.KVCache.load(path, model)


def fresh_tables(original):
    def init(self, *arguments):
        shared_table.cache_clear()
        original(self, *arguments)

    return init


# -- calibrations ------------------------------------------------------------------------------------------------------


def text_calibration(model) -> Calibration:
    return calibrate.calibrate(model, prompt(1, 300, seed=9)[0], "a text")


def test_statistics_come_along_where_parameters_are_still_to_be_frozen(path):
    model = build("llama", seed=3)
    cache = kvslim.KVCache(model, SMALL, calibration=text_calibration(model))
    forward(model, prompt(1, 10), cache)
    cache.save(path)
    mask = torch.ones(1, 10, dtype=torch.long)
    loaded = [kvslim.KVCache.load(path, model) for _ in range(3)]
    assert len({id(each.calibration) for each in (cache, *loaded)}) == 1  # no copy with every load
    goes_on_alike(model, cache, loaded[0], mask, steps=30)
    with pytest.raises(InputError, match="another calibration .from a text. than the one given"):
        kvslim.KVCache.load(path, model, calibration=calibrate.calibrate(model))
    cache.save(path)  # frozen by now
    assert kvslim.KVCache.load(path, model).calibration is not cache.calibration
    other = kvslim.KVCache.load(path, model, calibration=cache.calibration)
    assert other.calibration is cache.calibration


def test_a_calibration_given_by_path_is_kept_once(path):
    model = build("llama", seed=4)
    text_calibration(model).save(path)
    caches = [kvslim.KVCache(model, SMALL, calibration=path) for _ in range(3)]
    assert len({id(cache.calibration) for cache in caches}) == 1


BAD_STATISTICS = {
    "unknown name": lambda t: t.update({"0.other": torch.zeros(2, 32)}),
    "other head_dim": lambda t: t.update({"0.key_mean": torch.zeros(2, 31)}),
    "pairs out of range": lambda t: t["0.rope_pairs"].fill_(32),
    "negative pairs": lambda t: t["0.rope_pairs"].fill_(-1),
    "a channel twice": lambda t: t["0.rope_pairs"][0].fill_(1),
    "no frequencies": lambda t: t.pop("0.rope_frequency"),
    "NaN": lambda t: t["0.key_power"].fill_(torch.nan),
    "no layer": lambda t: t.update({"x.key_mean": torch.zeros(2, 32)}),
    "dtype": lambda t: t.update({"0.key_mean": torch.zeros(2, 32).half()}),
}


@pytest.mark.parametrize("damage", BAD_STATISTICS.values(), ids=BAD_STATISTICS)
def test_statistics_that_kernels_could_not_follow_are_refused(damage, path):
    model, _ = pair("llama")
    found = calibrate.calibration_of(model)
    tensors = {name: tensor.clone() for name, tensor in found.tensors().items()}
    damage(tensors)
    files.write(
        path,
        calibration.KIND,
        found.facts(),
        {n: files.Lazy.of(t) for n, t in tensors.items()},
    )
    with pytest.raises(StateFileError):
        kvslim.KVCache(model, SMALL, calibration=path)


def test_statistics_of_another_head_dim_are_refused_before_they_are_used():
    model, _ = pair("llama")
    right = calibrate.calibration_of(model)
    wrong = {
        layer: {name: t[..., :1] if t.ndim == 2 and t.is_floating_point() else t for name, t in each.items()}
        for layer, each in right.layers.items()
    }
    cache = kvslim.KVCache(model, PAGES, calibration=Calibration(right.fingerprint, "bad", 1024, wrong))
    with pytest.raises(InputError, match=r".* of the calibration is \(2, 1\), the keys have 2 kv heads of 32"):
        forward(model, prompt(1, 40), cache)


# -- the layer below, as a server would use it -------------------------------------------------------------------------


def test_one_sequence_goes_to_disk_and_back_into_the_pool_of_others(path):
    model, cache, _ids, mask = fed("llama")
    alone = cache.fork()
    alone.batch_select_indices(torch.tensor([1]))
    want = alone.fork()
    header, tensors = state.describe(alone.table, {layer.core.layer: layer.core.store for layer in alone._packed()})
    kind = files.Kind("tier", 1, "spilled sequence", "feed it again")
    files.write(path, kind, header, tensors)
    live = state_hash(cache)
    pools = {layer.core.layer: layer.core.store for layer in cache._packed()}
    back = want.fork()
    contents = files.Contents(path, kind)
    back.table.clear()
    stores = state.restore(
        contents.header, contents, back.table, lambda layer, *sizes: pools[layer].fork(back.table), mapped=True
    )
    contents.finish()
    for layer, store in stores.items():
        assert store.pool is pools[layer].pool
        back.layers[layer].core.store = store
    assert not {e.block for e in back.table.rows[0]} & {e.block for row in cache.table.rows for e in row}
    assert state_hash(back) == state_hash(want)
    goes_on_alike(model, want, back, mask[1:])
    assert state_hash(cache) == live


def test_a_refused_sequence_takes_no_blocks(path):
    _model, cache, _, _ = fed("llama")
    stores = {layer.core.layer: layer.core.store for layer in cache._packed()}
    header, tensors = state.describe(cache.table, stores)
    header["layers"][2]["length"] -= 1
    kind = files.Kind("tier", 1, "spilled sequence", "feed it again")
    files.write(path, kind, header, tensors)
    contents, table = files.Contents(path, kind), BlockTable(cache.table.allocator, 16)
    used = cache.table.allocator.in_use
    with pytest.raises(KVSlimError):
        state.restore(contents.header, contents, table, lambda layer, *sizes: stores[layer].fork(table), mapped=False)
    assert cache.table.allocator.in_use == used
