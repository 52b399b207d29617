"""Every check of the arguments of attention and of what goes with it, for every backend.

Metadata (tables, lengths, slots) is checked on the host, once a step, in one vectorised pass. Per call only shapes,
dtypes and strides are looked at, which costs no pass over data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.errors import (
    BadDtype,
    BadShape,
    BadStride,
    BadValue,
    QuireError,
    Unsupported,
    check_number,
)
from quire.ops import overlap
from quire.ops.rows import used_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from quire.ops.interface import AttentionSpec, Limits, PagedKV
    from quire.ops.plan import AttentionPlan

MAX_HEAD_DIM = 1024
MAX_BLOCK_SIZE = 256
INT32_MAX = 2**31 - 1
MAX_CONTEXT = 2**31 - 1024  # tokens: kernels count keys in an int32, a tile beyond the last one included
MAX_SCALE = 2.0**120  # of scores: fp32 holds it, and its inverse, in units of log 2 too
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of rows and states


# ------------------------------------------------------------------------------------------------ the spec


def check_spec(spec: AttentionSpec) -> None:
    """Raise BadValue or BadDtype for a field of the spec that no backend could serve."""
    for name, upper in (
        ("num_heads", INT32_MAX),
        ("num_kv_heads", INT32_MAX),
        ("head_dim", MAX_HEAD_DIM),
        ("head_dim_v", MAX_HEAD_DIM),
        ("block_size", MAX_BLOCK_SIZE),
        ("num_blocks", INT32_MAX),
        ("window", INT32_MAX),
    ):
        value = getattr(spec, name)
        if value is None and name in ("head_dim_v", "window"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadValue(f"spec.{name} is {value!r}; it must be an integer")
        if not 1 <= value <= upper:
            raise BadValue(f"spec.{name} is {value}; it must lie in 1..{upper}")
    if spec.num_heads % spec.num_kv_heads:
        raise BadValue(f"spec.num_heads is {spec.num_heads}, no multiple of spec.num_kv_heads, {spec.num_kv_heads}")
    if spec.num_blocks * spec.block_size > INT32_MAX:
        raise BadValue(
            f"spec.num_blocks * spec.block_size is {spec.num_blocks * spec.block_size}; slots are numbered in an "
            f"int32, so at most {INT32_MAX}"
        )
    if not isinstance(spec.reproducible, bool):
        raise BadValue(f"spec.reproducible is {spec.reproducible!r}; it must be True or False")
    if spec.window is not None and not spec.causal:
        raise BadValue(f"spec.window is {spec.window} with causal=False; a window needs causal attention")
    for name in ("dtype", "kv_dtype"):
        dtype = getattr(spec, name)
        if name == "kv_dtype" and dtype is None:
            continue
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise BadDtype(f"spec.{name} is {dtype!r}; it must be a floating-point torch.dtype")
    try:
        torch.device(spec.device)
    except (RuntimeError, TypeError):
        raise BadValue(f"spec.device is {spec.device!r}; it must name a device of torch, as 'cpu' does") from None


def check_supported(spec: AttentionSpec, name: str, limits: Limits) -> None:
    """Raise Unsupported where backend `name` does not declare that it serves the spec."""
    if spec.dtype not in limits.kv_dtypes:
        served = ", ".join(sorted(map(str, limits.kv_dtypes)))
        raise Unsupported(f"backend {name!r} does not serve dtype {spec.dtype}; it serves {served}")
    if spec.cache_dtype not in limits.kv_dtypes[spec.dtype]:
        served = ", ".join(sorted(map(str, limits.kv_dtypes[spec.dtype])))
        raise Unsupported(
            f"backend {name!r} does not serve a cache of {spec.cache_dtype} for dtype {spec.dtype}; it serves {served}"
        )
    if spec.reproducible and not limits.reproducible:
        raise Unsupported(
            f"backend {name!r} does not give the same bits in every batch; spec.reproducible must be False"
        )
    largest = max(spec.head_dim, spec.dim_v)
    if largest > limits.max_head_dim:
        raise Unsupported(
            f"backend {name!r} serves head dimensions up to {limits.max_head_dim}; the spec has {largest}"
        )


# ------------------------------------------------------------------------------------------ a step's metadata


def step_sizes(
    query_starts: torch.Tensor,  # int32 [S+1], host
    context_lens: torch.Tensor,  # int32 [S], host
    block_tables: torch.Tensor,  # int32 [S, M], host
) -> tuple[int, int, int]:
    """T, S and M of a step whose values are still to be checked. Raises BadShape, BadDtype or BadValue."""
    starts = _host_integers("query_starts", query_starts, 1)
    lens = _host_integers("context_lens", context_lens, 1)
    tables = _host_integers("block_tables", block_tables, 2)
    num_tokens = max(0, int(starts[-1])) if len(starts) else 0
    # Before room is made for so many.
    if num_tokens > INT32_MAX:
        raise BadValue(f"query_starts[{len(starts) - 1}] is {num_tokens}; rows are numbered in an int32")
    for name, shape in (("context_lens", lens.shape), ("block_tables", tables.shape)):
        if max(shape) > INT32_MAX:
            raise BadShape(f"{name} has shape {shape}; sequences and their blocks are numbered in an int32")
    return num_tokens, len(lens), tables.shape[1]


def check_metadata(
    plan: AttentionPlan,
    query_starts: torch.Tensor,  # int32 [S+1], host
    context_lens: torch.Tensor,  # int32 [S], host
    block_tables: torch.Tensor,  # int32 [S, M], host
    slots: torch.Tensor | None,  # int64 [T], host
) -> None:
    """Check a step's metadata against the plan's spec and room. Raises BadShape, BadDtype or BadValue."""
    starts = _host_integers("query_starts", query_starts, 1)
    lens = _host_integers("context_lens", context_lens, 1)
    tables = _host_integers("block_tables", block_tables, 2)
    num_seqs = len(lens)
    if len(starts) != num_seqs + 1:
        raise BadShape(
            f"query_starts has {len(starts)} entries and context_lens {num_seqs}; with S sequences they have S + 1 "
            f"and S"
        )
    if len(tables) != num_seqs:
        raise BadShape(f"block_tables has {len(tables)} rows for {num_seqs} sequences; it needs one a sequence")
    if num_seqs > plan.max_seqs:
        raise BadShape(f"the step has {num_seqs} sequences; the plan was made for at most {plan.max_seqs}")
    if tables.shape[1] > plan.max_blocks:
        raise BadShape(f"block_tables has {tables.shape[1]} columns; the plan was made for at most {plan.max_blocks}")
    num_tokens = _check_query_starts(starts, plan.max_tokens)
    _check_tables(plan.spec, starts, lens, tables)
    if slots is not None:
        _check_slots(plan.spec, _host_integers("slots", slots, 1), num_tokens)


def _host_integers(name: str, tensor: torch.Tensor, dims: int) -> NDArray[np.integer]:
    """The tensor as a numpy view, if it is an int32 or int64 host tensor of that many dimensions."""
    check_integers(name, tensor, dims)
    if tensor.device.type != "cpu":
        raise BadValue(f"{name} lies on {tensor.device}; metadata is read on the host, so give a CPU tensor")
    view: NDArray[np.integer] = tensor.numpy()
    return view


def check_integers(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Raise BadDtype or BadShape unless it is an int32 or int64 tensor of that many dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise BadDtype(f"{name} is a {type(tensor).__name__}; it must be an integer tensor")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise BadDtype(f"{name} has dtype {tensor.dtype}; it must be int32 or int64")
    if tensor.dim() != dims:
        raise BadShape(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimension(s)")


def to_host(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """An integer tensor on the host, where it lies or copied there. Raises BadDtype or BadShape."""
    check_integers(name, tensor, dims)
    return tensor.cpu()


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors that come from within name arguments as the caller knows them: names[theirs] for theirs."""
    try:
        yield
    except QuireError as error:
        words = re.compile(r"\b(?:kv\.)?(" + "|".join(names) + r")\b")
        raise type(error)(words.sub(lambda found: names[found[1]], str(error))) from None


