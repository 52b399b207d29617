"""Ragged batches over a poisoned paged cache: a `Case` describes one, a `Step` is its tensors.

Everything that a backend has no business to read or write is hostile: slots that no sequence owns hold NaN or
infinities, as do the gaps between strided rows, and table entries that may not be read hold rubbish.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire import ops
from quire.ops import native
from quire.ops.weights.rounding import LARGEST, quantised_rows
from tests.ops import dense

HEAD_DIMS = (1, 2, 3, 8, 15, 16, 17, 24, 31, 32, 40, 64, 80, 96, 128, 192, 256)
LATENT_DIMS = {24: 16, 40: 32, 80: 64, 96: 64, 192: 128}  # of K, and of V within it
BLOCK_SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 64, 100, 128, 255, 256)
GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 12)
KV_HEADS = (1, 2, 3, 5)
LAYOUTS = ("HND", "NHD", "K in HND, V in NHD", "side by side", "padded")
ROW_STRIDES = ("contiguous", "packed", "padded", "head-major")
POISONS = ("nan", "inf", "mixed")
RUBBISH = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention, with the cache it finds. `str(case)` is an expression that makes it again."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    seed: int = 0
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 16
    head_dim_v: int | None = None
    latent: bool = False
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    causal: bool = True
    ahead: bool = False  # some runs of rows see all keys up to the last one of the run
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    alibi_each: bool = False  # each sequence has slopes of its own
    sinks: bool = False
    return_lse: bool = False
    size: float = 1.0  # of q's entries, and so of the logits
    layout: str = "HND"
    row_strides: str = "contiguous"
    out_strides: str | None = None  # None: attention allocates the output
    poison: str = "nan"
    int_dtype: torch.dtype = torch.int32  # of the metadata
    spare_blocks: int = 2
    spare_columns: int = 1
    history_first: bool = True  # write the history, then this step's tokens; else all at once, then a read-only plan
    written: int | None = None  # tokens of the history that write_kv writes, the others lie there before; None: all
    shared_prefix: bool = False  # sequences own their common full blocks together with the one before

    @classmethod
    def draw(cls, seed: int, limits: ops.Limits) -> Case:
        """A random case of what the limits allow, the same one for the same seed."""
        rng = random.Random(seed)
        long = rng.random() < 0.03  # longer than a tile or a split of the keys may be
        dtype = rng.choice(sorted(limits.kv_dtypes, key=str))
        kv_dtypes = sorted(limits.kv_dtypes[dtype], key=str)
        kv_dtype = None if dtype in kv_dtypes and rng.random() < 0.6 else rng.choice(kv_dtypes)
        head_dim = limits.max_head_dim if rng.random() < 0.02 else rng.choice(HEAD_DIMS)
        head_dim_v = rng.choice(HEAD_DIMS) if rng.random() < 0.2 else head_dim
        head_dim, head_dim_v = min(head_dim, limits.max_head_dim), min(head_dim_v, limits.max_head_dim)
        num_kv_heads, group_size = rng.choice(KV_HEADS), rng.choice(GROUP_SIZES)
        block_size = rng.choice(BLOCK_SIZES[5:] if long else BLOCK_SIZES)
        width = num_kv_heads * (head_dim + head_dim_v)
        for attempt in itertools.count():
            query_lens, context_lens = _draw_lengths(rng, block_size, long)
            blocks = [-(-n // block_size) for n in context_lens]
            work = sum(rows * n for rows, n in zip(query_lens, context_lens, strict=True)) * width * group_size
            if sum(blocks) <= (120 if long else 24) and sum(blocks) * block_size * width < 300_000 and work < 6_000_000:
                break
            if attempt >= 3:  # too much work: fewer heads, and if need be other blocks
                num_kv_heads, width = 1, width // num_kv_heads
            if attempt >= 6:
                block_size, long = rng.choice(BLOCK_SIZES), False
        causal = rng.random() < 0.85
        window = rng.choice((1, 2, 3, block_size - 1, block_size, block_size + 1, rng.randint(1, 200), 2**31 - 1))
        sinks = rng.random() < 0.25
        drawn = cls(
            query_lens=query_lens,
            context_lens=context_lens,
            seed=seed,
            num_kv_heads=num_kv_heads,
            group_size=group_size,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            causal=causal,
            ahead=causal and random.Random(f"ahead {seed}").random() < 0.25,
            window=max(1, window) if causal and rng.random() < 0.4 else None,
            scale=rng.choice((0.1, 1.0, rng.uniform(0.01, 1.5), -0.3, 0.0)) if rng.random() < 0.3 else None,
            softcap=rng.choice((0.3, 2.0, 30.0, 50.0)) if rng.random() < 0.25 else None,
            alibi=rng.random() < 0.25,
            sinks=sinks,
            return_lse=not sinks and rng.random() < 0.5,
            size=rng.choice((1.0, 1.0, 1.0, 5.0)),
            layout=rng.choice(LAYOUTS),
            row_strides=rng.choice(ROW_STRIDES),
            out_strides=rng.choice((None, *ROW_STRIDES)),
            poison=rng.choice(POISONS),
            int_dtype=rng.choice((torch.int32, torch.int64)),
            spare_blocks=rng.choice((0, 1, 2, 5)) if sum(blocks) else 1,
            spare_columns=rng.choice((0, 1, 3)),
            history_first=rng.random() < 0.7,
            shared_prefix=rng.random() < 0.5,
            written=rng.choice((None, 20, 20, 20)),
            alibi_each=rng.random() < 0.5,
            chunk=rng.choice((1, 7, block_size, 64)) if causal and rng.random() < 0.2 else None,
        )
        if rng.random() < 0.3 and head_dim in LATENT_DIMS:
            return replace(drawn, latent=True, head_dim_v=LATENT_DIMS[head_dim])
        return drawn

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v


def _draw_lengths(rng: random.Random, block_size: int, long: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and context lengths of 1..6 sequences, many of them at the edges of blocks."""
    query_lens, context_lens = [], []
    for _ in range(1 if long else rng.randint(1, 6)):
        edge = max(0, block_size * rng.randint(1, 4) + rng.randint(-1, 1))
        rows = rng.choice((0, 1, 1, 1, 2, rng.randint(3, 8), min(edge, 70), rng.randint(1, 70)))
        edge = max(0, block_size * rng.randint(1, 9) + rng.randint(-1, 1))
        history = rng.choice((0, rng.randint(0, 150), edge if edge <= 260 else 0, rng.randint(0, 3 * block_size)))
        if long:
            rows, history = rng.choice((1, 1, 4)), rng.randint(250, 1500)
        query_lens.append(rows)
        context_lens.append(rng.randint(0, rows - 1) if rows and rng.random() < 0.08 else history + rows)
    return tuple(query_lens), tuple(context_lens)


