"""quire bench scheduler: the modes are what they are said to be, and the parts of a step add up to it."""

import json
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import app
from quire.errors import ConfigError, QuireError, RequestError
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests import make_requests
from quire_bench.engine import scheduler
from quire_bench.engine.scheduler import Load, Result, Run
from quire_bench.engine.split import PARTS, Timeline, chrome_trace, recorded
from quire_bench.workloads import workload

SMALL = Load(prompt="Hello", num_requests=3, max_new_tokens=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=256, num_speculative_tokens=0)


# --------------------------------------------------------------------------------------------------- the modes


@pytest.mark.parametrize(
    ("mode", "steps", "decoded"),
    [
        ("naive", 3 * 4, 3 * 3),  # each alone
        ("offline", 4, 3 * 3),  # all together
        ("online", 3 + 3, 1 + 2 + 3),  # one more in each of the first three, and the others go on
    ],
)
def test_modes(llm: LLM, mode: str, steps: int, decoded: int) -> None:
    ticks: list[int] = []
    result = scheduler.measure(llm, mode, SMALL, warmup=1, runs=2, advance=lambda: ticks.append(1))
    assert sum(span.name == "step" for span in result.spans) == steps
    assert len(result.runs) == 2
    assert len(ticks) == (1 + 2 + 1) * 12
    length = len(llm.tokenizer.encode("Hello"))
    assert (result.num_requests, result.prompt_tokens) == (3, 3 * length)
    for run in result.runs:
        assert (run.completion_tokens, run.decode_tokens) == (12, decoded)
        assert 0 < run.decode_seconds < run.total_seconds
        assert run.prefill_seconds + run.decode_seconds == pytest.approx(run.total_seconds)


