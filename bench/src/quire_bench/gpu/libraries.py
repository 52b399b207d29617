"""Other libraries' attention over the same tensors: each beside Quire, in a process of its own, where it is installed.

A library takes Quire's cache as it lies, blocks in random order, unless it cannot: SDPA, PyTorch's varlen_attn and a
prefill of FlexAttention get contiguous keys. Before anything is timed its result is compared with Quire's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import QuireError
from quire_bench.gpu.attention import DECODE, PREFILL, Paged, paged, sized
from quire_bench.gpu.common import Bench, Call, Contestant, copy, product, race
from quire_bench.kernels.attention import Shape

MOST_DIFFERENCE = 0.03  # |theirs - ours| / |ours|, both in bf16
SHAPES = {name: DECODE[name] for name in ("64 x 4096", "8 x 32768")} | {
    name: PREFILL[name] for name in ("8 x 4096 D128", "8 x 4096 D64")
}
BLOCK_SIZES = {"flex": (128,), "fa3": (16, 256)}  # of the others: 16

MODULES = {  # what has to be importable; FA3 is a library that is given
    "sdpa": "torch",
    "varlen": "torch.nn.attention.varlen",
    "flex": "torch.nn.attention.flex_attention",
    "conch": "conch",
    "flashinfer": "flashinfer",
}
Maker = Callable[[Bench, Paged], Callable[[int], Tensor]]  # of what runs over the copy of that number


def library(bench: Bench, name: str) -> None:
    """Stage: one library on all shapes. Decode of "conch" is two kernels: its own, and its copy of vLLM's."""
    makers: dict[str, dict[str, Maker]] = {
        "sdpa": {"sdpa, contiguous": sdpa},
        "varlen": {"varlen_attn, contiguous": varlen},
        "flex": {"flex": flex},
        "conch": {"conch": conch, "vllm's triton": vllm_triton},
        "flashinfer": {"flashinfer": flashinfer, "flashinfer, tensor cores": flashinfer_tensor_cores},
        "fa3": {"fa3": fa3},
    }
    for case, whole in SHAPES.items():
        own = {who: make for who, make in makers[name].items() if whole.query_len == 1 or make not in DECODE_ONLY}
        for size in BLOCK_SIZES.get(name, (16,)):
            _race(bench, case, replace(sized(bench, whole), block_size=size), own)
            bench.forget()


def _race(bench: Bench, case: str, shape: Shape, makers: dict[str, Maker]) -> None:
    decodes = shape.query_len == 1
    work, unit = (float(shape.kv_bytes), "GB/s") if decodes else (float(shape.operations), "TFLOP/s")
    try:
        mine = paged(bench, shape)
        expected = bench.backend.attention(mine.q, mine.kv, mine.plans[0]).clone()
    except Exception as error:  # then there is nothing to compare with
        bench.failed(case, "quire", error)
        return

    def checked(make: Maker) -> Call:
        run = make(bench, mine)
        found = run(0).reshape(expected.shape)
        away = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not away < MOST_DIFFERENCE:
            raise QuireError(f"its result differs from Quire's by {away:.3g} of it")
        return mine.turns(run)

    ceiling = "copy" if decodes else "product"
    suffix = "" if shape.block_size == 16 else f", blocks of {shape.block_size}"
    contestants = {
        ceiling: copy(bench) if decodes else product(bench),
        f"quire{suffix}": Contestant(mine.call, work, unit),
        **{f"{name}{suffix}": Contestant(partial(checked, make), work, unit) for name, make in makers.items()},
    }
    race(bench, case, contestants, ceiling, shape=shape.name)


def _on_device(bench: Bench, mine: Paged) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Query starts, context lengths, and the block tables of each copy."""
    tables = [table.to(bench.device) for table in mine.tables]
    return mine.starts.to(bench.device), mine.lens.to(bench.device), tables


def _nhd(mine: Paged) -> tuple[Tensor, Tensor]:
    """The cache as others number its dimensions: K and V [N, B, Hkv, D], strides as they are."""
    return mine.memory[:, 0].transpose(1, 2), mine.memory[:, 1].transpose(1, 2)


def _contiguous(bench: Bench, mine: Paged) -> list[tuple[Tensor, Tensor]]:
    """Each copy's K and V in a row: [S, Hkv, context, D]."""
    shape, copies = mine.shape, []
    for table in mine.tables:
        blocks = mine.memory[table.long().to(bench.device)]  # [S, M, 2, Hkv, B, D]
        rows = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : shape.context_len].contiguous()
        copies.append((rows[0], rows[1]))
    return copies


