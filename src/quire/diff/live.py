"""A loaded model whose operators are recorded, or replayed with the inputs of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire.diff.side import MOST_TOKENS, Side
from quire.diff.trace import About, Output, Prompt, Trace
from quire.errors import ConfigError, ModelError
from quire.frontend.llm import LLM
from quire.models import Adapted, choose, locate
from quire.models.decoder import Decoder
from quire.ops import native
from quire.ops.backends.eager import EagerExecutor, Step
from quire.ops.plan import AttentionPlan
from quire.ops.program import LayerCaches, Observer, Place, Plan, Program, Select, Write
from quire.ops.sparse import Selection
from quire.ops.spec import PagedKV
from quire.request import SamplingParams

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Fault:
    """A change of one element, or of one row, of an operator's output: to test the search."""

    output: str
    prompt: int
    row: int
    column: int | None  # None: the whole row
    size: float  # of the change: a share of the row's largest value, or of each value

    def apply(self, rows: Tensor) -> None:
        """Change the output, [T, width]."""
        row = rows[self.row].float()
        if self.column is None:
            row *= 1 + self.size
        else:
            change = self.size * max(float(row.abs().max()), 1e-3)
            row[self.column] -= change if row[self.column] > 0 else -change
        rows[self.row] = row.to(rows.dtype)


class Live:
    """A loaded model. Use `open_live` to get one."""

    def __init__(self, side: Side, llm: LLM, decoder: Decoder) -> None:
        self.llm, self.decoder = llm, decoder
        self.program: Program = decoder.layers.program
        decoder.layers = _Executor(decoder)
        formats = {
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "quantization": decoder.quantisation or "none",
            "cache": llm.config.cache.kv_cache_dtype,
        }
        kernels = llm.backend.instruction_set or llm.backend.name
        self.about = About(
            model=side.name or "the embedded model",
            settings=", ".join([formats["dtype"], kernels, *([side.settings] if side.settings else [])]),
            formats=", ".join(formats.values()),
            widths=self._widths(),
            ends=_ends(self.program),
            operators=self._operators(),
            unit=torch.finfo(decoder.dtype).eps / 2,
        )

    def trace(self, prompts: Sequence[Sequence[int]], num_greedy: int, most_bytes: int) -> Trace:
        """Run prompts, one after the other. Those are kept whole that fit into `most_bytes` together."""
        trace, left = Trace(self.about), most_bytes
        for tokens in prompts:
            size = sum(self.about.widths.values()) * len(tokens) * 4  # bytes, at most
            is_whole = size <= left
            left -= size * is_whole
            trace.prompts.append(self._run(tokens, _Visit(self.decoder, is_whole), num_greedy))
        return trace

    def replay(self, given: Prompt, fault: Fault | None = None) -> dict[str, Output]:
        """Return the output of each operator for the inputs that another run recorded, rounded to this run's dtype."""
        inputs = {name: output.values for name, output in given.outputs.items()}
        return self._run(given.tokens, _Visit(self.decoder, True, inputs, fault), 1).outputs

    def _run(self, tokens: Sequence[int], visit: _Visit, num_greedy: int) -> Prompt:
        executor = cast(_Executor, self.decoder.layers)
        executor.visit = visit
        params = SamplingParams(temperature=0.0, max_tokens=num_greedy, ignore_eos=True, prompt_logprobs=1)
        [output] = self.llm.generate([list(tokens)], params, use_tqdm=False)
        [sample] = output.outputs
        if sample.error is not None or visit.rows != len(tokens):
            raise ModelError(f"{self.about.model} did not compute a prompt in one step: {sample.error}")
        return Prompt(list(tokens), visit.outputs, visit.best, list(sample.token_ids))

    def _widths(self) -> dict[str, int]:
        program, config = self.program, self.decoder.config
        widths = {"embedding": program.input.size}
        for name, operator in zip(program.names, program.operators, strict=True):
            if isinstance(operator, Write):
                widths[name] = sum(place.size for place in _stored_places(operator))
            elif isinstance(operator, Select):
                widths[name] = MOST_TOKENS
            widths |= {_output(name, key): place.size for key, place in operator.results.items()}
        return widths | {"logits": config.vocab_size}

    def _operators(self) -> dict[str, str]:
        found = {"embedding": "embedding"}
        for name, operator in zip(self.program.names, self.program.operators, strict=True):
            keys = ["out"] if isinstance(operator, (Write, Select)) else operator.results
            found |= {_output(name, key): name for key in keys}
        return found | {"logits": "logits"}


