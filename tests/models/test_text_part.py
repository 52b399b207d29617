"""The text part of a checkpoint that also sees or hears: what is read of it, what it computes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config import engine_config
from quire.errors import ModelError
from quire.models import choose, load_model, read_config
from quire.models.text_part import TextPart, text_part
from quire.models.weights import INDEX, Checkpoint, weight_files
from quire.ops import load
from tests.marks import of_long_runs
from tests.models.checkpoints import TINY, engine, probed_logits, save
from tests.models.published import GEMMA3_4B, MISTRAL_SMALL, QWEN2_5_VL, QWEN3_VL
from tests.models.test_loading import change_config

PROMPTS = [[5], [7, 3, 9, 11], list(range(2, 40))]
LEFT_OUT = ("architectures", "dtype", "tie_word_embeddings")  # by those who publish a whole, of its text
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}


def save_whole(directory: Path) -> None:
    """A Gemma 3 that sees, as its makers publish it: with the text under language_model, and vision in a file apart."""
    save(directory, "Gemma3")
    text = json.loads((directory / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": 96,
        "mm_tokens_per_image": 4,
        "text_config": {key: value for key, value in text.items() if key not in LEFT_OUT},
        "vision_config": VISION,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    seeing = {"vision_tower.vision_model.embeddings.patch_embedding.weight": torch.ones(32, 3, 14, 14)}
    seeing["multi_modal_projector.mm_input_projection_weight"] = torch.ones(32, 48)
    (directory / "model.safetensors").unlink()
    save_file(weights, directory / "text.safetensors", metadata={"format": "pt"})
    save_file(seeing, directory / "vision.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(weights, "text.safetensors") | dict.fromkeys(seeing, "vision.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")


@pytest.mark.parametrize("impl", ["quire", pytest.param("transformers", marks=pytest.mark.slow)])
def test_it_computes_what_the_whole_computes_of_text(tmp_path: Path, impl: str) -> None:
    save_whole(tmp_path)
    whole = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager").eval()
    probe, tokens = probed_logits(engine(tmp_path, model_impl=impl, max_num_batched_tokens=16), PROMPTS, max_tokens=4)
    for i, prompt in enumerate(PROMPTS):
        text = prompt + tokens[f"r{i}"]
        with torch.inference_mode():
            expected = whole(input_ids=torch.tensor([text])).logits[0]
        for end in range(1, len(text)):
            torch.testing.assert_close(probe.found[tuple(text[:end])], expected[end - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["quire", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("content", [b"no safetensors at all", None])
def test_a_file_of_another_part_is_not_opened(tmp_path: Path, impl: str, content: bytes | None) -> None:
    save_whole(tmp_path)
    vision = tmp_path / "vision.safetensors"
    vision.unlink()
    if content is not None:
        vision.write_bytes(content)
    model = load_model(tmp_path, engine_config(model_impl=impl), load())
    assert model.origin.startswith("own decoder, text part of gemma3" if impl == "quire" else "adapter, text part of")
    assert [path.name for path in weight_files(tmp_path, TextPart("gemma3"))] == ["text.safetensors"]
    with pytest.raises(ModelError, match="cannot be read as weights"):
        Checkpoint(tmp_path)


def test_tensors_of_another_part_in_the_same_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_whole(tmp_path)
    weights = load_file(tmp_path / "text.safetensors") | load_file(tmp_path / "vision.safetensors")
    (tmp_path / INDEX).unlink()
    (tmp_path / "vision.safetensors").unlink()
    (tmp_path / "text.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path, TextPart("gemma3"))
    assert checkpoint.names == {name.removeprefix("language_model.") for name in weights if "language" in name}
    read: list[str] = []
    original = Checkpoint.__getitem__

    def noted(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "__getitem__", noted)
    load_model(tmp_path, engine_config(model_impl="quire"), load())
    assert set(read) == checkpoint.names


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.visual.merger.mlp.0.weight", None),
        ("vision_tower.vision_model.post_layernorm.bias", None),
        ("model.audio_tower.subsample.weight", None),
        ("model.embed_vision.embedding_projection.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("model.image_newline", None),
    ],
)
def test_names_of_tensors(theirs: str, ours: str | None) -> None:
    assert TextPart("any").name(theirs) == ours


def test_published_configs(tmp_path: Path) -> None:
    """Each is read as the text's own family: heads, window, rope, and whether the embedding is tied."""

    def decoder(raw: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return read_config(tmp_path)[0]

    gemma = decoder(GEMMA3_4B)
    assert (gemma.vocab_size, gemma.num_layers, gemma.hidden_size) == (262_208, 34, 2560)
    assert gemma.tied_embeddings
    mistral = decoder(MISTRAL_SMALL)
    assert (mistral.vocab_size, mistral.num_layers, mistral.tied_embeddings) == (131_072, 40, False)
    flat = decoder(QWEN2_5_VL)
    assert (flat.num_layers, flat.hidden_size, flat.tied_embeddings) == (28, 3584, False)
    tied = decoder(QWEN3_VL)
    assert (tied.num_layers, tied.hidden_size, tied.tied_embeddings) == (36, 2560, True)


def test_positions_in_an_image_are_left_out() -> None:
    alone, part = text_part(QWEN3_VL)
    assert str(part) == "text part of qwen3_vl"
    assert (alone["model_type"], alone["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert alone["rope_scaling"] == {"rope_type": "default"}
    assert text_part(QWEN2_5_VL)[0]["rope_scaling"] == {"type": "default"}


def test_the_files_say_whether_the_embedding_is_tied(tmp_path: Path) -> None:
    """Where no key says so: what a missing one means differs between the whole and its text."""
    save_whole(tmp_path)
    assert choose(tmp_path).raw["tie_word_embeddings"] is True
    files = json.loads((tmp_path / INDEX).read_text())
    weights = load_file(tmp_path / "text.safetensors")
    weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, tmp_path / "text.safetensors", metadata={"format": "pt"})
    files["weight_map"]["language_model.lm_head.weight"] = "text.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(files), encoding="utf-8")
    assert not choose(tmp_path).raw["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"logit_scale": 2.0}, "keys that are not known of a gemma3: logit_scale=2.0. Keys of its text part belong"),
        ({"text_config": None}, "text_config is None; a gemma3 has an object there"),
        ({"text_config": 5}, "text_config is 5; a gemma3 has an object there"),
    ],
)
def test_a_key_that_is_not_known(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    save_whole(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=sentence):
        choose(tmp_path)


def test_a_key_of_the_text_that_no_family_understands(tmp_path: Path) -> None:
    save_whole(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, text_config=raw["text_config"] | {"attention_twist": 3})
    with pytest.raises(ModelError, match="family 'gemma3' does not understand: attention_twist=3"):
        choose(tmp_path, "quire")


def test_a_tensor_that_is_of_no_part(tmp_path: Path) -> None:
    save_whole(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "vision.safetensors").unlink()
    weights = load_file(tmp_path / "text.safetensors")
    save_file(weights | {"model.extra.weight": torch.ones(3)}, tmp_path / "text.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors that this family does not use, among them model\.extra\.weight"):
        load_model(tmp_path, engine_config(model_impl="quire"), load())


def test_an_ordinary_model_is_the_whole() -> None:
    raw = TINY | {"model_type": "llama"}
    assert text_part(raw) == (raw, None)


@pytest.mark.parametrize("whole", [of_long_runs("qwen2_vl"), of_long_runs("qwen2_5_vl"), "qwen3_vl"])
def test_what_a_missing_key_means(tmp_path: Path, whole: str) -> None:
    """To the text part, not to the ordinary type that computes the same."""
    sizes = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "max_position_embeddings")}
    sizes |= {"num_attention_heads": 64, "hidden_size": 1024}
    theirs = transformers.AutoConfig.for_model(whole, text_config=sizes).text_config
    raw = {"model_type": whole, "text_config": {"model_type": theirs.model_type, **sizes}}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    decoder, _ = read_config(tmp_path)
    assert decoder.norm_eps == theirs.rms_norm_eps
    assert decoder.max_position_embeddings == theirs.max_position_embeddings
    assert decoder.attention[0].heads.num_kv_heads == theirs.num_key_value_heads
    assert [rope["rope_theta"] for rope in decoder.ropes if rope] == [theirs.rope_parameters["rope_theta"]] * 3
