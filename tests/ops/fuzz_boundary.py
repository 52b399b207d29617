"""Random calls of every operator, legal and illegal, on a backend and on the reference: the same result or error.

    python -m tests.ops.fuzz_boundary 100000 --seed 7

runs so many calls, and shows the number of each one first: where the process dies, that is the one to look at, and
`--only NUMBER` repeats it alone. Shapes may be empty, tensors strided, expanded, or in each other's memory.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import ops
from quire.errors import QuireError, Unsupported
from quire.ops import native
from quire.ops.backends.reference import BACKEND as REFERENCE

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ODD_DTYPES = (torch.float64, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn)
DIMS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 33, 40, 130)
COUNTS = (0, 1, 1, 2, 3, 4, 6, 9)
ILLEGAL = 0.05  # of arguments


class Memory:
    """Tensors of one call, and the storages that they lie in. The same seed gives the same ones again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._gen = torch.Generator().manual_seed(seed)
        self.storages: list[Tensor] = []  # one-dimensional
        self.poisons = (torch.nan, torch.inf, -torch.inf)  # now and then a storage holds one of them

    def some(self, chance: float) -> bool:
        return self.rng.random() < chance

    def count(self) -> int:
        return self.rng.choice(COUNTS)

    def dim(self) -> int:
        return self.rng.choice(DIMS)

    def dtype(self) -> torch.dtype:
        return self.rng.choice(ODD_DTYPES) if self.some(ILLEGAL) else self.rng.choice(FLOATS)

    def floats(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of about that shape and dtype, anywhere."""
        if self.some(ILLEGAL / 2):
            shape = self._other(shape)
        if self.some(ILLEGAL / 2):
            dtype = self.rng.choice(FLOATS + ODD_DTYPES)
        if self.some(ILLEGAL / 10):
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._placed(shape, dtype)

    def integers(self, values: list[int]) -> Tensor:
        """Those integers, now and then of a dtype that is no integer's."""
        dtype = self.rng.choice((torch.int32, torch.int64, torch.int64))
        if self.some(ILLEGAL / 2):
            dtype = self.rng.choice((torch.int16, torch.float32, torch.bool))
        x = torch.tensor(values, dtype=torch.int64).to(dtype)
        return x.repeat_interleave(2)[::2] if self.some(0.1) else x

    def _other(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        at = self.rng.randrange(len(shape))
        return self.rng.choice(
            (
                shape[:at] + shape[at + 1 :],
                (*shape[:at], 1, *shape[at:]),
                (*shape[:at], shape[at] + 1, *shape[at + 1 :]),
                (*shape[:at], max(0, shape[at] - 1), *shape[at + 1 :]),
                (*shape[:at], 0, *shape[at + 1 :]),
            )
        )

    def _placed(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Contiguous, padded, permuted, stepped over, expanded, overlapping itself, or in another tensor's memory."""
        rng, rank = self.rng, len(shape)
        sizes, order, step = list(shape), list(range(rank)), 1
        kind = rng.choices(
            ("plain", "padded", "leading permuted", "permuted", "stepped", "expanded", "random", "huge"),
            (8, 6, 4, 1, 1, 1, 1, 1),
        )[0]
        if kind == "padded":
            sizes = [n + rng.randint(0, 3) for n in sizes]
        elif kind == "leading permuted" and rank > 1:
            order = [*rng.sample(range(rank - 1), rank - 1), rank - 1]
        elif kind == "permuted":
            order = rng.sample(range(rank), rank)
        elif kind == "stepped":
            step = 2
        strides, at = [0] * rank, step
        for i in reversed(order):
            strides[i] = at
            at *= max(1, sizes[i])
        if kind == "expanded" and rank:
            strides[rng.randrange(rank)] = 0
        if kind == "random" and rank:
            strides = [rng.choice((0, 1, 2, 3, 5, 8, 17, 40)) for _ in shape[1:]] + [1]
        if kind == "huge":
            strides = [2**61 + 1 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n)
        if 0 in shape:
            extent = 0
        offset = rng.choice((0, 0, 0, 1, 3, 8))
        for storage in rng.sample(self.storages, len(self.storages)):
            room = len(storage) - extent
            if storage.dtype == dtype and room >= 0 and self.some(0.25):  # where another tensor lies too
                return storage.as_strided(shape, strides, rng.randint(0, room))
        storage = self._filled(offset + extent + rng.choice((0, 0, 5, 64)), dtype)
        return storage.as_strided(shape, strides, offset)

    def _filled(self, size: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(size, generator=self._gen) * self.rng.choice((0.5, 1.0, 3.0))
        if self.poisons and size and self.some(0.1):
            x[self.rng.randrange(size)] = self.rng.choice(self.poisons)
        x = x.nan_to_num(0.0, 9.0, -9.0).to(dtype) if not dtype.is_floating_point else x.to(dtype)
        self.storages.append(x)
        return x


@dataclass
class Call:
    """A call: its operator's name, what runs it, and the memory that it may write to."""

    name: str
    run: Callable[[ops.Backend], Any]
    memory: Memory
    seen: list[object] = field(default_factory=list)  # arguments, to be shown

    def tensors(self) -> list[Tensor]:
        return [x for x in self.seen if isinstance(x, Tensor)]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_shown, self.seen))})"