@contextmanager
def open_live(side: Side) -> Iterator[Live]:
    """Load a model with its settings.

    Raises ConfigError or ModelError for settings and models that cannot be traced, Unsupported for an instruction set
    that this machine lacks.
    """
    choice = choose(locate(side.name, side.options.get("gguf_file")))
    if isinstance(choice, Adapted):
        raise ModelError(
            f"{side.name} runs on transformers' code here, whose operators cannot be recorded ({choice.reason}); give "
            "a model of Quire's own layers (`quire models` lists them), or run=transformers"
        )
    if not choice.config.causal:
        raise ModelError(f"{side.name} is an encoder, which writes no tokens; give a model that generates")
    options: dict[str, Any] = dict(side.options)
    with (
        native.using(side.isa),
        LLM(
            side.name,
            **options,
            block_size=BLOCK_SIZE,
            num_blocks=2 * MOST_TOKENS // BLOCK_SIZE,
            num_speculative_tokens=0,
            enable_prefix_caching=False,
            max_num_seqs=1,
            max_num_batched_tokens=MOST_TOKENS,
            generation_config="none",
        ) as llm,
    ):
        if side.isa not in (None, native.NO_KERNELS) and llm.backend.instruction_set is None:
            raise ConfigError(
                f"isa is {side.isa!r}; the backend {llm.backend.name!r} has one set of kernels, so leave it out"
            )
        if not llm.decoder.config.has_head:
            raise ModelError(f"{side.name} has no output projection, so it writes no tokens; give one that generates")
        yield Live(side, llm, cast(Decoder, llm.decoder))


class _Executor:
    """Runs the decoder's layers operator by operator, and shows the next run to a visit."""

    def __init__(self, decoder: Decoder) -> None:
        self.program: Program = decoder.layers.program
        self.observer: Observer | None = None
        self.visit: _Visit | None = None
        self._eager = EagerExecutor(decoder.backend, self.program)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        caches: LayerCaches,
        plans: Sequence[Plan],
        rows: Tensor | None = None,
        lora_slots: Tensor | None = None,
    ) -> Tensor:
        """Run the program."""
        self._eager.hook, visit, self.visit = self.visit, self.visit, None
        if visit is not None:
            visit.begin(x, caches, plans)
        hidden = self._eager(x, positions, caches, plans, rows, lora_slots)
        if visit is not None:
            visit.end(hidden)
        return hidden


