"""Cascade attention: levels with caches of their own give what one flat cache gives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from tests.marks import spread
from tests.ops import dense
from tests.ops.cases import half_dtype
from tests.ops.conftest import checked_once


@dataclass
class Tree:
    """Levels of shared keys: groups[l][s] is the node of level l that sequence s hangs from."""

    groups: list[list[int]]
    lens: list[list[int]]  # tokens of each node of each level
    rows: list[int]  # query rows of each sequence, the last tokens of its own node
    block_sizes: list[int]
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True

    def build(
        self, backend: ops.Backend, device: str
    ) -> tuple[Tensor, list[ops.CascadeLevel], list[tuple[Tensor, Tensor]]]:
        """q, the levels, and for each sequence its keys and values one after the other."""
        gen = torch.Generator().manual_seed(11)
        num_heads = self.num_kv_heads * self.group_size
        q = torch.randn(sum(self.rows), num_heads, self.head_dim, generator=gen).to(self.dtype)
        whole = [([], []) for _ in self.rows]
        levels = []
        for depth, (groups, lens, block_size) in enumerate(zip(self.groups, self.lens, self.block_sizes, strict=True)):
            blocks = [-(-n // block_size) for n in lens]
            order, width = torch.randperm(sum(blocks) + 2, generator=gen).tolist(), max(blocks, default=0) + 1
            shape = (sum(blocks) + 2, self.num_kv_heads, block_size, self.head_dim)
            k, v = (torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2))
            tables = torch.full((len(lens), width), -1)
            for node, n in enumerate(lens):
                tokens = torch.randn(2, n, self.num_kv_heads, self.head_dim, generator=gen).to(self.dtype)
                for j in range(blocks[node]):
                    tables[node, j] = order.pop()
                for t in range(n):
                    block = tables[node, t // block_size]
                    k[block, :, t % block_size], v[block, :, t % block_size] = tokens[0, t], tokens[1, t]
                for s, mine in enumerate(groups):
                    if mine == node:
                        whole[s][0].append(tokens[0])
                        whole[s][1].append(tokens[1])
            rows = [sum(n for n, g in zip(self.rows, groups, strict=True) if g == node) for node in range(len(lens))]
            spec = ops.AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                block_size=block_size,
                num_blocks=shape[0],
                dtype=self.dtype,
                causal=self.causal and depth == len(self.groups) - 1,
                device=device,
            )
            starts = torch.tensor([0, *rows]).cumsum(0)
            plan = backend.plan(spec, starts, torch.tensor(lens), tables)
            levels.append(ops.CascadeLevel(ops.PagedKV(k.to(device), v.to(device)), plan))
        return q.to(device), levels, [(torch.cat(k), torch.cat(v)) for k, v in whole]

    def check(self, backend: ops.Backend, device: str, **options: object) -> None:
        q, levels, whole = self.build(backend, device)
        lse = None
        out = ops.cascade_attention(q, levels, backend=backend.name, return_lse="sinks" not in options, **options)
        if "sinks" not in options:
            out, lse = out
        parts = []
        for s, (rows, (k, v)) in enumerate(zip(q.split(self.rows), whole, strict=True)):
            slopes = options.get("alibi_slopes")
            mine = {} if slopes is None or slopes.dim() == 1 else {"alibi_slopes": slopes[s]}
            parts.append(dense.attend(rows, k, v, causal=self.causal, **{**options, **mine}))
        want = dense.concat(parts)
        want.check(out, lse, self.dtype, roundings=2 + 2 * len(levels))


TREES = {
    "shared 128, own 16": Tree([[0, 0, 0], [0, 1, 2]], [[300], [17, 1, 40]], [1, 1, 1], [128, 16]),
    "prefill of several rows": Tree([[0, 0, 0], [0, 1, 2]], [[50], [17, 9, 40]], [5, 9, 1], [16, 8]),
    "two prefixes": Tree([[0, 0, 1], [0, 1, 2]], [[64, 33], [16, 15, 17]], [1, 2, 3], [32, 16]),
    "three levels": Tree(
        [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]], [[40], [9, 20], [3, 4, 1, 8]], [1, 1, 1, 4], [8, 5, 2]
    ),
    "an empty prefix": Tree([[0, 0], [0, 1]], [[0], [5, 6]], [1, 1], [16, 16]),
    "one level": Tree([[0, 1]], [[20, 31]], [2, 1], [16]),
    "a sequence without rows": Tree([[0, 0, 0], [0, 1, 2]], [[30], [4, 5, 6]], [1, 0, 2], [16, 4]),
    "longer than a split": Tree([[0, 0], [0, 1]], [[1030], [17, 40]], [1, 1], [128, 16]),
    "not causal": Tree([[0, 0], [0, 1]], [[30], [17, 40]], [3, 2], [16, 16], causal=False),
}


@pytest.mark.parametrize(
    ("name", "options"),
    spread(
        2,
        TREES,
        [{}, {"alibi": True}, {"softcap": 2.0}, {"sinks": True}, {"scale": 0.3, "alibi": True}, {"each": True}],
    ),
)
def test_levels_are_one_sequence(backend, device, name, options):
    tree = TREES[name]
    options, heads = dict(options), tree.num_kv_heads * tree.group_size
    if options.pop("alibi", False):
        options["alibi_slopes"] = (0.3 * 0.5 ** torch.arange(heads)).to(device)
    if options.pop("each", False):
        slopes = 0.3 * 0.5 ** torch.arange(heads) * torch.linspace(1, -0.7, len(tree.rows))[:, None]
        options["alibi_slopes"] = slopes.to(device)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, heads).to(device)
    tree.check(backend, device, **options)


@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_dim"), [(1, 1, 8), (2, 5, 24), (1, 8, 80), (3, 7, 15)])
def test_any_heads(backend, device, num_kv_heads, group_size, head_dim):
    for dtype in (torch.float32, half_dtype(backend)):
        Tree(
            [[0, 0, 0], [0, 1, 2]], [[100], [7, 30, 16]], [1, 2, 1], [32, 16],
            num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim, dtype=dtype,
        ).check(backend, device)  # fmt: skip


def levels_of(backend: ops.Backend, device: str, second: dict | None = None, first: dict | None = None) -> list:
    levels = []
    for depth, changes in enumerate((first or {}, second or {})):
        fields = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, "num_blocks": 3}
        fields |= {"dtype": torch.float32, "causal": depth == 1, "device": device} | changes
        rows = fields.pop("rows", 2)
        spec = ops.AttentionSpec(**fields)
        k, v = (
            torch.zeros(3, spec.num_kv_heads, 4, dim, dtype=spec.dtype, device=device)
            for dim in (spec.head_dim, spec.dim_v)
        )
        plan = backend.plan(spec, torch.tensor([0, rows]), torch.tensor([4]), torch.tensor([[1]]))
        levels.append(ops.CascadeLevel(ops.PagedKV(k, v), plan))
    return levels


@checked_once
@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        ({"rows": 3}, {}, BadShape, "level 0 has 3 query rows and the last one 2"),
        ({"num_heads": 4}, {}, BadShape, "level 0 has num_heads 4 and the last one 2"),
        ({"head_dim": 4}, {}, BadShape, "level 0 has head_dim 4 and the last one 8"),
        ({}, {"window": 3}, Unsupported, "level 1 has a window of 3"),
    ],
)
def test_levels_that_do_not_fit_are_refused(backend, device, first, second, error, message):
    levels = levels_of(backend, device, second, first)
    with pytest.raises(error, match=message):
        ops.cascade_attention(torch.zeros(2, 2, 8, device=device), levels, backend=backend.name)


@checked_once
def test_what_else_is_refused(backend, device):
    q = torch.zeros(2, 2, 8, device=device)
    slopes = torch.zeros(2, 2, device=device)
    with pytest.raises(BadShape, match=r"alibi_slopes has shape \(2, 2\); expected \(2,\) or \(1, 2\)"):
        ops.cascade_attention(q, levels_of(backend, device), alibi_slopes=slopes, backend=backend.name)
    with pytest.raises(BadValue, match="levels is empty"):
        ops.cascade_attention(q, [], backend=backend.name)
    with pytest.raises(BadValue, match="sinks close a state"):
        ops.cascade_attention(
            q, levels_of(backend, device), sinks=torch.zeros(2, device=device), return_lse=True, backend=backend.name
        )
    mixed = levels_of(backend, device, first={"dtype": half_dtype(backend)})
    with pytest.raises(BadDtype, match="level 0 has dtype"):
        ops.cascade_attention(q, mixed, backend=backend.name)
    with pytest.raises(BadShape, match=r"q has shape \(3, 2, 8\)"):
        ops.cascade_attention(torch.zeros(3, 2, 8, device=device), levels_of(backend, device), backend=backend.name)


@checked_once
def test_a_causal_level_before_the_last_is_refused(backend, device):
    """Also in the middle, and where the two are the same object."""
    first, last = levels_of(backend, device)
    q = torch.zeros(2, 2, 8, device=device)
    for levels, name in (([last, last], "level 0"), ([first, last, last], "level 1")):
        with pytest.raises(BadValue, match=f"{name} is causal; only the last one may be"):
            ops.cascade_attention(q, levels, backend=backend.name)


def test_levels_may_differ_in_kv_heads_and_not_in_values(backend, device):
    first, last = levels_of(backend, device, first={"num_kv_heads": 2})
    q = torch.zeros(2, 2, 8, device=device)
    assert ops.cascade_attention(q, [first, last], backend=backend.name).shape == (2, 2, 8)
    first, last = levels_of(backend, device, first={"head_dim_v": 4})
    with pytest.raises(BadShape, match="level 0 has dim_v 4 and the last one 8"):
        ops.cascade_attention(q, [first, last], backend=backend.name)
