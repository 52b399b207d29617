"""The interface of all backends, the list of backends, and the choice of one for a device."""

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
from quire.ops.collectives import Communicator
from quire.ops.experts import ExpertLayer, weighted_experts
from quire.ops.linear import Linears
from quire.ops.plan import AttentionPlan
from quire.ops.program import Executor, Program
from quire.ops.recurrent_operators import RecurrentOperators
from quire.ops.spec import AttentionSpec, Limits, PagedKV, check_supported
from quire.ops.swap import Swap

Function = TypeVar("Function", bound=Callable[..., Any])


class Scores(NamedTuple):
    """The arguments of `attention` that define how scores are computed from q·k."""

    scale: float | None = None
    alibi_slopes: Tensor | None = None  # fp32 [Hq] or [S, Hq]
    softcap: float | None = None
    sinks: Tensor | None = None  # fp32 [Hq]
    chunk: int | None = None


def _operator(in_graph: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Decorate a public operator: while torch traces a graph, call the registered operator instead (`registered.py`).

    `in_graph` calls the registered operator with the arguments of the public one; None if both take the same. The graph
    runs the undecorated operator, `__wrapped__`, since torch may trace in one thread while others run graphs.
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
    """All device-dependent operators. Use `load` to get one; subclass it to add one.

    A public operator checks its arguments once and calls the implementation of the backend, whose name begins with an
    underscore. `quire.ops.reference` defines each result; `quire.ops.spec` defines the conventions and the letters of
    dimensions. `experts` and `choose` are composed of other operators unless a backend overrides them.

    Every operator raises BadShape, BadDtype, BadStride or BadValue for an invalid argument, naming it. Only additional
    errors are listed at the operators.
    """

    name: str  # as in BACKENDS
    limits: Limits  # the cases that it serves
    plan_type: type[AttentionPlan] = AttentionPlan  # of the plans that its operators take
    graphable = False  # True if its kernels read all step-dependent values from the plan's tensors on the device

    @property
    def instruction_set(self) -> str | None:
        """The instruction set of the kernels in use, or None if the backend has only one set of kernels."""
        return None

    def set_prefetch(self, choice: str) -> None:
        """Choose how this process prefetches memory. Results do not depend on it.

        Args:
            choice: a value of the option `prefetch`.

        Raises:
            ConfigError: for an unknown choice.
            Unsupported: if the backend leaves prefetching to the device.
        """
        raise Unsupported(f"prefetch is {choice!r}; the backend {self.name!r} leaves that to the device")

    @abstractmethod
    def unavailable(self, device: str) -> str | None:
        """Return the reason why this backend cannot serve the device on this machine, or None if it can.

        Args:
            device: a device of torch, for example "cpu" or "cuda".
        """

    def batch_invariant(self, device: str) -> bool:
        """Return True if every plan on the device is batch-invariant, without `AttentionSpec.reproducible`.

        This is the case on a CPU for backends that can be batch-invariant at all.

        Args:
            device: a device of torch, for example "cpu" or "cuda".
        """
        return device == "cpu" and self.limits.reproducible

    # -------------------------------------------------------------------------------------- models and memory

    @abstractmethod
    def linears(self, device: str, reproducible: bool = False) -> Linears:
        """Return an object that packs the weights of one model on the device.

        Args:
            device: a device of torch.
            reproducible: require batch-invariant products, in which a row's bits do not depend on the other rows. On a
                CPU they always are.

        Raises:
            Unsupported: if the backend has no such products on the device.
        """

    @abstractmethod
    def compile(self, program: Program) -> Executor:
        """Return an executor of the program with its current weights. Later changes of them may have no effect."""

    def exchange(
        self,
        memory: Tensor,  # uint8 [bytes], exchange_bytes(size) bytes shared by all ranks
        rank: int,  # of this process, 0..size - 1
        size: int,  # number of ranks
    ) -> Communicator:
        """Return the collectives of a tensor-parallel group on one host, over the shared memory.

        Raises:
            Unsupported: if the backend does not support tensor parallelism.
        """
        raise Unsupported(f"backend {self.name!r} does not compute a part of a model; tensor parallelism is for 'cpu'")

    def exchange_bytes(self, size: int) -> int:
        """Return the number of bytes of memory that `size` ranks share. Raises Unsupported as `exchange` does."""
        raise Unsupported(f"backend {self.name!r} does not compute a part of a model; tensor parallelism is for 'cpu'")

    @abstractmethod
    def swap(
        self,
        device: str,  # a device of torch
        host: Sequence[Tensor],  # [num_host_blocks, ...] of each layer
    ) -> Swap:
        """Return an object that copies blocks between pools on the device and these pools on the host.

        Raises:
            Unsupported: if blocks on the device cannot be swapped.
            ConfigError: if the host's pools cannot be pinned.
        """

    # --------------------------------------------------------------------------------------------------- plans

    def make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> AttentionPlan:
        """Make an empty plan for the largest step. Call its `update` before each step.

        Args:
            spec: of the layers that use the plan.
            max_tokens: largest T of an update.
            max_seqs: largest S of an update.
            max_blocks: largest M of an update, blocks per sequence.

        Raises:
            Unsupported: for a spec that the backend does not serve.
            BadValue: for a size that does not fit an int32.
            MemoryError: if the plan's tensors cannot be allocated.
        """
        check_supported(spec, self.name, self.limits)
        return self._make_plan(spec, max_tokens, max_seqs, max_blocks)

    def _make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> AttentionPlan:
        return self.plan_type(spec, max_tokens, max_seqs, max_blocks)

    def plan(
        self,
        spec: AttentionSpec,  # of the layers that use the plan
        query_starts: Tensor,  # int32 [S+1], host: sequence s has the query rows query_starts[s]:[s+1]
        context_lens: Tensor,  # int32 [S], host: KV tokens of each sequence, including this step's
        block_tables: Tensor,  # int32 [S, M], host: ids of each sequence's blocks
        slots: Tensor | None = None,  # int64 [T], host: where write_kv stores each row; None: read-only
    ) -> AttentionPlan:
        """Make a plan of exactly the size of one step, and update it with that step. See `AttentionPlan.update`.

        Raises:
            Unsupported: for a spec that the backend does not serve.
            BadShape, BadDtype, BadValue: naming the argument, the sequence and the value.

        Example:
            >>> spec = ops.AttentionSpec(
            ...     num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, num_blocks=8, dtype=torch.float32
            ... )
            >>> starts, lens, tables = torch.tensor([0, 3]), torch.tensor([20]), torch.tensor([[5, 0]])
            >>> ops.load().plan(spec, starts, lens, tables).num_tokens
            3
        """
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
        raise BadValue(f"plan is a {found}; make it with the {self.name} backend's plan or make_plan")

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
        kv: PagedKV,  # the layer's cache
        plan: AttentionPlan,  # of this backend, updated for this step
        *,
        scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
        alibi_slopes: Tensor | None = None,  # fp32 [Hq], or [S, Hq] per sequence
        softcap: float | None = None,  # scores become softcap * tanh(score / softcap); None: no cap
        sinks: Tensor | None = None,  # fp32 [Hq]
        chunk: int | None = None,  # positions per chunk of local attention; None: no chunks
        out: Tensor | None = None,  # [T, Hq, Dv], written and returned; no memory shared with q or the cache
        return_lse: bool = False,  # also return the LSE
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute softmax attention of every query row over its sequence's paged keys.

        `alibi_slopes` add slope * (key position - query position) to a head's scores (Press et al. 2022). `softcap` is
        Gemma 2's. `sinks` are one more logit per head in the softmax's denominator, without a value (gpt-oss). With
        `chunk` a row sees no key before the last multiple of `chunk` positions (Llama 4); this requires a causal plan.
        Blocks of earlier chunks may be freed if the plan has a window of `chunk` keys.

        Returns:
            out [T, Hq, Dv], and with `return_lse` the LSE, fp32 [T, Hq] (float64 for float64): the natural logarithm of
            the sum of exponentials of each row's scores. A row that sees no key gives zeros and -inf.

        Raises:
            BadValue: also for sinks together with `return_lse`, and for a plan of another backend.
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
        lse_a: Tensor,  # fp32 [T, Hq], natural logarithm
        out_b: Tensor,  # [T, Hq, Dv]
        lse_b: Tensor,  # fp32 [T, Hq], natural logarithm
    ) -> tuple[Tensor, Tensor]:
        """Merge attention over two disjoint sets of keys into attention over their union.

        out = (e^lse_a · out_a + e^lse_b · out_b) / (e^lse_a + e^lse_b), as FlashInfer's merge_state.

        Returns:
            out [T, Hq, Dv] and the LSE, fp32 [T, Hq].
        """
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
        """Apply attention sinks to a state: one more logit per head, without a value (gpt-oss).

        Returns:
            out · e^lse / (e^lse + e^sink), [T, Hq, Dv].
        """
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
        kv: PagedKV,  # the layer's cache, written
        plan: AttentionPlan,  # of this backend, updated with slots
    ) -> None:
        """Store row t's K and V at slot plan.slots[t], that is at offset slot % B of block slot // B; -1 skips it.

        K and V may share memory only as in a latent cache: the rows of one begin with the rows of the other, in the
        cache and in the new rows. `plan.nonfinite` reports the rows that were not finite.

        Raises:
            BadValue: also for a plan that was updated without slots, and for a plan of another backend.
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
        """Copy K and V of block src[i] to block dst[i]: copy-on-write of a shared block before it is written.

        Args:
            kv: the layer's cache, written.
            src: ids of the blocks to read.
            dst: ids of the blocks to write, as many. None may occur twice, or be in `src`.
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
        eps: float,  # added to the mean of squares
    ) -> Tensor:
        """Compute RMSNorm over the last dimension (Zhang & Sennrich 2019).

        Returns:
            x / sqrt(mean(x²) + eps) * weight, [..., H].
        """
        validate_small.check_norm(x, eps, weight=weight)
        return self._rms_norm(x, weight, eps)

    @abstractmethod
    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @_operator(_add_rms_norm_in_graph)
    def add_rms_norm(
        self,
        x: Tensor,  # [T, H]
        residual: Tensor,  # [T, H], becomes x + residual in place; no memory shared with x or weight
        weight: Tensor,  # [H]
        eps: float,  # added to the mean of squares
    ) -> Tensor:
        """Add x to the residual in place, and compute RMSNorm of the sum.

        Returns:
            rms_norm(residual, weight, eps), [T, H].
        """
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
        eps: float,  # added to the variance
    ) -> Tensor:
        """Compute LayerNorm over the last dimension (Ba et al. 2016).

        Returns:
            (x - mean) / sqrt(var + eps) * weight + bias, [..., H].
        """
        validate_small.check_norm(x, eps, weight=weight, bias=bias)
        return self._layer_norm(x, weight, bias, eps)

    @abstractmethod
    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    @_operator(_rope_in_graph)
    def rope(
        self,
        q: Tensor,  # [T, Hq, D], rotated in place
        k: Tensor,  # [T, Hkv, D], rotated in place; no memory shared with q
        positions: Tensor,  # int32 or int64 [T], in 0..P - 1
        cos: Tensor,  # fp32 [P, D_rot / 2]
        sin: Tensor,  # fp32 [P, D_rot / 2]
    ) -> None:
        """Rotate q and k in place by the angles of their positions (RoPE, Su et al. 2021).

        The pairs are (i, i + D_rot/2) of the first D_rot dimensions, as in GPT-NeoX.

        Raises:
            BadValue: also for a position outside the tables. Positions on a GPU are not checked.
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
        """Compute SwiGLU (Shazeer 2020).

        Returns:
            silu(gate) * up, [T, I].
        """
        validate_small.check_swiglu(gate_up)
        return self._swiglu(gate_up)

    @abstractmethod
    def _swiglu(self, gate_up: Tensor) -> Tensor: ...

    @_operator()
    def gelu(
        self,
        x: Tensor,  # [..., I]
        approximate: Literal["none", "tanh"],  # the exact form with erf, or the one with tanh
    ) -> Tensor:
        """Compute GELU (Hendrycks & Gimpel 2016).

        Returns:
            gelu(x), [..., I].
        """
        validate_small.check_gelu(x, approximate)
        return self._gelu(x, approximate)

    @abstractmethod
    def _gelu(self, x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor: ...

    def activate(
        self,
        x: Tensor,  # [T, 2 I] with a gate, else [T, I]
        activation: Activation,  # the function and its parameters
    ) -> Tensor:
        """Compute the activation between the linears of an MLP, in fp32.

        Returns:
            The activation in the dtype of x, [T, I].
        """
        validate_small.check_activation(x, activation)
        return self._activate(x, activation)

    @abstractmethod
    def _activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    def choose(
        self,
        logits: Tensor,  # fp32 [T, E], no NaN
        choice: Choice,  # the rule of the router
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row from its router's logits.

        Returns:
            The experts, int64 [T, k], most preferred first and ties by the lower id, and their shares, fp32 [T, k].
        """
        validate_small.check_choice(logits, choice)
        return self._choose(logits, choice)

    def _choose(self, logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        return chosen_experts(logits, choice, self.top_k_softmax, self.top_k)

    def experts(
        self,
        x: Tensor,  # [T, H]
        layer: ExpertLayer,  # the router and its experts
        seen: Tensor | None = None,  # [T, H], the router's input; None: x
    ) -> Tensor:
        """Compute a mixture of experts: each row's experts, weighted by the router (Shazeer et al. 2017).

        Rows are gathered by expert, so that a weight is read once for all rows of its expert. Their number has to be
        known on the host, so this synchronises with a GPU. The sum is computed in fp32, the preferred expert first.

        Returns:
            The weighted sum, [T, H].
        """
        return weighted_experts(x, layer, self.choose, self.activate, seen)

    # -------------------------------------------------------------------------- for a sampler, and for a router

    @_operator()
    def logsumexp(
        self,
        logits: Tensor,  # fp32 [R, V]
    ) -> Tensor:
        """Compute log(sum(exp(logits))) of each row.

        Returns:
            fp32 [R].
        """
        validate_small.check_logits(logits)
        return self._logsumexp(logits)

    @abstractmethod
    def _logsumexp(self, logits: Tensor) -> Tensor: ...

    @_operator()
    def top_k(
        self,
        logits: Tensor,  # fp32 [R, V], no NaN
        k: int,  # in 0..V
    ) -> Tensor:
        """Find the k largest logits of each row.

        Returns:
            Their ids, int64 [R, k], largest first and ties by the lower id.
        """
        validate_small.check_logits(logits, k)
        return self._top_k(logits, k)

    @abstractmethod
    def _top_k(self, logits: Tensor, k: int) -> Tensor: ...

    @_operator()
    def top_k_softmax(
        self,
        logits: Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
        k: int,  # in 0..V
    ) -> tuple[Tensor, Tensor]:
        """Find the k largest logits of each row and their probabilities, as a router chooses experts.

        Returns:
            The ids of `top_k`, int64 [R, k], and each one's value of the row's softmax, fp32 [R, k].
        """
        validate_small.check_logits(logits, k)
        return self._top_k_softmax(logits, k)

    @abstractmethod
    def _top_k_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]: ...


