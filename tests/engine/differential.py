"""Random requests on random engines of real models, compared bit for bit with the same requests alone.

A seed draws a small model, an engine's options, and a mix of requests that join, share prefixes, are taken back and go
on from what others found. Each of them is computed once more by a plain engine: a new one with default options, without
a prefix cache, guesses or a disk, that has nothing else to do. There, each beam of a search is a request of its own in
each step, so nothing is forked. Tokens, texts, reasons, logprobs and scores must be equal.

A fault that both runs share shows when the tokens that were found are scored: their log-likelihoods, by a third engine,
must be the logprobs that were reported.

`python -m tests.engine.differential 1000 [FIRST_SEED]` runs that many seeds and prints what differs.
"""

from __future__ import annotations

import logging
import operator
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from quire import BeamSearchParams, SamplingParams
from quire.config import EngineConfig, engine_config
from quire.engine.beam import BeamSearch
from quire.engine.beam_driver import BeamDriver
from quire.engine.engine import Engine, build_engine
from quire.engine.loops import OverlappedLoop
from quire.errors import RequestError
from quire.frontend.disk_cache import attach_disk
from quire.frontend.embedding import embedding_request
from quire.frontend.loglikelihood import loglikelihood_request
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import BeamSearchSequence, CompletionOutput, RequestOutput, beam_sequences
from quire.frontend.requests import constraints_for, make_requests
from quire.frontend.tokenizer import Tokenizer
from quire.models import EMBEDDED, load_model
from quire.models.files import files_of
from quire.models.lora.fitting import prepare
from quire.ops import load
from quire.request import FinishReason, Request
from tests.engine.draws import ADAPTERS, MAX_MODEL_LEN, MAX_PROMPT, Ask, Draw
from tests.models.adapters import embedded_linears, linears, save_adapter
from tests.models.checkpoints import save
from tests.test_text import byte_level

VOCABULARY = 270  # of the random models: a token a byte, and some without a text
MAX_STEPS = 20_000  # of a run: more would mean that it does not end


class Family(NamedTuple):
    """A kind of model. kind: of transformers' classes; "" is the embedded model."""

    kind: str
    dtype: torch.dtype = torch.bfloat16
    changes: dict[str, Any] = {}  # noqa: RUF012  # of the config
    options: dict[str, Any] = {}  # noqa: RUF012  # of the engine


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
FAMILIES = {
    "embedded": Family(""),
    "windows": Family("Gemma2", torch.float32, {"sliding_window": 9, "query_pre_attn_scalar": 16}),
    "states": Family("Qwen3Next", changes={"mlp_only_layers": [1]}),
    "experts": Family("Qwen3Moe"),
    "latents": Family("DeepseekV3", torch.float32),
    "learned positions": Family("GPT2"),
    "int8": Family("Llama", changes=WIDE, options={"quantization": "int8"}),
    "convolutions": Family("Lfm2", torch.float32),
    "dense": Family("Llama", torch.float32),
    "sinks": Family("GptOss"),
    "int4": Family("Llama", changes=WIDE, options={"quantization": "int4"}),
    "states of mamba": Family("GraniteMoeHybrid"),
    "alibi": Family("Bloom", torch.float32),
    "chunks": Family("Llama4"),
    "shared keys": Family("Gemma4", changes={"vocab_size_per_layer_input": VOCABULARY}),
}


