"""Score a small task set twenty times, each time with other batches, chunks, caches, threads, processes or replicas.

    python bench/studies/same_score.py
    python bench/studies/same_score.py --transformers

The tasks are made of files of Python's standard library (tests/data/heldout): which of four lines comes next, by
log-likelihood, and the next line, by greedy decoding. Each row has one score, and a digest of the bits of every
log-likelihood and of every generated token. `--transformers` scores the same with transformers' padded batches.
"""

from __future__ import annotations

import json
import random
import struct
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias

import torch
import typer

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire_bench.fleet.running import fleet
from quire_bench.server.process import server

HELDOUT = Path(__file__).parents[2] / "tests" / "data" / "heldout"
SEED = 20261128
LINES = 8  # of a context
NEW = 24  # tokens, of which the first line counts
EXAMPLES = 1  # texts that precede every context, so that there is a common prefix
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
ROOM = ("--num-blocks", "1024", "--max-num-seqs", "8")


@dataclass(frozen=True)
class Choice:
    """A context and four lines, of which the first one follows."""

    prompt: list[int]
    choices: list[list[int]]


@dataclass(frozen=True)
class Line:
    """A context and the line that follows."""

    prompt: list[int]
    line: str


@dataclass(frozen=True)
class Tasks:
    """The task set."""

    choices: list[Choice]
    lines: list[Line]

    def pairs(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the contexts and continuations whose log-likelihoods are needed."""
        return (
            [one.prompt for one in self.choices for _ in one.choices],
            [choice for one in self.choices for choice in one.choices],
        )


@dataclass(frozen=True)
class Answers:
    """The answers of an engine: the logprobs of each continuation's tokens, and the tokens of each line."""

    logprobs: list[list[float]]
    tokens: list[list[int]]
    texts: list[str]

    def digest(self) -> str:
        """Return a digest of all bits."""
        found = blake2b(digest_size=6)
        for each in self.logprobs:
            found.update(struct.pack(f"<{len(each)}f", *each))
        for tokens in self.tokens:
            found.update(struct.pack(f"<{len(tokens)}i", *tokens))
        return found.hexdigest()

    def score(self, tasks: Tasks) -> float:
        """Return the percentage of right answers."""
        sums, right = iter(map(sum, self.logprobs)), 0
        for one in tasks.choices:
            values = [next(sums) / len(choice) for choice in one.choices]  # a mean, or short lines would be preferred
            right += max(values) == values[0]
        right += sum(
            text.strip("\n").partition("\n")[0] == one.line for text, one in zip(self.texts, tasks.lines, strict=True)
        )
        return 100 * right / (len(tasks.choices) + len(tasks.lines))


Answer: TypeAlias = "Callable[[Tasks], Answers]"
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0)


def make_tasks(encode: Callable[[str], list[int]], num_choices: int = 60, num_lines: int = 40) -> Tasks:
    """Return the task set. encode: tokenizes a text, its first token included."""
    drawn = random.Random(SEED)
    texts = [path.read_text() for path in sorted(HELDOUT.glob("*.py.txt"))]
    places = []
    for text in texts:
        lines = text.splitlines()
        places += [
            ("\n".join(lines[at - LINES : at]), "\n" + lines[at])  # a line's token contains the break before it
            for at in range(LINES, len(lines))
            if lines[at].strip() and lines[at].isascii() and len(lines[at]) < 60
        ]
    chosen = drawn.sample(places, EXAMPLES + num_choices + num_lines)
    common = "".join(context + line + "\n" for context, line in chosen[:EXAMPLES])
    choices, lines_asked = [], []
    for number, (context, line) in enumerate(chosen[EXAMPLES:]):
        prompt = encode(common + context)
        if number < num_choices:
            others = [other for _, other in drawn.sample(places, 3)]
            choices.append(Choice(prompt, [encode(each)[1:] for each in (line, *others)]))
        else:
            lines_asked.append(Line(prompt, line[1:]))
    return Tasks(choices, lines_asked)


