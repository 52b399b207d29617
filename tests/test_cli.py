"""The quire command, as a user types it."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire.cli.options import OF_MANY
from quire.config import engine_config
from quire.errors import ConfigError
from quire.models.hub import EMBEDDED
from tests.forks import Spawner
from tests.models.checkpoints import save


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


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout
    assert "info" in result.stdout


ELSEWHERE = """
import sys
sys.platform = "win32"
try:
    import quire
except ImportError as error:
    print(error)
"""


def test_windows_gets_a_sentence() -> None:
    said = subprocess.check_output([sys.executable, "-c", ELSEWHERE], text=True)
    assert said == "Quire does not run on Windows. It runs on Linux, so also in WSL 2\n"


TOO_OLD = """
import sys
class Loader:  # PyTorch's own libraries, as they fail there
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ImportError("/lib64/libm.so.6: version `GLIBC_2.27' not found (required by libtorch_cpu.so)")
sys.meta_path.insert(0, Loader())
sys.argv = ["quire", "generate", "import os"]
from quire.cli import main
main()
"""


@pytest.mark.slow
def test_a_system_that_is_too_old_for_torch_gets_a_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", TOO_OLD], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: this system is older than PyTorch's wheels and Quire's, which need glibc 2.28"
    )
    assert "version `GLIBC_2.27' not found" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_repetition_penalty_ends_a_loop() -> None:
    arguments = ["def __repr__(self):", "--temperature", "0", "--max-tokens", "64"]
    name = "self.__class__.__name__"
    assert generated(*arguments, "--repetition-penalty", "1").count(name) > 2
    assert generated(*arguments, "--repetition-penalty", "1.25").count(name) <= 2


@pytest.mark.slow
def test_the_embedded_model_does_not_loop_without_options() -> None:
    """By its generation_config.json: without it some lines come ten times and more."""
    prompts = ("import os", "import os\n", "def fibonacci(", "class Stack:\n")
    repeated = []
    for line in generated(*prompts, "--json").splitlines():
        lines = [one.strip() for one in json.loads(line)["text"].splitlines()]
        repeated += [one for one in set(lines) if len(one) > 3 and lines.count(one) > 2]
    assert repeated == []


def test_bench_says_how_to_get_it_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quire_bench", None)
    for arguments in ([], ["--help"], ["throughput", "single", "--runs", "1"], ["gpu", "--tiny"]):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert (result.exit_code, result.stdout) == (1, ""), arguments
        assert result.stderr == (
            "error: quire bench is not installed; get it with: pip install 'quire[bench]', or in a clone: "
            "pip install './bench[all]'\n"
        )


@pytest.mark.slow
def test_bench_lists_its_commands_and_passes_arguments_on() -> None:
    listed = CliRunner().invoke(app, ["bench", "--help"])
    assert listed.exit_code == 0
    for command in ("attention", "calibrate", "fleet", "gpu", "latency", "machine", "memory", "quantisation", "serve",
                    "soak", "startup", "throughput"):  # fmt: skip
        assert re.search(rf"^\W*{command} ", listed.stdout, re.MULTILINE), command
    for arguments in (["startup", "--runs", "0"], ["memory", "--", "--json"], ["nothing"], []):
        assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2
    few = ["--distribution", "chat", "--requests=3", "--max-model-len", "64", "--json"]
    shown = CliRunner().invoke(app, ["bench", "memory", *few])
    assert {"requests": 3, "max_model_len": 64}.items() <= json.loads(shown.stdout.splitlines()[0]).items()


@pytest.mark.slow
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
    for arguments, shown in (
        (["--model", str(tmp_path)], "has no tokenizer"),
        (["--dtype", "int3"], "dtype is 'int3'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--attention-backend", "warp"], "no attention backend 'warp'"),
        (["--reproducible", "--attention-backend", "reference"], "'reference' does not give the same bits"),
        (["--kv-cache-memory", "1KiB"], "the KV cache may take 0.0 MiB"),
        (["--block-size", "300"], "block_size is 300"),
        (["--num-blocks", "1"], "the request can never fit"),
        (["--preemption", "panic"], "preemption is 'panic'; it must be 'recompute' or 'swap'"),
        (["--swap-space", "1GiB"], "only preemption='swap' uses it"),
        (["--preemption", "swap", "--swap-space", "9KB"], "swap_space is '9KB', 9,000 bytes; one block takes 20,480"),
        (["--max-model-len", "2000"], "max_model_len is 2000"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--file", "/no/such/file"], "/no/such/file cannot be read"),
    ):
        result = CliRunner().invoke(app, ["generate", "x", *arguments])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert shown in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
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
    lines = CliRunner().invoke(app, ["info"]).stdout.splitlines()
    rows = {line[:18].strip(): line[19:] for line in lines}
    assert rows["backend reference"] == "available"
    assert "blocks of 16 tokens, 20 KiB each" in rows["KV cache"]
    assert "GiB" in rows["free memory"]
    assert "threads" in rows["CPU"]


@pytest.mark.slow
def test_info_says_who_computes_a_model(tmp_path: Path) -> None:
    from quire.models import EMBEDDED

    shown = CliRunner().invoke(app, ["info", "--model", str(EMBEDDED)])
    assert shown.exit_code == 0
    model, parameters, weights, cache, longest, memory, speed = shown.stdout.splitlines()
    assert model.split()[1:] == ["own", "decoder"]
    assert re.fullmatch(r"parameters +\d\.\d million", parameters)
    assert re.fullmatch(r"weights +not quantised, \d+\.\d MiB", weights)
    assert re.fullmatch(r"KV cache +(bfloat16, 16|float32, 32) bits a number, 1,280 bytes a token", cache)
    assert re.fullmatch(r"longest +1,024 tokens, whose cache takes 1\.2 MiB", longest)
    assert re.fullmatch(r"memory +\d+\.\d MiB with one such sequence; [\d.,]+ [MG]iB are free here", memory)
    assert re.fullmatch(r"speed +about [\d,]+ tokens a second .*, at \d+ GB/s as just measured", speed)
    config = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"odd_key": 1}), encoding="utf-8")
    shown = CliRunner().invoke(app, ["info", "--model", str(tmp_path)])
    assert "adapter: because config.json has keys that family" in shown.stdout
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}')
    shown = CliRunner().invoke(app, ["info", "--model", str(tmp_path)])
    assert shown.exit_code == 1
    assert "it keeps a state in addition to keys and values" in shown.stderr


def test_info_says_how_a_model_is_quantised(tmp_path: Path) -> None:
    from quire.models import EMBEDDED

    config = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"quantization_config": scheme}), encoding="utf-8")
    shown = CliRunner().invoke(app, ["info", "--model", str(tmp_path)])
    assert re.search(
        r"^weights +awq int4, groups of 128, zeros, \d\.\d MiB; they are not here yet$", shown.stdout, re.MULTILINE
    )
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}), encoding="utf-8")
    shown = CliRunner().invoke(app, ["info", "--model", str(tmp_path)])
    assert shown.exit_code == 1
    assert "stored as quant_method hqq, which is not served" in shown.stderr


def test_models_lists_all_types() -> None:
    from quire.models.supported import read

    shown = CliRunner().invoke(app, ["models"]).stdout
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert [one["name"] for one in found["types"]] == [one.name for one in read().types]
    for one in read().types:
        assert any(
            line.split()[0] == one.name and one.how in line and one.reason in line for line in shown.splitlines()
        )
    starts = {len(re.split(r"(?<=  )(?=\S)", line)[0]) for line in shown.split("\n\n")[0].splitlines()}
    assert starts == {2 + max(len(one.name) for one in (*read().repositories, *read().types))}


@pytest.mark.slow
def test_a_prompt_through_the_adapter() -> None:
    shown = [
        generated("def f(", "--max-tokens", "12", "--temperature", "0", "--model-impl", impl)
        for impl in ("quire", "transformers")
    ]
    assert shown[0] == shown[1]


def test_every_field_of_the_configs_is_an_option_of_serve() -> None:
    """With the help that its field has, and its default."""
    from typer.main import get_command

    from quire.config import CacheConfig, EngineConfig, options_of
    from quire.server.server_config import ServerConfig

    made = {option.name: option for option in get_command(app).commands["serve"].params}
    for config in (ServerConfig, EngineConfig, CacheConfig):
        for name, about in options_of(config).items():
            assert made[name].help == about.help
            assert set(about.aliases) < set(made[name].opts)
    assert made["port"].default == ServerConfig().port
    assert made["kv_cache_memory"].default == "50%"
    assert made["num_blocks"].default is None


@pytest.mark.parametrize("name", ["serve", "fleet", "chat", "generate"])
def test_help_groups_options_by_the_headings_of_their_fields(name: str) -> None:
    """And shows a repeatable option as one value."""
    from quire.config import CacheConfig, EngineConfig, group_of, options_of
    from quire.fleet.config import GatewayConfig
    from quire.request import SERVED
    from quire.server.server_config import ServerConfig

    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    assert "list[" not in shown
    sections = dict(re.findall(r"^(\w.*):\n((?:(?:  .*)?\n)+)", shown, re.MULTILINE))
    found = {
        option: title for title, text in sections.items() for option in re.findall(r"^  .*?(--?[a-z-]+)", text, re.M)
    }
    configs = {"serve": (ServerConfig, EngineConfig, CacheConfig), "fleet": (GatewayConfig,)}
    expected = {
        f"--{field.replace('_', '-')}": group_of(config, field)
        for config in configs.get(name, (EngineConfig, CacheConfig))
        for field in options_of(config)
        if name not in ("chat", "generate") or field not in (*OF_MANY, "seed", "model")
    }
    if name in ("chat", "generate"):
        fields = {field for field, served in SERVED.items() if served.help and field != "n"}
        assert {"top_p", "top_k", "min_p", "stop", "seed", "repetition_penalty", "max_tokens"} <= fields
        expected |= {f"--{field.replace('_', '-')}": "Sampling" for field in fields}
    else:
        assert {"Server", "Access", "Logs and metrics"} <= set(expected.values())
    aliased = {"--model": "-m"}
    assert {option: found.get(aliased.get(option, option)) for option in expected} == expected


@pytest.mark.slow
def test_sampling_options_reach_the_samples() -> None:
    lines = generated("import os\n", "def f(", "-n", "2", "--json", "--max-tokens", "12", "--seed", "5").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["prompt"] for record in records] == ["import os\n"] * 2 + ["def f("] * 2
    assert len({record["text"] for record in records}) == 4
    text = generated("import os\n", "def f(", "-n", "2", "--max-tokens", "12", "--seed", "5")
    assert text == "\n\n".join(record["prompt"] + record["text"] for record in records) + "\n"
    arguments = ["class Stack:\n", "--max-tokens", "40", "--json"]
    greedy = json.loads(generated(*arguments, "--temperature", "0"))
    for one in (["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]):
        assert json.loads(generated(*arguments, "--temperature", "9", *one))["token_ids"] == greedy["token_ids"], one
    first, second = greedy["text"].split()[1:3]
    for stops in ([second], [second, first]):
        flags = [word for stop in stops for word in ("--stop", stop)]
        assert json.loads(generated(*arguments, "--temperature", "0", *flags))["stop_reason"] == stops[-1]
    refused = CliRunner().invoke(app, ["chat", "no/such", "hi", "--top-p", "2"])
    assert (refused.exit_code, "top_p is 2.0" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("serve --port abc", 2, "Error: Invalid value for '--port abc': it must be an integer\n"),
        ("generate x --temperature=hot", 2, "Error: Invalid value for '--temperature hot': it must be a number\n"),
        ("stop", 1, "error: no command stops a server: press Ctrl-C where it runs, or send SIGTERM"),
        ("fleet", 1, "error: there is no fleet_secret; make one, for example with `openssl rand -hex 32`"),
        ("fleet --fleet-secret s", 1, "error: replicas is empty; give URLs"),
    ],
)
def test_a_wrong_command_line_is_answered_in_plain_words(arguments: str, status: int, words: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), prog_name="quire")
    assert (result.exit_code, words in result.stderr) == (status, True), result.stderr


@pytest.mark.slow
def test_an_answer_of_the_embedded_model_ends_without_options() -> None:
    shown = CliRunner().invoke(app, ["chat"], input="hi")
    assert shown.exit_code == 0
    assert "(the answer ends here since it may have no more tokens)" in shown.stderr
    assert len(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(shown.stdout).ids) < 200


def test_show_and_ls_are_other_names() -> None:
    from quire.models import EMBEDDED

    shown = [CliRunner().invoke(app, [*words, str(EMBEDDED)]).stdout for words in (["show"], ["info", "-m"])]
    assert len(shown[0].splitlines()) == 7
    stable = [[line for line in text.splitlines() if not line.startswith(("memory", "speed"))] for text in shown]
    assert stable[0] == stable[1]
    helps = [CliRunner().invoke(app, [name, "--help"], prog_name="quire").stdout for name in ("ls", "list")]
    assert helps[0].replace("quire ls", "quire list") == helps[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be in 1..256"),
        ({"num_blocks": "4"}, "num_blocks is '4'; it must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"reproducible": 1}, "reproducible is 1; it must be True or False"),
        ({"async_scheduling": 1}, "async_scheduling is 1; it must be True or False"),
        ({"scheduling_policy": "x"}, "scheduling_policy is 'x'; it must be one of 'fcfs', 'priority', 'shortest'"),
        ({"preemption": ""}, "preemption is ''; it must be 'recompute' or 'swap'"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens is 8; it must be in 0..7"),
    ],
)
def test_a_value_outside_its_fields_bounds_is_refused(options: dict[str, object], message: str) -> None:
    from quire.config import engine_config
    from quire.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        engine_config(**options)
    assert str(caught.value) == message


@pytest.mark.slow
def test_version_and_short_help() -> None:
    from quire import __version__

    for name in ("--version", "-V"):
        assert CliRunner().invoke(app, [name]).stdout == f"quire {__version__}\n"
    for arguments in (["-h"], ["serve", "-h"], ["generate", "-h"], ["simulate", "-h"]):
        assert CliRunner().invoke(app, arguments).stdout.startswith("Usage:")


def commands() -> dict[str, Any]:
    """All commands, those of quire bench among them, by what is typed for them."""
    from typer.main import get_command

    from quire_bench.cli import app as bench

    found = {name: command for name, command in get_command(app).commands.items() if name != "bench"}
    return found | {f"bench {name}": command for name, command in get_command(bench).commands.items() if name != "gpu"}


def test_help_shows_each_name_as_a_whole_at_80_columns() -> None:
    wrong, runner = [], click.testing.CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    for typed, command in commands().items():
        shown = runner.invoke(command, ["--help"], prog_name=f"quire {typed}").stdout
        names = [name for option in command.params for name in (*option.opts, *option.secondary_opts)]
        whole = (rf"(^|[ /,]){name}($|[ ,])" for name in names if name.startswith("-"))
        wrong += [(typed, pattern) for pattern in whole if not re.search(pattern, shown, re.MULTILINE)]
        wrong += [(typed, line) for line in shown.splitlines() if len(line) > 80]
    assert not wrong


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "gpu"]])
def test_lists_of_commands_are_whole_at_80_columns(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # of bench gpu, which argparse reads
    shown = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    for line in shown.splitlines():
        assert "..." not in line or "[ARGS]..." in line, line


def test_run_is_chat() -> None:
    shown = [CliRunner().invoke(app, [name, "--help"], prog_name="quire").stdout for name in ("run", "chat")]
    assert shown[0].replace("quire run", "quire chat") == shown[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_a_shell(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    shown = CliRunner().invoke(app, ["--show-completion"], prog_name="quire")
    assert shown.exit_code == 0, shown.output
    assert "_QUIRE_COMPLETE" in shown.stdout


INTERRUPTED = """
import sys
import time
from quire.cli import main
from quire.engine.runner import Runner

