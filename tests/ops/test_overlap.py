"""What is written must not share memory with itself or with what is read; views that interleave do not share any."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quire import ops
from quire.errors import BadStride
from quire.ops.checks import overlap
from tests.ops.conftest import checked_once
from tests.ops.test_validate import cache_tensors, good_metadata, good_spec


def elements(x: Tensor) -> list[int]:
    """Where each element lies, one after the other."""
    places = [x.storage_offset()]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = [at + i * stride for at in places for i in range(size)]
    return places


def test_the_answer_is_that_of_counting_all_elements():
    rng, home = random.Random(0), torch.zeros(200)

    def view() -> Tensor:
        shape = [rng.choice((0, 1, 2, 2, 3, 4)) for _ in range(rng.randint(0, 4))]
        return home.as_strided(shape, [rng.choice((0, 1, 2, 3, 4, 6, 7, 20)) for _ in shape], rng.randint(0, 30))

    found = {"apart": 0, "shared": 0, "repeated": 0}
    for _ in range(2_000):
        a, b = view(), view()
        shared, repeated = bool({*elements(a)} & {*elements(b)}), len({*elements(a)}) < a.numel()
        assert overlap.shares(a, b) == shared, (a.shape, a.stride(), b.shape, b.stride())
        assert overlap.repeats(a) == repeated, (a.shape, a.stride())
        found["shared" if shared else "apart"] += 1
        found["repeated"] += repeated
    assert min(found.values()) > 100, found


def test_numbers_of_other_sizes_share_bytes():
    home = torch.zeros(8)
    assert overlap.shares(home[1:2], home.view(torch.float16)[3:5])
    assert not overlap.shares(home[1:2], home.view(torch.float16)[4:6])


def test_a_layout_that_takes_too_long_to_decide_is_taken_to_overlap(monkeypatch):
    home = torch.zeros(100_000)
    a = home.as_strided((9, 9, 9, 9), (6 * 881, 10 * 211, 15 * 97, 30), 0)
    b = home.as_strided((9, 9, 9, 9), (6 * 883, 10 * 223, 15 * 101, 30), 1)
    monkeypatch.setattr(overlap, "MAX_WORK", 1)
    assert overlap.shares(a, b)


# ------------------------------------------------------------------------------------------------ the operators


def refused(first: str, second: str = "share memory"):
    """The context in which a call is refused, naming what shares memory, and with what."""
    return pytest.raises(BadStride, match=rf"^{first} .*{second}")


@checked_once
def test_attention_refuses_an_output_in_the_memory_of_its_inputs(backend, device):
    plan, kv = backend.plan(good_spec(device), **good_metadata()), cache_tensors(device)
    q = torch.zeros(5, 6, 16, device=device)
    for name, out in (
        ("q", q),
        ("kv.k", kv.k.view(-1)[: 5 * 6 * 16].view(5, 6, 16)),
        ("kv.v", kv.v.view(-1)[-5 * 6 * 16 :].view(5, 6, 16)),
    ):
        with refused("out", f"memory with {name}"):
            backend.attention(q, kv, plan, out=out)
    one_row, heads_in_each_other = torch.zeros(1, 6, 16, device=device), torch.zeros(5 * 96, device=device)
    for out in (one_row.expand(5, 6, 16), heads_in_each_other.as_strided((5, 6, 16), (80, 15, 1))):
        with refused("out"):
            backend.attention(q, kv, plan, out=out)


def test_attention_may_write_beside_its_query(backend, device):
    """Both are parts of one tensor's rows, and share no element."""
    plan, kv = backend.plan(good_spec(device), **good_metadata()), cache_tensors(device)
    kv.v.copy_(torch.rand(kv.v.shape))
    both = torch.rand(5, 12, 16).to(device)
    q, out = both[:, :6], both[:, 6:]
    expected, before = backend.attention(q.clone(), kv, plan), q.clone()
    assert backend.attention(q, kv, plan, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(q, before)


@checked_once
def test_write_kv_refuses_a_cache_that_shares_memory(backend, device):
    plan, kv = backend.plan(good_spec(device), **good_metadata()), cache_tensors(device)
    rows = torch.ones(5, 2, 16, device=device)
    repeated = torch.zeros(1, 2, 8, 16, device=device).expand(10, 2, 8, 16)
    in_the_cache = kv.v.view(-1)[: rows.numel()].view(rows.shape)
    for cache, k_new, v_new, first, second in (
        (ops.PagedKV(repeated, kv.v), rows, rows, "kv.k", "share memory"),
        (ops.PagedKV(kv.k, repeated), rows, rows, "kv.v", "share memory"),
        (ops.PagedKV(kv.k, kv.k), rows, rows + 1, "kv.k", "memory with kv.v"),
        (kv, rows, in_the_cache, "kv.v", "memory with v_new"),
        (kv, in_the_cache, rows, "kv.v", "memory with k_new"),
    ):
        before = [x.clone() for x in (cache.k, cache.v)]
        with refused(first, second):
            backend.write_kv(k_new, v_new, cache, plan)
        assert all(torch.equal(x, y) for x, y in zip((cache.k, cache.v), before, strict=True))


def test_write_kv_takes_caches_side_by_side_and_latent_ones(backend, device):
    """V is the first half of K in a latent cache, and the new values are the first half of the new keys."""
    latent = torch.rand(5, 2, 16).to(device)
    spec = good_spec(device, head_dim_v=8)
    plan, home = backend.plan(spec, **good_metadata()), torch.zeros(10, 2, 8, 24, device=device)
    for kv in (ops.PagedKV(home[..., :16], home[..., 16:]), ops.PagedKV(home[..., :16], home[..., :8])):
        home.zero_()
        backend.write_kv(latent, latent[..., :8], kv, plan)
        assert torch.equal(kv.k[3, :, 0], latent[0])
        assert torch.equal(kv.v[4, :, 7], latent[4, :, :8])


def test_a_latent_cache_of_one_head(backend, device):
    """As such caches have. Slices of one tensor come in several strides then, all of which are the same."""
    spec = good_spec(device, num_heads=1, num_kv_heads=1, head_dim_v=8)
    plan, home = backend.plan(spec, **good_metadata()), torch.zeros(10, 1, 8, 16, device=device)
    kv, latent = ops.PagedKV(home, home[..., :8]), torch.rand(5, 16, device=device)
    for v_new in (latent[:, :8].unsqueeze(1), latent.view(5, 1, 16)[..., :8]):
        home.zero_()
        backend.write_kv(latent.unsqueeze(1), v_new, kv, plan)
        assert torch.equal(kv.k[3, 0, 0], latent[0])
        assert torch.equal(kv.v[4, 0, 7], latent[4, :8])


def test_a_compiler_may_copy_the_values_of_a_latent_cache(backend, device):
    """The registered operator takes a copy with the same numbers; one with others is refused as ever."""
    spec = good_spec(device, num_heads=1, num_kv_heads=1, head_dim_v=8)
    plan, home = backend.plan(spec, **good_metadata()), torch.zeros(10, 1, 8, 16, device=device)
    latent = torch.rand(5, 1, 16, device=device)
    copied = latent[..., :8].clone()
    torch.ops.quire.write_kv(backend.name, latent, copied, home, home[..., :8], plan.key)
    assert torch.equal(home[3, 0, 0], latent[0, 0])
    with refused("kv.k", "memory with kv.v"):
        torch.ops.quire.write_kv(backend.name, latent, copied + 1, home, home[..., :8], plan.key)


def test_tensors_without_memory_share_none():
    """As torch traces with them; the reference computes with whatever torch does."""
    with FakeTensorMode():
        x, residual, weight = torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
        assert ops.load("reference", "cpu").add_rms_norm(x, residual, weight, 1e-6).shape == (3, 8)


@checked_once
def test_copy_blocks_refuses_blocks_in_the_same_memory(backend, device):
    kv = cache_tensors(device)
    repeated = torch.zeros(1, 2, 8, 16, device=device).expand(10, 2, 8, 16)
    for cache, name in ((ops.PagedKV(repeated, kv.v), "kv.k"), (ops.PagedKV(kv.k, repeated), "kv.v")):
        with refused(name):
            backend.copy_blocks(cache, [0], [1])


@checked_once
def test_add_rms_norm_refuses_a_residual_that_shares_memory(backend, device):
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    home = torch.ones(40, device=device)
    for residual, second in (
        (torch.zeros(1, 8, device=device).expand(3, 8), "share memory"),
        (home.as_strided((3, 8), (7, 1)), "share memory"),
        (x, "memory with x"),
    ):
        before = residual.clone()
        with refused("residual", second):
            backend.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(residual, before)
    with refused("residual", "memory with weight"):
        backend.add_rms_norm(x, home[:24].view(3, 8), home[8:16], 1e-6)


def test_add_rms_norm_of_two_parts_of_the_same_rows(backend, device):
    home = torch.rand(3, 16).to(device)
    x, residual, weight = home[:, :8], home[:, 8:], torch.ones(8, device=device)
    total = x + residual
    backend.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)


