"""The indexer of sparse attention on every backend that has one: scores, choice, and attention to the chosen keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops.program import Place, Program, Select
from quire.ops.sparse import Selection, select
from quire.ops.weights.linear import Linears

B, HEADS, DIM, LATENT, INDEX, INDEX_HEADS = 4, 3, 24, 16, 20, 5


@dataclass
class Step:
    """Rows of sequences with scattered blocks, over a latent cache of which all else is NaN."""

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    seed: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        draw = lambda *shape: torch.randn(*shape, generator=gen).to(self.dtype)  # noqa: E731
        blocks = [-(-n // B) for n in self.lens]
        self.num_blocks = sum(blocks) + 3
        ids = torch.randperm(self.num_blocks, generator=gen).int()
        memory = torch.full((self.num_blocks, 1, B, DIM + INDEX), torch.nan, dtype=self.dtype)
        self.kv = ops.PagedKV(memory[..., :DIM], memory[..., :LATENT], index=memory[..., DIM:])
        self.tables = torch.full((len(blocks), max(blocks) + 1), -1, dtype=torch.int32)
        self.keys, self.index, first = [], [], 0
        slots = []
        for s, (count, n, new) in enumerate(zip(blocks, self.lens, self.rows, strict=True)):
            self.tables[s, :count], first = ids[first : first + count], first + count
            at = self.tables[s, torch.arange(n) // B].long(), 0, torch.arange(n) % B
            self.keys.append(draw(n, DIM))
            self.index.append(draw(n, INDEX))
            memory[at] = torch.cat([self.keys[-1], self.index[-1]], 1)
            slots.append((at[0] * B + at[2])[n - new :])
            memory.view(-1, DIM + INDEX)[slots[-1], DIM:] = torch.nan  # `select` stores them
        self.slots, total = torch.cat(slots), sum(self.rows)
        self.q, self.index_q = draw(total, HEADS, DIM), draw(total, INDEX_HEADS, INDEX)
        self.weights = torch.randn(total, INDEX_HEADS, generator=gen)

    def plan(self, backend: ops.Backend) -> ops.AttentionPlan:
        spec = ops.AttentionSpec(
            num_heads=HEADS, num_kv_heads=1, head_dim=DIM, head_dim_v=LATENT, latent=True, block_size=B,
            num_blocks=self.num_blocks, dtype=self.dtype,
        )  # fmt: skip
        starts = torch.tensor([0, *self.rows]).cumsum(0).int()
        return backend.plan(spec, starts, torch.tensor(self.lens, dtype=torch.int32), self.tables, self.slots)

    def select(self, backend: ops.Backend, top_k: int) -> Selection | None:
        new = torch.cat([x[len(x) - rows :] for x, rows in zip(self.index, self.rows, strict=True)])
        index = self.kv.index
        assert index is not None
        return select(backend, self.index_q, new, self.weights, index, self.plan(backend), top_k)

    def scores(self) -> list[Tensor]:
        """Of the keys that each row sees, in float64."""
        found, row = [], 0
        for new, n, keys in zip(self.rows, self.lens, self.index, strict=True):
            for count in range(n - new + 1, n + 1):
                products = (self.index_q[row].double() @ keys[:count].double().T).relu()
                found.append(self.weights[row].double() @ products)
                row += 1
        return found

    def sequences(self) -> list[int]:
        return [s for s, rows in enumerate(self.rows) for _ in range(rows)]


def chosen(selection: Selection) -> list[list[int]]:
    rows = zip(selection._positions, selection._counts.tolist(), strict=True)
    return [row[:count].tolist() for row, count in rows]


@pytest.fixture
def indexing(backend: ops.Backend) -> ops.Backend:
    if not backend.has_index:
        place = Place("x", 0, 4)
        select = Select(place, place, place, Linears().head(torch.eye(4), None), 0, 0, 2)
        with pytest.raises(Unsupported, match=r"no sparse attention with an indexer; attention_backend must be 'cpu'"):
            backend.compile(Program(torch.float32, place, place, {"x": 4}, [select]))
        pytest.skip(f"backend {backend.name} refuses programs with an indexer, as was just seen")
    return backend


@pytest.mark.parametrize("seed", range(6))
def test_rows_attend_to_the_keys_with_the_largest_scores(indexing: ops.Backend, seed: int) -> None:
    """Against float64: prompts, chunks and decoded rows, with NaN in all memory that no sequence has."""
    step = Step((1, 9, 30, 1, 2), (57, 41, 30, 5, 2), seed)
    top_k = (1, 3, 7, 16, 29, 40)[seed]
    selection = step.select(indexing, top_k)
    assert selection is not None
    scale, q = 0.3, step.q.double()
    out = selection.attention(step.q, step.kv, step.plan(indexing), scale)
    for row, (found, scores, s) in enumerate(zip(chosen(selection), step.scores(), step.sequences(), strict=True)):
        assert found == sorted(set(found))
        assert len(found) == min(top_k, len(scores))
        others = torch.ones(len(scores), dtype=torch.bool)
        others[found] = False
        assert not others.any() or scores[found].min() > scores[others].max() - 1e-4
        keys = step.keys[s][found].double()
        attended = (q[row] @ keys.T * scale).softmax(-1) @ keys[:, :LATENT]
        torch.testing.assert_close(out[row].double(), attended, atol=1e-5, rtol=1e-5)


def test_of_equal_scores_the_lower_positions_are_chosen(indexing: ops.Backend) -> None:
    """Keys that no head wants all have the score 0."""
    step = Step((2,), (40,), 0)
    step.weights[:] = -1.0
    step.index[0][:] = 0.0
    step.index[0][5] = step.index_q[0].sum(0)  # a score below 0
    assert step.kv.index is not None
    step.kv.index[step.tables[0, :10].long(), 0] = step.index[0].view(10, 4, INDEX)
    selection = step.select(indexing, 8)
    assert selection is not None
    assert chosen(selection)[0] == [0, 1, 2, 3, 4, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_do_not_depend_on_the_other_rows(indexing: ops.Backend, dtype: torch.dtype) -> None:
    """Nor on threads, nor on the blocks: the same bits in any call of the native kernels."""
    backend = indexing
    if not backend.limits.reproducible:
        pytest.skip(f"backend {backend.name} does not promise bits")
    step = Step((3, 1, 8), (1_300, 700, 64), 1, dtype)
    index, rows = step.kv.index, sum(step.rows)
    assert index is not None
    step.select(backend, 2_000)  # stores the keys
    counts, sequences = torch.tensor([len(one) for one in step.scores()]), torch.tensor(step.sequences())
    together = backend.index_scores(step.index_q, step.weights, index, step.tables, sequences, counts)
    order = torch.randperm(step.num_blocks, generator=torch.Generator().manual_seed(2))
    moved, at = torch.full_like(index, torch.nan), step.tables.clamp(min=0).long()
    moved[order] = index
    before = torch.get_num_threads()
    for row in range(rows):
        torch.set_num_threads(1 + row % 2)
        own = slice(row, row + 1)
        given = step.index_q[own], step.weights[own], moved, order[at].int(), sequences[own], counts[own]
        alone = backend.index_scores(*given)[0]
        assert torch.equal(alone, together[row, : len(alone)])
        assert (together[row, len(alone) :] == -torch.inf).all()
    torch.set_num_threads(before)


@pytest.mark.parametrize("top_k", [1_300, 5_000])
def test_enough_keys_give_the_bits_of_dense_attention(indexing: ops.Backend, top_k: int) -> None:
    """Of a row that chooses all of its keys, even if another one of the step does not."""
    if not indexing.limits.reproducible:
        pytest.skip(f"backend {indexing.name} does not promise bits")
    step = Step((2, 1, 8), (1_400, 1_300, 64), 3)
    dense = indexing.attention(step.q, step.kv, step.plan(indexing), scale=0.2)
    selection = step.select(indexing, top_k)
    assert (selection is None) == (top_k > 1_400)
    if selection is not None:
        sparse = selection.attention(step.q, step.kv, step.plan(indexing), 0.2)
        assert torch.equal(sparse[2:], dense[2:])
        assert not torch.equal(sparse[:2], dense[:2])


def test_a_copied_block_has_its_index_keys(indexing: ops.Backend) -> None:
    step = Step((1,), (8,), 0)
    assert step.kv.index is not None
    step.select(indexing, 8)
    first, free = int(step.tables[0, 0]), (set(range(step.num_blocks)) - set(step.tables[0, :2].tolist())).pop()
    indexing.copy_blocks(step.kv, [first], [free])
    assert torch.equal(step.kv.index[free], step.kv.index[first])
    assert torch.equal(step.kv.k[free], step.kv.k[first])


def test_shapes_are_checked(indexing: ops.Backend) -> None:
    step = Step((1,), (8,), 0)
    assert step.kv.index is not None
    given = {
        "q": step.index_q, "weights": step.weights, "index": step.kv.index, "tables": step.tables,
        "sequences": torch.zeros(1, dtype=torch.int64), "counts": torch.tensor([8]),
    }  # fmt: skip
    step.select(indexing, 8)
    assert indexing.index_scores(**given).shape == (1, 8)
    wrong: list[tuple[str, Tensor, type[Exception], str]] = [
        ("weights", step.weights[:, 1:], BadShape, r"weights has shape \(1, 4\); expected \(1, 5\)"),
        ("q", step.index_q[0], BadShape, r"q, index and tables have the shapes \(5, 20\)"),
        ("index", step.kv.k[..., :INDEX].double(), BadDtype, "index has dtype torch.float64"),
        ("tables", step.tables.long(), BadDtype, "tables has dtype torch.int64"),
        ("tables", step.tables - step.num_blocks, BadValue, r"tables has blocks in .*; a visible one must be in 0..4"),
        ("sequences", torch.ones(1, dtype=torch.int64), BadValue, r"sequences has values in 1..1; .* in 0..0"),
        ("counts", torch.tensor([13]), BadValue, r"counts has values in 13..13; they must be in 0..12"),
    ]
    for name, value, error, match in wrong:
        with pytest.raises(error, match=match):
            indexing.index_scores(**given | {name: value})
