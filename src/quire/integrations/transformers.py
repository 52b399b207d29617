"""Quire's attention inside transformers (5.0 or later):

    import quire.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="quire")

`generate`, padded batches and flattened ragged batches (one row, with `cu_seq_lens_q` and `cu_seq_lens_k`, or with
`use_cache=False` and `position_ids` that restart at 0) give the result of eager attention for each sequence alone.
The keys are not copied: a contiguous key cache is viewed as a paged one of block size 1, whose tables list the
tokens that are not padding. Rows of padding are not computed and are returned as zeros.

The visible keys are derived from the mask function that the model passes to transformers' mask interface. Causal
masks, sliding windows, packed sequences and bidirectional masks are supported; other masks, and options that would
change the result, raise Unsupported. So do models that do not use transformers' attention interface, and a whole model
under torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.errors import Unsupported, check_installed

check_installed("quire.integrations.transformers", "transformers")

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from quire import ops
from quire.integrations.gate import HARMLESS, attention_refusal

__all__ = ["NAME", "Mask", "attention", "mask", "register"]

NAME = "quire"  # the value of attn_implementation


def register() -> None:
    """Register attn_implementation="quire" with transformers. The import does it; another call has no effect.

    Afterwards, loading a model with it raises Unsupported if Quire cannot compute the model's attention.

    Example:
        >>> import quire.integrations.transformers
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="quire")
    """
    if AttentionInterface().get(NAME) is attention:
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    original = PreTrainedModel.get_correct_attn_implementation

    # Every model calls this before it builds its layers. Without the check, a model that never calls the interface
    # would accept the name and run eager attention.
    @functools.wraps(original)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention == NAME:
            _check_model(type(self), self.config)
        return original(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = checked


# --------------------------------------------------------------------------------------------------- the model


def _check_model(model: type, config: Any) -> None:
    """Raise Unsupported, with the reason, for a model whose attention Quire would not compute."""
    if (reason := attention_refusal(model, config)) is not None:
        raise Unsupported(f'{model.__name__} cannot run with {NAME!r}: {reason}; attn_implementation="eager" can')


# ---------------------------------------------------------------------------------------------------- the mask


@dataclass(frozen=True)
class Pattern:
    """The visible keys of the query rows in one forward pass, and the plans that its layers share."""

    causal: bool
    window: int | None  # number of keys that a row sees, its own included
    num_queries: int  # Tq, padding included
    num_keys: int  # Tk, padding and the unused end of a static cache included
    filled: int  # keys up to that of the last query row
    real: Tensor | None  # bool [batch, filled], host: keys that are not padding; None: all
    sequences: Tensor | None  # int [batch, Tq], host: the packed sequence of each token; None: one per batch row
    plans: dict[tuple[Any, ...], tuple[ops.Backend, ops.AttentionPlan, Tensor | None]] = field(default_factory=dict)


class Mask(torch.Tensor):
    """A placeholder for the mask [batch, 1, Tq, Tk] of eager attention, without its values.

    Code may pass it on and read its shape. Computing with it raises Unsupported, since only `attention` can use it.
    """

    pattern: Pattern

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow functions that read the shape or dtype, and raise Unsupported for all others."""
        if func is Tensor.contiguous:  # generate calls it with a static cache
            return args[0]
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                answer = func(*args, **(kwargs or {}))
            if func is not Tensor.to or answer is args[0]:  # a change of dtype or device would read the values
                return answer
        name = getattr(func, "__name__", str(func))
        raise Unsupported(
            f"this model computes with its attention mask itself ({name}), outside transformers' AttentionInterface, "
            f'or torch.compile does; {NAME!r} supports neither: load it with attn_implementation="eager"'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the pattern, as there are no values to show."""
        return f"Mask({self.pattern})"


_QUESTIONS = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.to,
        Tensor.is_floating_point,
        Tensor.numel,
        Tensor.__len__,
        Tensor.stride,
        Tensor.is_contiguous,
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda")),
        *(getattr(Tensor, name).__get__ for name in ("layout", "is_meta")),
    }
)

# A closure has the code object of the function that made it, so these identify transformers' own mask functions.
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_REMAP = (  # not in the first releases of transformers 5
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, torch.zeros(1, 1)).__code__
    if hasattr(masking_utils, "remap_positions_for_packed_sequence")
    else None
)


def mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,  # [batch, tokens so far]: True for tokens that are not padding
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,  # [Tq], given by early releases instead of q_length and q_offset
    device: torch.device | str = "cpu",
    **_: Any,  # hints for other implementations: dtype, local_size, allow_is_causal_skip, ...
) -> Mask:
    """Make the mask of one kind of layers in one forward pass, as transformers' AttentionMaskInterface requires.

    Raises:
        Unsupported: for a mask function that is not one of transformers' own for causal, sliding window, packed or
            bidirectional attention, and for padding that cannot be left out.
    """
    if torch.compiler.is_compiling():
        raise Unsupported(f"a whole model with {NAME!r} cannot be compiled: its mask is read on the host in every step")
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    if q_length is None:
        raise Unsupported("transformers gave the mask neither q_length nor cache_position; this release is not known")
    causal, window, sequences = _read(mask_function)
    filled = int(q_offset) - kv_offset + q_length if causal else kv_length
    if not q_length <= filled <= kv_length and causal:
        raise Unsupported(
            f"the query rows are at {int(q_offset)}..{int(q_offset) + q_length - 1} and the keys at "
            f"{kv_offset}..{kv_offset + kv_length - 1}; {NAME!r} requires the rows' own keys to be among them"
        )
    real = None if attention_mask is None else _real_keys(attention_mask, batch_size, kv_offset, filled, window)
    if sequences is not None and (real is not None or sequences.shape != (batch_size, q_length) or filled != q_length):
        raise Unsupported(f"{NAME!r} serves packed sequences only without padding and without keys of a cache")
    stand_in = torch.zeros((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    made = stand_in.as_subclass(Mask)
    made.pattern = Pattern(causal, window, q_length, kv_length, filled, real, sequences)
    return made


def _read(mask_function: Callable[..., Any]) -> tuple[bool, int | None, Tensor | None]:
    """Return True if the mask is causal, its window, and the packed sequences int [batch, T] that it separates."""
    found: dict[str, list[Any]] = {"causal": [], "bidirectional": [], "window": [], "packed": [], "positions": []}
    for kind, value in _parts(mask_function):
        found[kind].append(value)
    causal, packed = bool(found["causal"]), found["packed"]
    if found["window"] and not causal:
        raise Unsupported(f"the attention mask has a window without being causal; {NAME!r} does not serve that")
    if len(packed) > 1 or (found["positions"] and not packed):
        raise Unsupported(f"the attention mask packs sequences in a way that {NAME!r} does not know")
    if packed:
        steps = packed[0].diff(dim=-1)
        # Positions in the sequences and in the row differ by a constant in each of these: the same keys are seen.
        if (steps < 0).any() or any((p.diff(dim=-1)[steps == 0] != 1).any() for p in found["positions"]):
            raise Unsupported("the packed sequences of the attention mask are not contiguous with rising positions")
    return causal, min(found["window"], default=None), packed[0].cpu() if packed else None


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the conditions of which a mask function is the conjunction, each with its kind."""
    if mask_function is masking_utils.causal_mask_function:
        yield "causal", None
        return
    if mask_function is masking_utils.bidirectional_mask_function:
        yield "bidirectional", None
        return
    code = getattr(mask_function, "__code__", None)
    cells = (cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ())
    held = dict(zip(getattr(code, "co_freevars", ()), cells, strict=True))
    if code is _AND:
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif code is _WINDOW:
        yield "window", int(held["sliding_window"])
    elif code is _PACKED:
        yield "packed", held["packed_sequence_mask"]
    elif code is not None and code is _REMAP:
        yield "positions", held["position_ids"]
        yield from _parts(held["mask_function"])
    else:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise Unsupported(
            f"the attention mask is made by {name}; {NAME!r} serves causal, sliding window, packed and bidirectional "
            "masks without overlays"
        )


def _real_keys(attention_mask: Tensor, batch_size: int, offset: int, filled: int, window: int | None) -> Tensor | None:
    """Return True for keys that are not padding: bool [batch, filled] on the host, or None if all are real."""
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != batch_size or shape[1] < offset + filled:
        raise Unsupported(
            f"attention_mask has shape {shape}; with {NAME!r} it must be [{batch_size}, {offset + filled}] or wider: "
            "one entry for every token, those in the cache included"
        )
    real = attention_mask[:, offset : offset + filled].to("cpu", torch.bool)
    if real.all():
        return None
    if window is not None:
        # Padding is left out, so a window across padding would include wrong keys.
        seen = real.cumsum(1)
        inside = (seen > 0) & (seen < seen[:, -1:])
        span = (inside.sum(1) + 1).max().item()
        if (inside & ~real).any() and window < span:
            raise Unsupported(f"attention_mask has padding between tokens in layers with a window of {window}")
    return real


# --------------------------------------------------------------------------------------------- the attention


def attention(
    module: torch.nn.Module,
    query: Tensor,  # [batch, Hq, Tq, D]
    key: Tensor,  # [batch, Hkv, Tk, D]
    value: Tensor,  # [batch, Hkv, Tk, Dv]
    attention_mask: Tensor | None,  # made by `mask`, [batch, 1, Tq, Tk]; None: all keys
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq], the sinks
    position_ids: Tensor | None = None,  # int [1, Tq]
    cu_seq_lens_q: Tensor | None = None,  # int [S+1]
    cu_seq_lens_k: Tensor | None = None,  # int [S+1]
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, as transformers' AttentionInterface requires.

    Returns:
        out [batch, Tq, Hq, Dv], in the dtype of query, and None in place of the attention weights.

    Raises:
        Unsupported: if gradients, dropout, attention weights or an unknown argument are requested, if the mask was not
            made by `mask`, or if no backend serves the dtype or the device.
    """
    _check_options(dropout, kwargs)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise Unsupported(f"{NAME!r} has no backward pass; call the model under torch.no_grad() or inference_mode()")
    if not query.dtype == key.dtype == value.dtype:
        raise Unsupported(f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; they must be the same")
    pattern = _pattern(module, query, key, attention_mask, is_causal)
    window = _window(pattern, sliding_window)
    cuts = _cuts(pattern, len(query), position_ids, cu_seq_lens_q, cu_seq_lens_k)

    step = _token_step(key)
    if step is None or step != _token_step(value):
        key, value = key.contiguous(), value.contiguous()
        step = 1 if key.shape[2] == 1 else key.shape[1] * key.shape[2]
    batch, heads, rows, dim = query.shape
    spec_of = (heads, key.shape[1], dim, value.shape[3], query.dtype, query.device, window, step, cuts)
    if spec_of not in pattern.plans:
        pattern.plans[spec_of] = _plan(pattern, query, key, value, window, step, cuts)
    backend, plan, chosen = pattern.plans[spec_of]

    q = query.transpose(1, 2).reshape(batch * rows, heads, dim)
    q = q.contiguous() if q.stride(2) != 1 else q
    sinks = None if s_aux is None else s_aux.detach().to(query.device, torch.float32).contiguous()
    out = backend.attention(
        q if chosen is None else q[chosen],
        ops.PagedKV(_as_blocks(key, step), _as_blocks(value, step)),
        plan,
        scale=None if scaling is None else float(scaling),
        softcap=softcap,
        sinks=sinks,
    )
    if chosen is not None:
        out = out.new_zeros(batch * rows, *out.shape[1:]).index_copy_(0, chosen, out)
    return out.view(batch, rows, heads, -1), None


def _check_options(dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise Unsupported for options that would change the result and are not implemented."""
    if dropout:
        raise Unsupported(f"dropout is {dropout}; {NAME!r} is for inference, so call model.eval()")
    if kwargs.get("output_attentions"):
        raise Unsupported(
            f"output_attentions is set, but {NAME!r} never computes the attention weights; load the model with "
            'attn_implementation="eager" to see them'
        )
    for name, value in kwargs.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise Unsupported(f"the model gives {name} to its attention, which {NAME!r} does not know how to honor")


def _pattern(
    module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, is_causal: bool | None
) -> Pattern:
    """Return the pattern of the mask. Raises Unsupported unless it was made for this query and these keys."""
    (batch, _, num_queries, _), num_keys = query.shape, key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and num_queries > 1:
            raise Unsupported(
                f"{type(module).__name__} is causal and got no mask: eager attention would see all keys and others "
                f"only those before a row, so {NAME!r} serves neither"
            )
        return Pattern(False, None, num_queries, num_keys, num_keys, None, None)
    if not isinstance(attention_mask, Mask):
        shape = tuple(attention_mask.shape)
        raise Unsupported(f"attention_mask of shape {shape} is a custom mask; {NAME!r} serves 2-D padding masks")
    if tuple(attention_mask.shape) != (len(key), 1, num_queries, num_keys) or len(key) != batch:
        raise Unsupported(
            f"the mask is of shape {tuple(attention_mask.shape)} and the keys of {tuple(key.shape)} with "
            f"{num_queries} rows of {batch} sequences; a mask must have been made for the layer that it is used in"
        )
    return attention_mask.pattern


def _window(pattern: Pattern, asked: int | None) -> int | None:
    """Return the window of the mask. Raises Unsupported if the layer asks for another one."""
    # Eager attention uses the mask's window and flash attention the layer's: if they differ, no result is right.
    if asked is not None and asked != pattern.window and asked < pattern.filled:
        raise Unsupported(f"the layer asks for a window of {asked}, but its mask has {pattern.window or 'none'}")
    return pattern.window


_Cuts = tuple[tuple[int, int, int, int, int], ...]  # batch row, rows from and to, keys from and to


def _cuts(
    pattern: Pattern, batch: int, position_ids: Tensor | None, starts_q: Tensor | None, starts_k: Tensor | None
) -> _Cuts | None:
    """Return the cuts of a flattened batch into sequences, or None if each batch row is one sequence."""
    whole = pattern.real is None and pattern.filled == pattern.num_keys
    packed = None if pattern.sequences is None else _runs(pattern.sequences)
    if starts_q is not None or starts_k is not None:
        if starts_q is None or starts_k is None or batch != 1 or not whole:
            raise Unsupported(
                "cu_seq_lens_q and cu_seq_lens_k cut one row without padding into sequences; they must come together, "
                "with a batch of 1, without attention_mask and without a static cache"
            )
        q, k = starts_q.tolist(), starts_k.tolist()
        rows, keys = pattern.num_queries, pattern.num_keys
        if len(q) != len(k) or (q[0], q[-1], k[0], k[-1]) != (0, rows, 0, keys):
            raise Unsupported(f"cu_seq_lens_q is {q} and cu_seq_lens_k {k}; they must span {rows} rows and {keys} keys")
        given = tuple((0, *cut) for cut in zip(q, q[1:], k, k[1:], strict=False))
        if packed is not None and packed != tuple(cut for cut in given if cut[2] > cut[1]):
            raise Unsupported(f"cu_seq_lens_q is {q}, but position_ids cut the row into other sequences")
        return given
    prefill = pattern.causal and whole and pattern.num_queries == pattern.num_keys
    if packed is None and prefill and _restarts(position_ids):
        raise Unsupported(
            "position_ids restart at 0 within a row, but the mask of this call does not cut there: flash attention "
            "would, eager attention would not. Give use_cache=False and no attention_mask, or cu_seq_lens_q and "
            "cu_seq_lens_k"
        )
    return packed


def _runs(sequences: Tensor) -> _Cuts:
    """Return the cuts of packed sequences int [batch, T], each a run of equal numbers."""
    cuts = []
    for row, numbers in enumerate(sequences):
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1]
        ends = lengths.cumsum(0).tolist()
        cuts += [(row, start, end, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(cuts)


def _restarts(position_ids: Tensor | None) -> bool:
    """Return True if the positions of a row count up from 0 more than once."""
    if position_ids is None or position_ids.dim() != 2:
        return False
    positions = position_ids.cpu()
    first, rising = positions == 0, positions.diff(dim=1) == 1
    counting = first[:, 0] & (rising | first[:, 1:]).all(1) & rising.any(1)
    return bool((counting & (first.sum(1) > 1)).any())


def _plan(
    pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, window: int | None, step: int, cuts: _Cuts | None
) -> tuple[ops.Backend, ops.AttentionPlan, Tensor | None]:
    """Return the backend, its plan, and the indices of the batch * Tq query rows that it is for (None: all)."""
    (batch, heads, rows, dim), device = query.shape, query.device
    backend = ops.load("auto", device.type)
    spec = ops.AttentionSpec(
        num_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim=dim,
        head_dim_v=value.shape[3],
        block_size=1,
        num_blocks=(batch - 1) * step + key.shape[2],
        dtype=query.dtype,
        causal=pattern.causal,
        window=window,
        device=str(device),
    )
    chosen = None
    if pattern.real is None or cuts is not None:
        every = cuts or tuple((row, 0, rows, 0, pattern.filled) for row in range(batch))
        row, q_from, q_to, k_from, k_to = torch.tensor(every).unbind(1)
        new, lens = q_to - q_from, k_to - k_from
        tables = (row * step + k_from)[:, None] + torch.arange(int(lens.max()))
    else:
        lens = pattern.real.sum(1)
        tables = torch.argsort(~pattern.real, dim=1, stable=True)[:, : int(lens.max())]  # real tokens first
        tables = tables + torch.arange(batch)[:, None] * step
        new = torch.full((batch,), rows)
        if pattern.causal:  # the rows are the last tokens; padding among these has no row
            asks = pattern.real[:, pattern.filled - rows :]
            new, chosen = asks.sum(1), asks.flatten().nonzero().flatten().to(device)
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    # Entries beyond a sequence's length are never read, but they must fit an int32.
    plan = backend.plan(spec, starts.int(), lens.int(), tables.clamp(max=spec.num_blocks - 1).int())
    return backend, plan, chosen


# ------------------------------------------------------------------------------------------------- the keys


def _token_step(x: Tensor) -> int | None:
    """Return the distance between batch rows of x [batch, H, T, D] in token strides, or None if it is not whole."""
    batch_stride, _, token_stride, last = x.stride()
    if last != 1:
        return None
    if x.shape[2] == 1:  # no two tokens: the stride between them may be anything
        return 1
    if len(x) == 1:  # the number of a contiguous tensor, so that K and V agree
        return x.shape[1] * x.shape[2]
    return batch_stride // token_stride if token_stride > 0 and batch_stride % token_stride == 0 else None


def _as_blocks(x: Tensor, step: int) -> Tensor:
    """View x [batch, H, T, D] as blocks of one token, [N, H, 1, D]: token t of batch row b is block b * step + t."""
    batch, heads, tokens, dim = x.shape
    batch_stride, head_stride, token_stride, _ = x.stride()
    stride = batch_stride if tokens == 1 else token_stride
    return x.as_strided(((batch - 1) * step + tokens, heads, 1, dim), (stride, head_stride, stride, 1))


register()
