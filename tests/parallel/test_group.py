"""Groups of processes: how they are started, what they agree on, and that they end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import quire.frontend.llm
from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.config import EngineConfig
from quire.errors import ConfigError, GroupLost, Unsupported
from quire.frontend.startup_summary import chosen
from quire.models.weights import Weights
from quire.ops import Backend, native
from quire.parallel import launch
from quire.parallel.cores import Binding, by_place
from quire.parallel.group import ProcessGroup
from tests.forks import Spawner
from tests.marks import of_long_runs
from tests.models.checkpoints import save
from tests.parallel.forked import Forked, Forks

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")

PROMPT = [7 * i % 97 for i in range(40)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
Ranks = Callable[..., list[Forked]]


def answer(llm: LLM) -> list[Any]:
    [found] = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return [list(found.outputs[0].token_ids), found.outputs[0].cumulative_logprob]


def further(llm: LLM) -> list[Any]:
    """What else an engine computes: hidden states, beams, samples of one prompt, grammars, likelihoods."""
    beams = llm.beam_search(["import os"], BeamSearchParams(beam_width=3, max_tokens=6))[0].sequences
    several = SamplingParams(n=3, seed=1, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-z]{4,12}"))
    [samples] = llm.generate(["import "], several, use_tqdm=False)
    [likely] = llm.loglikelihood(["import os"], [" path"])
    return [
        llm.embed([PROMPT])[0].outputs.embedding,
        [(beam.text, beam.cum_logprob) for beam in beams],
        [sample.text for sample in samples.outputs],
        likely.token_logprobs,
    ]


def answer_on_and_on(llm: LLM) -> NoReturn:
    while True:
        answer(llm)


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    with LLM(num_blocks=100) as llm:
        return answer(llm)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def ranks(forks: Spawner) -> Iterator[Ranks]:
    """Starts two processes, as a launcher does."""
    found: list[Forked] = []

    def start(*words: str, options: dict[int, dict[str, Any]] | None = None, **environment: str) -> list[Forked]:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | environment
        for rank in range(2):
            own = {"RANK": str(rank), "OPTIONS": json.dumps((options or {}).get(rank, {}))}
            found.append(Forked(forks, "tests.parallel.group_rank", words, common | own))
        return found

    yield start
    for process in found:
        process.kill()


@pytest.fixture
def forked(forks: Spawner, monkeypatch: pytest.MonkeyPatch) -> Forks:
    """What the first rank starts are forks."""
    found = Forks(forks)
    monkeypatch.setattr(launch, "Popen", found)
    return found


@pytest.mark.slow
def test_processes_that_it_starts_itself(wanted: list[Any]) -> None:
    """The first of them drafts with the checkpoint's head."""
    with LLM(num_blocks=100, tensor_parallel_size=2, draft="head") as llm:
        assert llm.group is not None
        [process] = llm.group.processes
        assert "in each of 2 processes, which exchange numbers through shared memory" in chosen(llm)["threads"]
        assert answer(llm) == wanted
        assert answer(llm) == wanted  # with blocks that are there
        found = further(llm)
        assert llm.engine.scheduler.speculation is not None
        assert llm.engine.scheduler.speculation.accepted["head"] > 0
    assert process.poll() == 0
    with LLM(num_blocks=100) as llm:
        assert further(llm) == found


@pytest.mark.slow
def test_processes_use_the_instruction_set_of_the_first(forked: Forks) -> None:
    plainest = [isa for isa in native.runnable(native.library_path()) if isa != "amx_emulated"][-1]
    with native.using(plainest), LLM(num_blocks=100) as llm:
        wanted = answer(llm)
    with native.using(plainest), LLM(num_blocks=100, tensor_parallel_size=2) as llm:  # ranks that disagree end
        assert answer(llm) == wanted
    assert forked.started[0].wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "exchange"),
    [
        of_long_runs([], "MemoryExchange"),
        (["apart"], "TorchCommunicator"),
        (["device"], "DeviceCommunicator"),
    ],
)
def test_processes_of_a_launcher(ranks: Ranks, words: list[str], exchange: str, wanted: list[Any]) -> None:
    first, second = ranks(*words)
    assert first.wait(120) == 0, first.said()
    assert json.loads(first.said().splitlines()[-1]) == [exchange, *wanted]
    assert second.wait(60) == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Gemma4", "Qwen3_5"])
