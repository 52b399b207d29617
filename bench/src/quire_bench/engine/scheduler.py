"""One prompt asked many times: one by one, all at once, or as they come; paged and gathered.

naive: a request is added when the one before it has ended, so each is computed alone.
offline: all requests are there before the first step; prompts and tokens are computed together, as the budget allows.
online: requests are added while the engine runs, each when the one before it has its first token. So each prompt is
computed at once, and whoever has come before goes on in the same steps; when all have come, the rest is decoded.

A step in which a request still has no token is prefill, and so is adding requests; all other steps are decode. With a
prefix cache, that of a run that counts has the prompt from the run before.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.engine.engine import Engine
from quire.errors import ConfigError, QuireError, check_integer
from quire.frontend.llm import LLM
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests import make_requests
from quire.request import Event, Request, SamplingParams
from quire_bench.engine.split import Span, recorded
from quire_bench.plot import drawn
from quire_bench.workloads import workload

MODES = ("naive", "offline", "online")
GATHERED = "gather"
PROMPT = "rose_shared"  # the workload whose prompt is asked where none is given


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked, and how. Raises ConfigError or RequestError for what makes no sense."""

    prompt: str | None = None  # None: that of the workload PROMPT, cut to what the model can take
    num_requests: int = 64
    max_new_tokens: int = 16
    do_sample: bool = False
    top_k: int | None = None
    top_p: float | None = None
    stop_on_eos: bool = False

    def __post_init__(self) -> None:
        check_integer(ConfigError, "num_requests", self.num_requests, 1)
        check_integer(ConfigError, "max_new_tokens", self.max_new_tokens, 1)
        for name in ("top_k", "top_p"):
            if getattr(self, name) is not None and not self.do_sample:
                raise ConfigError(f"{name} is {getattr(self, name)}; it has no effect without --do-sample")
        self.sampling(0)

    def tokens(self, llm: LLM) -> list[int]:
        """The prompt, as this model has it."""
        if self.prompt is not None:
            if llm.tokenizer is None:
                raise ConfigError(f"prompt is {self.prompt[:40]!r}; this model has no tokenizer, so leave it out")
            return llm.tokenizer.encode(self.prompt)
        longest = llm.decoder.max_model_len
        if self.max_new_tokens >= longest:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; beside a prompt at most {longest - 1} fit")
        return workload(PROMPT).prompts[0][: longest - self.max_new_tokens]

    def sampling(self, seed: int) -> SamplingParams:
        """A request's parameters: the same in every run."""
        return SamplingParams(
            temperature=1.0 if self.do_sample else 0.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=self.max_new_tokens,
            ignore_eos=not self.stop_on_eos,
            seed=seed,
        )


@dataclass(frozen=True)
class Run:
    """One run of all requests."""

    total_seconds: float
    decode_seconds: float
    completion_tokens: int
    decode_tokens: int  # of these, those that came in decode

    @property
    def prefill_seconds(self) -> float:
        """All that is not decode."""
        return self.total_seconds - self.decode_seconds


@dataclass(frozen=True)
class Result:
    """What one mode took with one backend."""

    mode: str
    backend: str
    prefix_caching: bool
    num_requests: int
    prompt_tokens: int  # of all requests
    runs: tuple[Run, ...]
    split: Mapping[str, float]  # seconds of each part, of one more run
    spans: Sequence[Span]  # the calls of that run

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.mode}, {self.backend}, {'prefix cache' if self.prefix_caching else 'no prefix cache'}"

    @property
    def figures(self) -> dict[str, list[float]]:
        """Seconds, and tokens a second, of each run."""
        runs, prompt = self.runs, self.prompt_tokens
        found = {
            "prefill_seconds": [run.prefill_seconds for run in runs],
            "decode_seconds": [run.decode_seconds for run in runs],
            "total_seconds": [run.total_seconds for run in runs],
            "completion_tokens_per_second": [run.completion_tokens / run.total_seconds for run in runs],
            "total_tokens_per_second": [(prompt + run.completion_tokens) / run.total_seconds for run in runs],
        }
        if all(run.decode_tokens for run in runs):  # none where requests end with their first token
            found["decode_tokens_per_second"] = [run.decode_tokens / run.decode_seconds for run in runs]
        return found

    @property
    def speed(self) -> float:
        """Completion tokens a second over the total time, the median: what ratios are formed of."""
        return statistics.median(self.figures["completion_tokens_per_second"])

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        completion, whole = self.runs[-1].completion_tokens, sum(self.split.values())
        return {
            "mode": self.mode,
            "backend": self.backend,
            "prefix_caching": self.prefix_caching,
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            **{
                name: {"runs": values, "p50": statistics.median(values), "mean": statistics.fmean(values)}
                for name, values in self.figures.items()
            },
            "split": {
                part: {"seconds": seconds, "percent": 100 * seconds / whole} for part, seconds in self.split.items()
            },
        }

    def table(self) -> list[tuple[str, str]]:
        """The figures, named, for a reader."""
        completion, whole = self.runs[-1].completion_tokens, sum(self.split.values())
        total = self.prompt_tokens + completion
        lines = [
            ("requests", f"{self.num_requests:,}"),
            ("tokens", f"{self.prompt_tokens:,} prompt + {completion:,} completion = {total:,}"),
        ]
        for name, values in self.figures.items():
            what, _, unit = name.partition("_")
            p50, mean = statistics.median(values), statistics.fmean(values)
            if unit == "seconds":
                lines.append((what, f"{p50:.4f} / {mean:.4f} s, p50 / mean"))
            else:
                lines.append((f"{what} tokens", f"{p50:,.1f} / {mean:,.1f} a second, p50 / mean"))
        for part, seconds in sorted(self.split.items(), key=lambda item: -item[1]):
            if seconds > 0:
                lines.append((f"  {part}", f"{seconds:9.4f} s {seconds / whole:6.1%}"))
        return lines