class Target:
    """A loaded model and its adapters."""

    def __init__(self, family: Family, directory: Path) -> None:
        """directory: where its checkpoint and adapters are written."""
        self.family, path = family, directory / "model"
        if family.kind:
            shapes = linears(save(path, family.kind, family.dtype, vocab_size=VOCABULARY, **family.changes))
            byte_level().save(str(path / "tokenizer.json"))
        else:
            path, shapes = EMBEDDED, embedded_linears()
        self.files, self.tokenizer = files_of(path), Tokenizer(path)
        self.has_grammars = not family.kind and find_spec("llguidance") is not None
        self.config = engine_config(max_model_len=MAX_MODEL_LEN, max_num_seqs=8, **family.options)
        self.backend = load(self.config.attention_backend)
        self.base = load_model(self.files, self.config, self.backend)
        self.adapted = load_model(self.files, replace(self.config, enable_lora=True), self.backend)
        assert self.adapted.loras is not None
        known = {name for name, one in self.adapted.loras.targets.items() if one.table is not None}
        shapes = {name: shape for name, shape in shapes.items() if name in known}
        first = min(shapes).rpartition(".")[2]
        save_adapter(directory / "all", shapes, 0, spread=0.15)
        save_adapter(directory / "some", shapes, 1, chosen=lambda name: name.endswith(first), r=3)
        for name in ADAPTERS:
            self.adapted.loras.put(name, prepare(self.adapted.loras, directory / name))

    @cached_property
    def grammars(self) -> Any:
        from quire.sandbox.grammar import Grammars  # llguidance, which may be missing

        return Grammars(self.tokenizer.json(), self.base.config.vocab_size, self.base.eos_token_ids)

    def options(self, **options: Any) -> EngineConfig:
        own = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "num_blocks": 64}
        return engine_config(**self.family.options | own | options)

    def plain(self, kv_cache_dtype: str, lora: str | None) -> Serving:
        """An engine that does nothing but compute one request. Without an adapter, the model has none either."""
        config = self.options(
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=False,
            num_speculative_tokens=0,
            num_blocks=MAX_MODEL_LEN // 16,
            max_num_seqs=1,
        )
        model = self.base if lora is None else self.adapted
        return Serving(self, build_engine(model, self.backend, config))


class Serving:
    """An engine with what makes texts of its events, as LLM has them."""

    def __init__(self, target: Target, engine: Engine) -> None:
        self.target, self.engine = target, engine
        self.processor = OutputProcessor(engine, target.tokenizer)
        self.drivers: dict[str, BeamDriver] = {}

    def start(self, ask: Ask) -> None:
        """Queue it. Raises RequestError."""
        own = (ask.priority, ask.salt, ask.lora)
        if isinstance(ask.params, BeamSearchParams):
            ask.driver = BeamDriver(self.engine, ask.name, ask.prompt, ask.params, ask.salt, ask.lora)
            ask.driver.start()
            self.drivers |= dict.fromkeys(ask.driver.request_ids, ask.driver)
            return
        if isinstance(ask.params, SamplingParams):
            ask.output, ask.requests = self.sampled(ask, ask.params)
        elif ask.params is None:
            request, ask.output = embedding_request(ask.name, None, ask.prompt, *own)
            ask.requests = [request]
        else:
            before, after = ask.prompt[: ask.params], ask.prompt[ask.params :]
            request, ask.output = loglikelihood_request(ask.name, before, after, *own)
            ask.requests = [request]
        for request in ask.requests:
            self.processor.add(request, ask.output, deque())

    def sampled(self, ask: Ask, params: SamplingParams) -> tuple[RequestOutput, list[Request]]:
        constraints = constraints_for(params, self.target.tokenizer, self.engine.vocab_size)
        own = (ask.priority, ask.salt, ask.lora, constraints)
        output, requests = make_requests(ask.name, None, ask.prompt, params, *own)
        if params.structured_outputs is not None:
            from quire.sandbox.grammar import Spec

            guide = self.target.grammars.compile(Spec.of(params.structured_outputs))
            for request in requests:
                request.guide = guide.copy()
        return output, requests

    def abort(self, ask: Ask) -> None:
        ask.is_aborted = True
        if ask.driver is not None:
            ask.driver.stop()
        for request in ask.requests:
            self.engine.abort(request.id)

    def step(self) -> None:
        events = self.engine.step()
        for _ in self.processor.process(events):
            pass
        for event in events:
            if event.request_id in self.drivers:
                self.drivers[event.request_id].take(event)

    def run(self) -> None:
        """Until nothing is left."""
        while self.engine.has_work:
            self.step()


# ------------------------------------------------------------------------------------------- what a caller sees