def test_an_online_request_with_a_long_prompt_has_its_first_token_before_the_next_one_comes() -> None:
    llm = LLM(num_blocks=256, num_speculative_tokens=0, max_num_batched_tokens=64, enable_prefix_caching=False)
    result = scheduler.measure(llm, "online", Load(prompt="word " * 90, num_requests=2, max_new_tokens=2), 0, 1)
    pieces = -(-(result.prompt_tokens // 2) // 64)
    assert pieces > 1
    steps = sum(span.name == "step" for span in result.spans)
    assert steps == 2 * pieces + 1  # the first request ends while the second one's prompt is computed


@pytest.mark.slow
def test_runs_that_count_find_the_prompt_in_the_prefix_cache(llm: LLM) -> None:
    load = Load(num_requests=2, max_new_tokens=2)
    before = llm.engine.scheduler.manager.hits.hits
    scheduler.measure(llm, "offline", load, warmup=1, runs=1)
    length = len(load.tokens(llm))
    assert length == 856
    hits = llm.engine.scheduler.manager.hits
    assert hits.hits - before == 5  # all but the first request of the warm-up
    off = LLM(num_blocks=256, enable_prefix_caching=False)
    result = scheduler.measure(off, "offline", load, warmup=1, runs=1)
    assert not result.prefix_caching
    assert off.engine.scheduler.manager.hits.cached_tokens == 0


def test_the_prompt(llm: LLM) -> None:
    prompt = workload("rose_shared").prompts[0]
    assert Load().tokens(llm) == prompt
    assert Load(max_new_tokens=1000).tokens(llm) == prompt[:24]
    with pytest.raises(ConfigError, match="max_new_tokens is 1024; beside a prompt at most 1023 fit"):
        Load(max_new_tokens=1024).tokens(llm)
    with pytest.raises(RequestError, match="a prompt may have at most 1023"):
        scheduler.measure(llm, "naive", replace(SMALL, prompt="word " * 1100), 0, 1)


def test_sampling() -> None:
    assert SMALL.sampling(7).temperature == 0.0
    assert SMALL.sampling(7).ignore_eos
    drawn = replace(SMALL, do_sample=True, top_k=40, top_p=0.9, stop_on_eos=True).sampling(7)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.seed, drawn.ignore_eos) == (1.0, 40, 0.9, 7, False)
    with pytest.raises(ConfigError, match="top_k is 40; it has no effect without --do-sample"):
        Load(top_k=40)
    with pytest.raises(ConfigError, match="num_requests is 0"):
        Load(num_requests=0)
    with pytest.raises(RequestError, match="top_p is 2"):
        Load(do_sample=True, top_p=2.0)


def test_a_request_that_fails_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(llm.decoder, "forward", fail)
    with pytest.raises(QuireError, match="request 0 failed: RuntimeError: injected"):
        scheduler.measure(llm, "offline", SMALL, 0, 1)


# --------------------------------------------------------------------------------------------------- the parts


def test_a_call_counts_without_the_calls_within() -> None:
    timeline = Timeline()
    inner = timeline.timed("gather", "inner", lambda: time.sleep(0.004))
    between = timeline.timed("attention", "between", lambda: (inner(), inner(), time.sleep(0.002)))
    timeline.timed("other", "outer", between)()
    spans = {span.name: span for span in timeline.spans}
    assert [span.name for span in timeline.spans] == ["inner", "inner", "between", "outer"]
    split = timeline.split(1.0)
    assert split["gather"] == pytest.approx(sum(span.seconds for span in timeline.spans[:2]))
    assert split["attention"] == pytest.approx(spans["between"].seconds - split["gather"])
    assert split["other"] == pytest.approx(1.0 - spans["between"].seconds)
    assert sum(split.values()) == pytest.approx(1.0)


def test_a_call_that_raises_counts_too() -> None:
    timeline = Timeline()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        timeline.timed("plan", "plan", timeline.timed("commit", "commit", fail))()
    split = timeline.split(1.0)
    assert 0 < split["commit"] < timeline.spans[1].seconds
    assert sum(split.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
def test_every_part_is_found(backend: str) -> None:
    llm = LLM(num_blocks=16, attention_backend=backend)
    result = scheduler.measure(llm, "offline", SMALL, 0, 1)
    assert tuple(result.split) == PARTS
    found = {part for part, seconds in result.split.items() if seconds > 0}
    assert found == set(PARTS) - {"states"} - (set() if backend == "gather" else {"gather"})  # no layer keeps one
    layers, steps = llm.decoder.config.num_layers, 4
    calls = [span.part for span in result.spans]
    assert calls.count("attention") == layers * steps
    assert calls.count("linears") == (4 * layers + 1) * steps
    if backend == "gather":
        assert calls.count("gather") == layers * steps


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_what_is_looked_at_does_the_same_and_is_left_as_it_was(backend: str) -> None:
    llm = LLM(num_blocks=16, attention_backend=backend)
    engine, decoder = llm.engine, llm.decoder
    watched = (engine, engine.runner, engine.scheduler, decoder, decoder.layers, llm.backend)
    before = [dict(vars(one)) for one in watched]
    greedy = SamplingParams(temperature=0.0)
    alone = llm.generate("Hello", greedy)[0].outputs[0].token_ids
    with recorded(llm) as (timed, timeline):
        processor = OutputProcessor(timed, llm.tokenizer)
        output, [request] = make_requests("0", None, llm.tokenizer.encode("Hello"), greedy)
        ended: deque[RequestOutput] = deque()
        processor.add(request, output, ended)
        while timed.has_work:
            list(processor.process(timed.step()))
        assert ended[0].outputs[0].token_ids == alone
    number = len(timeline.spans)
    assert {"step", "plan", "run", "flatten", "commit", "lm_head"} < {span.name for span in timeline.spans}
    for one, was in zip(watched, before, strict=True):
        now = vars(one)
        assert now.keys() == was.keys()
        assert all(now[name] is value for name, value in was.items() if callable(value) or name == "layers")
    assert llm.generate("Hello", greedy)[0].outputs[0].token_ids == alone
    assert len(timeline.spans) == number


def nested(spans: list[dict[str, float]]) -> bool:
    """Whether each one lies within or beside each other one, as a row of a trace needs it."""
    open_until: list[float] = []
    for span in spans:
        while open_until and open_until[-1] <= span["ts"] + 1e-3:
            open_until.pop()
        if open_until and span["ts"] + span["dur"] > open_until[-1] + 1e-3:
            return False
        open_until.append(span["ts"] + span["dur"])
    return True


def test_chrome_trace(llm: LLM) -> None:
    result = scheduler.measure(llm, "offline", SMALL, 0, 1)
    trace = json.loads(json.dumps(chrome_trace({"one": result.spans, "two": result.spans})))
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert named == ["one", "engine", "operators", "two", "engine", "operators"]
    calls = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(calls) == 2 * len(result.spans)
    rows = {(pid, tid): [c for c in calls if (c["pid"], c["tid"]) == (pid, tid)] for pid in (0, 1) for tid in (0, 1)}
    assert all(nested(row) for row in rows.values())
    assert {call["name"] for call in rows[0, 0]} == {"step", "plan", "flatten", "run", "commit", "detokenize"}
    assert {"linear", "norm", "attention", "lm_head", "update", "finish"} <= {call["name"] for call in rows[0, 1]}
    assert min(call["ts"] for call in calls) == 0
    longest = max(span.seconds for span in result.spans)
    assert max(call["dur"] for call in calls) == pytest.approx(1e6 * longest)


# -------------------------------------------------------------------------------------------------- the figures


def made(mode: str, backend: str, prefix_caching: bool, *seconds: float) -> Result:
    runs = tuple(Run(total, total / 4, 100, 75) for total in seconds)
    return Result(mode, backend, prefix_caching, 10, 900, runs, {"plan": 1.0, "other": 3.0}, [])


def test_figures() -> None:
    found = made("naive", "cpu", True, 1.0, 4.0, 2.0)
    shown = found.as_dict()
    assert shown["total_tokens"] == 1000
    assert shown["total_seconds"] == {"runs": [1.0, 4.0, 2.0], "p50": 2.0, "mean": pytest.approx(7 / 3)}
    assert shown["prefill_seconds"]["p50"] == 1.5
    assert shown["completion_tokens_per_second"] == {"runs": [100, 25, 50], "p50": 50, "mean": pytest.approx(175 / 3)}
    assert shown["total_tokens_per_second"]["p50"] == 500
    assert shown["decode_tokens_per_second"]["p50"] == 150
    assert shown["split"]["plan"] == {"seconds": 1.0, "percent": 25.0}
    single = replace(found, runs=(Run(1.0, 0.0, 10, 0),))
    assert "decode_tokens_per_second" not in single.figures


def test_ratios() -> None:
    results = [
        made("naive", "cpu", True, 2.0), made("offline", "cpu", True, 1.0), made("offline", "cpu", False, 6.0),
        made("naive", "gather", True, 8.0), made("offline", "gather", True, 3.0), made("naive", "gather", False, 9.0),
    ]  # fmt: skip
    found = list(scheduler.ratios(results))
    assert [(one.over_gathered, one.over_naive) for one in found] == [
        (pytest.approx(4.0), pytest.approx(4.0)),
        (pytest.approx(3.0), pytest.approx(8.0)),
        (None, pytest.approx(1.5)),
    ]
    assert str(found[1]) == "offline, cpu, prefix cache: 3.00 x gathered, 8.00 x naive and gathered"
    assert str(found[2]) == "offline, cpu, no prefix cache: 1.50 x naive and gathered"
    assert list(scheduler.ratios(results[:3])) == []


# -------------------------------------------------------------------------------------------------- the command


def run(arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "scheduler", *arguments.split()])
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


TINY = "--prompt Hello --num-requests 2 --max-new-tokens 2 --warmup 0 --runs 1"


@pytest.mark.slow
def test_all_at_once(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run(f"{TINY} --json --plot {tmp_path / 'x.png'}").splitlines()]
    ways = [(backend, caching) for backend in ("cpu", "gather") for caching in (True, False)]
    expected = [(mode, *way) for way in ways for mode in scheduler.MODES]
    assert [(one["mode"], one["backend"], one["prefix_caching"]) for one in lines[:12]] == expected
    assert all(one["completion_tokens"] == 4 for one in lines[:12])
    assert [(one["mode"], one["backend"], one["prefix_caching"]) for one in lines[12:]] == expected[:6]
    assert all(one["over_gathered"] > 0 and one["over_naive"] > 0 for one in lines[12:])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_sampling_and_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    shown = run(f"{TINY} --device cpu --mode online --do-sample --top-k 40 --top-p 0.9 --no-stop-on-eos"
               f" --attention cpu --no-enable-prefix-caching --profile {path}")  # fmt: skip
    assert shown.startswith("=== online, cpu, no prefix cache ===\nrequests           2\n")
    for name in ("prefill", "decode", "total", "completion tokens", "total tokens", "decode tokens", "  linears"):
        assert f"\n{name} " in shown
    assert "gathered" not in shown
    assert json.loads(path.read_text())["traceEvents"][0]["args"] == {"name": "online, cpu, no prefix cache"}


@pytest.mark.slow
def test_bad_options(tmp_path: Path) -> None:
    assert "mode is 'fast'; it must be naive, offline, online or all" in run("--mode fast", status=1)
    assert "there is no directory" in run(f"--profile {tmp_path / 'none' / 'x.json'}", status=1)
    assert f"{tmp_path} cannot be written" in run(f"{TINY} --mode naive --attention cpu --profile {tmp_path}", status=1)
    assert "there is no directory" in run(f"--plot {tmp_path / 'none' / 'x.png'}", status=1)
    assert "top_p is 0.5; it has no effect without --do-sample" in run("--top-p 0.5", status=1)
    assert "there is no attention backend 'none'" in run("--attention none", status=1)