def test_families_between_hosts(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Experts, a table of each layer, states, and heads that ranks cannot have as many of each."""
    save(tmp_path, kind, torch.bfloat16)
    options = {"model": str(tmp_path), "num_speculative_tokens": 2}
    with LLM(num_blocks=100, **options) as llm:
        wanted = answer(llm)
    first, second = ranks("apart", options={0: options, 1: options})
    assert first.wait(120) == 0, first.said()
    assert json.loads(first.said().splitlines()[-1]) == ["TorchCommunicator", *wanted]
    assert second.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["load", of_long_runs("step")])
def test_why_a_rank_has_failed_is_said(ranks: Ranks, where: str) -> None:
    first, second = ranks(where)
    assert first.wait(120) == 1
    assert "GroupLost: rank 1 of the tensor-parallel group has failed: this rank is broken" in first.said()
    assert second.wait(60) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rank_that_dies_while_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[ProcessGroup] = []
    names: list[str] = []
    join, read = quire.frontend.llm.join, Weights.__getitem__

    def joined(config: EngineConfig, backend: Backend) -> ProcessGroup:
        groups.append(join(config, backend))
        return groups[0]

    def read_and_kill(weights: Weights, name: str) -> Any:
        names.append(name)
        groups[0].processes[0].kill()
        deadline = time.monotonic() + 60
        while groups[0].exchange.lost is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return read(weights, name)

    monkeypatch.setattr(quire.frontend.llm, "join", joined)
    monkeypatch.setattr(Weights, "__getitem__", read_and_kill)
    with pytest.raises(GroupLost, match="rank 1 of the tensor-parallel group has died or hangs"):
        LLM(num_blocks=100, tensor_parallel_size=2)
    assert len(names) == 1  # no other weight is read


@pytest.mark.slow
@pytest.mark.long
def test_a_group_that_was_stopped_as_a_whole_goes_on() -> None:
    program = """
import sys
from quire import LLM, SamplingParams
llm = LLM(num_blocks=100, tensor_parallel_size=2)
print(llm.group.processes[0].pid, flush=True)
sys.stdin.readline()
[found] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(len(found.outputs[0].token_ids), flush=True)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        both = [int(process.stdout.readline()), process.pid]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in both:
                os.kill(pid, number)
            time.sleep(1.2)  # longer than a rank may be silent
        assert process.communicate("go on\n", timeout=60)[0] == "3\n"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", [of_long_runs(signal.SIGKILL), signal.SIGSTOP], ids=["died", "hangs"])
def test_a_rank_that_is_lost_ends_the_group(kind: signal.Signals) -> None:
    with LLM(num_blocks=100, tensor_parallel_size=2) as llm:
        answer(llm)
        lost = []
        group = llm.group
        assert group is not None
        group.on_lost = lambda: lost.append(time.monotonic())
        [process] = group.processes
        os.kill(process.pid, kind)  # type: ignore[attr-defined]
        with pytest.raises(GroupLost, match="rank 1 of the tensor-parallel group has died or hangs"):
            answer_on_and_on(llm)
        with pytest.raises(GroupLost, match="rank 1"):
            group.check()
        deadline = time.monotonic() + 60
        while not lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lost
        if kind == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)  # type: ignore[attr-defined]
        assert process.wait(60) in (-signal.SIGKILL, 1)


@pytest.mark.slow
def test_the_other_ranks_end_with_the_first(forks: Spawner) -> None:
    program = "import sys, time; from quire import LLM; llm = LLM(num_blocks=100, tensor_parallel_size=2);" + (
        "print('the other is', llm.group.processes[0].pid, flush=True); time.sleep(60)"
    )
    process = forks.start("first", program=program)
    other = int(process.said(r"^the other is (\d+)$")[1])
    process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.slow
def test_ranks_that_disagree(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(options={1: {"block_size": 8}}, UNTIL=str(tmp_path / "until"))
    assert second.wait(120)
    assert second.said().count("rank 1 of the tensor-parallel group has block_size") == 1
    (tmp_path / "until").touch()
    assert first.wait(60)
    assert "rank 1 of the tensor-parallel group has block_size '8', and rank 0 '16'" in first.said()


@pytest.mark.slow
def test_ranks_that_have_loaded_other_weights(ranks: Ranks) -> None:
    first, second = ranks("weights")
    assert first.wait(120)
    assert "rank 1 of the tensor-parallel group has weights 'others', and rank 0 '" in first.said()
    assert second.wait(60)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_of_another_number(ranks: Ranks) -> None:
    first, _ = ranks(WORLD_SIZE="3")
    assert first.wait(120)
    assert "tensor_parallel_size is 2, and a launcher has started 3 processes" in first.said()


@pytest.mark.slow
@pytest.mark.long
def test_a_port_in_use(ranks: Ranks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        first, _ = ranks(MASTER_PORT=address.partition(":")[2])
        assert first.wait(120)
    assert f"cannot meet at MASTER_ADDR:MASTER_PORT {address}" in first.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3; it must be up to 2, the KV heads of layer 0"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size is 16; it must be 8 at most"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be at least 1"),
        ({"kv_disk": "x"}, "tensor_parallel_size is 2, and kv_disk is 'x'"),
        ({"enable_lora": True}, "tensor_parallel_size is 2, and enable_lora is True"),
        ({"attention_backend": "reference"}, "tensor_parallel_size is 2, and attention_backend is 'reference'"),
        ({"model_impl": "transformers"}, "tensor_parallel_size is 2, and its layers are transformers' own"),
    ],
    ids=str,
)
def test_what_does_not_go_together(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        LLM(**({"tensor_parallel_size": 2} | options))


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_others(forked: Forks) -> None:
    with pytest.raises(Unsupported, match="does not serve a cache of torch"):
        LLM(tensor_parallel_size=2, num_blocks=100, kv_cache_dtype="fp8")
    [other] = forked.started
    assert other.poll() is not None


def test_each_part_of_the_cores_is_another_one() -> None:
    whole = Binding(tuple(range(6)), 6, thread=0)
    parts = [whole.part(i, 4) for i in range(4)]
    assert sorted(cpu for part in parts for cpu in part.cpus) == list(range(6))
    assert [part.threads for part in parts] == [1] * 4
    assert Binding((3,), 2, thread=0).part(1, 2) == Binding((3,), 1, thread=0)  # too few


def test_cores_are_in_the_order_of_their_memory(tmp_path: Path) -> None:
    """Two nodes, whose cores have two CPUs each, numbered as Linux does: first one of every core."""
    for cpu in range(8):
        core, node = cpu % 4, cpu % 4 // 2
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{node}\n")
        (topology / "core_id").write_text(f"{core % 2}\n")
        (tmp_path / "cpu" / f"cpu{cpu}" / f"node{node}").mkdir()
    assert by_place(range(8), tmp_path) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert by_place([7, 2, 3], tmp_path) == [[2], [7, 3]]
    assert by_place([0, 1], tmp_path / "none") == [[0], [1]]