def _shown(x: object) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{x.dtype} {tuple(x.shape)} by {x.stride()} at {x.data_ptr():#x} on {x.device}"


# --------------------------------------------------------------------------------------------------- the calls


def _simple(name: str, memory: Memory, *args: object) -> Call:
    return Call(name, lambda backend: getattr(backend, name)(*args), memory, list(args))


def _eps(m: Memory, *usual: float) -> object:
    return m.rng.choice((1.0, -1.0, float("nan"), "1", None) if m.some(0.1) else usual)


def _rows(m: Memory) -> tuple[int, ...]:
    return (*(m.count() for _ in range(m.rng.choice((0, 1, 1, 1, 2, 2, 3)))), m.dim())


def _rms_norm(m: Memory) -> Call:
    shape = _rows(m)
    return _simple("rms_norm", m, m.floats(shape, m.dtype()), m.floats(shape[-1:], m.dtype()), _eps(m, 0.0, 1e-6))


def _add_rms_norm(m: Memory) -> Call:
    shape, dtype = (m.count(), m.dim()), m.dtype()
    x = m.floats(shape, dtype)
    return _simple("add_rms_norm", m, x, m.floats(shape, dtype), m.floats(shape[-1:], m.dtype()), _eps(m, 0.0, 1e-6))


def _layer_norm(m: Memory) -> Call:
    shape = _rows(m)
    bias = m.floats(shape[-1:], m.dtype()) if m.some(0.5) else None
    x, weight = m.floats(shape, m.dtype()), m.floats(shape[-1:], m.dtype())
    return _simple("layer_norm", m, x, weight, bias, _eps(m, 0.1, 1.0))  # less would blow up what rounding leaves


def _rope(m: Memory) -> Call:
    tokens, dim, length, dtype = m.count(), m.dim(), m.rng.choice((0, 1, 5, 50)), m.dtype()
    half = m.rng.randint(0, dim // 2)
    if m.some(0.3):  # parts of one projection
        heads, packed = m.count(), m.floats((tokens, 9, dim), dtype)
        q, k = packed[:, :heads], packed[:, heads : heads + 2]
    else:
        q, k = (m.floats((tokens, m.count(), dim), dtype) for _ in range(2))
    values = [m.rng.randrange(max(1, length)) for _ in range(tokens + m.some(ILLEGAL))]
    if values and m.some(ILLEGAL):
        values[-1] = m.rng.choice((-1, length, 2**31, -(2**40)))
    tables = [m.floats((length, half), torch.float32) for _ in range(2)]
    return _simple("rope", m, q, k, m.integers(values), *tables)


def _swiglu(m: Memory) -> Call:
    *outer, size = _rows(m)
    return _simple("swiglu", m, m.floats((*outer, 2 * size + m.some(ILLEGAL)), m.dtype()))


def _gelu(m: Memory) -> Call:
    m.poisons = (torch.nan,)  # torch makes NaN of infinity, in its vectors
    form = m.rng.choice(("quick", "", "Tanh", None, True, 1)) if m.some(0.1) else m.rng.choice(("none", "tanh"))
    return _simple("gelu", m, m.floats(_rows(m), m.dtype()), form)


def _logits(m: Memory) -> Tensor:
    m.poisons = ()  # top_k takes no NaN
    return m.floats((m.count(), m.dim()), torch.float32)


def _logsumexp(m: Memory) -> Call:
    return _simple("logsumexp", m, _logits(m))


def _top_k(m: Memory) -> Call:
    logits = _logits(m)
    k = m.rng.randint(0, logits.shape[-1]) if logits.dim() else 0
    if m.some(0.1):
        k = m.rng.choice((-1, k + 1000, 2**31, 2**63, 2**64 + 1, 1.0, True, "1"))
    return _simple(m.rng.choice(("top_k", "top_k_softmax")), m, logits, k)


def _merge_states(m: Memory) -> Call:
    m.poisons = (torch.nan, -torch.inf)
    tokens, heads, dim, dtype = m.count(), m.count(), m.dim(), m.dtype()
    states = [
        m.floats(shape, d)
        for _ in range(2)
        for shape, d in (((tokens, heads, dim), dtype), ((tokens, heads), torch.float32))
    ]
    return _simple("merge_states", m, *states)


def _apply_sinks(m: Memory) -> Call:
    m.poisons = (torch.nan, -torch.inf)
    tokens, heads, dim, dtype = m.count(), m.count(), m.dim(), m.dtype()
    out, lse = m.floats((tokens, heads, dim), dtype), m.floats((tokens, heads), torch.float32)
    return _simple("apply_sinks", m, out, lse, m.floats((heads,), torch.float32))


def _copy_blocks(m: Memory) -> Call:
    blocks, dtype = m.rng.choice((0, 1, 2, 5, 9)), m.rng.choice(FLOATS)
    k, v = (m.floats((blocks, m.count(), m.count(), m.dim()), dtype) for _ in range(2))
    ids = m.rng.sample(range(blocks), blocks)
    pairs = m.rng.randint(0, blocks // 2)
    src, dst = ids[:pairs], ids[pairs : 2 * pairs]
    if pairs and m.some(0.5):
        src[-1] = src[0]  # one block to several
    for x in (src, dst):
        if m.some(ILLEGAL):
            x.append(m.rng.choice((-1, 0, blocks, 2**40, 2**64, 1.0, True)))
    return Call("copy_blocks", lambda backend: backend.copy_blocks(ops.PagedKV(k, v), src, dst), m, [k, v, src, dst])


def _step(m: Memory) -> tuple[ops.AttentionSpec, list[Tensor], Tensor | None]:
    """A spec, the metadata of a step, and its slots."""
    rng = m.rng
    hkv, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 5))
    causal = m.some(0.8)
    spec = ops.AttentionSpec(
        num_heads=hkv * group,
        num_kv_heads=hkv,
        head_dim=max(1, m.dim()),
        head_dim_v=max(1, m.dim()) if m.some(0.3) else None,
        block_size=rng.choice((1, 2, 5, 8, 16)),
        num_blocks=rng.choice((1, 3, 8)),
        dtype=rng.choice(FLOATS),
        causal=causal,
        window=rng.choice((1, 3, 20, 2**31 - 1)) if causal and m.some(0.3) else None,
        device="meta" if m.some(ILLEGAL / 10) else "cpu",
    )
    rows = [rng.choice((0, 1, 1, 2, 5)) for _ in range(m.count())]
    width = rng.choice((0, 1, 2, 5, 40))
    lens = [rng.randint(0, width * spec.block_size) for _ in rows]
    tables = [rng.randrange(spec.num_blocks) for _ in range(len(rows) * width)]
    starts = [sum(rows[:s]) for s in range(len(rows) + 1)]
    for values, wrong in (
        (starts, (-1, 0, 10**6, 2**31, 2**40)),
        (lens, (-1, 10**6, 2**31 - 1, 2**40)),
        (tables, (-1, spec.num_blocks, 2**31, -(2**40))),
    ):
        if values and m.some(ILLEGAL):
            values[rng.randrange(len(values))] = rng.choice(wrong)
    table = m.integers(tables)
    metadata = [m.integers(starts), m.integers(lens), table.reshape(len(rows), width)]
    if m.some(ILLEGAL):
        i = rng.randrange(3)
        metadata[i] = rng.choice((metadata[i][:-1], metadata[i][None], metadata[i].flatten()))
    slots = None
    if m.some(0.8):
        room = spec.num_blocks * spec.block_size
        values = rng.sample(range(room), min(room, sum(rows)))
        values += [-1] * (sum(rows) - len(values))
        if values and m.some(ILLEGAL):
            values[-1] = rng.choice((-2, room, values[0], 2**40))
        slots = m.integers(values)
    return spec, metadata, slots


def _cache(m: Memory, spec: ops.AttentionSpec) -> ops.PagedKV:
    lead = (spec.num_blocks, spec.num_kv_heads, spec.block_size)
    k = m.floats((*lead, spec.head_dim), spec.dtype)
    if m.some(0.1) and k.dim() == 4:
        return ops.PagedKV(k, k[..., : spec.dim_v])  # a latent cache
    return ops.PagedKV(k, m.floats((*lead, spec.dim_v), spec.dtype))


def _write_kv(m: Memory) -> Call:
    spec, metadata, slots = _step(m)
    kv, tokens = _cache(m, spec), max(0, int(metadata[0].flatten()[-1])) if metadata[0].numel() else 0
    shape = (tokens if tokens < 1000 else 3, spec.num_kv_heads)
    k = m.floats((*shape, spec.head_dim), spec.dtype)
    latent = m.some(0.1) and k.dim() == 3
    v = k[..., : spec.dim_v] if latent else m.floats((*shape, spec.dim_v), spec.dtype)

    def run(backend: ops.Backend) -> None:
        backend.write_kv(k, v, kv, backend.plan(spec, *metadata, slots))

    return Call("write_kv", run, m, [spec, *metadata, slots, k, v, kv.k, kv.v])


def _attention(m: Memory) -> Call:
    spec, metadata, _ = _step(m)
    m.poisons = ()
    kv, tokens = _cache(m, spec), max(0, int(metadata[0].flatten()[-1])) if metadata[0].numel() else 0
    shape = (tokens if tokens < 1000 else 3, spec.num_heads)
    m.poisons = (torch.nan,)  # in q: what a NaN or an infinity of the cache does to other rows is not defined
    q = m.floats((*shape, spec.head_dim), spec.dtype)
    options: dict[str, object] = {}
    if m.some(0.3):
        options["out"] = m.floats((*shape, spec.dim_v), spec.dtype)
    if m.some(0.2):
        options["scale"] = m.rng.choice((0.0, 0.3, -0.2, 1, float("nan"), float("inf"), 1e39, "1"))
    if m.some(0.2):
        options["softcap"] = m.rng.choice((0.5, 30.0, 30, 1e5, 0.0, -1.0, 1e-50, 1e300, float("nan"), "1"))
    for name in ("alibi_slopes", "sinks"):
        if m.some(0.15):
            options[name] = m.floats((spec.num_heads,), torch.float32)
    if m.some(0.3):
        options["return_lse"] = True

    def run(backend: ops.Backend) -> object:
        return backend.attention(q, kv, backend.plan(spec, *metadata), **options)

    return Call("attention", run, m, [spec, *metadata, q, kv.k, kv.v, *options, *options.values()])


def _make_plan(m: Memory) -> Call:
    spec, metadata, slots = _step(m)
    room = [m.rng.choice((0, 1, 4, 30, 200)) for _ in range(3)]
    if m.some(0.3):
        room[m.rng.randrange(3)] = m.rng.choice((-1, 2**31, 2**63, 2**70, 1.0, True, "3", None))

    def run(backend: ops.Backend) -> tuple[Tensor, ...]:
        plan = backend.make_plan(spec, *room)
        plan.update(*metadata, slots)
        t, s = plan.num_tokens, plan.num_seqs
        sizes = torch.tensor([t, s, plan.writable])
        return sizes, plan.query_starts[: s + 1], plan.context_lens[:s], plan.slots[: t * plan.writable]

    return Call("make_plan", run, m, [spec, room, *metadata, slots])


OPERATORS: dict[str, Callable[[Memory], Call]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "gelu": _gelu,
    "logsumexp": _logsumexp,
    "top_k": _top_k,
    "merge_states": _merge_states,
    "apply_sinks": _apply_sinks,
    "copy_blocks": _copy_blocks,
    "write_kv": _write_kv,
    "attention": _attention,
    "make_plan": _make_plan,
}


def draw(seed: int) -> Call:
    """The call of that number."""
    memory = Memory(seed)
    names = list(OPERATORS)
    return OPERATORS[names[seed % len(names)]](memory)


# ------------------------------------------------------------------------------------------------ the comparison


def check(seed: int, backend: ops.Backend) -> str:
    """Run the call on both, and say how it ended: "result", or the error's name. AssertionError where they differ."""
    theirs, ours = draw(seed), draw(seed)
    before = [x.clone() for x in ours.memory.storages]
    expected, got = _outcome(theirs, REFERENCE), _outcome(ours, backend)
    where = f"call {seed}: {ours}"
    if isinstance(got, Unsupported) and (
        any(x.dtype not in FLOATS or not x.is_cpu for x in ours.tensors()) or "device='meta'" in str(ours)
    ):
        return "Unsupported"
    if isinstance(expected, Exception) or isinstance(got, Exception):
        assert (type(got), str(got)) == (type(expected), str(expected)), f"{got!r}, not {expected!r}\n{where}"
        assert isinstance(got, QuireError), f"{got!r} is no error of Quire's\n{where}"
        for x, old in zip(ours.memory.storages, before, strict=True):
            same = x.view(torch.uint8) == old.view(torch.uint8)
            assert same.all(), f"a refused call wrote\n{where}"
        return type(got).__name__
    size = max((float(x.float().nan_to_num(0, 0, 0).abs().max()) for x in before if len(x)), default=1.0)
    for a, b in zip(_tensors(got), _tensors(expected), strict=True):
        _compare(a, b, size, where)
    for a, b in zip(ours.memory.storages, theirs.memory.storages, strict=True):
        _compare(a, b, size, where)
    return "result"


def _outcome(call: Call, backend: ops.Backend) -> object:
    try:
        return call.run(backend)
    except Exception as error:
        return error


def _tensors(result: object) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _compare(got: Tensor, want: Tensor, size: float, where: str) -> None:
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device), f"{got}, not {want}\n{where}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want), f"{_first(got, got != want)}, not {_first(want, got != want)}\n{where}"
        return
    eps = max(torch.finfo(got.dtype).eps, 1e-6)
    a, b = got.double(), want.double()
    close = torch.isclose(a, b, rtol=16 * eps, atol=16 * eps * max(1.0, size), equal_nan=True)
    assert close.all(), f"{_first(got, ~close)}, not {_first(want, ~close)}\n{where}"


def _first(x: Tensor, where: Tensor) -> str:
    return f"{int(where.sum())} of {x.numel()} numbers are wrong: {x[where][:3].tolist()}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", type=int, help="this call alone")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--native-library", type=Path, help="of another build")
    options = parser.parse_args()
    if options.native_library:
        library = native.load(path=options.native_library)
        native.default = lambda: library  # type: ignore[assignment]
    backend, failed, ends = ops.load(options.backend, "cpu"), 0, {}
    calls = range(options.seed, options.seed + options.calls) if options.only is None else [options.only]
    for seed in calls:
        print(seed, end="\r", file=sys.stderr, flush=True)
        try:
            end = check(seed, backend)
            key = f"{draw(seed).name}: {end}" if options.only is not None else end
            ends[key] = ends.get(key, 0) + 1
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
    print(dict(sorted(ends.items())), f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
