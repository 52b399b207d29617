"""An engine whose KV cache is of int8: what it computes, what it refuses, and what its memory looks like."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import SamplingParams, ops
from quire.cache.groups import CacheGroup, Heads
from quire.cache.storage import KVCache, bytes_per_block
from quire.errors import ConfigError, Unsupported
from quire.ops import AttentionPlan, PagedKV, native
from quire.ops.backends.reference import ReferenceBackend
from quire.ops.weights.rounding import quantised_rows
from quire.request import Request
from tests.marks import of_long_runs, spread
from tests.models.checkpoints import assert_texts_do_not_depend, engine, probed_logits, save

NATIVE = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
PROMPTS = [[7, 8, 9] * 12 + [i] for i in range(6)]


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["quire", of_long_runs("transformers")])
def test_sharing_guessing_and_preemption_change_no_token(tmp_path: Path, implementation: str) -> None:
    save(tmp_path)
    drafts = {"num_blocks": 200, "max_num_batched_tokens": 8, "num_speculative_tokens": 4}
    options = {"model_impl": implementation, "kv_cache_dtype": "int8"}
    assert_texts_do_not_depend(tmp_path, {"num_speculative_tokens": 0}, {"num_blocks": 30}, drafts, **options)


@pytest.mark.parametrize("backend", ["reference", "gather", pytest.param("cpu", marks=NATIVE)])
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_logits_are_near_those_of_the_full_cache(tmp_path: Path, backend: str, kind: str) -> None:
    save(tmp_path, kind)
    found = [
        probed_logits(engine(tmp_path, attention_backend=backend, kv_cache_dtype=kv), PROMPTS[:2], 1)[0].found
        for kv in ("auto", "int8")
    ]
    assert found[0].keys() == found[1].keys()
    for text, full in found[0].items():
        error = (found[1][text] - full).norm() / full.norm()
        assert error < 0.05, (len(text), float(error))
    assert any(not torch.equal(found[1][text], full) for text, full in found[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DeepseekV3", of_long_runs("DeepseekV2")])
@pytest.mark.parametrize("backend", ["reference", "gather", pytest.param("cpu", marks=NATIVE)])
def test_a_latent_cache_holds_both_parts_rounded(
    tmp_path: Path, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those over a full cache in which each token's latent and rotated key were rounded before."""
    save(tmp_path, kind, q_lora_rank=24)
    options = {"attention_backend": backend, "kv_cache_dtype": "int8", "dtype": "float32"}
    found = probed_logits(engine(tmp_path, **options), PROMPTS[:2], 1)[0].found
    plain = ReferenceBackend._write_kv

    def rounded(self: ReferenceBackend, k: Tensor, v: Tensor, kv: PagedKV, plan: AttentionPlan) -> None:
        parts = [quantised_rows(part) for part in (v, k[..., plan.spec.dim_v :])]
        k = torch.cat([integers * scale[..., None] for integers, scale in parts], -1)
        plain(self, k, k[..., : plan.spec.dim_v], kv, plan)

    monkeypatch.setattr(ReferenceBackend, "_write_kv", rounded)
    full = engine(tmp_path, attention_backend="reference", dtype="float32")
    expected = probed_logits(full, PROMPTS[:2], 1)[0].found
    assert found.keys() == expected.keys()
    for text, logits in expected.items():
        assert (found[text] - logits).abs().max() <= 1e-3 * logits.abs().max(), len(text)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kv_dtype"), spread(2, ["Llama", "DeepseekV3"], ["int8", "fp8"]))