class Step:
    """The tensors of a case: the inputs of the operators, and in `keys` and `values` what each sequence really holds.

    Sequence s holds context_lens[s] tokens, the last ones of them this step's query rows. It owns the blocks from the
    first one that its first row can see; what lies wholly below the window is given up.
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self._rng = random.Random(f"step {case.seed}")
        self._gen = torch.Generator().manual_seed(case.seed)
        self._bytes = torch.Generator().manual_seed(case.seed)  # apart, so that the layout changes no number
        self.num_seqs = len(case.context_lens)
        self.num_tokens = sum(case.query_lens)
        self._draw_tokens()
        self._assign_blocks()
        self.spec = ops.AttentionSpec(
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            latent=case.latent,
            block_size=case.block_size,
            num_blocks=self.num_blocks,
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            device=device,
            causal=case.causal,
            window=case.window,
        )
        self._make_cache()
        self._make_rows()
        self._draw_key_ends()
        heads = torch.arange(case.num_heads)
        slopes = 0.7 * 0.5 ** (heads % 7) * (-1.0) ** (heads // 3)
        if case.alibi_each:  # [S, Hq]
            slopes = torch.stack([slopes.roll(s) * 0.8**s for s in range(self.num_seqs)] or [slopes])[: self.num_seqs]
        self.alibi_slopes = slopes.to(device) if case.alibi else None
        sinks = 2 * torch.randn(case.num_heads, generator=self._gen)
        sinks[heads % 5 == 3] = -torch.inf
        self.sinks = sinks.to(device) if case.sinks else None

    # ------------------------------------------------------------------------------------------ what they hold

    def _draw_tokens(self) -> None:
        """K and V of every token of every sequence [context_len, Hkv, D], as they are before they enter the cache."""
        case = self.case
        # From float64 to a half type is one rounding by way of fp32 and another directly: avoid the difference.
        exact = case.dtype == torch.float64 and case.kv_dtype in (None, torch.float64)
        draw = torch.float64 if exact else torch.float32
        total, width = sum(case.context_lens), case.head_dim + case.dim_v
        both = torch.randn(total, case.num_kv_heads, width, generator=self._gen, dtype=draw).to(case.dtype)
        k, v = both.split((case.head_dim, case.dim_v), dim=-1)
        if case.latent:  # what is rotated is larger, as it is in models
            k[..., case.dim_v :] *= 30
            v = k[..., : case.dim_v]
        self.no_keys, self.no_values = k[:0], v[:0]
        ends = list(itertools.accumulate(case.context_lens))
        bounds = list(zip(ends, case.context_lens, strict=True))
        self.keys, self.values = ([x[end - n : end] for end, n in bounds] for x in (k, v))

    def _draw_key_ends(self) -> None:
        """For the rows of every sequence [rows], the keys before which each attends."""
        rng = random.Random(f"ends {self.case.seed}")
        self.key_ends: list[Tensor] = []
        for rows, n in zip(self.case.query_lens, self.case.context_lens, strict=True):
            ends = torch.arange(n - rows + 1, n + 1, dtype=self.case.int_dtype).clamp(min=0)
            at = 0
            while at < rows:
                stop = min(rows, at + rng.choice((1, 2, 5, 17, 40, 300)))
                if self.case.ahead and rng.random() < 0.6:
                    ends[at:stop] = ends[stop - 1].clone()
                at = stop
            self.key_ends.append(ends)

    def ends_of(self, first: int, last: int) -> Tensor | None:
        """What a plan of the rows first..last - 1 takes as their `key_ends`."""
        return torch.cat(self.key_ends)[first:last] if self.case.ahead and self.num_seqs else None

    def _assign_blocks(self) -> None:
        """Block tables, and for every token of every sequence its slot and whether the sequence itself writes it."""
        case, B = self.case, self.case.block_size
        ends = [-(-n // B) for n in case.context_lens]
        free = self._rng.sample(range(sum(ends) + case.spare_blocks), sum(ends) + case.spare_blocks)
        self.num_blocks = len(free)
        self.width = max(ends, default=0) + case.spare_columns
        self.tables = [[self._rubbish() for _ in range(self.width)] for _ in ends]
        self.slots: list[Tensor] = []  # int64 [context_len], -1 where given up
        self.written: list[Tensor] = []  # the same, -1 also where another sequence writes
        first_owned: list[int] = []
        for s, (rows, n) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
            first = 0 if case.window is None else max(0, n - rows - case.window + 1) // B
            shared = self._shared_blocks(s) if case.shared_prefix and s else 0
            table, slots = self.tables[s], torch.full((ends[s], B), -1)
            for j in range(first, ends[s]):
                theirs = j < shared and j >= first_owned[s - 1]
                table[j] = self.tables[s - 1][j] if theirs else free.pop()
                slots[j] = table[j] * B + torch.arange(B)
            if shared:
                self.keys[s][: shared * B] = self.keys[s - 1][: shared * B]
                self.values[s][: shared * B] = self.values[s - 1][: shared * B]
            self.slots.append(slots.flatten()[:n])
            mine = slots.clone()
            if shared and first_owned[s - 1] < shared:
                mine[first_owned[s - 1] : shared] = -1
            self.written.append(mine.flatten()[:n])
            first_owned.append(first)

    def _shared_blocks(self, s: int) -> int:
        """Full blocks that both this sequence and the one before have in their history."""
        history = [max(0, self.case.context_lens[i] - self.case.query_lens[i]) for i in (s - 1, s)]
        return min(history) // self.case.block_size

    def _rubbish(self) -> int:
        rng = self._rng
        wide = (2**40 + 1, -(2**63)) if self.case.int_dtype == torch.int64 else ()
        return rng.choice((*RUBBISH, *wide, self.num_blocks, rng.randrange(self.num_blocks)))

    # -------------------------------------------------------------------------------------------------- tensors

    def _make_cache(self) -> None:
        N, Hkv, B = self.num_blocks, self.case.num_kv_heads, self.case.block_size
        D, Dv, dtype = self.case.head_dim, self.case.dim_v, self.spec.cache_dtype
        layout = self.case.layout
        if self.case.latent:
            Dv = 0  # no memory of their own
        if layout == "side by side" and dtype == torch.int8:
            self._make_block_memory()
            return
        if layout == "side by side":
            both = self._poisoned((N, 2, Hkv, B, max(D, Dv)), dtype)
            self.storages = [both, both]
            k, v = both[:, 0, ..., :D], both[:, 1, ..., :Dv]
        elif layout == "NHD":
            self.storages = [self._poisoned((N, B, Hkv, d), dtype) for d in (D, Dv)]
            k, v = (x.permute(0, 2, 1, 3) for x in self.storages)
        elif layout == "K in HND, V in NHD":
            self.storages = [self._poisoned((N, Hkv, B, D), dtype), self._poisoned((N, B, Hkv, Dv), dtype)]
            k, v = self.storages[0], self.storages[1].permute(0, 2, 1, 3)
        elif layout == "padded":
            self.storages = [self._poisoned((N + 1, Hkv + 1, B + 1, d + 3), dtype) for d in (D, Dv)]
            k, v = (x[1:, 1:, 1:, 1:-2] for x in self.storages)
        else:
            self.storages = [self._poisoned((N, Hkv, B, d), dtype) for d in (D, Dv)]
            k, v = self.storages
        if self.case.latent:
            self.storages[1], v = self.storages[0], k[..., : self.case.dim_v]
        scales = self._make_scales() if dtype == torch.int8 else ()
        self.kv = ops.PagedKV(k, v, *scales)
        clones = {id(x): x.clone() for x in self.storages}
        self._expect([clones[id(x)] for x in self.storages])

    def _make_scales(self) -> list[Tensor]:
        """Memory for the scales of K and V, adding to the storages: views [N, Hkv, B]."""
        N, Hkv, B = self.num_blocks, self.case.num_kv_heads, self.case.block_size
        layout = self.case.layout
        shape = {"NHD": (N, B, Hkv), "padded": (N + 1, Hkv + 1, B + 1)}.get(layout, (N, Hkv, B))
        made = [self._poisoned(shape, torch.float32) for _ in range(2)]
        self.storages += made
        if layout == "NHD":
            return [x.transpose(1, 2) for x in made]
        return [x[1:, 1:, 1:] for x in made] if layout == "padded" else made

    def _make_block_memory(self) -> None:
        """One piece of memory for a block's integers and scales, as an engine's cache has it, with a gap in between."""
        N, Hkv, B = self.num_blocks, self.case.num_kv_heads, self.case.block_size
        D, Dv = self.case.head_dim, 0 if self.case.latent else self.case.dim_v
        ends = list(itertools.accumulate((Hkv * B * D, Hkv * B * Dv)))
        first = -(-ends[1] // 4) + 1
        memory = self._poisoned((N, (first + 2 * Hkv * B) * 4), torch.int8)
        k, v = memory[:, : ends[0]].unflatten(1, (Hkv, B, D)), memory[:, ends[0] : ends[1]].unflatten(1, (Hkv, B, Dv))
        if self.case.latent:
            v = k[..., : self.case.dim_v]
        scales = memory.view(torch.float32)[:, first:].unflatten(1, (2, Hkv, B))
        scales.copy_(self._poisoned(tuple(scales.shape), torch.float32))
        self.kv = ops.PagedKV(k, v, scales[:, 0], scales[:, 1])
        self.storages = [memory, memory, memory.view(torch.float32), memory.view(torch.float32)]
        wanted = memory.clone()
        self._expect([wanted, wanted, wanted.view(torch.float32), wanted.view(torch.float32)])

    def _expect(self, storages: list[Tensor]) -> None:
        """Put what each sequence holds into these copies of the storages."""
        self.expected_storages = storages
        B, scaled = self.case.block_size, self.spec.is_scaled
        for s in range(self.num_seqs):
            kept = self.slots[s] >= 0
            slots = self.slots[s][kept].to(self.device)
            rows = [x[s][kept].to(self.device) for x in (self.keys, self.values)]
            if scaled:
                v, v_scale = quantised_rows(rows[1])
                first = self.case.dim_v if self.case.latent else 0
                k, k_scale = quantised_rows(rows[0][..., first:])
                rows = [torch.cat([v[..., :first], k], -1), v, k_scale, v_scale]
            for expected, held in zip(self.expected_views(), rows, strict=True):
                expected[slots // B, :, slots % B] = held.to(expected.dtype)

    def expected_views(self) -> list[Tensor]:
        """What the tensors of the cache are to hold in the end, where sequences own it."""
        views = self.kv.tensors().values()
        return [
            storage.as_strided(view.shape, view.stride(), view.storage_offset())
            for view, storage in zip(views, self.expected_storages, strict=True)
        ]

    def _make_rows(self) -> None:
        """q, k_new and v_new of this step; rows that stand before the sequence's start have no slot."""
        case = self.case
        draw = torch.float64 if case.dtype == torch.float64 else torch.float32
        q = torch.randn(self.num_tokens, case.num_heads, case.head_dim, generator=self._gen, dtype=draw) * case.size
        k_new, v_new, slots = [self.no_keys], [self.no_values], [torch.zeros(0, dtype=torch.int64)]
        for s, (rows, n) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
            here, before = min(rows, n), max(0, rows - n)
            k_new += [torch.ones(before, *self.keys[s].shape[1:]), self.keys[s][n - here :]]
            v_new += [torch.ones(before, *self.values[s].shape[1:]), self.values[s][n - here :]]
            slots += [torch.full((before,), -1), self.written[s][n - here :]]
        self.q, self.k_new, self.v_new = self._strided(q, torch.cat(k_new), torch.cat(v_new))
        self.new_slots = torch.cat(slots)

        integers = case.int_dtype
        starts = [sum(case.query_lens[:s]) for s in range(self.num_seqs + 1)]
        self.query_starts = torch.tensor(starts, dtype=integers)
        self.context_lens = torch.tensor(case.context_lens, dtype=integers)
        self.block_tables = torch.tensor(self.tables, dtype=integers).reshape(self.num_seqs, self.width)

    def _strided(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows as the case strides them, in this step's dtype and on its device."""
        tensors = [x.to(self.case.dtype).to(self.device) for x in (q, k, v)]
        if self.case.row_strides == "packed":
            heads, widest = [x.shape[1] for x in tensors], max(x.shape[2] for x in tensors)
            packed = self._poisoned((len(q), sum(heads), widest), self.case.dtype).split(heads, dim=1)
            homes = [home[..., : x.shape[2]] for home, x in zip(packed, tensors, strict=True)]
        else:
            homes = [self._rows(self.case.row_strides, tuple(x.shape)) for x in tensors]
        q, k, v = (home.copy_(x) for home, x in zip(homes, tensors, strict=True))
        return q, k, k[..., : self.case.dim_v] if self.case.latent else v

    def _rows(self, strides: str, shape: tuple[int, int, int]) -> Tensor:
        rows, heads, dim = shape
        if strides in ("padded", "packed"):
            return self._poisoned((rows, heads + 1, dim + 3), self.case.dtype)[:, 1:, 1:-2]
        if strides == "head-major":
            return self._poisoned((heads, rows, dim), self.case.dtype).transpose(0, 1)
        return self._poisoned(shape, self.case.dtype)

    def _poisoned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of NaN, infinities, or both and numbers too; of any integers."""
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, generator=self._bytes).to(self.device)
        if self.case.poison == "nan":
            return torch.full(shape, torch.nan, dtype=dtype, device=self.device)
        poisons = {"inf": (torch.inf, -torch.inf), "mixed": (torch.nan, torch.inf, -torch.inf, 3e4)}
        choices = torch.tensor(poisons[self.case.poison], dtype=dtype)
        return choices[torch.randint(len(choices), shape, generator=self._gen)].to(self.device)

    # ------------------------------------------------------------------------------------------------- running

    def write(self, backend: ops.Backend) -> ops.AttentionPlan:
        """Fill the cache, through write_kv as far as the case says, and return the plan of this step."""
        metadata = (self.query_starts, self.context_lens, self.block_tables)
        new = [max(0, n - rows) for rows, n in zip(self.case.query_lens, self.case.context_lens, strict=True)]
        if not self.case.history_first:
            new = list(self.case.context_lens)
        if sum(new):
            self._write_tokens(backend, new)
        ends = self.ends_of(0, self.num_tokens)
        if not self.case.history_first:
            return backend.plan(self.spec, *metadata, key_ends=ends)
        plan = backend.plan(self.spec, *metadata, self.new_slots, ends)
        backend.write_kv(self.k_new, self.v_new, self.kv, plan)
        return plan

    def _write_tokens(self, backend: ops.Backend, counts: list[int]) -> None:
        """Write the first counts[s] tokens of each sequence, in random order, by a plan that serves nothing else."""
        order = torch.randperm(sum(counts), generator=self._gen)
        k, v, slots = (
            torch.cat([x[:n] for x, n in zip(tokens, counts, strict=True)])[order]
            for tokens in (self.keys, self.values, self.written)
        )
        if self.case.written is not None:
            self._place(slots[self.case.written :])
            k, v, slots = (x[: self.case.written] for x in (k, v, slots))
        _, k, v = self._strided(torch.zeros(len(slots), self.case.num_heads, 1), k, v)
        integers = self.case.int_dtype
        starts, none = torch.tensor([0, len(slots)], dtype=integers), torch.zeros(1, dtype=integers)
        plan = backend.plan(self.spec, starts, none, torch.zeros(1, 0, dtype=integers), slots)
        backend.write_kv(k, v, self.kv, plan)

    def _place(self, slots: Tensor) -> None:
        """Put what these slots are to hold in its place, as if it had been written."""
        slots = slots[slots >= 0].to(self.device)
        blocks, offsets = slots // self.case.block_size, slots % self.case.block_size
        for view, expected in zip(self.kv.tensors().values(), self.expected_views(), strict=True):
            view[blocks, :, offsets] = expected[blocks, :, offsets]

    def check_cache(self) -> None:
        """Every bit of the cache: the tokens where they belong, the poison everywhere else."""
        for got, want in zip(self.storages, self.expected_storages, strict=True):
            same = got.view(torch.uint8) == want.view(torch.uint8)
            assert same.all(), f"write_kv left wrong bytes in the cache, the first at {_first(~same)} of the storage"

    def attend(
        self, backend: ops.Backend, plan: ops.AttentionPlan, **overrides: object
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as the case asks for it: out, and the LSE if asked for."""
        case = self.case
        out = None
        if case.out_strides is not None:
            out = self._rows(case.out_strides, (self.num_tokens, case.num_heads, case.dim_v))
        options = {
            "scale": case.scale,
            "alibi_slopes": self.alibi_slopes,
            "softcap": case.softcap,
            "sinks": self.sinks,
            "chunk": case.chunk,
            "out": out,
            "return_lse": case.return_lse,
            **overrides,
        }
        result = backend.attention(self.q, self.kv, plan, **options)
        got, lse = result if options["return_lse"] else (result, None)
        assert out is None or (got.data_ptr() == out.data_ptr() and got.stride() == out.stride()), "out= was not used"
        return got, lse

    def dense(self) -> dense.Dense:
        """The answer in float64, from K and V as the cache's dtype rounds them."""
        case, parts = self.case, []
        for s, q in enumerate(self.q.split(case.query_lens)):
            k, v = (self.held(x[s]) for x in (self.keys, self.values))
            if case.latent:
                k = torch.cat([v, self.held(self.keys[s][..., case.dim_v :])], -1)
            slopes = self.alibi_slopes
            if slopes is not None and case.alibi_each:
                slopes = slopes[s]
            parts.append(
                dense.attend(
                    q,
                    k,
                    v,
                    causal=case.causal,
                    ends=self.key_ends[s] if case.ahead else None,
                    window=case.window,
                    chunk=case.chunk,
                    scale=case.scale,
                    softcap=case.softcap,
                    alibi_slopes=slopes,
                    sinks=self.sinks,
                )
            )
        return dense.concat(parts)

    def held(self, rows: Tensor) -> Tensor:
        """Rows [..., D] as the cache rounds them."""
        if not self.spec.is_scaled:
            return rows.to(self.spec.cache_dtype)
        q, scale = quantised_rows(rows)
        return q.double() * scale.double()[..., None]

    def check(self, backend: ops.Backend) -> None:
        """Write, attend and compare."""
        plan = self.write(backend)
        self.check_cache()
        self.check_result(backend, *self.attend(backend, plan))
        self.check_cache()

    def check_result(self, backend: ops.Backend, out: Tensor, lse: Tensor | None) -> None:
        """Compare what that backend found with the answer."""
        # Weights of integers are multiplied by the scale before they are rounded.
        largest = LARGEST if self.spec.is_scaled else 1.0
        errors = errors_of_bytes(backend, self.spec, max(self.case.context_lens))
        self.dense().check(out, lse, self.case.dtype, largest=largest, **errors)


def errors_of_bytes(backend: ops.Backend, spec: ops.AttentionSpec, context_len: int) -> dict[str, float]:
    """What `Dense.check` has to allow where an int8 cache is multiplied as bytes."""
    if not (spec.is_scaled and spec.dtype.itemsize == 2 and backend.name == "cpu"):
        return {}
    if native.default().isa != "avx512_bf16":
        return {}
    # Numbers of queries and weights are off by half a unit at most, and one of a query's (of each part) by another one.
    unit = 1 / (32512 if spec.head_dim <= 512 else 16256)
    return {"query_error": unit * (spec.head_dim**0.5 / 2 + 1 + spec.latent), "weight_error": context_len / 2 / 65535}


def half_dtype(backend: ops.Backend) -> torch.dtype:
    """The narrowest dtype that the backend serves with a cache of the same: fp16 or bf16 where it can."""
    halves = (torch.float16, torch.bfloat16, torch.float32)
    return next(dtype for dtype in halves if dtype in backend.limits.kv_dtypes.get(dtype, ()))


def check(backend: ops.Backend, case: Case, device: str) -> None:
    """Run a case; whatever goes wrong names it."""
    with naming(case):
        Step(case, device).check(backend)


@contextmanager
def naming(case: Case) -> Iterator[None]:
    """Put the case in front of what goes wrong."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{error}\n  {case}") from error


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
