"""What a seed of tests.engine.differential draws: an engine's options, and requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.engine.beam_driver import BeamDriver
from quire.frontend.outputs import RequestOutput
from quire.frontend.tokenizer import Tokenizer
from quire.request import Request

MAX_MODEL_LEN = 96
MAX_PROMPT = 72
PIECE = 32  # tokens: what layers with a state compute at a time
ADAPTERS = ("all", "some")
GRAMMARS = (
    StructuredOutputsParams(regex=r"[a-z]{2,5}\([0-9]*\)"),
    StructuredOutputsParams(choice=["return", "raise", "returning"]),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)


@dataclass
class Ask:
    """What a caller asks for, and what became of it."""

    name: str
    prompt: list[int]
    params: SamplingParams | BeamSearchParams | int | None  # int: tokens before those to score; None: an embedding
    lora: str | None = None
    salt: str = ""
    priority: int = 0
    at: int = 0  # the step before which it is asked for
    aborted_after: int | None = None  # steps
    goes_on: bool = False  # when it has ended, another one goes on from there
    output: RequestOutput | None = None
    driver: BeamDriver | None = None
    requests: list[Request] = field(default_factory=list)
    is_aborted: bool = False

    @property
    def finished(self) -> bool:
        return self.driver.done if self.driver is not None else self.output is not None and self.output.finished

    def __str__(self) -> str:
        given: dict[str, Any] = {
            "lora": self.lora,
            "cache_salt": self.salt,
            "priority": self.priority,
            "params": self.params,
        }
        if isinstance(self.params, SamplingParams):
            given |= {"params": {k: v for k, v in vars(self.params).items() if v != getattr(SamplingParams, k)}}
        return f"{self.name}, {len(self.prompt)} tokens: {given}"


class Draw:
    """What a seed draws. What is drawn later may depend on what was found by then."""

    def __init__(self, seed: int, tokenizer: Tokenizer, vocab_size: int, has_grammars: bool, directory: str) -> None:
        """has_grammars: whether texts may be asked to follow one. directory: of the disk's blocks."""
        rng = self.rng = random.Random(seed)
        self.tokenizer, self.vocab_size, self.has_grammars = tokenizer, vocab_size, has_grammars
        self.few = [rng.randrange(256) for _ in range(6)]  # tokens that come again and again
        self.stems = [[self.token() for _ in range(50)] for _ in range(3)]
        self.has_disk = rng.random() < 0.1
        self.options = self.engine_options()
        if self.has_disk:
            self.options |= {"kv_disk": directory, "kv_disk_space": rng.choice(["256KiB", "16MiB"])}
        self.is_overlapped = not self.has_disk and rng.random() < 0.25
        if self.is_overlapped:  # steps with drafts are not planned ahead
            self.options["num_speculative_tokens"] = 0
        self.num_threads = 1 + (rng.random() < 0.1)
        self.num_asks = 0

    def token(self) -> int:
        return self.rng.choice(self.few) if self.rng.random() < 0.5 else self.rng.randrange(self.vocab_size)

    def engine_options(self) -> dict[str, Any]:
        rng = self.rng
        block_size = rng.choice([1, 2, 4, 4, 8, 16, 32])
        least = -(-MAX_MODEL_LEN // block_size)
        caching = self.has_disk or rng.random() < 0.8
        preemption = rng.choice(["recompute", "swap"])
        return {
            "block_size": block_size,
            "num_blocks": rng.choice([least, least, least, least + rng.randint(0, least), 8 * least]),
            "max_num_batched_tokens": rng.choice([1, 3, 8, 8, 20, 64, None]),
            "max_num_seqs": rng.choice([1, 2, 3, 5, 8, 8, 8]),
            "enable_prefix_caching": caching,
            "num_speculative_tokens": rng.choice([0, 1, 3, 7]),
            "kv_cache_dtype": rng.choice(["auto", "auto", "int8"]),
            "preemption": preemption,
            "swap_space": rng.choice(["256KiB", "8MiB"]) if preemption == "swap" else None,
            "state_snapshot_interval": PIECE * rng.choice([1, 2]),
            "scheduling_policy": rng.choice(["fcfs", "priority", "shortest"]),
            "seed": rng.randrange(100),
        }

    def restarted(self) -> dict[str, Any]:
        """Options of an engine that takes the disk of the one before: what bits depend on is the same."""
        names = ("block_size", "num_blocks", "kv_cache_dtype", "kv_disk", "kv_disk_space")
        self.options = self.engine_options() | {name: self.options[name] for name in names}
        return self.options

    def asks(self, before: Sequence[Ask] = ()) -> list[Ask]:
        """before: what was asked of an engine that has gone. Some of it is asked again."""
        rng = self.rng
        again = [self.ask(list(rng.choice(before).prompt)) for _ in range(4 if before else 0)]
        return again + [self.ask() for _ in range(rng.randint(3, 7))]

    def prompt(self) -> list[int]:
        rng = self.rng
        tail = [self.token() for _ in range(rng.randint(1, rng.choice([4, 20])))]
        return rng.choice(self.stems)[: rng.choice([0, 8, 16, 32, 50, rng.randint(0, 50)])] + tail

    def ask(self, prompt: list[int] | None = None, after: Ask | None = None) -> Ask:
        """A request; of a prompt, or one that goes on after another one, with its adapter and salt."""
        rng = self.rng
        prompt = prompt or self.prompt()
        self.num_asks += 1
        lora, salt = rng.choice([None, None, *ADAPTERS]), rng.choice(["", "", "", "tenant"])
        if after is not None and rng.random() < 0.8:
            lora, salt = after.lora, after.salt
        by_priority = self.options["scheduling_policy"] == "priority"
        return Ask(
            f"r{self.num_asks}",
            prompt,
            self.params(prompt),
            lora,
            salt,
            rng.choice([-1, 0, 1]) * by_priority,
            at=rng.choice([0, 0, 0, rng.randint(0, 30)]),
            aborted_after=rng.randint(0, 20) if rng.random() < 0.12 else None,
            goes_on=rng.random() < 0.3 and self.num_asks < 8,
        )

    def params(self, prompt: list[int]) -> SamplingParams | BeamSearchParams | int | None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.06:
            return None
        if kind < 0.12 and len(prompt) > 1:
            return rng.randint(1, len(prompt) - 1)
        if kind < 0.3:
            return BeamSearchParams(
                beam_width=rng.randint(1, min(4, self.options["max_num_seqs"])),
                max_tokens=rng.randint(1, 8),
                ignore_eos=rng.random() < 0.5,
                length_penalty=rng.choice([1.0, 0.0, -1.0, 2.0]),
                logprobs=rng.choice([None, 0, 2]),
            )
        return self.sampling()

    def sampling(self) -> SamplingParams:
        rng = self.rng

        def seldom(draw: Callable[[], Any], otherwise: Any = None, share: float = 0.15) -> Any:
            return draw() if rng.random() < share else otherwise

        max_tokens = rng.randint(1, rng.choice([4, 24, 24]))
        detokenize = rng.random() < 0.9
        structured = seldom(lambda: rng.choice(GRAMMARS), share=0.1)
        if not self.has_grammars:
            structured = None
        if rng.random() < 0.04:  # no token is left to draw
            [barred] = self.tokenizer.encode("a", add_special_tokens=False)
            return SamplingParams(allowed_token_ids=[barred], bad_words=["a"], prompt_logprobs=rng.choice([None, 0]))
        letters = [self.tokenizer.decode([token]) for token in self.few]
        texts = [text for text in letters if text.strip("\ufffd")] or ["a"]
        return SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            temperature=rng.choice([0.0, 0.0, 0.6, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 1, 5, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.4]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=seldom(lambda: rng.choice([0.7, 1.4]), 1.0),
            presence_penalty=seldom(lambda: rng.choice([-1.5, 1.5]), 0.0),
            frequency_penalty=seldom(lambda: rng.choice([-0.5, 1.0]), 0.0),
            logit_bias=seldom(lambda: {self.token(): rng.choice([-100.0, -3.0, 4.0, 100.0]) for _ in range(4)}),
            allowed_token_ids=seldom(lambda: rng.sample([*self.few, self.token()], rng.choice([1, 2, 7])), share=0.25),
            bad_words=seldom(lambda: [*rng.choices(texts, k=rng.randint(1, 3)), rng.choice(texts) + rng.choice(texts)]),
            structured_outputs=structured,
            max_tokens=max_tokens,
            min_tokens=0 if structured else seldom(lambda: rng.randint(0, max_tokens), 0),
            stop=seldom(lambda: [rng.choice(texts), rng.choice(texts) + rng.choice(texts)]) if detokenize else None,
            stop_token_ids=seldom(lambda: rng.choices(self.few, k=2)),
            include_stop_str_in_output=rng.random() < 0.5,
            ignore_eos=rng.random() < 0.5,
            seed=rng.choice([None, rng.randrange(1000)]),
            logprobs=rng.choice([None, 0, 0, 3]),
            prompt_logprobs=seldom(lambda: rng.choice([0, 0, 2]), share=0.25),
            detokenize=detokenize,
            skip_special_tokens=rng.random() < 0.5,
        )