def by(llm: LLM, tasks: Tasks) -> Answers:
    """Return the answers of an engine of this process."""
    scored = llm.loglikelihood(*tasks.pairs(), use_tqdm=False)
    outputs = llm.generate([one.prompt for one in tasks.lines], GREEDY, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    logprobs = [one.token_logprobs for one in scored]
    logprobs += [
        [at[token].logprob for token, at in zip(one.token_ids, one.logprobs or [], strict=True)] for one in samples
    ]
    return Answers(logprobs, [one.token_ids for one in samples], [one.text for one in samples])


def offline(model: str | None, **options: Any) -> Answer:
    """Return what scores the tasks with an LLM of these options."""

    def answer(tasks: Tasks) -> Answers:
        with LLM(model, **{"num_blocks": 1024} | options) as llm:
            return by(llm, tasks)

    return answer


def preempted(model: str | None, preemption: str) -> Answer:
    """Return what scores the tasks with a pool that is too small for them. Raises QuireError if it is not."""

    def answer(tasks: Tasks) -> Answers:
        options: dict[str, Any] = {
            "num_blocks": 40,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "preemption": preemption,
        }
        with LLM(model, **options) as llm:
            found = by(llm, tasks)
            if not llm.engine.scheduler.num_preemptions:
                raise QuireError("no request was preempted; the pool must be smaller")
            return found

    return answer


def warm(model: str | None) -> Answer:
    """Return what scores the tasks when all of their prompts are in the prefix cache."""

    def answer(tasks: Tasks) -> Answers:
        with LLM(model, num_blocks=4096) as llm:
            by(llm, tasks)
            return by(llm, tasks)

    return answer


def restarted(model: str | None) -> Answer:
    """Return what scores the tasks after a restart, with the blocks of half of them on a disk."""

    def answer(tasks: Tasks) -> Answers:
        with TemporaryDirectory() as directory:
            options: dict[str, Any] = {"num_blocks": 1024, "kv_disk": directory}
            with LLM(model, **options) as llm:
                by(llm, Tasks(tasks.choices[::2], tasks.lines[::2]))
            with LLM(model, **options) as llm:
                return by(llm, tasks)

    return answer


def threaded(model: str | None, count: int) -> Answer:
    """Return what scores the tasks on a number of threads."""

    def answer(tasks: Tasks) -> Answers:
        usual = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return offline(model)(tasks)
        finally:
            torch.set_num_threads(usual)

    return answer


def shuffled(model: str | None) -> Answer:
    """Return what scores the tasks in another order."""

    def answer(tasks: Tasks) -> Answers:
        contexts, continuations = tasks.pairs()
        order = random.Random(1).sample(range(len(contexts)), len(contexts))
        with LLM(model, num_blocks=1024, max_num_seqs=5) as llm:
            scored = llm.loglikelihood([contexts[i] for i in order], [continuations[i] for i in order], use_tqdm=False)
            found = by(llm, Tasks([], tasks.lines))
        logprobs: list[list[float]] = [[] for _ in order]
        for place, one in zip(order, scored, strict=True):
            logprobs[place] = one.token_logprobs
        return Answers(logprobs + found.logprobs, found.tokens, found.texts)

    return answer


def served(url: str, tasks: Tasks, clients: int = 8) -> Answers:
    """Return the answers of a server, asked by several clients at the same time."""

    def ask(**body: Any) -> dict[str, Any]:
        data = json.dumps({"temperature": 0.0, **body}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with OPENER.open(request, timeout=300) as answer:
            return dict(json.load(answer)["choices"][0])

    def scored(pair: tuple[list[int], list[int]]) -> list[float]:
        before, after = pair
        at = ask(prompt=before + after, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][len(before) :]
        return [one[str(token)]["logprob"] for token, one in zip(after, at, strict=True)]

    def line(one: Line) -> tuple[list[float], list[int], str]:
        found = ask(prompt=one.prompt, max_tokens=NEW, ignore_eos=True, logprobs=0, return_token_ids=True)
        return found["logprobs"]["token_logprobs"], found["token_ids"], found["text"]

    with ThreadPoolExecutor(clients) as pool:
        logprobs = list(pool.map(scored, zip(*tasks.pairs(), strict=True)))
        lines = list(pool.map(line, tasks.lines))
    return Answers(
        logprobs + [one for one, _, _ in lines], [tokens for _, tokens, _ in lines], [text for _, _, text in lines]
    )


def by_server(model: str | None) -> Answer:
    """Return what scores the tasks with a server."""

    def answer(tasks: Tasks) -> Answers:
        with server(*ROOM, *named(model)) as process:
            return served(process.url, tasks)

    return answer


def by_fleet(model: str | None, replicas: int) -> Answer:
    """Return what scores the tasks with a fleet."""

    def answer(tasks: Tasks) -> Answers:
        with fleet(replicas, *ROOM, *named(model)) as found:
            return served(found.gateway.url, tasks)

    return answer


def named(model: str | None) -> list[str]:
    """Return the options that name the model."""
    return [] if model is None else ["--model", model]


def combinations(model: str | None) -> dict[str, Answer]:
    """Return the combinations: how the tasks are scored, by its description."""
    return {
        "defaults": offline(model),
        "one sequence at a time": offline(model, max_num_seqs=1),
        "4 sequences": offline(model, max_num_seqs=4),
        "16 sequences": offline(model, max_num_seqs=16),
        "17 tokens a step": offline(model, max_num_batched_tokens=17, max_num_seqs=8),
        "64 tokens a step": offline(model, max_num_batched_tokens=64),
        "509 tokens a step": offline(model, max_num_batched_tokens=509),
        "blocks of 32 tokens": offline(model, block_size=32, num_blocks=512),
        "no prefix cache": offline(model, enable_prefix_caching=False),
        "a warm prefix cache": warm(model),
        "another order, 5 sequences": shuffled(model),
        "without speculative decoding": offline(model, draft="off"),
        "1 thread": threaded(model, 1),
        "2 threads": threaded(model, 2),
        "3 threads": threaded(model, 3),
        "tensor parallel, 2 processes": offline(model, tensor_parallel_size=2),
        "preemption by recomputing": preempted(model, "recompute"),
        "preemption by swapping": preempted(model, "swap"),
        "restarted, blocks on a disk": restarted(model),
        "a server, 8 clients": by_server(model),
        "a fleet of 2 replicas": by_fleet(model, 2),
    }


def table(rows: Iterator[tuple[str, Answers]], tasks: Tasks) -> Iterator[str]:
    """Yield the lines of a table of scores, with the number of answers that differ from the first row's."""
    yield "| combination | score | digest of all bits | answers that differ |"
    yield "|---|---|---|---|"
    first: Answers | None = None
    for name, found in rows:
        first = first or found
        pairs = [*zip(first.logprobs, found.logprobs, strict=True), *zip(first.tokens, found.tokens, strict=True)]
        differ = f"{sum(a != b for a, b in pairs)} of {len(pairs)}"
        yield f"| {name} | {found.score(tasks):.1f} % | {found.digest()} | {differ} |"


@contextmanager
def transformers_model(model: str) -> Iterator[Any]:
    """Yield transformers' model of a checkpoint."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        yield AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()


def padded(model: Any, decode: Callable[[Sequence[int]], str], size: int) -> Answer:
    """Return what scores the tasks with transformers, in padded batches of this size."""

    def batch(rows: Sequence[Sequence[int]], left: bool) -> dict[str, torch.Tensor]:
        longest = max(map(len, rows))
        pads = [[0] * (longest - len(row)) for row in rows]
        ids = [[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, pads, strict=True)]
        ones = [[1] * len(row) for row in rows]
        mask = [[*pad, *one] if left else [*one, *pad] for one, pad in zip(ones, pads, strict=True)]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def answer(tasks: Tasks) -> Answers:
        pairs = list(zip(*tasks.pairs(), strict=True))
        logprobs: list[list[float]] = []
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            found = model(**batch([before + after for before, after in part], False)).logits.float().log_softmax(-1)
            for row, (before, after) in zip(found, part, strict=True):
                at = row[len(before) - 1 : len(before) + len(after) - 1]
                logprobs.append(at.gather(1, torch.tensor(after)[:, None]).flatten().tolist())
        tokens, texts = [], []
        for start in range(0, len(tasks.lines), size):
            prompts = batch([one.prompt for one in tasks.lines[start : start + size]], True)
            new = model.generate(
                **prompts, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False, repetition_penalty=1.0
            )
            for row in new[:, prompts["input_ids"].shape[1] :].tolist():
                tokens.append(row)
                texts.append(decode(row))
        return Answers(logprobs, tokens, texts)

    return answer


def main(
    model: Annotated[str | None, typer.Option(help="Checkpoint. Default: the embedded model.")] = None,
    transformers: Annotated[bool, typer.Option(help="Score with transformers' batches of 1, 4 and 16.")] = False,
) -> None:
    """Print the scores of all combinations."""
    with LLM(model, num_blocks=1024) as llm:
        tokenizer, path = llm.get_tokenizer(), str(llm.files.path)
        tasks = make_tasks(tokenizer.encode)
        decode = tokenizer.decode
    if transformers:
        with transformers_model(path) as theirs:
            rows = ((f"batches of {size}", padded(theirs, decode, size)(tasks)) for size in (1, 4, 16))
            for line in table(rows, tasks):
                print(line, flush=True)
        return
    for line in table(((name, answer(tasks)) for name, answer in combinations(model).items()), tasks):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
