"""The interface of all backends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from quire.errors import BadValue, Unsupported
from quire.ops import in_graph
from quire.ops.checks import metadata
from quire.ops.checks.attention import check_attention, check_copy, check_index, check_sinks, check_states, check_write
from quire.ops.collectives import Communicator
from quire.ops.decoder_operators import DecoderOperators
from quire.ops.plan import AttentionPlan
from quire.ops.program import Chain, Executor, Program
from quire.ops.recurrent.operators import RecurrentOperators
from quire.ops.spec import AttentionSpec, Limits, PagedKV, Scores, check_supported
from quire.ops.swap import Swap
from quire.ops.weights.linear import Embedding, Linear, Linears


class Backend(DecoderOperators, RecurrentOperators):
    """All device-dependent operators. Use `load` to get one; subclass it to add one.

    A public operator checks its arguments once and calls the implementation of the backend, whose name begins with an
    underscore. `quire.ops.backends.reference` defines each result; `quire.ops.spec` defines the conventions and the
    letters of dimensions. `experts` and `choose` are composed of other operators unless a backend overrides them.

    Every operator raises BadShape, BadDtype, BadStride or BadValue for an invalid argument, naming it. Only additional
    errors are listed at the operators.
    """

    name: str  # as in BACKENDS
    limits: Limits  # the cases that it serves
    plan_type: type[AttentionPlan] = AttentionPlan  # of the plans that its operators take
    has_index = False  # True if it has `index_scores`, which sparse attention needs
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

    def chain(
        self,
        executor: Executor,
        embedding: Embedding,
        head: Linear,
        targets: Tensor | None = None,  # int64 [V]
    ) -> Chain | None:
        """Return the drafts of a head in one call, with the bits of its parts; None if the backend has no such call.

        Args:
            executor: of the head's layers, from the embedding of a token joined with a hidden state to the next one.
            embedding: of the tokens.
            head: the output projection.
            targets: the token of each logit; None: its number.
        """
        return None

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
        self._check_device(spec.device)
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
        key_ends: Tensor | None = None,  # int32 [T], host: a row sees the keys before it; None: those up to its own
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
        plan.update(query_starts, context_lens, block_tables, slots, key_ends)
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
    @in_graph.operator(in_graph.attention)
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
        check_attention(q, kv, plan, scores, out, return_lse)

    @in_graph.operator()
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
        check_states(out_a, lse_a, out_b, lse_b)
        return self._merge_states(out_a, lse_a, out_b, lse_b)

    @abstractmethod
    def _merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]: ...

    @in_graph.operator()
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
        check_sinks(out, lse, sinks)
        return self._apply_sinks(out, lse, sinks)

    @abstractmethod
    def _apply_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor: ...

    def index_scores(
        self,
        q: Tensor,  # [R, Hi, Di]
        weights: Tensor,  # fp32 [R, Hi]
        index: Tensor,  # [N, 1, B, Di], `PagedKV.index`
        tables: Tensor,  # int32 [S, M], host
        sequences: Tensor,  # int64 [R], host: each row's sequence
        counts: Tensor,  # int64 [R], host: the keys that it sees, from the first on
    ) -> Tensor:
        """Score the keys that each row sees, for sparse attention (DeepSeek-V3.2's lightning indexer).

        Returns:
            The sum over the heads of weights * max(0, q·k), fp32 [R, largest count]; -inf for keys that a row does not
            see.

        Raises:
            Unsupported: if the backend has no indexer.
        """
        check_index(q, weights, index, tables, sequences, counts)
        return self._index_scores(q, weights, index, tables, sequences, counts)

    def _index_scores(
        self, q: Tensor, weights: Tensor, index: Tensor, tables: Tensor, sequences: Tensor, counts: Tensor
    ) -> Tensor:
        raise Unsupported(f"backend {self.name!r} has no indexer")

    # ----------------------------------------------------------------------------------------------- the cache

    @in_graph.operator(in_graph.write_kv)
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
        check_write(k_new, v_new, kv, plan)

    @in_graph.operator(in_graph.copy_blocks)
    def copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy K and V of block src[i] to block dst[i]: copy-on-write of a shared block before it is written.

        Args:
            kv: the layer's cache, written.
            src: ids of the blocks to read.
            dst: ids of the blocks to write, as many. None may occur twice, or be in `src`.
        """
        check_copy(kv, src, dst)
        self._copy_blocks(kv, src, dst)

    @abstractmethod
    def _copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None: ...
