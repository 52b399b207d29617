"""The quire command, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from tests.models.checkpoints import save


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def generated(*arguments: str, stdin: str | None = None) -> str:
    """What `quire generate` prints, without a process of its own."""
    result = CliRunner().invoke(app, ["generate", *arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


HELP = """
import sys
sys.argv = ["quire", "--help"]
from quire.cli import main
try:
    main()
except SystemExit:
    pass
heavy = {"torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "transformers"}
raise SystemExit(sorted(heavy & set(sys.modules)) or None)
"""


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout
    assert "info" in result.stdout


@pytest.mark.slow
def test_generate_prints_prompt_and_text_and_loads_no_transformers() -> None:
    result = quire("generate", "def fibonacci(", "--max-tokens", "8", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def fibonacci(")
    assert len(result.stdout) > len("def fibonacci(") + 4
    program = "import sys, quire\nquire.LLM().generate('a', quire.SamplingParams(max_tokens=1))\n"
    program += "raise SystemExit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_several_prompts_a_file_and_json(tmp_path: Path) -> None:
    (tmp_path / "prompt.py").write_text("import os\n")
    arguments = ["one", "two", "--file", str(tmp_path / "prompt.py"), "--max-tokens", "5", "--seed", "3"]
    records = [json.loads(line) for line in generated(*arguments, "--json").splitlines()]
    assert [record["prompt"] for record in records] == ["one", "two", "import os\n"]
    assert all(len(record["token_ids"]) <= 5 and record["finish_reason"] in ("length", "stop") for record in records)
    assert generated(*arguments) == "\n\n".join(record["prompt"] + record["text"] for record in records) + "\n"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_stdin(arguments: list[str]) -> None:
    record = json.loads(generated(*arguments, "--max-tokens", "3", "--json", stdin="class Stack:\n"))
    assert record["prompt"] == "class Stack:\n"


@pytest.mark.slow
def test_options_reach_the_engine(tmp_path: Path) -> None:
    save(tmp_path)
    for arguments, told in (
        (["--model", str(tmp_path)], "has no tokenizer"),
        (["--dtype", "int3"], "dtype is 'int3'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--attention-backend", "warp"], "no attention backend 'warp'"),
        (["--reproducible", "--attention-backend", "reference"], "'reference' does not give the same bits"),
        (["--kv-cache-memory", "1KiB"], "the KV cache may take 0.0 MiB"),
        (["--block-size", "300"], "block_size is 300"),
        (["--num-blocks", "1"], "request 0-0 can never fit"),
        (["--preemption", "panic"], "preemption is 'panic'; it must be 'recompute' or 'swap'"),
        (["--swap-space", "1GiB"], "only preemption='swap' uses it"),
        (["--preemption", "swap", "--swap-space", "9"], "swap_space is '9', 9 bytes; one block takes 20,480"),
        (["--max-model-len", "2000"], "max_model_len is 2000"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--file", "/no/such/file"], "/no/such/file cannot be read"),
    ):
        result = CliRunner().invoke(app, ["generate", "x", *arguments])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert told in result.stderr
        assert "Traceback" not in result.stderr


def test_the_text_is_the_same_however_memory_is_short() -> None:
    prompts = ["import os\n", "class Stack:\n", "def main("]
    texts = [
        [json.loads(line)["text"] for line in CliRunner().invoke(app, arguments).stdout.splitlines()]
        for options in ("", "--num-blocks 9 --no-enable-prefix-caching",
                        "--num-blocks 9 --preemption swap --swap-space 1MiB")
        for arguments in [["generate", *prompts, "--json", "--max-tokens", "60", *options.split()]]
    ]  # fmt: skip
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 3


@pytest.mark.slow
def test_info() -> None:
    lines = quire("info").stdout.splitlines()
    rows = {line[:18].strip(): line[19:] for line in lines}
    assert rows["backend reference"] == "available"
    assert "blocks of 16 tokens, 20 KiB each" in rows["KV cache"]
    assert "GiB" in rows["free memory"]
    assert "threads" in rows["CPU"]


def test_info_says_who_computes_a_model(tmp_path: Path) -> None:
    from quire.models import EMBEDDED

    told = CliRunner().invoke(app, ["info", "--model", str(EMBEDDED)])
    assert told.exit_code == 0
    assert told.stdout.split()[1:] == ["own", "decoder"]
    config = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"odd_key": 1}), encoding="utf-8")
    told = CliRunner().invoke(app, ["info", "--model", str(tmp_path)])
    assert "adapter: because config.json has keys that family" in told.stdout
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}')
    told = CliRunner().invoke(app, ["info", "--model", str(tmp_path)])
    assert told.exit_code == 1
    assert "it keeps a state beside keys and values" in told.stderr


def test_models_lists_all_types() -> None:
    from quire.models.supported import read

    told = CliRunner().invoke(app, ["models"]).stdout
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert [one["name"] for one in found["types"]] == [one.name for one in read().types]
    for one in read().types:
        assert any(line.split()[0] == one.name and one.how in line and one.reason in line for line in told.splitlines())


def test_a_prompt_through_the_adapter() -> None:
    told = [
        generated("def f(", "--max-tokens", "12", "--temperature", "0", "--model-impl", impl)
        for impl in ("quire", "transformers")
    ]
    assert told[0] == told[1]
