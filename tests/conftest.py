"""What several test files share: a tiny model made here, real ones that fetch and unpack themselves, the command."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# before anything imports triton: its kernels run as Python on CPU tensors here; compiling is tested in other processes
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvslim
from kvslim.cli import main
from kvslim.integrations.transformers.loading import LoadedModel, load_model
from kvslim.kernels.cpu import library
from kvslim.kernels.cpu.build import isas

_REAL = {"qwen05b", "gemma270m"}
_THREADS = torch.get_num_threads()  # OMP_NUM_THREADS, else one per core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _REAL.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("real_model")


@pytest.fixture(autouse=True)
def _threads(request) -> None:
    """Tiny tensors gain nothing from a second thread, and lose much where the machine is busy."""
    torch.set_num_threads(_THREADS if request.node.get_closest_marker("real_model") else 1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """Folder of a two-layer Llama (context 256, head_dim 32) with a word tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    words = ["<unk>", "<end>", "user", "a", "b", "assistant", *(f"w{index}" for index in range(58))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    wrapped.chat_template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    wrapped.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def byte_model() -> LoadedModel:
    """A two-layer Llama (context 8192) that reads bytes, without a chat template; a test that changes it changes it back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.3,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = kvslim.enable(LlamaForCausalLM(config).eval())
    return LoadedModel(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer), "tiny", "tiny")


def _load(name: str) -> LoadedModel:
    folder = os.environ.get("KVSLIM_MODELS")
    return load_model(name, dtype="float32", device="cpu", models_dir=Path(folder) if folder else None)


@pytest.fixture(scope="session")
def qwen05b() -> LoadedModel:
    """Qwen2.5-Coder-0.5B-Instruct in fp32 on kvslim's attention; a test that changes it changes it back."""
    return _load("qwen0.5b")


@pytest.fixture(scope="session")
def gemma270m() -> LoadedModel:
    """Gemma 3 270M in fp32 on kvslim's attention; a test that changes it changes it back."""
    return _load("gemma270m")


@pytest.fixture
def reference_only() -> Iterator[None]:
    """Attention and encoders in torch, as where the native kernels could not be built."""
    library.use("off")
    yield
    library.use("")


@pytest.fixture(params=["avx512", "avx2", "portable"])
def native_kernels(request) -> Iterator[library.Library]:
    """The CPU kernels of each instruction set that runs here."""
    if request.param not in isas() or library.native(request.param) is None:
        pytest.skip(f"this processor has no {request.param}")
    library.use(request.param)
    yield library.native()
    library.use("")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: `run(*arguments, stdin="")` gives exit code, standard output, standard error."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvslim", *arguments])
        monkeypatch.setattr(sys, "stdin", Pipe(stdin))
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return stopped.value.code, output.out, output.err

    return call


class Pipe:
    """Standard input with some text in it."""

    def __init__(self, text: str):
        self.lines = text.splitlines(keepends=True)

    def isatty(self) -> bool:
        return False

    def read(self) -> str:
        return "".join(self.lines)

    def readline(self) -> str:
        return self.lines.pop(0) if self.lines else ""