def seen(output: RequestOutput) -> list[dict[str, Any]]:
    """All that must be the same, of each sample; numbers as they are written, which is exact."""
    return [
        {
            "prompt logprobs": [repr(position) for position in output.prompt_logprobs or () if sample.index == 0],
            "hidden state": None if output.hidden_state is None else output.hidden_state.tobytes().hex(),
            "tokens": sample.token_ids,
            "logprobs": [repr(position) for position in sample.logprobs or ()],
            "cumulative logprob": repr(sample.cumulative_logprob),
            "text": sample.text,
            "ends": (sample.finish_reason, sample.stop_reason, sample.error),
        }
        for sample in output.outputs
    ]


def differences(found: Any, alone: Any, is_part: bool = False, where: str = "") -> Iterator[str]:
    """Where the two differ. is_part: found is what there was of it when it was taken back."""
    if isinstance(found, dict) and isinstance(alone, dict):
        is_part = is_part or found.get("ends", ("",))[0] == FinishReason.ABORT.value
        for name in found:
            if not (is_part and name in ("text", "ends", "cumulative logprob", "hidden state")):
                yield from differences(found[name], alone[name], is_part, f"{where} {name}")
    elif isinstance(found, list) and isinstance(alone, list):
        if is_part:
            alone = alone[: len(found)]
        if len(found) != len(alone):
            yield f"{where}: {len(found)} of {len(alone)}"
        for i, pair in enumerate(zip(found, alone, strict=False)):
            if pair[0] != pair[1]:
                yield from differences(*pair, is_part, f"{where}[{i}]")
                return
    elif found != alone:
        yield f"{where}: {found!r:.200} and alone {alone!r:.200}"


def alone(target: Target, ask: Ask, kv_cache_dtype: str) -> list[dict[str, Any]]:
    """What a plain engine makes of a request that is no search."""
    assert ask.output is not None
    serving = target.plain(kv_cache_dtype, ask.lora)
    mine = replace(ask, priority=0, salt="", output=None, requests=[])
    if not isinstance(ask.params, SamplingParams):
        serving.start(mine)
        serving.run()
        assert mine.output is not None
        return seen(mine.output)
    # One sample after the other, with the seed that they had.
    whole, requests = serving.sampled(mine, replace(ask.params, seed=ask.output.outputs[0].seed))
    for request in requests:
        request.group = None
        own = RequestOutput(ask.name, None, ask.prompt, [CompletionOutput(request.sample_index)])
        serving.processor.add(request, own, deque())
        serving.run()
        whole.outputs[request.sample_index] = own.outputs[0]
        whole.prompt_logprobs = whole.prompt_logprobs or own.prompt_logprobs
    return seen(whole)


def seen_beams(sequences: Sequence[BeamSearchSequence]) -> list[dict[str, Any]]:
    """All that must be the same of what a search found."""
    return [
        {
            "tokens": one.tokens,
            "logprobs": [repr(position) for position in one.logprobs or ()],
            "scores": (one.cum_logprob, one.score),
            "text": one.text,
            "reason": one.finish_reason,
        }
        for one in sequences
    ]


def searched_alone(target: Target, ask: Ask, params: BeamSearchParams, kv_cache_dtype: str) -> list[BeamSearchSequence]:
    """What a search finds that computes each beam from its first token on in each step."""
    engine = target.plain(kv_cache_dtype, ask.lora).engine
    room = min(params.max_tokens, MAX_MODEL_LEN - len(ask.prompt))
    search = BeamSearch(params, room, engine.eos_token_ids)
    count = max(min(search.num_candidates, engine.vocab_size), params.logprobs or 0)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=count)
    while not search.done:
        candidates = []
        for beam in search.beams:
            tokens = array("i", [*ask.prompt, *beam.tokens])
            engine.add(Request(ask.name, tokens, len(tokens), sampling, lora=ask.lora))
            while engine.has_work:
                candidates += [event.logprobs.top for event in engine.step() if event.logprobs is not None]
        search.advance(candidates)
    return beam_sequences(ask.prompt, search.results(), target.tokenizer)


Reported = Sequence[dict[int, Any] | None]