def sdpa(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """PyTorch's scaled_dot_product_attention."""
    shape, copies = mine.shape, _contiguous(bench, mine)
    q = mine.q.view(shape.batch, shape.query_len, shape.num_heads, shape.head_dim).transpose(1, 2)
    causal = shape.query_len > 1

    def run(i: int) -> Tensor:
        return F.scaled_dot_product_attention(q, *copies[i], is_causal=causal, enable_gqa=True).transpose(1, 2)

    return run


def varlen(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """PyTorch's varlen_attn: FlashAttention 2 over ragged rows."""
    from torch.nn.attention.varlen import varlen_attn

    shape = mine.shape
    copies = [tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in pair) for pair in _contiguous(bench, mine)]
    starts = mine.starts.to(bench.device)
    ends = torch.arange(0, shape.batch * shape.context_len + 1, shape.context_len, device=bench.device).int()
    known = inspect.signature(varlen_attn).parameters  # they change from release to release
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    if shape.query_len > 1:
        options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def run(i: int) -> Tensor:
        k, v = copies[i]
        out = varlen_attn(mine.q, k, v, starts, ends, shape.query_len, shape.context_len, **options)
        return out if isinstance(out, Tensor) else out[0]

    return run


def flex(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """FlexAttention, compiled: decode over the blocks with its own page table, prefill over contiguous keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = mine.shape
    compiled = torch.compile(flex_attention) if bench.on_gpu else flex_attention
    q = mine.q.view(shape.batch, shape.query_len, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()

    def causal(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + shape.context_len - shape.query_len

    mask = create_block_mask(causal, shape.batch, None, shape.query_len, shape.context_len, device=bench.device)
    if shape.query_len > 1:
        [(k, v), *_] = _contiguous(bench, mine)
        return lambda _: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)
    paging = import_module("torch.nn.attention.experimental._paged_attention")
    size, width, pool = mine.spec.block_size, mine.tables.shape[2], mine.spec.num_blocks
    if size != 128:
        raise QuireError(f"the cache has blocks of {size}; FlexAttention's masks have blocks of 128")
    k, v = (x.transpose(0, 1).reshape(1, shape.num_kv_heads, pool * size, shape.head_dim) for x in _hnd(mine))
    masks = []
    lens = mine.lens.to(bench.device)
    for table in mine.tables:
        pages = paging.PagedAttention(pool, size, shape.batch, device=bench.device)
        blocks = table.long().to(bench.device)
        pages.page_table[:, :width] = blocks
        logical = torch.arange(width, device=bench.device).expand(shape.batch, -1)
        pages.physical_to_logical.scatter_(1, blocks, logical)
        masks.append(pages.convert_logical_block_mask(mask, kv_len=lens))
    return lambda i: compiled(q, k, v, block_mask=masks[i], enable_gqa=True).transpose(1, 2)


def _hnd(mine: Paged) -> tuple[Tensor, Tensor]:
    return mine.memory[:, 0], mine.memory[:, 1]


def conch(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """conch-triton-kernels: paged attention for decode, varlen attention for prefill."""
    shape, (k, v) = mine.shape, _nhd(mine)
    starts, lens, tables = _on_device(bench, mine)
    if shape.query_len == 1:
        paged_attention = import_module("conch.ops.attention.paged_attention").paged_attention
        return lambda i: paged_attention(mine.q, k, v, tables[i], lens)
    varlen_attention = import_module("conch.ops.attention.varlen_attention").varlen_attention
    most = shape.query_len, shape.context_len
    return lambda i: varlen_attention(mine.q, k, v, starts, most[0], lens, most[1], tables[i], causal=True)


def vllm_triton(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """vLLM's unified Triton kernel, as conch-triton-kernels holds it."""
    unified_attention = import_module("conch.third_party.vllm.unified_attention").unified_attention
    shape, (k, v) = mine.shape, _nhd(mine)
    starts, lens, tables = _on_device(bench, mine)
    out = torch.empty_like(mine.q)

    def run(i: int) -> Tensor:
        unified_attention(
            q=mine.q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=shape.query_len,
            seqused_k=lens,
            max_seqlen_k=shape.context_len,
            softmax_scale=mine.spec.default_scale,
            causal=True,
            window_size=(-1, -1),
            block_table=tables[i],
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return out

    return run


def flashinfer(bench: Bench, mine: Paged, *, tensor_cores: bool = False) -> Callable[[int], Tensor]:
    """FlashInfer's decode and prefill wrappers over the same cache, HND."""
    library: Any = import_module("flashinfer")
    shape, runs = mine.shape, []
    for table in mine.tables:
        workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=bench.device)
        width = table.shape[1]
        indptr = torch.arange(0, shape.batch * width + 1, width, dtype=torch.int32)
        indices = table.flatten().to(bench.device)
        last = torch.full((shape.batch,), shape.context_len - (width - 1) * shape.block_size, dtype=torch.int32)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
        kinds = {"q_data_type": mine.spec.dtype, "kv_data_type": mine.spec.cache_dtype}
        if shape.query_len == 1:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
            wrapper.plan(indptr, indices, last, *sizes, **kinds)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            wrapper.plan(mine.starts, indptr, indices, last, *sizes, causal=True, **kinds)
        runs.append(wrapper)
    return lambda i: runs[i].run(mine.q, mine.memory)


def flashinfer_tensor_cores(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """The decode wrapper that multiplies a group's heads together."""
    return flashinfer(bench, mine, tensor_cores=True)


DECODE_ONLY = frozenset({flashinfer_tensor_cores})


def fa3(bench: Bench, mine: Paged) -> Callable[[int], Tensor]:
    """FlashAttention 3 over the blocks, from the library that was given, called by the names of its schema."""
    if bench.settings.fa3 is None:
        raise QuireError("its library was not given: --fa3 PATH")
    torch.ops.load_library(bench.settings.fa3)  # type: ignore[no-untyped-call]
    forward = torch.ops._vllm_fa3_C.fwd
    shape, (k, v) = mine.shape, _nhd(mine)
    starts, lens, tables = _on_device(bench, mine)
    out = torch.empty_like(mine.q)
    given: dict[str, Any] = {
        "q": mine.q,
        "k": k,
        "v": v,
        "out": out,
        "cu_seqlens_q": starts,
        "seqused_k": lens,
        "max_seqlen_q": shape.query_len,
        "max_seqlen_k": shape.context_len,
        "softmax_scale": mine.spec.default_scale,
        "is_causal": shape.query_len > 1,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,  # its own choice
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    names = [argument.name for argument in forward.default._schema.arguments]

    def run(i: int) -> Tensor:
        forward(*(tables[i] if name == "page_table" else given.get(name) for name in names))
        return out

    return run