class _Visit:
    """Records the outputs of one run, and before each operator replaces its inputs by those of another run."""

    def __init__(
        self,
        decoder: Decoder,
        is_whole: bool,
        given: Mapping[str, Tensor] | None = None,  # the outputs of the other run
        fault: Fault | None = None,
    ) -> None:
        self.outputs: dict[str, Output] = {}
        self.best: list[int] = []
        self.rows = 0
        self._decoder, self._program = decoder, decoder.layers.program
        self._is_whole, self._given, self._fault = is_whole, given, fault
        self._buffers: dict[str, Tensor] = {}  # of the other run, just before the next operator

    def begin(self, x: Tensor, caches: LayerCaches, plans: Sequence[Plan]) -> None:
        """Called with the arguments of the run."""
        self._caches, self._plans, self.rows = caches, plans, len(x)
        self._record("embedding", x)
        self._advance("embedding", self._program.input)

    def before(self, index: int, step: Step) -> None:
        """Give the operator the other run's inputs."""
        if self._given is not None:
            for place in self._program.operators[index].reads:
                step.values[place.buffer] = self._buffers[place.buffer].to(self._decoder.dtype, copy=True)

    def after(self, index: int, step: Step) -> None:
        """Record the operator's outputs."""
        name, operator = self._program.names[index], self._program.operators[index]
        if isinstance(operator, Write):
            self._record_stored(name, operator)
        elif isinstance(operator, Select):
            self._record_chosen(name, step)
        for key, place in operator.results.items():
            value = step.values[place.buffer][:, place.first : place.first + place.size]
            self._record(_output(name, key), value)
            self._advance(_output(name, key), place)

    def end(self, hidden: Tensor) -> None:
        """Called with the run's result."""
        if self._given is not None:
            hidden = self._buffers[self._program.output.buffer].to(self._decoder.dtype)
        logits = torch.cat([self._decoder.logits(part) for part in torch.split(hidden, 64)])
        self._record("logits", logits)
        self.best = logits.argmax(-1).tolist()

    def _record(self, name: str, value: Tensor) -> None:
        if self._fault is not None and self._fault.output == name:
            self._fault.apply(value)
        output = Output(value.clone())
        self.outputs[name] = output if self._is_whole else output.reduced()

    def _advance(self, name: str, place: Place) -> None:
        """Set the columns of the other run's buffer to its output of that name."""
        if self._given is None:
            return
        value = self._given[name]
        if place == self._program.whole(place.buffer):
            self._buffers[place.buffer] = value
        else:
            self._buffers[place.buffer] = buffer = self._buffers[place.buffer].clone()
            buffer[:, place.first : place.first + place.size] = value

    def _record_stored(self, name: str, operator: Write) -> None:
        """Record the K and V that the cache has now: [T, 2 * Hkv * D]."""
        kv = cast(PagedKV, self._caches.layer(operator.layer))
        slots = cast(AttentionPlan, self._plans[operator.group]).slots[: self.rows].long()
        at = (slots // kv.k.shape[2], slice(None), slots % kv.k.shape[2])
        pools = [(kv.k, kv.k_scale), (kv.v, kv.v_scale)][: len(_stored_places(operator))]
        found = []
        for pool, scale in pools:  # [N, Hkv, B, D], [N, Hkv, B]
            stored = pool[at] if scale is None else pool[at] * scale[at][..., None]  # [T, Hkv, D]
            found.append(stored.flatten(1))
        rows = torch.cat(found, 1)
        self._record(name, rows)
        if self._fault is not None and self._fault.output == name:
            for (pool, scale), part in zip(pools, torch.split(rows, [one.shape[1] for one in found], 1), strict=True):
                changed = part.view(len(part), pool.shape[1], -1)
                if scale is not None:
                    changed = (changed / scale[at][..., None]).round().clamp(-127, 127)
                pool[at] = changed.to(pool.dtype)

    def _record_chosen(self, name: str, step: Step) -> None:
        """Record the keys that each row attends to: 1 at their positions, else 0, [T, MOST_TOKENS]."""
        every = torch.ones(self.rows, MOST_TOKENS).tril()
        rows = every.clone() if step.selection is None else step.selection.mask(MOST_TOKENS)
        if (fault := self._fault) is not None and fault.output == name:  # the row takes other keys
            at = slice(fault.row + 1) if fault.column is None else fault.column % (fault.row + 1)
            rows[fault.row, at] = 1 - rows[fault.row, at]
        output = Output(rows)
        self.outputs[name] = output if self._is_whole else output.reduced()
        if self._given is not None:
            given = self._given[name]
            step.selection = None if given.equal(every) else Selection.of_mask(self._decoder.backend, given)


def _stored_places(operator: Write) -> list[Place]:
    """Return the places of K and V; of a latent cache K alone, whose first columns are V."""
    is_latent = (operator.k.buffer, operator.k.first) == (operator.v.buffer, operator.v.first)
    return [operator.k] if is_latent else [operator.k, operator.v]


def _output(name: str, key: str) -> str:
    """Return the name of an operator's output: its own for the usual one."""
    return name if key in ("out", "x") else f"{name}.{key}"


def _ends(program: Program) -> dict[str, str]:
    """Return the name of the output that is the residual after the embedding and after each layer, and the last ones.

    An input norm adds the branch of the layer before it, so a layer begins after it.
    """
    ends: dict[str, str] = {}
    last, layer, output = "embedding", "embedding", "embedding"
    for name, operator in zip(program.names, program.operators, strict=True):
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] != "input_norm" and (here := ".".join(parts[:2])) != layer:
            ends[layer], layer = last, here
        for key, place in operator.results.items():
            if place.buffer == "residual":
                last = _output(name, key)
            if place == program.output:
                output = _output(name, key)
    return ends | {layer: last, "final_norm": output, "logits": "logits"}
