"""flash-attn's functions and the cache update of transformers' continuous batching, with Quire's operators.

Caches are NHD here, `[N, B, Hkv, D]`, as in these libraries. Argument names are theirs, except for return_lse: its LSE
has Quire's shape, one row per token. Options that Quire does not have are not accepted: passing one is a TypeError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported, check_integer
from quire.ops.checks.attention import check_attention, check_new
from quire.ops.checks.tensors import check_integers, check_written, has_values, renamed, to_host
from quire.ops.paged import check_sizes, describe, empty_state
from quire.ops.registered import one_call, pin
from quire.ops.registry import load
from quire.ops.spec import PagedKV, Scores

Window: TypeAlias = tuple[SupportsIndex, SupportsIndex] | Tensor  # two integers, or an integer tensor [2]


def _in_graph(name: str) -> Callable[..., Any]:
    """Return a caller of a registered operator, which takes a tensor as `window`, and always returns an LSE."""

    def call(*args: Any, window_size: Window = (-1, -1), return_lse: bool = False, **options: Any) -> Any:
        options["window" if isinstance(window_size, Tensor) else "window_size"] = window_size
        out, lse = getattr(torch.ops.quire, name)(*args, **options)
        return (out, lse) if return_lse else out

    return call


def _convert(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the arguments of its registered operator."""

    def run(
        *args: Any, window_size: list[int] | tuple[int, int] = (-1, -1), window: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        given = window_size if window is None else window
        out, lse = function(*args, window_size=given, return_lse=True, **options)
        return out, lse

    return run


def _empty_varlen(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = empty_state(*args, **options)
    return out, lse.flatten(0, -2)  # [Tq, Hq] also for q of 4 dimensions


@one_call(
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, *, float? softmax_scale=None, bool causal=False, SymInt[] window_size=[-1, -1], "
    'Tensor? window=None, float softcap=0.0, Tensor? alibi_slopes=None, str backend="auto") -> (Tensor, Tensor)',
    _empty_varlen,
    _in_graph("varlen_attention"),
    _convert,
)
def varlen_attention(
    q: Tensor,  # [Tq, Hq, D] or [1, Tq, Hq, D]
    k: Tensor,  # [Tk, Hkv, D] or [1, Tk, Hkv, D]
    v: Tensor,  # [Tk, Hkv, Dv] or [1, Tk, Hkv, Dv]
    cu_seqlens_q: Tensor,  # int32 or int64 [S+1]: sequence s has the query rows cu_seqlens_q[s]:[s+1]
    cu_seqlens_k: Tensor,  # int32 or int64 [S+1]: sequence s has the keys cu_seqlens_k[s]:[s+1]
    max_seqlen_q: int,  # at least the largest number of query rows of a sequence
    max_seqlen_k: int,  # at least the largest number of keys of a sequence
    *,
    softmax_scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
    causal: bool = False,  # a query sees no key after its own position
    window_size: Window = (-1, -1),  # number of keys to the left and to the right; -1: all
    softcap: float = 0.0,  # scores become softcap * tanh(score / softcap); 0: no cap
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    return_lse: bool = False,  # also return the LSE
    backend: str = "auto",  # name of a backend, as in `load`
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of ragged queries over ragged keys, as flash-attn's flash_attn_varlen_func.

    The last query of a sequence is at the position of its last key. There may be fewer keys than queries, or none: a
    row that sees no key gives zeros. K and V are read in place. cu_seqlens and a window on a GPU are copied to the
    host, which synchronises.

    Returns:
        out [Tq, Hq, Dv], or [1, Tq, Hq, Dv] for q with 4 dimensions, and with `return_lse` the LSE, fp32 [Tq, Hq].

    Raises:
        BadShape, BadDtype, BadStride: naming the argument.
        BadValue: for cu_seqlens that do not start at 0, fall, or do not end at the number of rows, and for a max_seqlen
            below the longest sequence.
        Unsupported: for windows other than causal ones, and for tensors that require gradients, except under
            torch.no_grad() or torch.inference_mode().

    Example:
        >>> q, k, v = torch.randn(3, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
        >>> ops.varlen_attention(q, k, v, torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5]), 2, 3, causal=True).shape
        torch.Size([3, 8, 64])
    """
    batched = q.dim() == 4
    q, k, v = (_ragged(name, x, batched) for name, x in (("q", q), ("k", k), ("v", v)))
    causal, window = _window(causal, window_size)
    _check_alibi(alibi_slopes, causal, max_seqlen_q)
    starts_q = _starts("cu_seqlens_q", cu_seqlens_q, len(q), "max_seqlen_q", max_seqlen_q)
    starts_k = _starts("cu_seqlens_k", cu_seqlens_k, len(k), "max_seqlen_k", max_seqlen_k)
    if len(starts_q) != len(starts_k) or len(k) != len(v):
        raise BadShape(
            f"cu_seqlens_q has {len(starts_q)} entries and cu_seqlens_k {len(starts_k)}, k {len(k)} rows and v "
            f"{len(v)}; they must be the same"
        )
    if len(k) == 0:  # a cache needs at least one block
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
    kv = PagedKV(k.unsqueeze(2), v.unsqueeze(2))  # blocks of one token: nothing is copied
    with renamed(k_cache="k", v_cache="v", k="k", v="v"):
        ops, spec = load(backend, q.device.type), describe(q, kv.k, kv.v, causal=causal, window=window)
        lens = starts_k.diff()
        if not has_values(q):
            scores = Scores(softmax_scale, alibi_slopes, softcap or None)
            return check_sizes(ops, spec, q, kv, starts_q, lens, starts_k[:-1, None], scores)
        longest = int(lens.max()) if len(lens) else 0
        plan = ops.plan(spec, starts_q, lens, starts_k[:-1, None] + torch.arange(longest))
        out, lse = ops.attention(
            q, kv, plan, scale=softmax_scale, alibi_slopes=alibi_slopes, softcap=softcap or None, return_lse=True
        )
    out = out[None] if batched else out
    return (out, lse) if return_lse else out


def _kvcache_in_graph(q: Tensor, *args: Any, cache_seqlens: int | Tensor, **options: Any) -> Any:
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((len(q),), cache_seqlens)
    return _in_graph("attention_with_kvcache")(q, *args, cache_seqlens=cache_seqlens, **options)


def _empty_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    pin(k_cache, v_cache)
    return empty_state(q, k_cache, v_cache)


@one_call(
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, *, Tensor cache_seqlens, "
    "Tensor block_table, float? softmax_scale=None, bool causal=False, SymInt[] window_size=[-1, -1], "
    'Tensor? window=None, float softcap=0.0, Tensor? alibi_slopes=None, str backend="auto") -> (Tensor, Tensor)',
    _empty_kvcache,
    _kvcache_in_graph,
    _convert,
)
def attention_with_kvcache(
    q: Tensor,  # [S, Tq, Hq, D]
    k_cache: Tensor,  # [N, B, Hkv, D], written if k is given
    v_cache: Tensor,  # [N, B, Hkv, Dv], written if v is given
    k: Tensor | None = None,  # [S, Tnew, Hkv, D]
    v: Tensor | None = None,  # [S, Tnew, Hkv, Dv]
    *,
    cache_seqlens: int | Tensor,  # int32 or int64 [S], cached tokens without the new ones; an int: of every sequence
    block_table: Tensor,  # int32 or int64 [S, M]; -1: no block
    softmax_scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
    causal: bool = False,  # a query sees no key after its own position
    window_size: Window = (-1, -1),  # number of keys to the left and to the right; -1: all
    softcap: float = 0.0,  # scores become softcap * tanh(score / softcap); 0: no cap
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    return_lse: bool = False,  # also return the LSE
    backend: str = "auto",  # name of a backend, as in `load`
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to a paged cache in place and attend over all of it, as flash-attn's flash_attn_with_kvcache.

    The new tokens of sequence s are written after its cache_seqlens[s] cached tokens. Its row of block_table must
    already name the blocks for them. Then its Tq queries, the last ones of the sequence, attend. Without k and v the
    cache has all tokens already. Lengths, a table and a window on a GPU are copied to the host, which synchronises.

    Returns:
        out [S, Tq, Hq, Dv], and with `return_lse` the LSE, fp32 [S, Tq, Hq].

    Raises:
        BadShape, BadDtype, BadStride: naming the argument. Nothing is written after any of these errors.
        BadValue: for a table that is too short, or has -1 at a cached or new token, naming the sequence.
        Unsupported: for windows other than causal ones, and for tensors that require gradients, except under
            torch.no_grad() or torch.inference_mode().

    Example:
        >>> cache, q, new = torch.zeros(2, 8, 32, 2, 64), torch.randn(1, 1, 8, 64), torch.randn(2, 1, 1, 2, 64)
        >>> table = torch.tensor([[2, 5]])
        >>> ops.attention_with_kvcache(q, *cache, *new, cache_seqlens=0, block_table=table, causal=True).shape
        torch.Size([1, 1, 8, 64])
    """
    causal, window = _window(causal, window_size)
    table = to_host("block_table", block_table, 2).long()
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((len(q),), cache_seqlens)
    cached = to_host("cache_seqlens", cache_seqlens, 1).long()
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k_cache, v_cache))
        raise BadShape(f"q, k_cache and v_cache have shapes {shapes}; expected [S, Tq, Hq, D] and twice [N, B, Hkv, D]")
    if (k is None) != (v is None):
        raise BadValue("k and v come together: one of them is None")
    num_seqs, rows = q.shape[:2]
    num_new = 0 if k is None else _new_rows(k, v, num_seqs)
    _check_alibi(alibi_slopes, causal, rows)
    if not len(table) == len(cached) == num_seqs:
        raise BadShape(
            f"block_table has shape {tuple(table.shape)} and cache_seqlens {tuple(cached.shape)}; expected "
            f"({num_seqs}, M) and ({num_seqs},)"
        )
    flat = q.flatten(0, 1)
    kv = PagedKV(k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    with renamed(block_tables="block_table", slots="new_token_slots", k="k_cache", v="v_cache"):
        ops, spec = load(backend, q.device.type), describe(flat, kv.k, kv.v, causal=causal, window=window)
        lens, starts, cap = cached + num_new, torch.arange(num_seqs + 1), softcap or None
        scores = Scores(softmax_scale, alibi_slopes, cap)
        if not has_values(q):
            if k is not None and v is not None:
                check_new(k.flatten(0, 1), v.flatten(0, 1), spec, num_seqs * num_new)
            return check_sizes(ops, spec, flat, kv, starts, lens, table, scores)
        slots = _slots_after(cached, num_new, table, spec.block_size)
        plan = ops.plan(spec, starts * rows, lens, table)
        check_attention(flat, kv, plan, scores, None, True)  # all arguments, before the cache is written
        if k is not None and v is not None:
            writer = ops.plan(spec, starts * num_new, lens, table, slots)
            ops.write_kv(k.flatten(0, 1), v.flatten(0, 1), kv, writer)
        out, lse = ops.attention(
            flat, kv, plan, scale=softmax_scale, alibi_slopes=alibi_slopes, softcap=cap, return_lse=True
        )
    out, lse = out.view(num_seqs, rows, *out.shape[1:]), lse.view(num_seqs, rows, spec.num_heads)
    return (out, lse) if return_lse else out


def _empty_update(
    key_states: Tensor, value_states: Tensor, k_cache: Tensor, v_cache: Tensor, read_index: Tensor, write_index: Tensor
) -> tuple[Tensor, ...]:
    pin(k_cache, v_cache)
    rows = read_index.shape[0] or key_states.shape[2]
    return tuple(x.new_empty(1, x.shape[1], rows, x.shape[3]) for x in (key_states, value_states))


def _copied(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function with contiguous results, in memory that is not an argument's."""
    return lambda *args: tuple(x.clone(memory_format=torch.contiguous_format) for x in function(*args))


@one_call(
    "(Tensor key_states, Tensor value_states, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor read_index, "
    "Tensor write_index) -> (Tensor, Tensor)",
    _empty_update,
    convert=_copied,
)
def update_and_gather(
    key_states: Tensor,  # [1, Hkv, T, D]
    value_states: Tensor,  # [1, Hkv, T, Dv]
    k_cache: Tensor,  # [N, B, Hkv, D], written
    v_cache: Tensor,  # [N, B, Hkv, Dv], written
    read_index: Tensor,  # int32 or int64 [Tk], slots; -1: the next of the new tokens
    write_index: Tensor,  # int32 or int64 [T], slots; -1: not written
) -> tuple[Tensor, Tensor]:
    """Write new tokens to a paged cache and gather K and V for attention.

    This does the work of transformers' PagedAttentionCache.update for one layer, before `varlen_attention`. A slot is
    `block_id * B + offset`. Without -1 in read_index the cache is read after it is written. With -1, which means the
    new tokens in order, it is read before: so a sliding window may overwrite slots that it still reads. An empty
    read_index returns the new tokens, for sequences without cached tokens.

    transformers uses other numbers than -1 (`sentinel_index` among the read, `write_trash_index` among the written
    slots): convert its indices by `read_index.masked_fill(read_index == sentinel, -1)`.

    Returns:
        K [1, Hkv, Tk, D] and V [1, Hkv, Tk, Dv].

    Raises:
        BadShape, BadDtype, BadStride, BadValue: naming the argument. Nothing is written then.
        Unsupported: for a tensor that requires gradients, except under torch.no_grad() or torch.inference_mode().
    """
    read, write = _check_update(key_states, value_states, k_cache, v_cache, read_index, write_index)
    if not has_values(read):
        return key_states, value_states  # in a trace, where the sizes are checked
    gathered = []
    for states, cache in ((key_states, k_cache), (value_states, v_cache)):
        size, new = cache.shape[1], states[0].transpose(0, 1)  # [T, Hkv, D]
        before = cache[read // size, read % size]  # -1 reads the last slot, and is replaced
        kept = write >= 0
        cache[write[kept] // size, write[kept] % size] = new[kept]
        fresh = read < 0
        if not len(read):
            found = new
        elif fresh.any():
            before[fresh] = new
            found = before
        else:
            found = cache[read // size, read % size]
        gathered.append(found.transpose(0, 1)[None])
    keys, values = gathered
    return keys, values


# ------------------------------------------------------------------------------------------------------ checks


def _ragged(name: str, x: Tensor, batched: bool) -> Tensor:
    if x.dim() != (4 if batched else 3) or (batched and len(x) != 1):
        expected = "[1, T, H, D] as q" if batched else "[T, H, D], or all of q, k and v [1, T, H, D]"
        raise BadShape(f"{name} has shape {tuple(x.shape)}; expected {expected}")
    return x[0] if batched else x


def _check_alibi(alibi_slopes: Tensor | None, causal: bool, rows: int) -> None:
    """Raise Unsupported if a row may see keys to its right.

    flash-attn's bias is -slope * |distance|, Quire's is slope * (key - query): they are equal for keys to the left.
    """
    if alibi_slopes is not None and not causal and rows > 1:
        raise Unsupported(
            "alibi_slopes with causal=False and several query rows: for a key to the right of its query the bias would "
            "grow with the distance, where flash-attn's falls; give causal=True"
        )


def _window(causal: bool, window_size: Window) -> tuple[bool, int | None]:
    """Convert flash-attn's causal and window_size to Quire's, whose window includes the row's own key."""
    if isinstance(window_size, Tensor) and not has_values(window_size):
        return True, None  # a window is served where rows see nothing to their right
    given = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise BadValue(f"window_size is {window_size!r}; it must be a pair: keys to the left and to the right")
    try:
        left, right = window_size = operator.index(given[0]), operator.index(given[1])
    except (TypeError, ValueError) as error:
        raise BadValue(f"window_size is {window_size!r}; both sides must be integers") from error
    if left < -1 or right < -1:
        raise BadValue(f"window_size is {window_size}; each side must be -1 (all) or at least 0")
    if right > 0 and causal:
        right = 0  # a causal row sees nothing to its right anyway
    if right > 0 or (left >= 0 and right < 0 and not causal):
        raise Unsupported(
            f"window_size is {window_size} with causal={causal}; a window is served where rows see nothing to their "
            f"right: causal=True, or window_size=(left, 0)"
        )
    return causal or right == 0, None if left < 0 else left + 1


def _starts(name: str, cu_seqlens: Tensor, total: int, max_name: str, longest: int) -> Tensor:
    """Check that the offsets divide `total` rows into sequences of up to `longest`. Return them on the host, int64."""
    starts = to_host(name, cu_seqlens, 1).long()
    if len(starts) == 0:
        raise BadShape(f"{name} has shape (0,); expected [S+1]")
    check_integer(BadValue, max_name, longest, 0)
    if not has_values(starts):
        return starts
    lens = starts.diff()
    if starts[0] != 0 or starts[-1] != total or (lens < 0).any():
        raise BadValue(f"{name} is {_brief(starts)}; it must start at 0, never fall, and end at the {total} rows")
    if len(lens) and lens.max() > longest:
        s = int(lens.argmax())
        raise BadValue(f"{max_name} is {longest}; sequence {s} has {lens[s]} rows, so it must be at least that")
    return starts


def _brief(x: Tensor) -> str:
    values = x.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


def _new_rows(k: Tensor, v: Tensor | None, num_seqs: int) -> int:
    for name, x in (("k", k), ("v", v)):
        if x is None or x.dim() != 4 or len(x) != num_seqs or x.shape[1] != k.shape[1]:
            shape = None if x is None else tuple(x.shape)
            raise BadShape(f"{name} has shape {shape}; expected [S, Tnew, Hkv, D] with S = {num_seqs}")
    return k.shape[1]


def _slots_after(cached: Tensor, num_new: int, table: Tensor, block_size: int) -> Tensor:
    """Return the slots of the new tokens, [S * Tnew]. Raises BadValue if the table has no block for one."""
    width = table.shape[1]
    for s, length in enumerate(cached.tolist()):
        if length < 0 or length + num_new > width * block_size:
            raise BadValue(
                f"cache_seqlens[{s}] is {length}; with {num_new} new token(s), sequence {s}'s table of {width} blocks "
                f"of {block_size} holds 0..{width * block_size}"
            )
    column, last = torch.arange(width), -(-(cached[:, None] + num_new) // block_size)
    needed = (column >= cached[:, None] // block_size) & (column < last)
    missing = (needed & (table < 0)).nonzero()
    if len(missing):
        s, j = missing[0].tolist()
        raise BadValue(
            f"block_table[{s}, {j}] is {table[s, j]}; sequence {s} has {cached[s]} cached and {num_new} new token(s), "
            f"so it needs a block there"
        )
    position = cached[:, None] + torch.arange(num_new)  # [S, Tnew]
    return (table.gather(1, position // block_size) * block_size + position % block_size).flatten()


def _check_update(
    key_states: Tensor, value_states: Tensor, k_cache: Tensor, v_cache: Tensor, read_index: Tensor, write_index: Tensor
) -> tuple[Tensor, Tensor]:
    for name, states, cache in (("key_states", key_states, k_cache), ("value_states", value_states, v_cache)):
        if cache.dim() != 4 or cache.shape[:2] != k_cache.shape[:2] or 0 in cache.shape[:2]:
            raise BadShape(
                f"the cache of {name} has shape {tuple(cache.shape)}; expected [N, B, Hkv, D] with a block at least, N "
                f"and B the same for K and V"
            )
        wanted = (1, cache.shape[2], key_states.shape[2] if key_states.dim() == 4 else -1, cache.shape[3])
        if tuple(states.shape) != wanted:
            raise BadShape(f"{name} has shape {tuple(states.shape)}; expected [1, Hkv, T, D], here {wanted}")
        if states.dtype != cache.dtype:
            raise BadDtype(f"{name} has dtype {states.dtype} and its cache {cache.dtype}; they must be the same")
    num_slots, num_new = k_cache.shape[0] * k_cache.shape[1], key_states.shape[2]
    indices = ("read_index", read_index), ("write_index", write_index)
    for name, index in indices:
        check_integers(name, index, 1)
    read, write = read_index.long(), write_index.long()
    if len(write) != num_new:
        raise BadShape(f"write_index has {len(write)} entries for {num_new} new tokens; it needs one per token")
    if not has_values(read):
        return read, write
    for name, index in indices:
        outside = ((index < -1) | (index >= num_slots)).nonzero().flatten()
        if len(outside):
            t = int(outside[0])
            raise BadValue(f"{name}[{t}] is {index[t]}; it must be -1 or a slot in 0..{num_slots - 1}")
    fresh = int((read < 0).sum())
    if fresh not in (0, num_new):
        raise BadValue(f"read_index has -1 {fresh} times; it must occur {num_new} times, once per new token, or never")
    slots = write[write >= 0].sort().values
    twice = (slots.diff() == 0).nonzero().flatten()
    if len(twice):
        raise BadValue(f"write_index names slot {slots[twice[0]]} twice; every token needs its own slot")
    check_written({"k_cache": k_cache, "v_cache": v_cache}, {"key_states": key_states, "value_states": value_states})
    return read, write