def scored(
    serving: Serving, ask: Ask, tokens: list[int], of_prompt: Reported | None, reported: Reported | None
) -> Iterator[str]:
    """Where the log-likelihoods of a prompt and the tokens after it are not the logprobs that were reported of both."""
    everything, told = [*ask.prompt, *tokens], [*(of_prompt or [None] * len(ask.prompt)), *(reported or ())]
    if not ask.is_aborted:
        for name, given, wanted in (("prompt logprobs", of_prompt, ask.prompt), ("logprobs", reported, tokens)):
            if given is not None and len(given) != len(wanted):
                yield f" {name}: {len(given)} of {len(wanted)}"
                return
    if len(everything) < 2 or not (reported or of_prompt):
        return
    score = Ask(f"score {ask.name}", everything, 1, ask.lora)
    serving.start(score)
    serving.run()
    assert score.output is not None
    assert score.output.prompt_logprobs is not None
    for at, (one, right) in enumerate(zip(told, score.output.prompt_logprobs, strict=False)):
        token = everything[at]
        if one is not None and right is not None and one[token] != right[token]:
            yield f" scored at {at}: reported {one[token]}, and it is {right[token]}"
            return


def check(target: Target, ask: Ask, kv_cache_dtype: str, scorer: Serving) -> Iterator[str]:
    """What is wrong with what a request got."""
    if ask.driver is None:
        assert ask.output is not None
        yield from differences(seen(ask.output), alone(target, ask, kv_cache_dtype))
        if isinstance(ask.params, SamplingParams):
            for sample in ask.output.outputs:
                prompt_logprobs = ask.output.prompt_logprobs if sample.index == 0 else None
                yield from scored(scorer, ask, sample.token_ids, prompt_logprobs, sample.logprobs)
    elif not ask.is_aborted:
        assert isinstance(ask.params, BeamSearchParams)
        found = beam_sequences(ask.prompt, ask.driver.results(), target.tokenizer)
        if ask.driver.error:
            yield f" error: {ask.driver.error}"
        right = searched_alone(target, ask, ask.params, kv_cache_dtype)
        yield from differences(seen_beams(found), seen_beams(right))
        for sequence in found:
            tokens = sequence.tokens[len(ask.prompt) :]
            yield from scored(scorer, ask, tokens, None, sequence.logprobs)
            if sequence.logprobs:
                one_each = [one[token].logprob for one, token in zip(sequence.logprobs, tokens, strict=True)]
                if reduce(operator.add, one_each) != sequence.cum_logprob:
                    yield f" cumulative logprob: {sequence.cum_logprob}, of {one_each}"


# ------------------------------------------------------------------------------------------------------ a seed