def test_gpu_kernels_serve_both_narrow_caches(tmp_path: Path, kind: str, kv_dtype: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := ops.unavailable("triton", device):
        pytest.skip(reason)
    save(tmp_path, kind, num_hidden_layers=1)  # of DeepSeek's, one without experts
    found = [
        probed_logits(
            engine(tmp_path, attention_backend="triton", device=device, async_scheduling=False, kv_cache_dtype=kv),
            [[5, 6, 7, 8, 9, 10]],
            1,
        )[0].found
        for kv in ("auto", kv_dtype)
    ]
    for text, full in found[0].items():
        assert 0 < (found[1][text] - full).norm() / full.norm() < (0.05 if kv_dtype == "int8" else 0.2)


def test_blocks_of_another_dtype_have_other_digests(tmp_path: Path) -> None:
    """So that a store of blocks by digest does not give those of one cache to another."""
    save(tmp_path)
    managers = [
        engine(tmp_path, kv_cache_dtype=kv_dtype, attention_backend="reference").scheduler.manager
        for kv_dtype in ("auto", "auto", "int8", "int8")
    ]
    digests = [
        manager.lookup.digest(Request("r", array("i", range(40)), 40, SamplingParams()), 0) for manager in managers
    ]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_a_dtype_that_the_backend_lacks_is_refused_before_there_is_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr("quire.engine.engine.KVCache", None)
    with pytest.raises(Unsupported, match=r"'reference' does not serve a cache of torch.float8_e4m3fn .* torch.int8"):
        engine(tmp_path, kv_cache_dtype="fp8", attention_backend="reference")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'; it must be one of 'auto', 'int8', 'fp8'"):
        engine(tmp_path, kv_cache_dtype="int4")


# --------------------------------------------------------------------------------------------------- memory


def groups_of(num_kv_heads: int, head_dim: int) -> list[CacheGroup]:
    heads = Heads(num_kv_heads, num_kv_heads, head_dim)
    return [CacheGroup((0, 1), heads=heads), CacheGroup((2,), heads=heads)]


@pytest.mark.parametrize(("block_size", "heads", "dim"), spread(4, (1, 3, 16, 255), (1, 3), (1, 2, 3, 7, 16, 33)))
def test_a_block_holds_integers_and_scales(block_size: int, heads: int, dim: int) -> None:
    groups = groups_of(heads, dim)
    cache = KVCache(groups, 5, block_size, torch.int8, num_host_blocks=2)
    a_layer = bytes_per_block(groups, block_size, torch.int8) // 3
    assert 2 * heads * block_size * (dim + 4) <= a_layer < 2 * heads * block_size * (dim + 4) + 4
    for layer in range(3):
        kv = cache.layer(layer)
        places = torch.zeros(5 * a_layer, dtype=torch.int8)
        for i, (name, x) in enumerate(kv.tensors().items()):
            is_scale = name.endswith("scale")
            assert x.shape == ((5, heads, block_size) if is_scale else (5, heads, block_size, dim))
            assert x.dtype == (torch.float32 if is_scale else torch.int8)
            assert x.data_ptr() % x.element_size() == 0
            assert x.stride(0) * x.element_size() == a_layer
            x.fill_(i + 1)
            first = x.data_ptr() - kv.k.data_ptr()
            for block in range(5):  # each byte is one tensor's
                size = x[0].numel() * x.element_size()
                part = places[block * a_layer + first : block * a_layer + first + size]
                assert len(part) == size
                assert not part.any()
                part.fill_(1)
        assert [float(x.float().mean()) for x in kv.tensors().values()] == [1, 2, 3, 4]


def test_swapped_blocks_come_back_with_their_scales() -> None:
    cache = KVCache(groups_of(2, 6), 5, 4, torch.int8, num_host_blocks=3)
    before = []
    for layer in range(3):
        kv = cache.layer(layer)
        for x in kv.tensors().values():
            x.copy_(torch.randint(-100, 100, x.shape))
        before.append([x[[1, 4]].clone() for x in kv.tensors().values()])
    cache.swap_out(0, [1, 4], [2, 0])
    for layer in range(3):
        for x in cache.layer(layer).tensors().values():
            x.fill_(99)
    cache.swap_in(0, [2, 0], [3, 0])
    for layer in range(3):
        for x, old in zip(cache.layer(layer).tensors().values(), before[layer], strict=True):
            assert torch.equal(x[[3, 0]], old) == (layer < 2)
            assert (x[[1, 2, 4]] == 99).all()
