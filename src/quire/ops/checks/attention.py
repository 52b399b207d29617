"""Checks of the arguments of attention and its related operators, for every backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import BadDtype, BadShape, BadValue, check_integer, check_number
from quire.ops.checks.tensors import INT32_MAX, begin_alike, check_float, check_tensor, check_written
from quire.ops.plan import AttentionPlan, Outline
from quire.ops.spec import AttentionSpec, PagedKV, Scores, check_kv

MAX_SCALE = 2.0**120  # of scores: fp32 represents it and its inverse, also in units of log 2


def check_write(
    k_new: torch.Tensor,  # [T, Hkv, D]
    v_new: torch.Tensor,  # [T, Hkv, Dv]
    kv: PagedKV,
    plan: AttentionPlan,
) -> None:
    """Check the arguments of write_kv. Raises BadValue on a read-only plan.

    K and V may share memory as in a latent cache: one begins with the other, in the cache and in the new rows. In a
    cache with scales they may do so only if `spec.latent`, since the rounding of a row depends on all of its numbers.
    """
    spec = plan.spec
    check_kv(kv, spec)
    if not plan.writable:
        raise BadValue("write_kv needs a plan that was updated with slots; this one is read-only")
    check_new(k_new, v_new, spec, plan.num_tokens)
    new = {"k_new": k_new, "v_new": v_new}
    if (spec.latent or not spec.is_scaled) and begin_alike(kv.k, kv.v) and begin_alike(k_new, v_new):
        written = kv.tensors()
        latent = written.pop("kv.v")
        check_written(written, new)
        check_written({"kv.v": latent}, new)
    else:
        check_written(kv.tensors(), new)


def check_new(
    k_new: torch.Tensor,  # [T, Hkv, D]
    v_new: torch.Tensor,  # [T, Hkv, Dv]
    spec: AttentionSpec,
    num_tokens: int,  # T
) -> None:
    """Check the keys and values of new tokens."""
    device = torch.device(spec.device)
    check_tensor("k_new", k_new, (num_tokens, spec.num_kv_heads, spec.head_dim), spec.dtype, device)
    check_tensor("v_new", v_new, (num_tokens, spec.num_kv_heads, spec.dim_v), spec.dtype, device)


def check_attention(
    q: torch.Tensor,  # [T, Hq, D]
    kv: PagedKV,
    plan: AttentionPlan | Outline,
    scores: Scores,
    out: torch.Tensor | None,  # [T, Hq, Dv]
    return_lse: bool,
) -> None:
    """Check the arguments of attention."""
    scale, alibi_slopes, softcap, sinks, chunk = scores
    spec, device = plan.spec, torch.device(plan.spec.device)
    check_kv(kv, spec)
    check_tensor("q", q, (plan.num_tokens, spec.num_heads, spec.head_dim), spec.dtype, device)
    if out is not None:
        check_tensor("out", out, (plan.num_tokens, spec.num_heads, spec.dim_v), spec.dtype, device)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, spec.num_heads, plan.num_seqs, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (spec.num_heads,), torch.float32, device)
    if out is not None:
        check_written({"out": out}, {"q": q, **kv.tensors(), "alibi_slopes": alibi_slopes, "sinks": sinks})
    if scale is not None:
        check_number(BadValue, "scale", scale, -MAX_SCALE, MAX_SCALE)
    if softcap is not None:  # None for no cap
        check_number(BadValue, "softcap", softcap, 1.0 / MAX_SCALE, MAX_SCALE)
    if chunk is not None:
        check_integer(BadValue, "chunk", chunk, 1, INT32_MAX)
        if not spec.causal:
            raise BadValue(f"chunk is {chunk} with causal=False; chunks need causal attention")
    if sinks is not None and return_lse:
        raise BadValue(
            "sinks close a state, so its LSE could not be merged any more: ask for the LSE without sinks, merge, "
            "and call apply_sinks last"
        )


def check_index(
    q: torch.Tensor,  # [R, Hi, Di]
    weights: torch.Tensor,  # fp32 [R, Hi]
    index: torch.Tensor,  # [N, 1, B, Di]
    tables: torch.Tensor,  # int32 [S, M], host
    sequences: torch.Tensor,  # int64 [R], host
    counts: torch.Tensor,  # int64 [R], host
) -> None:
    """Check the arguments of index_scores."""
    rows, host = len(sequences), torch.device("cpu")
    if q.dim() != 3 or index.dim() != 4 or tables.dim() != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, index, tables))
        raise BadShape(f"q, index and tables have the shapes {shapes}; expected [R, Hi, Di], [N, 1, B, Di] and [S, M]")
    check_float("q", q)
    check_tensor("q", q, (rows, *q.shape[1:]), q.dtype, q.device)
    check_tensor("weights", weights, (rows, q.shape[1]), torch.float32, q.device)
    check_tensor("index", index, (index.shape[0], 1, index.shape[2], q.shape[2]), q.dtype, q.device)
    check_tensor("tables", tables, tuple(tables.shape), torch.int32, host)
    check_tensor("sequences", sequences, (rows,), torch.int64, host)
    check_tensor("counts", counts, (rows,), torch.int64, host)
    num_blocks, size, most = index.shape[0], index.shape[2], tables.shape[1]
    for name, x, end in (("sequences", sequences, len(tables)), ("counts", counts, most * size + 1)):
        if rows and not 0 <= int(x.min()) <= int(x.max()) < end:
            raise BadValue(f"{name} has values in {int(x.min())}..{int(x.max())}; they must be in 0..{end - 1}")
    longest = torch.zeros(len(tables), dtype=torch.int64).scatter_reduce(0, sequences, counts, "amax")
    held = tables[torch.arange(most) * size < longest[:, None]]
    if held.numel() and not 0 <= int(held.min()) <= int(held.max()) < num_blocks:
        raise BadValue(
            f"tables has blocks in {int(held.min())}..{int(held.max())}; a visible one must be in 0..{num_blocks - 1}"
        )


def check_slopes(slopes: torch.Tensor, num_heads: int, num_seqs: int, device: torch.device) -> None:
    """Check ALiBi's slopes: [Hq] or [S, Hq]."""
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


def check_sinks(
    out: torch.Tensor,  # [T, Hq, Dv]
    lse: torch.Tensor,  # fp32 [T, Hq]
    sinks: torch.Tensor,  # fp32 [Hq]
) -> None:
    """Check the arguments of apply_sinks."""
    check_state("out", out, "lse", lse)
    check_tensor("sinks", sinks, (out.shape[1],), torch.float32, out.device)


def check_copy(kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    """Check the arguments of copy_blocks: ids in range, no block written twice or both read and written."""
    for name, tensor in kv.tensors().items():
        is_scale = name.endswith("_scale")
        if tensor.dim() != (3 if is_scale else 4):
            expected = "[N, Hkv, B]" if is_scale else "[N, Hkv, B, D]"
            raise BadShape(f"{name} has shape {tuple(tensor.shape)}; expected {expected}")
        check_tensor(name, tensor, tuple(tensor.shape), tensor.dtype, tensor.device, any_strides=is_scale)
        check_written({name: tensor}, {})
    if len(src) != len(dst):
        raise BadShape(f"src has {len(src)} block ids and dst {len(dst)}; they are pairs")
    num_blocks = kv.k.shape[0]
    for name, tensor in kv.tensors().items():
        if tensor.shape[0] != num_blocks:
            raise BadShape(f"kv.k has {num_blocks} blocks and {name} {tensor.shape[0]}; they are pairs")
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
        raise BadValue(f"block {min(both)} is in both src and dst; the order of copies is not defined")