# -------------------------------------------------------------------------------------- which backends there are

BACKENDS = {  # name -> the module with its BACKEND, by preference: "auto" takes the first one that is available
    "cpu": "quire.ops.cpu",
    "triton": "quire.ops.triton",
    "reference": "quire.ops.reference",
    "gather": "quire.ops.gather",
}

NEEDS = {"triton": "triton"}  # name -> the package that the module imports


def load(name: str = "auto", device: str = "cpu") -> Backend:
    """Return a backend by name, or with "auto" the fastest one that serves the device.

    Args:
        name: a key of BACKENDS, or "auto".
        device: a device of torch, for example "cpu" or "cuda".

    Raises:
        Unsupported: if there is no such backend or it cannot run here. The message has the reason.

    Example:
        >>> ops.load("reference").name
        'reference'
    """
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        reason = unavailable(candidate, device)
        if reason is None:
            return _backend(candidate)
        reasons.append(f"{candidate}: {reason}")
    raise Unsupported(f"no attention backend for device {device!r} ({'; '.join(reasons)})")


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Return the reason why a backend cannot serve the device on this machine, or None if it can.

    Args:
        name: a key of BACKENDS.
        device: a device of torch, for example "cpu" or "cuda".

    Raises:
        Unsupported: if there is no such backend.

    Example:
        >>> print(ops.unavailable("reference"))
        None
    """
    if name not in BACKENDS:
        raise Unsupported(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return f"the package {NEEDS[name]!r} is not installed"
    return _backend(name).unavailable(device)


def _backend(name: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[name]).BACKEND)