def _check_query_starts(starts: NDArray[np.integer], max_tokens: int) -> int:
    if starts[0] != 0:
        raise BadValue(f"query_starts[0] is {starts[0]}; the first sequence's rows start at 0")
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if falls.size:
        s = int(falls[0])
        raise BadValue(f"query_starts falls from {starts[s]} to {starts[s + 1]} at sequence {s}; it must never fall")
    num_tokens = int(starts[-1])
    if num_tokens > max_tokens:
        raise BadShape(f"the step has {num_tokens} query tokens; the plan was made for at most {max_tokens}")
    return num_tokens


def _check_tables(
    spec: AttentionSpec,
    starts: NDArray[np.integer],
    lens: NDArray[np.integer],
    tables: NDArray[np.integer],
) -> None:
    """Lengths that the tables can hold, and a valid id in every table entry that may be read."""
    width = tables.shape[1]
    longest = min(width * spec.block_size, MAX_CONTEXT)
    starts, lens = starts.astype(np.int64), lens.astype(np.int64)
    bad = np.flatnonzero((lens < 0) | (lens > longest))
    if bad.size:
        s = int(bad[0])
        raise BadValue(
            f"context_lens[{s}] is {lens[s]}; sequence {s}'s table of {width} blocks of {spec.block_size} holds "
            f"0..{longest} tokens"
        )
    if tables.size == 0 or (tables.min() >= 0 and tables.max() < spec.num_blocks):
        return  # whichever entries are read
    end = -(-lens // spec.block_size)  # first entry that is not read
    begin = np.zeros_like(end)  # first entry that is read
    if spec.window is not None:
        first_row = lens - (starts[1:] - starts[:-1])  # position of the sequence's first query row
        begin = np.maximum(first_row - spec.window + 1, 0) // spec.block_size
    column = np.arange(width, dtype=np.int64)
    read = (column >= begin[:, None]) & (column < end[:, None])
    rows, columns = np.nonzero(read & ((tables < 0) | (tables >= spec.num_blocks)))
    if rows.size:
        s, j = int(rows[0]), int(columns[0])
        raise BadValue(
            f"block_tables[{s}, {j}] is {tables[s, j]}; sequence {s} of {lens[s]} tokens reads that entry, so it "
            f"must be a block id in 0..{spec.num_blocks - 1}"
        )


def _check_slots(spec: AttentionSpec, slots: NDArray[np.integer], num_tokens: int) -> None:
    if len(slots) != num_tokens:
        raise BadShape(f"slots has {len(slots)} entries for {num_tokens} query tokens; it needs one a token")
    num_slots = spec.num_blocks * spec.block_size
    bad = np.flatnonzero((slots < -1) | (slots >= num_slots))
    if bad.size:
        t = int(bad[0])
        raise BadValue(f"slots[{t}] is {slots[t]}; it must be -1 (skip) or lie in 0..{num_slots - 1}")
    written = np.sort(slots[slots >= 0])
    twice = np.flatnonzero(written[1:] == written[:-1])
    if twice.size:
        slot = written[twice[0]]
        t, u = np.flatnonzero(slots == slot)[:2]
        raise BadValue(f"slots[{t}] and slots[{u}] are both {slot}; every row needs a slot of its own")


# ------------------------------------------------------------------------------------------ tensors of a call


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BadShape, BadDtype, BadStride or BadValue unless the tensor is as described, its last stride 1."""
    if tensor.shape != shape:
        raise BadShape(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != dtype:
        raise BadDtype(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    here = tensor.device
    if here != device and (here.type != device.type or device.index is not None):
        raise BadValue(f"{name} lies on {tensor.device}; expected {device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise BadStride(f"{name} has strides {tensor.stride()}; the last one must be 1")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise BadDtype unless it is a dtype that rows and states may have."""
    if tensor.dtype not in FLOATS:
        raise BadDtype(f"{name} has dtype {tensor.dtype}; it must be one of {', '.join(map(str, FLOATS))}")


def check_beside(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise BadValue unless they lie on the device of x."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise BadValue(f"{name} lies on {other.device}; expected {x.device}")


def check_written(
    written: Mapping[str, torch.Tensor],  # by name
    read: Mapping[str, torch.Tensor | None],  # by name
) -> None:
    """Raise BadStride where an element that is written stands for another one as well, of this tensor or another."""
    for name, tensor in written.items():
        if overlap.repeats(tensor):
            raise BadStride(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; it is written, so its "
                f"elements must not share memory"
            )
    if found := overlap.first_shared(written, read):
        raise BadStride(f"{found[0]} shares memory with {found[1]}; it is written, so it needs memory of its own")


def check_kv(kv: PagedKV, spec: AttentionSpec) -> None:
    """Check a layer's cache against the spec."""
    lead = (spec.num_blocks, spec.num_kv_heads, spec.block_size)
    device = _device(spec)
    check_tensor("kv.k", kv.k, (*lead, spec.head_dim), spec.cache_dtype, device)
    check_tensor("kv.v", kv.v, (*lead, spec.dim_v), spec.cache_dtype, device)


def check_write(
    k_new: torch.Tensor,  # [T, Hkv, D]
    v_new: torch.Tensor,  # [T, Hkv, Dv]
    kv: PagedKV,
    plan: AttentionPlan,
) -> None:
    """Check the arguments of write_kv. Raises BadValue on a read-only plan.

    K and V may share memory as those of a latent cache do: one begins with the other, in the cache and in the new rows.
    """
    spec = plan.spec
    check_kv(kv, spec)
    if not plan.writable:
        raise BadValue("write_kv needs a plan that was updated with slots; this one is read-only")
    device = _device(spec)
    check_tensor("k_new", k_new, (plan.num_tokens, spec.num_kv_heads, spec.head_dim), spec.dtype, device)
    check_tensor("v_new", v_new, (plan.num_tokens, spec.num_kv_heads, spec.dim_v), spec.dtype, device)
    new = {"k_new": k_new, "v_new": v_new}
    if begin_alike(kv.k, kv.v) and begin_alike(k_new, v_new):
        check_written({"kv.k": kv.k}, new)
        check_written({"kv.v": kv.v}, new)
    else:
        check_written({"kv.k": kv.k, "kv.v": kv.v}, new)


def begin_alike(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether each row of the one begins with the row of the other."""
    return k.data_ptr() == v.data_ptr() and used_strides(k)[:-1] == used_strides(v)[:-1]


def check_attention(
    q: torch.Tensor,  # [T, Hq, D]
    kv: PagedKV,
    plan: AttentionPlan,
    scale: float | None,
    alibi_slopes: torch.Tensor | None,  # fp32 [Hq] or [S, Hq]
    softcap: float | None,
    sinks: torch.Tensor | None,  # fp32 [Hq]
    out: torch.Tensor | None,  # [T, Hq, Dv]
    return_lse: bool,
) -> None:
    """Check the arguments of attention."""
    spec, device = plan.spec, _device(plan.spec)
    check_kv(kv, spec)
    check_tensor("q", q, (plan.num_tokens, spec.num_heads, spec.head_dim), spec.dtype, device)
    if out is not None:
        check_tensor("out", out, (plan.num_tokens, spec.num_heads, spec.dim_v), spec.dtype, device)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, spec.num_heads, plan.num_seqs, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (spec.num_heads,), torch.float32, device)
    if out is not None:
        check_written({"out": out}, {"q": q, "kv.k": kv.k, "kv.v": kv.v, "alibi_slopes": alibi_slopes, "sinks": sinks})
    if scale is not None:
        check_number(BadValue, "scale", scale, -MAX_SCALE, MAX_SCALE)
    if softcap is not None:  # None for no cap
        check_number(BadValue, "softcap", softcap, 1.0 / MAX_SCALE, MAX_SCALE)
    if sinks is not None and return_lse:
        raise BadValue(
            "sinks close a state, so its LSE could not be merged any more: ask for the LSE without sinks, merge, "
            "and call apply_sinks last"
        )


def check_slopes(slopes: torch.Tensor, num_heads: int, num_seqs: int, device: torch.device) -> None:
    """Check ALiBi's slopes: of each head, or of each sequence and head."""
    shape = tuple(slopes.shape)
    if shape not in ((num_heads,), (num_seqs, num_heads)):
        raise BadShape(f"alibi_slopes has shape {shape}; expected ({num_heads},) or ({num_seqs}, {num_heads})")
    check_tensor("alibi_slopes", slopes, shape, torch.float32, device)


def check_states(
    out_a: torch.Tensor,  # [T, Hq, Dv]
    lse_a: torch.Tensor,  # fp32 [T, Hq]
    out_b: torch.Tensor,  # [T, Hq, Dv]
    lse_b: torch.Tensor,  # fp32 [T, Hq]
) -> None:
    """Check the arguments of merge_states."""
    check_state("out_a", out_a, "lse_a", lse_a)
    check_tensor("out_b", out_b, tuple(out_a.shape), out_a.dtype, out_a.device)
    check_tensor("lse_b", lse_b, tuple(lse_a.shape), lse_a.dtype, out_a.device)


def check_state(
    out_name: str,
    out: torch.Tensor,  # [T, Hq, Dv]
    lse_name: str,
    lse: torch.Tensor,  # fp32 [T, Hq]
) -> None:
    """Check one attention state: an output and the LSE of its rows."""
    if out.dim() != 3:
        raise BadShape(f"{out_name} has shape {tuple(out.shape)}; expected [T, Hq, Dv]")
    check_float(out_name, out)
    check_tensor(out_name, out, tuple(out.shape), out.dtype, out.device)
    lse_dtype = torch.promote_types(out.dtype, torch.float32)
    check_tensor(lse_name, lse, tuple(out.shape[:2]), lse_dtype, out.device)


def check_copy(kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    """Check the arguments of copy_blocks: ids in range, no block written twice or both read and written."""
    for name, tensor in (("kv.k", kv.k), ("kv.v", kv.v)):
        if tensor.dim() != 4:
            raise BadShape(f"{name} has shape {tuple(tensor.shape)}; expected [N, Hkv, B, D]")
        check_tensor(name, tensor, tuple(tensor.shape), tensor.dtype, tensor.device)
        check_written({name: tensor}, {})
    if len(src) != len(dst):
        raise BadShape(f"src has {len(src)} block ids and dst {len(dst)}; they are pairs")
    num_blocks = kv.k.shape[0]
    if kv.v.shape[0] != num_blocks:
        raise BadShape(f"kv.k has {num_blocks} blocks and kv.v {kv.v.shape[0]}; they are pairs")
    for name, ids in (("src", src), ("dst", dst)):
        for i, block in enumerate(ids):
            if isinstance(block, bool) or not isinstance(block, int):
                raise BadDtype(f"{name}[{i}] is {block!r}; it must be an integer on the host")
            if not 0 <= block < num_blocks:
                raise BadValue(f"{name}[{i}] is {block}; it must be a block id in 0..{num_blocks - 1}")
    if len(set(dst)) != len(dst):
        twice = next(block for block in dst if list(dst).count(block) > 1)
        raise BadValue(f"dst names block {twice} twice; a block can be written only once")
    if both := set(src) & set(dst):
        raise BadValue(f"block {min(both)} stands in src and in dst; the order of copies is not defined")


def _device(spec: AttentionSpec) -> torch.device:
    return torch.device(spec.device)
