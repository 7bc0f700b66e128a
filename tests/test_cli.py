"""The command line: what it prints, and that every bad input ends with code 2, one message and no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvslim.cli import main
from kvslim.models import MODELS
from kvslim.presets import PRESETS


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: `run(*arguments, stdin="")` gives exit code, standard output, standard error."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvslim", *arguments])
        monkeypatch.setattr(sys, "stdin", _Pipe(stdin))
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return stopped.value.code, output.out, output.err

    return call


class _Pipe:
    """Standard input with some text in it."""

    def __init__(self, text: str):
        self.lines = text.splitlines(keepends=True)

    def isatty(self) -> bool:
        return False

    def read(self) -> str:
        return "".join(self.lines)

    def readline(self) -> str:
        return self.lines.pop(0) if self.lines else ""


def test_help_loads_neither_torch_nor_transformers():
    script = (
        "import sys; sys.argv = ['kvslim', '--help']\n"
        "import atexit; from kvslim.cli import main\n"
        "atexit.register(lambda: print('LOADED', {'torch', 'transformers'} & set(sys.modules)))\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "LOADED set()" in done.stdout
    for verb in ("demo", "generate", "chat", "eval", "bench", "recipes", "doctor"):
        assert verb in done.stdout


def test_version(run):
    import kvslim

    assert run("--version") == (0, f"kvslim {kvslim.__version__}\n", "")


def test_recipes_lists_every_preset(run):
    code, out, _ = run("recipes", "--json")
    assert code == 0
    assert [preset["name"] for preset in json.loads(out)] == list(PRESETS)
    code, out, _ = run("recipes")
    assert code == 0
    assert all(name in out for name in PRESETS)


def test_doctor_names_machine_packages_backends_and_models(run):
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert {package["name"] for package in found["required"]} >= {"torch", "transformers", "safetensors"}
    assert all(package["supported"] for package in found["required"])
    assert found["machine"]["cores"] >= 1
    assert [backend["name"] for backend in found["backends"]] == ["reference", "native", "triton", "cuda"]
    assert [model["name"] for model in found["models"]] == list(MODELS)
    assert {"gguf", "test", "vllm"} <= {extra["name"] for extra in found["extras"]}
    for extra in found["extras"]:
        assert bool(extra["missing"]) == (extra["install"] == f"pip install 'kvslim[{extra['name']}]'")
    code, out, _ = run("doctor")
    assert code == 0
    assert "reference" in out


def test_doctor_fails_where_a_package_is_too_old(run, monkeypatch):
    from kvslim.cli import doctor

    installed = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: "4.0.0" if name == "transformers" else installed(name))
    code, out, _ = run("doctor")
    assert code == 1
    assert "needs >=" in out


def test_generate_streams_text_and_reports_on_stderr(run, tiny_folder):
    code, out, err = run("generate", "-m", str(tiny_folder), "-p", "a b w1", "-n", "5", "--recipe", "int8")
    assert code == 0
    assert out.strip()
    assert "decode" in err
    assert "int8:" in err
    assert "2 of 2 layers packed" in err


def test_generate_takes_prompts_from_all_sources_alike(run, tiny_folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("a b w1")
    common = ("generate", "-m", str(tiny_folder), "-n", "5", "--raw", "--json")
    answers = [
        json.loads(run(*common, "-p", "a b w1")[1]),
        json.loads(run(*common, "-f", str(tmp_path / "prompt.txt"))[1]),
        json.loads(run(*common, stdin="a b w1")[1]),
    ]
    assert {answer["text"] for answer in answers} == {answers[0]["text"]}
    assert answers[0]["prompt_tokens"] == 3
    assert 1 <= answers[0]["new_tokens"] <= 5
    assert answers[0]["cache"]["layers_packed"] == 2


def test_generate_packs_each_side_as_told(run, tiny_folder):
    code, out, _ = run(
        "generate", "-m", str(tiny_folder), "-p", "a", "-n", "2", "--json", "-r", "kivi4", "--key", "int8"
    )
    assert code == 0
    assert json.loads(out)["recipe"].startswith("k=affine:8:scale=block+v=affine:4:asym:scale=32")


def test_sampling_repeats_with_its_seed(run, tiny_folder):
    common = ("generate", "-m", str(tiny_folder), "-p", "a b", "-n", "20", "--json", "-t", "2.0", "--seed")
    texts = [json.loads(run(*common, seed)[1])["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


BAD = {
    "empty prompt": (["generate", "-p", " "], "the prompt is empty"),
    "nothing piped in": (["generate"], "the prompt is empty"),
    "two prompts": (["generate", "-p", "a", "-f", "b"], "give one"),
    "missing prompt file": (["generate", "-f", "missing.txt"], "missing.txt"),
    "unknown recipe": (["generate", "-p", "a", "-r", "kivi5"], "Did you mean 'kivi4'?"),
    "unknown codec": (["generate", "-p", "a", "-r", "k=afine:4+v=none"], "afine"),
    "unknown key side": (["generate", "-p", "a", "--key", "kivi5"], "kivi5"),
    "unknown model": (["generate", "-p", "a", "-m", "qwen05b"], "Did you mean 'qwen0.5b'?"),
    "missing model": (["generate", "-p", "a", "-m", "missing.gguf"], "does not exist"),
    "unknown dtype": (["generate", "-p", "a", "--dtype", "float8"], "bfloat16"),
    "unknown weights": (["generate", "-p", "a", "--weights", "int3"], "nf4"),
    "no new tokens": (["generate", "-p", "a", "-n", "0"], "max-new-tokens"),
    "negative temperature": (["generate", "-p", "a", "-t", "-1"], "temperature"),
    "unknown option": (["generate", "--promt", "a"], "--prompt"),
    "unknown verb": (["generat"], "generat"),
    "chat with an unknown recipe": (["chat", "-r", "kivi5"], "Did you mean 'kivi4'?"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_ends_with_code_2_and_one_message(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


BAD_FOR_MODEL = {
    "prompt beyond the context": (
        ["-p", "a " * 250, "--raw", "-n", "7"],
        "250 prompt tokens and 7 new tokens make 257",
    ),
    "group that does not divide": (["-p", "a", "-n", "4", "-r", "k=affine:4:asym:scale=24+v=none"], "head_dim=32"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_FOR_MODEL.values(), ids=BAD_FOR_MODEL)
def test_bad_input_that_depends_on_the_model(run, tiny_folder, arguments, message):
    code, out, err = run("generate", "-m", str(tiny_folder), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_broken_gguf_and_a_binary_prompt_are_refused(run, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\3\0\0\0")
    code, _, err = run("generate", "-p", "a", "-m", str(broken))
    assert code == 2
    assert "broken.gguf is broken" in err
    code, _, err = run("generate", "-f", str(_written(tmp_path / "binary", b"\xff\xfe\x00")))
    assert code == 2
    assert "UTF-8" in err


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_terminal_without_a_prompt_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(_Pipe, "isatty", lambda self: True)
    code, _, err = run("generate")
    assert code == 2
    assert "no prompt" in err


def test_a_model_without_chat_template_generates_raw_and_says_so_but_does_not_chat(run, monkeypatch, tiny_folder):
    from kvslim.cli.session import Session

    monkeypatch.setattr(Session, "has_chat_template", False)
    code, out, err = run("generate", "-m", str(tiny_folder), "-p", "a b", "-n", "2", "--json")
    assert (code, json.loads(out)["prompt_tokens"]) == (0, 2)
    assert "has no chat template" in err
    code, _, err = run("chat", "-m", str(tiny_folder), stdin="a\n")
    assert code == 2
    assert "kvslim generate --raw" in err


def test_interrupting_ends_with_130(run, monkeypatch, tiny_folder):
    from kvslim.cli.session import Session

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "reply", interrupt)
    code, _, err = run("generate", "-m", str(tiny_folder), "-p", "a", "-n", "4")
    assert code == 130
    assert "Traceback" not in err


def test_a_real_model_answers_from_the_command_line(run, qwen05b, monkeypatch):
    from kvslim.cli import session

    monkeypatch.setattr(session, "load_model", lambda *arguments, **options: qwen05b)
    code, out, _ = run("generate", "-p", "What is 2 + 2? Answer with the number only.", "-n", "8", "--json")
    assert code == 0
    assert "4" in json.loads(out)["text"]