@dataclass
class Report:
    """What differs, and what was seen, so that what does not differ says something."""

    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Targets:
    """The models that seeds have asked for, each loaded once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._loaded: dict[str, Target] = {}

    def __getitem__(self, name: str) -> Target:
        if name not in self._loaded:
            directory = self.directory / name.replace(" ", "-")
            directory.mkdir()
            self._loaded[name] = Target(FAMILIES[name], directory)
        return self._loaded[name]


def serve(draw: Draw, serving: Serving, todo: list[Ask], counts: Counter[str]) -> list[Ask]:
    """Run these requests, and those that go on from what they find. All of them, in the order in which they began."""
    engine, begun, rng = serving.engine, [], draw.rng
    engine.listen(lambda event: counts.update([type(event).__name__]))
    todo.sort(key=lambda ask: ask.at)
    for step in range(MAX_STEPS):
        if not engine.has_work and todo:
            todo[0].at = 0
        while todo and todo[0].at <= step:
            ask = todo.pop(0)
            ask.at = step
            try:
                serving.start(ask)
                begun.append(ask)
            except RequestError as error:  # a search that needs more blocks than there are
                counts["refused"] += 1
                if "can never fit" not in str(error):
                    raise
        for ask in begun:
            if ask.aborted_after is not None and step == ask.at + ask.aborted_after and not ask.finished:
                counts["aborted"] += 1
                serving.abort(ask)
        if rng.random() < 0.01:
            engine.reset_prefix_cache()
        serving.step()
        for ask in begun:
            if ask.goes_on and ask.finished:
                ask.goes_on = False
                todo.insert(0, following(draw, ask))
                counts["gone on"] += 1
        if not todo and not engine.has_work:
            break
    else:
        raise AssertionError(f"it has not ended after {MAX_STEPS} steps")
    engine.scheduler.audit()
    manager = engine.scheduler.manager
    assert all(pool.num_free == pool.num_blocks for pool in (*manager.pools, *manager.host_pools)), "blocks are left"
    counts["preempted"] += engine.scheduler.num_preemptions
    counts["embedded"] += sum(ask.params is None for ask in begun if ask.finished)
    counts["scored"] += sum(isinstance(ask.params, int) for ask in begun if ask.finished)
    counts["searched"] += sum(ask.driver is not None for ask in begun)
    counts["adapted"] += sum(ask.lora is not None for ask in begun)
    counts["guided"] += sum(request.guide is not None for ask in begun for request in ask.requests)
    counts["overlapped"] += draw.is_overlapped
    counts["int8 cache"] += draw.options["kv_cache_dtype"] == "int8"
    counts["cached tokens"] += manager.hits.cached_tokens
    if engine.scheduler.speculation is not None:
        counts["right drafts"] += engine.scheduler.speculation.num_right
    if manager.disk is not None:
        counts["read from the disk"] += manager.disk.reader.counts.blocks
    return begun


def following(draw: Draw, ask: Ask) -> Ask:
    """A request that goes on from what another one found, or asks the same once more."""
    found: list[list[int]] = [[]]
    if ask.driver is not None:
        found += [list(one.tokens) for one in ask.driver.results()]
    elif ask.output is not None:
        found += [sample.token_ids for sample in ask.output.outputs]
    tokens = draw.rng.choice(found)
    if tokens and draw.rng.random() < 0.5:
        tokens = [*tokens, draw.token()]
    later = draw.ask((ask.prompt + tokens)[:MAX_PROMPT], ask)
    later.at = 0
    return later


def run(seed: int, targets: Targets, report: Report) -> None:
    """Run a seed: what differs goes into the report."""
    name = list(FAMILIES)[seed % len(FAMILIES)]
    target = targets[name]
    threads = torch.get_num_threads()
    with TemporaryDirectory(prefix="quire-differential-") as directory:
        draw = Draw(seed, target.tokenizer, target.base.config.vocab_size, target.has_grammars, directory)
        where = f"seed {seed}, {name}, {draw.options}{', overlapped' if draw.is_overlapped else ''}"
        torch.set_num_threads(draw.num_threads)
        try:
            asks: list[Ask] = []
            for is_first in (True, False)[: 1 + draw.has_disk]:
                config = target.options(**(draw.options if is_first else draw.restarted()))
                engine = build_engine(target.adapted, target.backend, config)
                attach_disk(engine, target.adapted, target.files, target.backend, config)
                if engine.scheduler.prefetch is not None:
                    engine.scheduler.prefetch.seconds_a_token = 1.0  # to read is always worth while
                if draw.is_overlapped:
                    engine.loop = OverlappedLoop()
                try:
                    asks += serve(draw, Serving(target, engine), draw.asks(asks), report.counts)
                finally:
                    engine.close()
            torch.set_num_threads(1)
            kv_dtype = draw.options["kv_cache_dtype"]
            scorers = {lora: target.plain(kv_dtype, lora) for lora in (None, *ADAPTERS)}
            for ask in asks:
                report.counts["requests"] += 1
                wrong = list(check(target, ask, kv_dtype, scorers[ask.lora]))
                report.failures += ["\n    ".join([where, str(ask), *wrong])] if wrong else []
        except Exception as error:
            report.failures.append(f"{where}\n    {type(error).__name__}: {error}")
        finally:
            torch.set_num_threads(threads)


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.getLogger("quire").setLevel(logging.ERROR)
    began, report, shown = time.monotonic(), Report(), 0
    with TemporaryDirectory() as directory:
        targets = Targets(Path(directory))
        for seed in range(first, first + count):
            run(seed, targets, report)
            if (seed + 1 - first) % 100 == 0 or report.failures[shown:]:
                print("\n".join([*report.failures[shown:], f"{seed + 1 - first} seeds"]), flush=True)
                shown = len(report.failures)
    what = ", ".join(f"{number:,} {name}" for name, number in sorted(report.counts.items()))
    print(f"{count:,} seeds in {time.monotonic() - began:.0f} s, {len(report.failures)} differences: {what}")
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
