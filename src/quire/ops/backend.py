"""The one door to a device: what every backend offers, which backends there are, and which of them serves a device."""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from quire.errors import BadValue, Unsupported
from quire.ops import metadata, validate, validate_small
from quire.ops.activation import Activation
from quire.ops.choice import Choice, chosen_experts
from quire.ops.exchange import Exchange
from quire.ops.experts import ExpertLayer, weighted_experts
from quire.ops.linear import Linears
from quire.ops.plan import AttentionPlan
from quire.ops.program import Executor, Program
from quire.ops.recurrent_operators import RecurrentOperators
from quire.ops.spec import AttentionSpec, Limits, PagedKV, check_supported
from quire.ops.swap import Swap

Function = TypeVar("Function", bound=Callable[..., Any])


class Scores(NamedTuple):
    """How scores are formed from q·k, as `attention` was asked to."""

    scale: float | None = None
    alibi_slopes: Tensor | None = None  # fp32 [Hq] or [S, Hq]
    softcap: float | None = None
    sinks: Tensor | None = None  # fp32 [Hq]
    chunk: int | None = None


def _operator(in_graph: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Decorate a public operator: in a graph that is being traced, call what torch knows instead (`registered.py`).

    in_graph: calls it with the operator's own arguments; None: it takes just these. What the graph then calls when it
    runs is the operator as it was before, `__wrapped__`: torch traces in one thread while others run graphs.
    """

    def decorate(operator: Function) -> Function:
        name = operator.__name__

        @functools.wraps(operator)
        def call(backend: Backend, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                return operator(backend, *args, **kwargs)
            if in_graph is not None:
                return in_graph(backend.name, *args, **kwargs)
            return getattr(torch.ops.quire, name)(backend.name, *args, **kwargs)

        return cast(Function, call)

    return decorate


def _attention_in_graph(
    backend: str,
    q: Tensor,
    kv: PagedKV,
    plan: AttentionPlan,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    **scores: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    arguments = backend, q, kv.k, kv.v, plan.key
    scores |= {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    if out is None:
        out, lse = torch.ops.quire.attention(*arguments, **scores, return_lse=return_lse)
    else:
        lse = torch.ops.quire.attention_out(*arguments, **scores, out=out, return_lse=return_lse)
    return (out, lse) if return_lse else out


def _write_kv_in_graph(backend: str, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: AttentionPlan) -> None:
    torch.ops.quire.write_kv(backend, k_new, v_new, kv.k, kv.v, plan.key, kv.k_scale, kv.v_scale)


def _copy_blocks_in_graph(backend: str, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    torch.ops.quire.copy_blocks(backend, kv.k, kv.v, src, dst, kv.k_scale, kv.v_scale)


def _add_rms_norm_in_graph(backend: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed, total = torch.ops.quire.add_rms_norm(backend, x, residual, weight, eps)
    residual.copy_(total)
    return cast(Tensor, normed)


def _rope_in_graph(backend: str, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    turned_q, turned_k = torch.ops.quire.rope(backend, q, k, positions, cos, sin)
    q.copy_(turned_q)
    k.copy_(turned_k)


class Backend(RecurrentOperators):
    """Everything that depends on the device.

    A public operator checks its arguments once and calls the backend's own, whose name begins with an underscore. What
    each computes is in `quire.ops.reference`; the conventions and the letters of dimensions are in `quire.ops.spec`.

    Operators raise BadShape, BadDtype, BadStride or BadValue, naming the argument. `experts` is made of others.
    """

    name: str
    limits: Limits
    plan_type: type[AttentionPlan] = AttentionPlan  # what its operators take
    graphable = False  # whether its kernels read what changes from step to step from their plan's tensors on the device

    @property
    def instruction_set(self) -> str | None:
        """What its kernels were compiled for, where it has kernels of its own for several."""
        return None

    def set_prefetch(self, choice: str) -> None:
        """Choose how this process fetches memory before it is used, where there is a choice. No bit depends on it.

        Raises ConfigError where the choice is not understood, and Unsupported where there is none.
        """
        raise Unsupported(f"prefetch is {choice!r}; the backend {self.name!r} leaves that to the device")

    @abstractmethod
    def unavailable(self, device: str) -> str | None:
        """Why this backend cannot serve that device on this machine, or None where it can."""

    def keeps_bits(self, device: str) -> bool:
        """Whether a row has the same bits in every batch there without being asked to: on a CPU, where it can."""
        return device == "cpu" and self.limits.reproducible

    # -------------------------------------------------------------------------------------- models and memory

    @abstractmethod
    def linears(self, device: str, reproducible: bool = False) -> Linears:
        """What packs the weights of one model on that device.

        reproducible: a row's bits must not depend on the other rows; on a CPU they never do.
        """

    @abstractmethod
    def compile(self, program: Program) -> Executor:
        """Return an executor of the program with the weights that it has now: later ones may not be seen."""

    def exchange(
        self,
        memory: Tensor,  # uint8 [bytes], exchange_bytes(size), which all ranks share
        rank: int,
        size: int,
    ) -> Exchange:
        """What the ranks of a tensor-parallel group on one host exchange through that memory. Raises Unsupported."""
        raise Unsupported(f"backend {self.name!r} does not compute a part of a model; tensor parallelism is for 'cpu'")

    def exchange_bytes(self, size: int) -> int:
        """Bytes of the memory that so many ranks share. Raises Unsupported, as `exchange` does."""
        raise Unsupported(f"backend {self.name!r} does not compute a part of a model; tensor parallelism is for 'cpu'")

    @abstractmethod
    def swap(
        self,
        device: str,
        host: Sequence[Tensor],  # [num_host_blocks, ...] of each layer
    ) -> Swap:
        """What moves blocks between pools on the device and these on the host. Raises Unsupported or ConfigError."""

    # --------------------------------------------------------------------------------------------------- plans

    def make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> AttentionPlan:
        """An empty plan with room for `max_tokens` T, `max_seqs` S and `max_blocks` M; call its `update`.

        Raises Unsupported for a spec that the backend does not serve.
        """
        check_supported(spec, self.name, self.limits)
        return self._make_plan(spec, max_tokens, max_seqs, max_blocks)

    def _make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> AttentionPlan:
        return self.plan_type(spec, max_tokens, max_seqs, max_blocks)

    def plan(
        self,
        spec: AttentionSpec,
        query_starts: Tensor,  # int32 [S+1], host
        context_lens: Tensor,  # int32 [S], host
        block_tables: Tensor,  # int32 [S, M], host
        slots: Tensor | None = None,  # int64 [T], host
    ) -> AttentionPlan:
        """`make_plan` of exactly this size, updated once."""
        plan = self.make_plan(spec, *metadata.step_sizes(query_starts, context_lens, block_tables))
        plan.update(query_starts, context_lens, block_tables, slots)
        return plan

    def _check_plan(self, plan: AttentionPlan) -> None:
        if isinstance(plan, self.plan_type):
            return
        found = type(plan).__name__
        if isinstance(plan, AttentionPlan):
            raise BadValue(
                f"the plan is of another backend (a {found}); make it with the {self.name} backend's plan or make_plan"
            )
        raise BadValue(f"plan is a {found}; it must be what the {self.name} backend's plan or make_plan returned")

    # ----------------------------------------------------------------------------------------------- attention

    @overload
    def attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        softcap: float | None = None,
        sinks: Tensor | None = None,  # fp32 [Hq]
        chunk: int | None = None,
        out: Tensor | None = None,  # [T, Hq, Dv]
        return_lse: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        softcap: float | None = None,
        sinks: Tensor | None = None,  # fp32 [Hq]
        chunk: int | None = None,
        out: Tensor | None = None,  # [T, Hq, Dv]
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @_operator(_attention_in_graph)
    def attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        softcap: float | None = None,
        sinks: Tensor | None = None,  # fp32 [Hq]
        chunk: int | None = None,
        out: Tensor | None = None,  # [T, Hq, Dv]
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Softmax attention of every query row over its sequence's paged keys: out [T, Hq, Dv] (, LSE fp32 [T, Hq]).

        scale: factor of q·k; None is 1 / sqrt(D).
        alibi_slopes: each head adds slope * (key position - query position) to its scores (Press et al. 2022). Those
            of [S, Hq] are each sequence's own.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: one more logit a head in the softmax's denominator, without a value (gpt-oss).
        chunk: a row sees no key before the last multiple of so many positions (Llama 4). Causal plans only; one with a
            window of as many keys need not keep the blocks of earlier chunks.
        out: written and returned where given; apart from q and the cache.
        return_lse: also return the logarithm of the sum of exponentials of each row's scores (float64 for float64).
        """
        scores = Scores(scale, alibi_slopes, softcap, sinks, chunk)
        self._check_plan(plan)
        with plan.lock:
            self._check_attention(q, kv, plan, scores, out, return_lse)
            spec = plan.spec
            if out is None:
                out = torch.empty(plan.num_tokens, spec.num_heads, spec.dim_v, dtype=spec.dtype, device=q.device)
            if not return_lse:
                self._attention(q, kv, plan, scores, out, None)
                return out
            wide = torch.promote_types(spec.dtype, torch.float32)
            lse = torch.empty(plan.num_tokens, spec.num_heads, dtype=wide, device=q.device)
            self._attention(q, kv, plan, scores, out, lse)
            return out, lse

    @abstractmethod
    def _attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: Any,  # AttentionPlan, of plan_type; locked
        scores: Scores,
        out: Tensor,  # [T, Hq, Dv], written
        lse: Tensor | None,  # fp32 [T, Hq], written
    ) -> None: ...

    def _check_attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: Any,  # AttentionPlan, of plan_type
        scores: Scores,
        out: Tensor | None,  # [T, Hq, Dv]
        return_lse: bool,
    ) -> None:
        validate.check_attention(q, kv, plan, *scores, out, return_lse)

    @_operator()
    def merge_states(
        self,
        out_a: Tensor,  # [T, Hq, Dv]
        lse_a: Tensor,  # fp32 [T, Hq]
        out_b: Tensor,  # [T, Hq, Dv]
        lse_b: Tensor,  # fp32 [T, Hq]
    ) -> tuple[Tensor, Tensor]:
        """Attention over two disjoint sets of keys from attention over each: out [T, Hq, Dv], LSE fp32 [T, Hq]."""
        validate.check_states(out_a, lse_a, out_b, lse_b)
        return self._merge_states(out_a, lse_a, out_b, lse_b)

    @abstractmethod
    def _merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]: ...

    @_operator()
    def apply_sinks(
        self,
        out: Tensor,  # [T, Hq, Dv]
        lse: Tensor,  # fp32 [T, Hq]
        sinks: Tensor,  # fp32 [Hq]
    ) -> Tensor:
        """Close a state with one more logit a head that carries no value: out · e^lse / (e^lse + e^sink)."""
        validate.check_sinks(out, lse, sinks)
        return self._apply_sinks(out, lse, sinks)

    @abstractmethod
    def _apply_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor: ...

    # ----------------------------------------------------------------------------------------------- the cache

    @_operator(_write_kv_in_graph)
    def write_kv(
        self,
        k_new: Tensor,  # [T, Hkv, D]
        v_new: Tensor,  # [T, Hkv, Dv]
        kv: PagedKV,
        plan: AttentionPlan,
    ) -> None:
        """Store row t's K and V at slot plan.slots[t], that is at offset slot % B of block slot // B; -1 skips it.

        K and V may share memory only as those of a latent cache do: the rows of one begin with those of the other, in
        the cache and in what is new. Raises BadValue for a plan that was updated without slots.
        """
        self._check_plan(plan)
        with plan.lock:
            self._check_write(k_new, v_new, kv, plan)
            self._write_kv(k_new, v_new, kv, plan)

    @abstractmethod
    def _write_kv(self, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: Any) -> None: ...

    def _check_write(self, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: Any) -> None:
        validate.check_write(k_new, v_new, kv, plan)

    @_operator(_copy_blocks_in_graph)
    def copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to block dst[i], K and V: copy-on-write of a shared block that is about to be written.

        No block may be written twice, or be in src and in dst.
        """
        validate.check_copy(kv, src, dst)
        self._copy_blocks(kv, src, dst)

    @abstractmethod
    def _copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None: ...

    # --------------------------------------------------------------------------------- operators of a decoder

    @_operator()
    def rms_norm(
        self,
        x: Tensor,  # [..., H]
        weight: Tensor,  # [H]
        eps: float,
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight, over the last dimension (Zhang & Sennrich 2019)."""
        validate_small.check_norm(x, eps, weight=weight)
        return self._rms_norm(x, weight, eps)

    @abstractmethod
    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @_operator(_add_rms_norm_in_graph)
    def add_rms_norm(
        self,
        x: Tensor,  # [T, H]
        residual: Tensor,  # [T, H], becomes x + residual in place; apart from x and weight
        weight: Tensor,  # [H]
        eps: float,
    ) -> Tensor:
        """rms_norm of the new residual."""
        validate_small.check_residual(x, residual, weight)
        validate_small.check_norm(x, eps, weight=weight)
        return self._add_rms_norm(x, residual, weight, eps)

    @abstractmethod
    def _add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @_operator()
    def layer_norm(
        self,
        x: Tensor,  # [..., H]
        weight: Tensor,  # [H]
        bias: Tensor | None,  # [H]
        eps: float,
    ) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba et al. 2016)."""
        validate_small.check_norm(x, eps, weight=weight, bias=bias)
        return self._layer_norm(x, weight, bias, eps)

    @abstractmethod
    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    @_operator(_rope_in_graph)
    def rope(
        self,
        q: Tensor,  # [T, Hq, D], rotated in place
        k: Tensor,  # [T, Hkv, D], rotated in place; apart from q
        positions: Tensor,  # int32 or int64 [T]
        cos: Tensor,  # fp32 [P, D_rot / 2]
        sin: Tensor,  # fp32 [P, D_rot / 2]
    ) -> None:
        """Rotate the pairs (i, i + D_rot/2) of the first D_rot dimensions by their position's angle (Su et al. 2021).

        Raises BadValue for a position on the host that the tables do not hold.
        """
        validate_small.check_rope(q, k, positions, cos, sin)
        self._rope(q, k, positions, cos, sin)

    @abstractmethod
    def _rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    @_operator()
    def swiglu(
        self,
        gate_up: Tensor,  # [T, 2 * I]: gates, then ups
    ) -> Tensor:
        """silu(gate) * up: [T, I] (Shazeer 2020)."""
        validate_small.check_swiglu(gate_up)
        return self._swiglu(gate_up)

    @abstractmethod
    def _swiglu(self, gate_up: Tensor) -> Tensor: ...

    @_operator()
    def gelu(
        self,
        x: Tensor,  # [..., I]
        approximate: Literal["none", "tanh"],
    ) -> Tensor:
        """GELU in its exact (erf) or its tanh form (Hendrycks & Gimpel 2016)."""
        validate_small.check_gelu(x, approximate)
        return self._gelu(x, approximate)

    @abstractmethod
    def _gelu(self, x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor: ...

    def activate(
        self,
        x: Tensor,  # [T, 2 I] with a gate, else [T, I]
        activation: Activation,
    ) -> Tensor:
        """What stands between the linears of an MLP: [T, I], computed in fp32."""
        validate_small.check_activation(x, activation)
        return self._activate(x, activation)

    @abstractmethod
    def _activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    def choose(
        self,
        logits: Tensor,  # fp32 [T, E], no NaN
        choice: Choice,
    ) -> tuple[Tensor, Tensor]:
        """Each row's experts, int64 [T, k], the preferred one first, and their shares, fp32 [T, k].

        Of experts that are equally preferred, the first one comes first.
        """
        validate_small.check_choice(logits, choice)
        return self._choose(logits, choice)

    def _choose(self, logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        return chosen_experts(logits, choice, self.top_k_softmax, self.top_k)

    def experts(
        self,
        x: Tensor,  # [T, H]
        layer: ExpertLayer,
        seen: Tensor | None = None,  # [T, H], what the router sees; None: x
    ) -> Tensor:
        """What each row's experts compute of it, weighted by the router: [T, H] (Shazeer et al. 2017).

        Rows are gathered by expert, so that a weight is read once for all rows that want it. How many those are has to
        be known on the host, which waits for a GPU here. The sum is formed in fp32, the preferred expert first.
        """
        return weighted_experts(x, layer, self.choose, self.activate, seen)

    # -------------------------------------------------------------------------- for a sampler, and for a router

    @_operator()
    def logsumexp(
        self,
        logits: Tensor,  # fp32 [R, V]
    ) -> Tensor:
        """log(sum(exp(logits))) of each row: fp32 [R]."""
        validate_small.check_logits(logits)
        return self._logsumexp(logits)

    @abstractmethod
    def _logsumexp(self, logits: Tensor) -> Tensor: ...

    @_operator()
    def top_k(
        self,
        logits: Tensor,  # fp32 [R, V], no NaN
        k: int,
    ) -> Tensor:
        """The ids of the k largest logits of each row, the largest first, of equal ones the lower id: int64 [R, k]."""
        validate_small.check_logits(logits, k)
        return self._top_k(logits, k)

    @abstractmethod
    def _top_k(self, logits: Tensor, k: int) -> Tensor: ...

    @_operator()
    def top_k_softmax(
        self,
        logits: Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
        k: int,
    ) -> tuple[Tensor, Tensor]:
        """top_k's ids, int64 [R, k], and each one's share of the row's softmax, fp32 [R, k]: a router's choice."""
        validate_small.check_logits(logits, k)
        return self._top_k_softmax(logits, k)

    @abstractmethod
    def _top_k_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]: ...


# -------------------------------------------------------------------------------------- which backends there are

# Name -> the module with its BACKEND, the preferred first: "auto" takes the first one that is available.
BACKENDS = {
    "cpu": "quire.ops.cpu",
    "triton": "quire.ops.triton",
    "reference": "quire.ops.reference",
    "gather": "quire.ops.gather",
}

NEEDS = {"triton": "triton"}  # name -> the package without which the module cannot be imported


def load(name: str = "auto", device: str = "cpu") -> Backend:
    """The backend of that name, or with "auto" the fastest one that serves the device.

    Raises Unsupported where there is no such backend, or it cannot run here; the message says why.
    """
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        reason = unavailable(candidate, device)
        if reason is None:
            return _backend(candidate)
        reasons.append(f"{candidate}: {reason}")
    raise Unsupported(f"no attention backend for device {device!r} ({'; '.join(reasons)})")


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Why the backend of that name cannot serve the device on this machine, or None where it can.

    Raises Unsupported where there is no such backend.
    """
    if name not in BACKENDS:
        raise Unsupported(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return f"the package {NEEDS[name]!r} is not installed"
    return _backend(name).unavailable(device)


def _backend(name: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[name]).BACKEND)