def measure(
    llm: LLM, mode: str, load: Load, warmup: int, runs: int, advance: Callable[[], None] = lambda: None
) -> Result:
    """Run the load `warmup` times, `runs` times against the clock, and once more to see where the time goes.

    `advance` is called at each new token. Raises RequestError for a load that can never fit, QuireError where a request
    fails.
    """
    llm.reset_prefix_cache()
    prompt = load.tokens(llm)
    processor = OutputProcessor(llm.engine, llm.tokenizer)

    def once() -> Run:
        return serve(llm.engine, processor.add, processor.process, mode, prompt, load, advance)

    for _ in range(warmup):
        once()
    counted = tuple(once() for _ in range(runs))
    with recorded(llm) as (engine, timeline):
        processor = OutputProcessor(engine, llm.tokenizer)
        detokenize = timeline.timed("detokenize", "detokenize", lambda events: list(processor.process(events)))
        last = serve(engine, processor.add, detokenize, mode, prompt, load, advance)
    return Result(
        mode=mode,
        backend=llm.backend.name,
        prefix_caching=llm.config.cache.enable_prefix_caching,
        num_requests=load.num_requests,
        prompt_tokens=load.num_requests * len(prompt),
        runs=counted,
        split=timeline.split(last.total_seconds),
        spans=timeline.spans,
    )


def serve(
    engine: Engine,
    add: Callable[[Request, RequestOutput, deque[RequestOutput]], object],  # an OutputProcessor's
    process: Callable[[list[Event]], Iterable[object]],  # the same one's
    mode: str,
    prompt: list[int],
    load: Load,
    advance: Callable[[], None],
) -> Run:
    """Serve all requests, in the way of that mode."""
    ended: deque[RequestOutput] = deque()
    waiting: list[Request] = []  # for their first token
    decode_seconds, decode_tokens = 0.0, 0

    def step() -> None:
        nonlocal decode_seconds, decode_tokens
        is_decode, start = not waiting, time.perf_counter()
        for _ in process(engine.step()):
            decode_tokens += is_decode
            advance()
        waiting[:] = [request for request in waiting if request.num_generated == 0 and request.finish_reason is None]
        decode_seconds += (time.perf_counter() - start) * is_decode

    made = [make_requests(str(i), None, prompt, load.sampling(i)) for i in range(load.num_requests)]
    begin = time.perf_counter()
    for output, [request] in made:
        add(request, output, ended)
        waiting.append(request)
        while (mode == "naive" and engine.has_work) or (mode == "online" and waiting):
            step()
    while engine.has_work:
        step()
    total_seconds = time.perf_counter() - begin
    for output in ended:
        if output.outputs[0].error is not None:
            raise QuireError(f"request {output.request_id} failed: {output.outputs[0].error}")
    completion_tokens = sum(len(output.outputs[0].token_ids) for output in ended)
    return Run(total_seconds, decode_seconds, completion_tokens, decode_tokens)


# ----------------------------------------------------------------------------------------------- side by side


@dataclass(frozen=True)
class Ratios:
    """How many times the completion tokens a second a result has, of others with the same use of the prefix cache."""

    result: Result
    over_gathered: float | None  # gathered, in the same mode; None where that was not measured
    over_naive: float | None  # gathered, one by one

    def __str__(self) -> str:
        others = {"gathered": self.over_gathered, "naive and gathered": self.over_naive}
        return f"{self.result.name}: " + ", ".join(f"{ratio:.2f} x {name}" for name, ratio in others.items() if ratio)

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        shown = self.result
        return {
            **{"mode": shown.mode, "backend": shown.backend, "prefix_caching": shown.prefix_caching},
            **{"over_gathered": self.over_gathered, "over_naive": self.over_naive},
        }


def ratios(results: Sequence[Result]) -> Iterator[Ratios]:
    """Those of each paged result that has something to be compared with."""
    base = {(one.mode, one.prefix_caching): one.speed for one in results if one.backend == GATHERED}
    for one in results:
        gathered, naive = (base.get((mode, one.prefix_caching)) for mode in (one.mode, "naive"))
        if one.backend != GATHERED and (gathered or naive):
            yield Ratios(one, gathered and one.speed / gathered, naive and one.speed / naive)


def plot(results: Sequence[Result], path: Path) -> None:
    """Completion tokens a second, a panel with a prefix cache and one without. Raises ConfigError where it cannot."""
    kept = sorted({one.prefix_caching for one in results}, reverse=True)
    backends = list(dict.fromkeys(one.backend for one in results))
    modes = [mode for mode in MODES if any(one.mode == mode for one in results)]
    with drawn(path, 1, len(kept), (6 * len(kept), 4)) as (_, axes):
        for panel, prefix_caching in zip(axes[0], kept, strict=True):
            speeds = {(one.mode, one.backend): one.speed for one in results if one.prefix_caching == prefix_caching}
            width = 0.8 / len(backends)
            for i, backend in enumerate(backends):
                places = [x + i * width for x in range(len(modes))]
                panel.bar(places, [speeds[mode, backend] for mode in modes], width, label=backend)
            panel.set_xticks([x + 0.4 - width / 2 for x in range(len(modes))], modes)
            panel.set_title("prefix cache" if prefix_caching else "no prefix cache")
            panel.set_ylabel("completion tokens/s")
            panel.legend()