@checked_once
def test_rope_refuses_heads_that_share_memory(backend, device):
    tables = [torch.rand(50, 4).to(device) for _ in range(2)]
    q, k = torch.ones(3, 4, 8, device=device), torch.ones(3, 2, 8, device=device)
    positions = torch.arange(3, device=device)
    for wrong_q, wrong_k, first, second in (
        (q[:1].expand(3, 4, 8), k, "q", "share memory"),
        (q[:, :1].expand(3, 4, 8), k, "q", "share memory"),
        (q, k[:1].expand(3, 2, 8), "k", "share memory"),
        (q, q[:, 2:], "q", "memory with k"),
        (tables[0].view(-1)[:96].view(3, 4, 8), k, "q", "memory with cos"),
        (q, tables[1].view(-1)[:48].view(3, 2, 8), "k", "memory with sin"),
    ):
        with refused(first, second):
            backend.rope(wrong_q, wrong_k, positions, *tables)
    assert torch.equal(q, torch.ones_like(q))


def test_rope_takes_heads_that_alternate(backend, device):
    """q and k are every second head of one tensor."""
    home = torch.rand(3, 4, 8)
    q, k = home[:, ::2].clone(), home[:, 1::2].clone()
    tables = torch.rand(50, 4), torch.rand(50, 4)
    ops.load("reference").rope(q, k, torch.arange(3), *tables)
    turned = home.to(device)
    backend.rope(turned[:, ::2], turned[:, 1::2], torch.arange(3, device=device), *(x.to(device) for x in tables))
    torch.testing.assert_close(turned[:, ::2].cpu(), q)
    torch.testing.assert_close(turned[:, 1::2].cpu(), k)
