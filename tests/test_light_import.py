"""`import kvslim` costs nothing, and the attention is registered whichever of the two is imported first."""

import subprocess
import sys

import pytest

USE = """
from kvslim.integrations.transformers.compat import CACHE_ARGUMENT
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=None)
model = AutoModelForCausalLM.from_config(config, attn_implementation="kvslim")
assert model.config._attn_implementation == "kvslim"
ids = torch.arange(20)[None]
cache = kvslim.KVCache(model, "int8+block=8+recent=0")
model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=2, do_sample=False, pad_token_id=0)
print("packed", cache.layers[0].core.store.rows[0].packed, "kvslim" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement", ["import kvslim", "import kvslim.recipe, kvslim.presets, kvslim.models, kvslim.cli"]
)
def test_import_loads_neither_torch_nor_transformers(statement):
    heavy = run(
        f"{statement}\nimport sys\nprint([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert heavy == "[]"


def test_attention_on_a_cpu_does_not_load_triton():
    assert run("import kvslim.cache, kvslim.attention.dispatch, sys; print('triton' in sys.modules)") == "False"


def test_version_and_names_are_there_without_torch():
    assert run(
        "import kvslim, sys; kvslim.Recipe.parse('kivi4'); print(kvslim.__version__, 'torch' in sys.modules)"
    ).endswith(" False")


def test_a_name_that_does_not_exist():
    assert run("import kvslim\ntry:\n    kvslim.KVCach\nexcept AttributeError as error:\n    print(error)") == (
        "module 'kvslim' has no attribute 'KVCach'"
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import kvslim\nimport torch\n",
        "import torch, transformers\nfrom transformers import modeling_utils\nimport kvslim\n",
        "from kvslim import KVCache\nimport kvslim, torch\n",
    ],
    ids=["kvslim first", "transformers first", "by name"],
)
def test_attention_is_registered(imports):
    """Its mask function as well: without one transformers hands over no mask, and padding and windows vanish silently."""
    assert run(imports + USE) == "packed 16 True"