compute = Runner.run

def run(self, batch):
    print("in a step", file=sys.stderr, flush=True)
    time.sleep(0.05)
    return compute(self, batch)

Runner.run = run
main()
"""
LINGERING = INTERRUPTED.replace("main()\n", "try:\n    main()\nfinally:\n    time.sleep(3600)\n")  # as a long last step


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["generate x --max-tokens 900", "chat"])
def test_the_first_interrupt_says_what_happens(forks: Spawner, arguments: str) -> None:
    process = forks.start(*arguments.replace("chat", "chat --max-tokens 900").split(), program=ASKED + INTERRUPTED)
    process.said("in a step")
    process.send(signal.SIGINT)
    if arguments == "chat":  # it stops the answer, after which this chat has no more to do
        assert process.wait() == 0
        process.said(r"\(stopped\)")
    else:
        assert process.wait() == 130
        process.said("stopping as soon as the current step is done; Ctrl-C again ends it at once\n")
    assert "Traceback" not in process.log.read_text()


ASKED = "import io, sys; sys.stdin = io.StringIO('a stack')\n"


@pytest.mark.slow
def test_the_second_interrupt_ends_it_at_once_without_a_traceback(forks: Spawner) -> None:
    process = forks.start("generate", "x", "--max-tokens", "900", program=LINGERING)
    process.said("in a step")
    process.send(signal.SIGINT)
    process.said("stopping as soon as")
    assert process.is_alive
    process.send(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.log.read_text()


LOADING = """
import sys
import time
import quire.frontend.llm
from quire.cli import main

