"""InfiniOP's paged prefill: a descriptor that is made once, from shapes alone, and run many times."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadStride, BadValue, Unsupported, check_number
from quire.ops.checks.attention import check_slopes
from quire.ops.checks.tensors import check_integers, renamed
from quire.ops.plan import AttentionPlan
from quire.ops.registry import load
from quire.ops.spec import MAX_HEAD_DIM, AttentionSpec, PagedKV

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = ("out", "q", "k_cache", "v_cache", "block_tables", "seq_lens", "cum_seq_lens_q", "alibi_slopes")
DIMS = ((3,), (3,), (4,), (4,), (2,), (1,), (1,), (1, 2))


@dataclass(frozen=True)
class PagedPrefillInfo:
    """Properties of the calls that a descriptor was made for. Strides are in elements."""

    dtype: torch.dtype  # of q, the caches and out
    scale: float  # factor of q·k
    num_seqs: int  # S
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_size: int  # D
    block_size: int  # B
    max_num_blocks_per_seq: int  # M
    total_q_tokens: int  # T
    q_stride: int  # from one query token to the next
    q_head_stride: int  # from one query head to the next
    kv_block_stride: int  # from one block to the next, in K and in V
    kv_head_stride: int  # from one KV head to the next, in K and in V


class Look(NamedTuple):
    """The properties of a tensor that a call has to repeat."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]


