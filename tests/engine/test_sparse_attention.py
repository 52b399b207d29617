"""Models with sparse attention: the bits of dense attention where all keys are chosen, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError, Unsupported
from quire.ops import native
from tests.models.checkpoints import engine, probed_logits, save

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + 5 * j) % 90 + 2 for j in range(n)] for i, n in enumerate((70, 11, 15, 3))]
TOP_K = 24


def dense_twin(sparse: Path, dense: Path) -> None:
    """Write the same model without its indexer, as DeepSeek-V3."""
    dense.mkdir()
    tensors = {k: x for k, x in load_file(sparse / "model.safetensors").items() if ".indexer." not in k}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    raw = json.loads((sparse / "config.json").read_text())
    left_out = ("index", "layer_types", "mlp_layer_types")
    raw = {key: value for key, value in raw.items() if not key.startswith(left_out)}
    raw |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (dense / "config.json").write_text(json.dumps(raw))


@pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
@pytest.mark.parametrize(("top_k", "dtype"), [(TOP_K, torch.float32), (1_000, torch.bfloat16)])
def test_the_bits_of_dense_attention(tmp_path: Path, top_k: int, dtype: torch.dtype) -> None:
    """Of each row that sees top_k keys at most; in steps with others, whose logits differ."""
    save(tmp_path / "sparse", "DeepseekV32", dtype, index_topk=top_k)
    dense_twin(tmp_path / "sparse", tmp_path / "dense")
    options = {"block_size": 4, "max_num_batched_tokens": 40, "enable_prefix_caching": False}
    found, wanted = (
        probed_logits(engine(tmp_path / name, **options), PROMPTS, max_tokens=6)[0].found
        for name in ("sparse", "dense")
    )
    few = [tokens for tokens in found if len(tokens) <= top_k]
    assert set(few) >= {tuple(prompt[:n]) for prompt in PROMPTS for n in range(1, min(len(prompt), top_k) + 1)}
    assert all(torch.equal(found[tokens], wanted[tokens]) for tokens in few)
    many = [tuple(PROMPTS[0][:n]) for n in range(top_k + 1, len(PROMPTS[0]) + 1)]
    assert not any(torch.equal(found[tokens], wanted[tokens]) for tokens in many)


def test_the_reference_serves_it(tmp_path: Path) -> None:
    """The reference backend, with its operators in PyTorch, gives the logits of the native one."""
    save(tmp_path, "GlmMoeDsa", indexer_types=["full", "shared", "full"], index_topk=7)
    found = [
        probed_logits(engine(tmp_path, attention_backend=name, block_size=4), PROMPTS[1:], max_tokens=1)[0].found
        for name in ("reference", "gather", "auto")
    ]
    for tokens, expected in found[-1].items():
        for other in found[:-1]:
            torch.testing.assert_close(other[tokens], expected, atol=2e-4, rtol=1e-4)


def test_a_checkpoint_without_its_indexer(tmp_path: Path) -> None:
    save(tmp_path / "sparse", "DeepseekV32")
    dense_twin(tmp_path / "sparse", tmp_path / "dense")
    (tmp_path / "dense" / "config.json").write_text((tmp_path / "sparse" / "config.json").read_text())
    with pytest.raises(
        ModelError, match=r"index_topk is 9.*no indexer; it must have self_attn.indexer.wq_b, wk, k_norm"
    ):
        engine(tmp_path / "dense")


def test_a_cache_of_integers_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "DeepseekV32")
    with pytest.raises(Unsupported, match=r"kv_cache_dtype is 'int8'; .* keys of an indexer.* it must be 'auto'"):
        engine(tmp_path, kv_cache_dtype="int8")
