"""Checkpoints that load, and the errors of those that do not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import engine_config
from quire.errors import ConfigError, ModelError
from quire.models import FAMILIES, load_model, locate
from quire.models.rope import rope_table
from quire.ops import load
from tests.models.checkpoints import engine, probed_logits, save

PROMPT = [5, 6, 7, 8, 9]


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "DELETE"}))


def tokens(directory: Path, **options: Any) -> list[int]:
    return probed_logits(engine(directory, **options), [PROMPT], max_tokens=8)[1]["r0"]


def refused(directory: Path, match: str, error: type[ValueError] = ModelError, **options: Any) -> None:
    config = engine_config(**options)
    with pytest.raises(error, match=match):
        load_model(directory, config, load())


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    model = save(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert tokens(tmp_path / "many") == tokens(tmp_path / "one")


def test_weights_are_copied_into_aligned_memory(tmp_path: Path) -> None:
    save(tmp_path, dtype=torch.bfloat16)
    model = engine(tmp_path, dtype="float32").runner.model
    for weight in (model.embedding, model.layers[1].qkv.weight, model.layers[2].gate_up.weight, model.final_norm):
        assert weight.dtype is torch.float32
        assert weight.data_ptr() % 64 == 0


def test_the_old_forms_of_rope_and_dtype_mean_the_same(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for directory in (new, old):
        save(
            directory, rope_parameters={"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}, dtype=torch.bfloat16
        )
    change_config(old, rope_parameters="DELETE", rope_theta=77.0, rope_scaling={"type": "linear", "factor": 3.0},
                  dtype="DELETE", torch_dtype="bfloat16")  # fmt: skip
    assert tokens(old) == tokens(new)


def test_redundant_tensors_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    expected = tokens(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, tmp_path / "model.safetensors")
    assert tokens(tmp_path) == expected


class TestRefused:
    @pytest.fixture(autouse=True)
    def _saved(self, tmp_path: Path) -> None:
        save(tmp_path)

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        change_config(tmp_path, architectures=["MambaForCausalLM"])
        refused(tmp_path, f"MambaForCausalLM, which is not supported; supported: {', '.join(FAMILIES)}")

    def test_config_key_that_is_not_understood(self, tmp_path: Path) -> None:
        change_config(tmp_path, quantization_config={"bits": 4}, logit_scale=2.0)
        refused(tmp_path, r"does not understand: logit_scale=2\.0, quantization_config=.*It understands .*head_dim")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; family 'llama' serves 'silu' only"),
            ({"hidden_size": "48"}, "hidden_size is '48'; it must be a positive integer"),
            ({"num_hidden_layers": "DELETE"}, "num_hidden_layers is None"),
            (
                {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
                "'dynamic' is not supported: its angles",
            ),
            ({"rope_parameters": {"rope_type": "nonsense"}}, "'nonsense' is not supported; supported: default, linear"),
            ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks factor"),
            ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "not understood: mrope_section"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5; only 1\.0"),
            ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; only 1\.0"),
        ],
    )
    def test_config_values(self, tmp_path: Path, changes: dict[str, Any], match: str) -> None:
        change_config(tmp_path, **changes)
        refused(tmp_path, match)

    def test_missing_superfluous_and_misshapen_tensors(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        weights = load_file(path)
        norm = "model.layers.1.input_layernorm.weight"
        save_file({name: weight for name, weight in weights.items() if name != norm}, path)
        refused(tmp_path, f"lacks 1 tensors, among them {norm}")
        save_file(weights | {"model.extra.weight": torch.ones(1)}, path)
        refused(tmp_path, r"1 tensors that this family does not use, among them model\.extra\.weight")
        save_file(weights | {norm: torch.ones(47)}, path)
        refused(tmp_path, rf"{norm} \(47,\) should make up a tensor of shape \(48,\)")

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
        refused(tmp_path, "cannot be read as safetensors")
        (tmp_path / "model.safetensors").unlink()
        refused(tmp_path, r"holds no \*\.safetensors weights; it holds config\.json")
        (tmp_path / "config.json").write_text("[1]")
        refused(tmp_path, r"config\.json holds a list")
        (tmp_path / "config.json").write_text("{")
        refused(tmp_path, r"config\.json cannot be read as JSON")

    def test_options(self, tmp_path: Path) -> None:
        refused(tmp_path, "max_model_len is 257; .* up to 256", ConfigError, max_model_len=257)
        refused(tmp_path, "dtype is 'int8'; it must be auto or one of float32", ConfigError, dtype="int8")


def test_names_that_are_no_model() -> None:
    for name in ("no such directory", "/nowhere/at/all"):
        with pytest.raises(ModelError, match="is neither a directory nor the name of a Hugging Face repository"):
            locate(name)


def test_a_model_in_the_hub_cache_is_found_offline(tmp_path: Path) -> None:
    """The cache's own layout: refs/main names a commit, snapshots/<commit> holds the files."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    save(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    program = "from quire.models import locate; print(locate('someone/tiny'))"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()) == repository / "snapshots" / "abc123"
    program = "from quire.models import locate; locate('someone/else')"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert "'someone/else' is no directory, it is not in the Hugging Face hub cache" in result.stderr


def test_rope_needs_no_more_than_its_theta() -> None:
    cos, sin = rope_table({}, dim=4, max_position_embeddings=8, max_model_len=3)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


@pytest.fixture(scope="module")
def smol135(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The full shape of a 135M model: 30 layers, 9 heads of 64, 3 KV heads, a vocabulary of 49,152."""
    directory = tmp_path_factory.mktemp("smol135")
    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
             "tie_word_embeddings": True, "rope_theta": 100_000}  # fmt: skip
    return directory, save(directory, **shape)


@torch.no_grad()
def test_a_full_shape_runs_2k_of_context(smol135: tuple[Path, Any]) -> None:
    directory, theirs = smol135
    prompt = torch.randint(2, 2000, (2040,), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM(str(directory), max_model_len=2048, max_num_batched_tokens=256, kv_cache_memory="1GiB")
    [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=8, logprobs=2))
    ours = output.outputs[0]
    assert len(ours.token_ids) == 8
    logprobs = torch.log_softmax(theirs(torch.tensor([prompt + ours.token_ids[:-1]])).logits[0, -8:].float(), -1)
    for expected, token, reported in zip(logprobs, ours.token_ids, ours.logprobs or [], strict=True):
        assert reported[token].logprob == pytest.approx(expected[token].item(), abs=2e-3)
        best, second = expected.topk(2).values
        assert token == expected.argmax() or best - second < 1e-3