class PagedPrefill:
    """Causal attention of ragged query rows over a paged cache, made once and run many times (InfiniOP).

    `create` reads shapes, strides and dtypes only, so tensors on torch's "meta" device are accepted. `run` takes
    tensors with the same properties and allocates no tensor: the descriptor owns the plan's memory, so only one caller
    may use it at a time. (The check of values on the host takes some temporary memory; so does a run on a GPU without
    host copies, for one column of the tables at a time.)

    All errors are `quire.errors` with a `status`: BAD_SHAPE, BAD_DTYPE, BAD_STRIDE, BAD_VALUE or UNSUPPORTED.

    Example:
        >>> q, cache = torch.randn(3, 8, 64), torch.randn(32, 2, 16, 64)
        >>> tensors = {
        ...     "out": torch.empty_like(q),
        ...     "q": q,
        ...     "k_cache": cache,
        ...     "v_cache": torch.randn_like(cache),
        ...     "block_tables": torch.tensor([[7, 2, 11]]),
        ...     "seq_lens": torch.tensor([40]),
        ...     "cum_seq_lens_q": torch.tensor([0, 3]),
        ... }
        >>> with ops.PagedPrefill.create("cpu", **tensors) as prefill:
        ...     prefill.run(**tensors)
    """

    def __init__(
        self, info: PagedPrefillInfo, num_blocks: int, device: torch.device, looks: dict[str, Look | None], backend: str
    ) -> None:
        """Make a descriptor from checked properties. Use `create` instead."""
        self._info, self._device, self._looks = info, device, looks
        spec = AttentionSpec(
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_size,
            block_size=info.block_size,
            num_blocks=num_blocks,
            dtype=info.dtype,
            device=str(device),
        )
        self._ops = load(backend, device.type)
        sizes = info.total_q_tokens, info.num_seqs, info.max_num_blocks_per_seq
        self._plan: AttentionPlan | None = self._ops.make_plan(spec, *sizes)

    @classmethod
    def create(
        cls,
        device: str | torch.device,  # of the tensors of a run
        out: Tensor,  # [T, Hq, D]
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [N, Hkv, B, D]
        v_cache: Tensor,  # [N, Hkv, B, D]
        block_tables: Tensor,  # int32 or int64 [S, M]
        seq_lens: Tensor,  # int32 or int64 [S]
        cum_seq_lens_q: Tensor,  # int32 or int64 [S+1]
        alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
        *,
        backend: str = "auto",  # name of a backend, as in `load`
    ) -> PagedPrefill:
        """Make a descriptor of calls with tensors like these. The values of the tensors are not read.

        Returns:
            The descriptor. Close it to free its memory, or use it in a `with` statement.

        Raises:
            BadShape: for a wrong number of dimensions, sizes that do not match, no query token, no head, no sequence,
                or a head size above 1,024.
            BadDtype: if q, k, v and out have different dtypes, or one other than fp16, bf16 and fp32; or if tables and
                lengths are neither int32 nor int64.
            BadStride: if a last dimension is not contiguous, or the caches have different strides.
            BadValue: for a scale that is not finite, or a block size above 256.
            Unsupported: if there is no such device or backend.
        """
        given = (out, q, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, alibi_slopes)
        tensors = dict(zip(NAMES, given, strict=True))
        _check_looks(tensors)
        if scale is not None:
            check_number(BadValue, "scale", scale, -math.inf)
        info = PagedPrefillInfo(
            dtype=q.dtype,
            scale=1.0 / math.sqrt(q.shape[2]) if scale is None else scale,
            num_seqs=len(seq_lens),
            num_heads=q.shape[1],
            num_kv_heads=k_cache.shape[1],
            head_size=q.shape[2],
            block_size=k_cache.shape[2],
            max_num_blocks_per_seq=block_tables.shape[1],
            total_q_tokens=q.shape[0],
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            kv_block_stride=k_cache.stride(0),
            kv_head_stride=k_cache.stride(1),
        )
        looks = {name: None if x is None else Look(x.shape, x.dtype, x.stride()) for name, x in tensors.items()}
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise Unsupported(f"device is {device!r}; torch knows no such device") from error
        return cls(info, len(k_cache), place, looks, backend)

    @property
    def info(self) -> PagedPrefillInfo:
        """Properties of the calls that the descriptor was made for."""
        return self._info

    @property
    def workspace_size(self) -> int:
        """Size in bytes of the workspace that `run` needs: 0 on a CPU and with the triton backend.

        Other backends on a GPU, if the host does not read the lengths, need the state of the running softmax.
        """
        if self._device.type == "cpu" or self._open_plan().takes_device_metadata:
            return 0
        return self._info.total_q_tokens * self._info.num_heads * (self._info.head_size + 2) * 4

    def run(
        self,
        out: Tensor,  # [T, Hq, D]
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [N, Hkv, B, D]
        v_cache: Tensor,  # [N, Hkv, B, D]
        block_tables: Tensor,  # int32 or int64 [S, M]
        seq_lens: Tensor,  # int32 or int64 [S]
        cum_seq_lens_q: Tensor,  # int32 or int64 [S+1]
        alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        *,
        workspace: Tensor | None = None,  # [bytes], at least workspace_size of them
        stream: torch.cuda.Stream | None = None,  # None: torch's current one
        host_metadata: tuple[Tensor, Tensor, Tensor] | None = None,  # [S, M], [S], [S+1] on the CPU
    ) -> None:
        """Compute `out`. Sequence s has the query rows cum_seq_lens_q[s]:[s+1], the last of its seq_lens[s] tokens.

        On a CPU all values are checked: cum_seq_lens_q starts at 0, never falls and ends at T; every KV length is at
        least its query length and fits its table; every table entry that is read is the id of a block.

        On a GPU the work is queued on `stream` without a synchronisation. Values on the device are therefore not
        checked, unless `host_metadata` has copies of block_tables, seq_lens and cum_seq_lens_q. Unchecked, a wrong
        length or id reads another sequence's block and gives wrong numbers, but never reads memory outside the cache;
        and backends other than triton walk all columns of the tables, whatever the lengths. With host copies, long
        contexts are also divided among programs.

        Raises:
            BadShape, BadDtype, BadStride: for a tensor that differs from the described one.
            BadValue: for invalid values, a workspace that is too small or missing, a stream on a CPU, or a closed
                descriptor.
        """
        given = (out, q, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, alibi_slopes)
        tensors = dict(zip(NAMES, given, strict=True))
        plan = self._open_plan()
        self._check_call(tensors, workspace, stream)
        if self._device.type == "cpu":
            if host_metadata is not None:
                raise BadValue("host_metadata was given; on the CPU the metadata itself lies on the host")
            host_metadata = (block_tables, seq_lens, cum_seq_lens_q)
        kv = PagedKV(k_cache, v_cache)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if host_metadata is not None:
                tables, lens, starts = self._check_host(host_metadata)
                with renamed(query_starts="cum_seq_lens_q", context_lens="seq_lens", k="k_cache", v="v_cache"):
                    plan.update(starts, lens, tables)
                    self._ops.attention(q, kv, plan, scale=self._info.scale, alibi_slopes=alibi_slopes, out=out)
            elif plan.takes_device_metadata:
                plan.update_on_device(self._info.total_q_tokens, cum_seq_lens_q, seq_lens, block_tables)
                self._ops.attention(q, kv, plan, scale=self._info.scale, alibi_slopes=alibi_slopes, out=out)
            elif workspace is None:
                raise BadValue(
                    f"workspace is None; lengths on {self._device} need one of {self.workspace_size} bytes, or "
                    f"host_metadata"
                )
            else:
                state = workspace.view(torch.uint8).flatten()[: self.workspace_size].view(torch.float32)
                attend_unseen(*given, self._info.scale, state)

    def close(self) -> None:
        """Free the descriptor's memory. It cannot be run afterwards. Closing twice is allowed."""
        self._plan = None

    def __enter__(self) -> PagedPrefill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_plan(self) -> AttentionPlan:
        if self._plan is None:
            raise BadValue("the descriptor was closed; create another one")
        return self._plan

    def _check_call(
        self, tensors: dict[str, Tensor | None], workspace: Tensor | None, stream: torch.cuda.Stream | None
    ) -> None:
        if stream is not None and self._device.type == "cpu":
            raise BadValue(f"stream is {stream}; a descriptor on the CPU has no streams, so it must be None")
        if workspace is not None:
            self._check_workspace(workspace)
        for name, tensor in tensors.items():
            look = self._looks[name]
            if tensor is None or look is None:
                if (tensor is None) != (look is None):
                    there, here = ("without", "with") if look is None else ("with", "without")
                    raise BadValue(f"the descriptor was created {there} {name} and is run {here} it")
                continue
            if tensor.shape != look.shape:
                raise BadShape(f"{name} has shape {tuple(tensor.shape)}; described was {tuple(look.shape)}")
            if tensor.dtype != look.dtype:
                raise BadDtype(f"{name} has dtype {tensor.dtype}; described was {look.dtype}")
            differ = any(a != b and n > 1 for a, b, n in zip(tensor.stride(), look.stride, look.shape, strict=True))
            if differ and tensor.is_floating_point():
                raise BadStride(f"{name} has strides {tensor.stride()}; described were {look.stride}")
            if tensor.device.type != self._device.type:
                raise BadValue(f"{name} is on {tensor.device}; the descriptor was created for {self._device}")

    def _check_workspace(self, workspace: Tensor) -> None:
        size = workspace.numel() * workspace.element_size()
        if size < self.workspace_size:
            raise BadValue(f"workspace has {size} bytes; it needs at least {self.workspace_size}")
        if not workspace.is_contiguous() or workspace.data_ptr() % 4:
            raise BadStride(
                f"workspace has strides {workspace.stride()} and starts at {workspace.data_ptr()}; it must be "
                f"contiguous and start at a multiple of 4 bytes"
            )

    def _check_host(self, metadata: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Check the metadata and return it."""
        if not isinstance(metadata, tuple) or len(metadata) != 3:
            raise BadValue("host_metadata must be a tuple: copies of block_tables, seq_lens and cum_seq_lens_q")
        tables, lens, starts = metadata
        for name, x in (("block_tables", tables), ("seq_lens", lens), ("cum_seq_lens_q", starts)):
            look = self._looks[name]
            check_integers(name, x, 2 if name == "block_tables" else 1)
            if look is not None and x.shape != look.shape:
                raise BadShape(f"{name} on the host has shape {tuple(x.shape)}; described was {tuple(look.shape)}")
        self._check_values(lens, starts)
        return metadata

    def _check_values(self, lens: Tensor, starts: Tensor) -> None:
        """Check the requirements of InfiniOP's interface on lengths. The plan checks the rest."""
        rows = starts.diff()
        if starts[0] != 0:
            raise BadValue(f"cum_seq_lens_q[0] is {starts[0]}; the first sequence's rows start at 0")
        if (rows < 0).any():
            s = int((rows < 0).nonzero()[0])
            raise BadValue(
                f"cum_seq_lens_q falls from {starts[s]} to {starts[s + 1]} at sequence {s}; it must never fall"
            )
        if starts[-1] != self._info.total_q_tokens:
            raise BadValue(
                f"cum_seq_lens_q ends at {starts[-1]}; q has {self._info.total_q_tokens} tokens, so it must end there"
            )
        if (lens < rows).any():
            s = int((lens < rows).nonzero()[0])
            raise BadValue(
                f"seq_lens[{s}] is {lens[s]}; sequence {s} has {rows[s]} query tokens, which are among its KV tokens"
            )


def attend_unseen(
    out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [N, Hkv, B, D]
    v_cache: Tensor,  # [N, Hkv, B, D]
    block_tables: Tensor,  # int [S, M]
    seq_lens: Tensor,  # int [S]
    cum_seq_lens_q: Tensor,  # int [S+1]
    alibi_slopes: Tensor | None,  # fp32 [Hq] or [S, Hq]
    scale: float,
    state: Tensor,  # fp32 [T * Hq * (D + 2)], overwritten
) -> None:
    """Compute the same attention without reading lengths and tables on the host: walk every column of the tables.

    Each row finds its sequence by binary search and masks the keys that it does not see. Ids are clamped to the cache.
    """
    (T, Hq, D), (N, Hkv, B, _) = q.shape, k_cache.shape
    row = torch.arange(T, device=q.device)
    starts = cum_seq_lens_q.long()
    seq = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, len(seq_lens) - 1)
    position = (seq_lens.long()[seq] - starts[seq + 1] + row)[:, None]  # [T, 1]
    wide = q.float().reshape(T, Hkv, Hq // Hkv, D)
    state = state.view(T, Hkv, Hq // Hkv, D + 2)
    top, total, mix = state[..., :1], state[..., 1:2], state[..., 2:]
    top.fill_(-torch.inf), total.zero_(), mix.zero_()
    for column in range(block_tables.shape[1]):
        ids = block_tables[:, column].long().clamp(0, N - 1)[seq]
        key = column * B + torch.arange(B, device=q.device)
        visible = (key <= position)[:, None, None]  # [T, 1, 1, B]
        score = torch.einsum("thgd,thbd->thgb", wide, k_cache[ids].float()) * scale
        if alibi_slopes is not None:
            slopes = alibi_slopes[seq] if alibi_slopes.dim() == 2 else alibi_slopes
            score += slopes.view(*slopes.shape[:-1], Hkv, -1, 1) * (key - position)[:, None, None]
        score = score.masked_fill(~visible, -torch.inf)
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)  # -inf: the row has seen no key yet
        weight, correction = torch.exp(score - shift), torch.exp(top - shift)
        values = v_cache[ids].float().masked_fill(~visible.mT, 0.0)  # unowned slots may be NaN
        total.mul_(correction).add_(weight.sum(-1, keepdim=True))
        mix.mul_(correction).add_(torch.einsum("thgb,thbd->thgd", weight, values))
        top.copy_(new_top)
    out.copy_(torch.where(total == 0, 0.0, mix / total).flatten(1, 2))


# ------------------------------------------------------------------------------------------------- the looks


def _check_looks(tensors: dict[str, Tensor | None]) -> None:
    """Check shapes, dtypes and strides, without reading values."""
    for (name, x), dims in zip(tensors.items(), DIMS, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise BadDtype(f"{name} is a {type(x).__name__}; it must be a tensor")
        if x is not None and x.dim() not in dims:
            wanted = " or ".join(map(str, dims))
            raise BadShape(f"{name} has shape {tuple(x.shape)}; it must have {wanted} dimension(s)")
    out, q, k, v, tables, lens, starts, slopes = tensors.values()
    if out is None or q is None or k is None or v is None or tables is None or lens is None or starts is None:
        missing = next(name for name, x in tensors.items() if x is None)
        raise BadValue(f"{missing} is None; only alibi_slopes may be left out")
    if q.dtype not in DTYPES:
        raise BadDtype(f"q has dtype {q.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    for name, x in (("out", out), ("k_cache", k), ("v_cache", v)):
        if x.dtype != q.dtype:
            raise BadDtype(f"{name} has dtype {x.dtype} and q {q.dtype}; they must be the same")
    for name, x in (("block_tables", tables), ("seq_lens", lens), ("cum_seq_lens_q", starts)):
        check_integers(name, x, x.dim())
    _check_sizes(out, q, k, v, tables, lens, starts, slopes)
    for name, x in (("out", out), ("q", q), ("k_cache", k), ("v_cache", v)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise BadStride(f"{name} has strides {x.stride()}; the last one must be 1")
    if k.stride()[:2] != v.stride()[:2]:
        raise BadStride(
            f"k_cache has strides {k.stride()} and v_cache {v.stride()}; the first two, of blocks and of heads, must "
            f"be the same"
        )


def _check_sizes(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, starts: Tensor, slopes: Tensor | None
) -> None:
    total_q_tokens, num_heads, head_size = q.shape
    if total_q_tokens == 0 or num_heads == 0:
        raise BadShape(f"q has shape {tuple(q.shape)}; there must be a query token and a head")
    if len(lens) == 0:
        raise BadShape(f"seq_lens has shape (0,); the {total_q_tokens} query tokens of q belong to a sequence at least")
    if not 1 <= head_size <= MAX_HEAD_DIM:
        raise BadShape(f"q has a head size of {head_size}; it must lie in 1..{MAX_HEAD_DIM}")
    if k.shape[1] == 0 or num_heads % k.shape[1]:
        raise BadShape(f"k_cache has {k.shape[1]} heads; the {num_heads} heads of q must be a multiple of that")
    if k.shape[0] == 0 or k.shape[2] == 0:
        raise BadShape(f"k_cache has shape {tuple(k.shape)}; there must be a block, and a token in it")
    for name, x, shape in (
        ("out", out, tuple(q.shape)),
        ("k_cache", k, (*k.shape[:3], head_size)),
        ("v_cache", v, tuple(k.shape)),
        ("block_tables", tables, (len(lens), tables.shape[1])),
        ("cum_seq_lens_q", starts, (len(lens) + 1,)),
    ):
        if tuple(x.shape) != shape:
            raise BadShape(f"{name} has shape {tuple(x.shape)}; expected {shape}")
    if slopes is not None:
        check_slopes(slopes, num_heads, len(lens), slopes.device)