def load(*_):
    print("loading", file=sys.stderr, flush=True)
    while True:  # a signal that arrives just before a sleep is handled after it
        time.sleep(0.05)

quire.frontend.llm.load_model = load
main()
"""


@pytest.mark.slow
def test_interrupts_of_bench_and_of_loading(forks: Spawner) -> None:
    for arguments in ("bench throughput single --runs 1", "generate x", "serve --port 0", "chat"):
        process = forks.start(*arguments.split(), program=ASKED + LOADING)
        process.said("loading")
        process.send(signal.SIGINT)
        assert process.wait() == 130, arguments
        process.said("Ctrl-C again ends it at once")
        assert "Traceback" not in process.log.read_text()


def served(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[dict[str, Any], Any, Any]:
    """The options with which `quire serve` would serve, and its result."""
    import quire.server.run

    given: list[Any] = [{}, None]

    def serve(options: dict[str, Any], server: Any, *_: Any) -> int:
        given[:] = [options, server]
        return 0

    monkeypatch.setattr(quire.server.run, "serve", serve)
    result = CliRunner().invoke(app, ["serve", *arguments])
    return given[0], given[1], result


@pytest.mark.slow
def test_flags_of_vllm_that_ask_for_what_holds_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pasted = (
        "some/model --tensor-parallel-size 1 -pp 1 --data_parallel_size=1 --trust-remote-code --enforce-eager "
        "--enable-chunked-prefill --disable-log-stats --disable-log-requests --tokenizer some/model --revision main "
        "--load-format=auto --served-model-name a b --max-num-seqs 7 --num-gpu-blocks-override 99 --uvicorn-log-level "
        "warning --distributed-executor-backend mp --host 0.0.0.0 --spec-tokens 2 --gpu-memory-utilization 0.9 "
        '--swap-space 4 --limit-mm-per-prompt={"image":2} --max-seq-len-to-capture 8192 --allowed-media-domains '
        "a.example b.example,c.example"
    )
    options, server, result = served(monkeypatch, *pasted.split())
    assert result.exit_code == 0, result.output
    assert (options["model"], options["max_num_seqs"], options["num_blocks"]) == ("some/model", 7, 99)
    assert options["num_speculative_tokens"] == 2
    assert (server.served_model_name, server.log_stats, server.host) == (("a", "b"), False, "0.0.0.0")
    assert server.allowed_media_domains == ("a.example", "b.example,c.example")
    assert options["tokenizer"] == "some/model"
    assert options["enforce_eager"] is True
    caplog.set_level("INFO")
    assert engine_config(**options).num_speculative_tokens == 2  # the table of the Python interface takes the others
    reported = "\n".join(caplog.messages)
    for start in ("trust_remote_code=True: no code", "gpu_memory_utilization=0.9: on a GPU", "swap_space=4: a number",
                  "limit_mm_per_prompt={'image': 2}: ", "max_seq_len_to_capture=8192: CUDA graphs"):  # fmt: skip
        assert start in reported
    for arguments in (["-m", "x"], ["--model", "x"], ["x"]):
        assert served(monkeypatch, *arguments)[0]["model"] == "x"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--pipeline-parallel-size 2", "'2'); tensor_parallel_size divides a model"),
        ("-pp=2", "tensor_parallel_size divides a model"),
        (
            "--gpu-memory-utilization 1.5",
            "option --gpu-memory-utilization is '1.5'; on a GPU a number above 0, up to 1, sets kv_cache_memory",
        ),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks"),
        ("--revision abc", "download the revision"),
        ("--ssl-ca-certs x", "leave it to a proxy"),
        ("--hf-token x", "HF_TOKEN"),
        ("--api-server-count 4", "--api-server-count is '4'"),
        ("--model x", "the model is given twice, as 'm' and as --model 'x'"),
    ],
)
def test_other_flags_of_vllm_are_refused_with_a_sentence(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server, result = served(monkeypatch, "m", *arguments.split())
    assert (result.exit_code, server) == (1, None)
    assert result.stderr.startswith("error: ")
    assert words in result.stderr


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--hf-token", "hf_abc"], ["--hf-token=hf_abc"]):
        result = served(monkeypatch, "m", *arguments)[2]
        assert result.stderr.startswith("error: there is no option --hf-token; ")
        assert "hf_abc" not in result.output
    with pytest.raises(ConfigError, match=r"no engine option 'hf_token'; .* HF_TOKEN$"):
        LLM(hf_token="hf_abc")


def test_every_flag_of_the_table_is_none_of_our_own() -> None:
    """What is an option of ours is taken as that, so a sentence about it would never be said."""
    from typer.main import get_command

    from quire.cli.vllm_flags import HOLDS, HOLDS_AT, NOT_HERE

    own = {name for option in get_command(app).commands["serve"].params for name in option.opts}
    assert not own & {*HOLDS, *HOLDS_AT, *NOT_HERE}


def test_keys_come_from_the_environment_and_yaml_says_where_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "one two")
    assert served(monkeypatch)[1].keys == ("one", "two")
    assert served(monkeypatch, "--api-key", "three")[1].keys == ("three",)
    path = tmp_path / "quire.yaml"
    for text, words in (
        ("port: abc", f"{path}: port is 'abc'; it must be an integer\n"),
        ("max-num-seqs: [1, x]", "max-num-seqs is"),
    ):
        path.write_text(text)
        result = served(monkeypatch, "--config", str(path))[2]
        assert result.exit_code == 1
        assert words in result.stderr
    assert f"there is no file {tmp_path}/nowhere" in served(monkeypatch, "--config", f"{tmp_path}/nowhere")[2].stderr


def test_every_option_is_also_a_variable_below_the_command_line_and_above_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from typer.main import get_command

    for command in ("serve", "fleet"):
        shown = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())
        for option in get_command(app).commands[command].params:
            if option.param_type_name == "option" and option.name != "help":
                assert option.envvar == f"QUIRE_{option.name.strip('_').upper()}"
                assert f"env var: {option.envvar}" in shown
    path = tmp_path / "quire.yaml"
    path.write_text("max-num-seqs: 1\nblock-size: 32\nport: 1\nhost: a\nenable-prefix-caching: true\n")
    variables = {"CONFIG": path, "MAX_NUM_SEQS": 2, "PORT": 2, "LORA": "a=/x b=/y", "MODEL": "m", "HOST": ""}
    variables |= {"ENABLE_PREFIX_CACHING": "false", "OLLAMA": "1", "SHUTDOWN_TIMEOUT": "1.5", "RANK": "", "PORTS": ""}
    for name, value in variables.items():
        monkeypatch.setenv(f"QUIRE_{name}", str(value))
    options, server, result = served(monkeypatch, "--port", "3")
    assert result.exit_code == 0, result.output
    assert (options["max_num_seqs"], options["block_size"], options["model"]) == (2, 32, "m")
    assert (server.port, server.host, server.shutdown_timeout, server.ollama) == (3, "a", 1.5, True)
    assert (options["enable_prefix_caching"], server.lora) == (False, ("a=/x", "b=/y"))
    unknown = [record.getMessage() for record in caplog.records if record.name == "quire"]
    assert unknown == [
        "the environment has QUIRE_PORTS, which is not the variable of an option; did you mean QUIRE_PORT?"
    ]
    assert served(monkeypatch, "other")[0]["model"] == "other"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "abc", "error: QUIRE_PORT is 'abc'; "),
        ("PORT", "tcp://10.0.0.1:80", "unless the pod has enableServiceLinks: false"),
        ("PORT", "70000", "error: port is 70000; it must be in 0..65535 (from the environment: QUIRE_PORT)"),
        ("OLLAMA", "maybe", "error: QUIRE_OLLAMA is 'maybe'; "),
    ],
)
def test_a_wrong_value_in_the_environment_is_refused_with_its_variable(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"QUIRE_{name}", value)
    _, server, result = served(monkeypatch)
    assert (result.exit_code, server) == (1, None)
    assert words in result.stderr
    assert served(monkeypatch, f"--{name.lower()}", *(["3"] if name == "PORT" else []))[2].exit_code == 0


def test_the_variable_of_ranks_is_known_to_be_no_option() -> None:
    from quire.cli.environment import OF_RANKS
    from quire.parallel.launch import GIVEN

    assert OF_RANKS == GIVEN


@pytest.mark.slow
def test_generate_takes_the_checkpoints_own_sampling(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3}')
    own = ["import os\n", "--json", "--generation-config", str(tmp_path)]
    same = [json.loads(generated(*own, "--seed", seed))["token_ids"] for seed in ("1", "2")]
    assert (len(same[0]), same[0]) == (3, same[1])
    assert len(json.loads(generated(*own, "--max-tokens", "5"))["token_ids"]) == 5
