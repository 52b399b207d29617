"""Vision parts in separate GGUF files: the numbers of the safetensors checkpoint, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError, ModelError, RequestError
from quire.frontend.model_fingerprint import _images_part
from quire.models import find_files
from quire.models.gguf.model import GgufModel
from quire.models.images import SERVED
from quire.models.text_part import UNREAD, TextPart
from tests.models.gguf.writer import add, add_tensor, finish, write_gguf
from tests.models.image_checkpoints import pictures, save_images_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_blocks": 100}
KINDS = {"qwen2_5_vl": ("Qwen2VL", "qwen2.5vl_merger"), "gemma3": ("Gemma3", "gemma3")}
# Settings that converters do not store: those of the published checkpoints.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {
        "config.json": {"vision_config": {"window_size": 112}},
        "preprocessor_config.json": {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}},
    },
    "gemma3": {
        "config.json": {"text_config": {"query_pre_attn_scalar": 16}, "mm_tokens_per_image": 4},
        "preprocessor_config.json": {"image_seq_length": 4},
        "processor_config.json": {"image_seq_length": 4},
    },
}
TEXT, VISION = "model.gguf", "mmproj-model.gguf"


def vocabulary(directory: Path) -> dict[str, Any]:
    """What the converter writes of a tokenizer of bytes."""
    state = json.loads((directory / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in state["added_tokens"]}
    texts = {i: text for text, i in state["model"]["vocab"].items()} | added
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",  # like the checkpoint's own, but for spaces after line ends
        "tokenizer.ggml.tokens": [texts[i] for i in range(len(texts))],
        "tokenizer.ggml.token_type": np.array([3 if i in added else 1 for i in range(len(texts))], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def write_text(directory: Path, kind: str, name: str = TEXT, **changes: Any) -> None:
    """Write the text part of a checkpoint."""
    alone = directory / "text"
    alone.mkdir(exist_ok=True)
    text = json.loads((directory / "config.json").read_text())["text_config"]
    (alone / "config.json").write_text(json.dumps(text))
    part = TextPart(kind)
    weights = {part.name(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file({name: tensor for name, tensor in weights.items() if name is not None}, alone / "model.safetensors")
    own: dict[str, Any] = {"rope.dimension_sections": [2, 3, 3, 0]}
    if kind == "gemma3":
        own = {"attention.sliding_window_pattern": [True, False] * 2}
    write_gguf(alone, directory / name, KINDS[kind][0], **(own | vocabulary(directory) | changes))


def write_vision(
    directory: Path,
    kind: str,
    path: Path | None = None,
    kind_of: Callable[[str], Kind] = lambda _: Kind.F32,
    is_swapped: bool = False,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write the vision part of a checkpoint; what its tensors mean, by their names in the checkpoint.

    is_swapped: with the MLP's names of the first converters.
    """
    config, processor = (
        json.loads((directory / f"{name}.json").read_text()) for name in ("config", "preprocessor_config")
    )
    vision, architecture = config["vision_config"], changes.pop("general.architecture", "clip")
    metadata = {
        "projector_type": KINDS[kind][1],
        "has_vision_encoder": True,
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": vision.get("image_size", 560),
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": vision["hidden_size"],
        "vision.feed_forward_length": vision["intermediate_size"],
        "vision.block_count": vision.get("depth", vision.get("num_hidden_layers")),
        "vision.attention.head_count": vision.get("num_heads", vision.get("num_attention_heads")),
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": processor["image_mean"],
        "vision.image_std": processor["image_std"],
    }
    if kind == "qwen2_5_vl":
        metadata |= {"use_silu": True, "vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1}
    else:
        rows = (vision["image_size"] // vision["patch_size"]) / config["mm_tokens_per_image"] ** 0.5
        metadata |= {"use_gelu": True, "vision.projector.scale_factor": int(rows)}
    writer = gguf.GGUFWriter(directory / VISION if path is None else path, architecture)
    for key, value in (metadata | changes).items():
        add(writer, f"clip.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        parts = []
        name = re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)  # as it is published
        for theirs, part in _parts(name, tensor):
            found = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
            if is_swapped:
                found = found.replace("ffn_up", "ffn_").replace("ffn_down", "ffn_up").replace("ffn_.", "ffn_down.")
            parts.append(
                torch.from_numpy(add_tensor(writer, found, part, kind_of(found) if part.dim() > 1 else Kind.F32))
            )
        if parts:
            meant[name] = torch.stack(parts, 2) if tensor.dim() == 5 else torch.cat(parts)
    finish(writer)
    return meant


def _parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that the converter makes of one."""
    if not name.startswith(("visual.", "vision_tower.", "multi_modal_projector.")) or ".head." in name:
        return []
    if ".qkv." in name:
        return [(name.replace("qkv", one), rows) for one, rows in zip("qkv", tensor.chunk(3), strict=True)]
    if name == "visual.patch_embed.proj.weight":
        return [("v.patch_embd.weight", tensor[:, :, 0]), ("v.patch_embd.weight.1", tensor[:, :, 1])]
    return [(name.replace("_weight", ".weight"), tensor + 1 if "soft_emb_norm" in name else tensor)]


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind in SERVED])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The directory of a checkpoint and of both its GGUF files, its type, and its mark of an image."""
    directory = tmp_path_factory.mktemp(request.param)
    mark = save_images_model(directory, request.param)
    for name, changes in CHANGES[request.param].items():
        file = directory / name
        content = json.loads(file.read_text())
        for part, values in changes.items():
            content[part] = content[part] | values if isinstance(values, dict) else values
        file.write_text(json.dumps(content))
    write_text(directory, request.param)
    write_vision(directory, request.param)
    return directory, request.param, mark


def test_logits_are_those_of_the_safetensors_checkpoint(checkpoint: tuple[Path, str, str]) -> None:
    directory, _, mark = checkpoint
    one, two = (picture.resize((3 * picture.width, 2 * picture.height)) for picture in pictures(2, seed=7))
    prompt = {"prompt": f"def f {mark}and {mark}world", "multi_modal_data": {"image": [one, two]}}
    found = []
    for model in (directory, directory / TEXT):
        with LLM(str(model), **OPTIONS) as llm:
            sampling = replace(GREEDY, logprobs=llm.decoder.config.vocab_size)
            found.append(llm.generate(prompt, sampling, use_tqdm=False)[0])
    expected, output = found
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for theirs, ours in zip(expected.outputs[0].logprobs, output.outputs[0].logprobs, strict=True):
        numbers = [np.array([each[token].logprob for token in sorted(theirs)]) for each in (theirs, ours)]
        assert np.abs(numbers[1] - numbers[0]).max() <= 1e-4 * np.abs(numbers[0]).max()


def test_the_fingerprint_covers_the_libraries_that_read_images(checkpoint: tuple[Path, str, str]) -> None:
    model = GgufModel(checkpoint[0] / TEXT)
    assert _images_part(model) == {}, "it reads no images"
    model.read_images(checkpoint[0] / VISION)
    assert [*_images_part(model)] == ["images"]


@pytest.mark.parametrize("stored", [Kind.F16, Kind.BF16, Kind.Q8_0])
def test_tensors_mean_what_was_written(checkpoint: tuple[Path, str, str], tmp_path: Path, stored: Kind) -> None:
    directory, kind, _ = checkpoint

    def kind_of(name: str) -> Kind:
        return stored if stored is not Kind.Q8_0 or "attn" in name else Kind.F32  # the others have no blocks of 32

    meant = write_vision(directory, kind, tmp_path / VISION, kind_of, is_swapped=stored is Kind.F16)
    model = GgufModel(directory / TEXT)
    model.read_images(tmp_path / VISION)
    tensors = model.tensors()
    assert {name for name in tensors.names if UNREAD.match(name)} == {*meant}
    for name, expected in meant.items():
        shift = 1.0 if "soft_emb_norm" in name else 0.0
        torch.testing.assert_close(tensors[name].float() + shift, expected, rtol=0.0, atol=1e-6 * shift)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"general.architecture": "llama"}, "has the architecture 'llama'; the file of a vision part has 'clip'"),
        ({"projector_type": "pixtral"}, "clip.projector_type is pixtral; it must be one of qwen2.5vl_merger, gemma3"),
        ({"projector_type": "OTHER"}, "give the vision part of the same model"),
        ({"vision.projection_dim": 128}, "has rows of 128 values, and .* 64; give the vision part of the same model"),
        ({"vision.block_count": 10**6}, "clip.vision.block_count is 1000000; it must be at most"),
        ({"vision.attention.head_count": 9}, "clip.vision.attention.head_count is 9; it must be"),
        ({"vision.feed_forward_length": 40}, r"v.blk.0.ffn_up.weight is \[48, 32\]; it must be \[40, 32\]"),
        ({"vision.image_std": [1.0, 2.0]}, "clip.vision.image_std is .*; it must be three numbers"),
        ({"vision.new_key": 1}, "keys that are not understood of the architecture 'clip': vision.new_key=1"),
    ],
)
def test_other_files_are_refused(
    checkpoint: tuple[Path, str, str], tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    directory, kind, _ = checkpoint
    if changes.get("projector_type") == "OTHER":
        changes = {"projector_type": next(name for one, (_, name) in KINDS.items() if one != kind)}
    write_vision(directory, kind, tmp_path / VISION, **changes)
    with pytest.raises(ModelError, match=sentence):
        GgufModel(directory / TEXT).read_images(tmp_path / VISION)


def test_how_the_file_is_found(
    checkpoint: tuple[Path, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, kind, _ = checkpoint
    text, given = tmp_path / TEXT, directory / VISION
    text.symlink_to(directory / TEXT)

    def found(**options: Any) -> Path | None:
        files = find_files(EngineConfig(model=str(text), **options))
        assert isinstance(files, GgufModel)
        return None if files.mmproj is None else files.mmproj.path

    assert found() is None
    assert found(mmproj=str(given)) == given
    write_vision(directory, kind, tmp_path / "mmproj-other.gguf", **{"vision.projection_dim": 32})
    assert found() is None
    assert "has rows of 32 values" in caplog.text
    one, two = (tmp_path / f"mmproj-{name}.gguf" for name in ("F16", "F32"))
    one.symlink_to(given)
    assert found() == one
    assert found(no_mmproj=True) is None
    two.symlink_to(given)
    assert found() is None
    assert "mmproj-F16.gguf, mmproj-F32.gguf; name one with mmproj" in caplog.text
    options = {"model": str(tmp_path), "gguf_file": TEXT, "mmproj": two.name}
    assert find_files(EngineConfig(**options)).mmproj.path == two  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"mmproj is '/no/such\.gguf'; there is no such file"):
        found(mmproj="/no/such.gguf")
    with pytest.raises(ConfigError, match="leave one of them out"):
        found(mmproj=str(given), no_mmproj=True)
    with pytest.raises(ConfigError, match="is no GGUF file; leave it out"):
        find_files(EngineConfig(mmproj=str(given)))


def test_tensors_that_do_not_fit_are_refused_with_the_first_image(
    checkpoint: tuple[Path, str, str], tmp_path: Path
) -> None:
    directory, kind, mark = checkpoint
    write_vision(directory, kind, tmp_path / VISION, **{"vision.block_count": 1})
    with LLM(str(directory / TEXT), mmproj=str(tmp_path / VISION), **OPTIONS) as llm:
        assert llm.generate("class A:", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match=r"the vision part has .*, which no module takes"):
            llm.generate({"prompt": mark, "multi_modal_data": {"image": pictures(1)[0]}}, GREEDY)


def test_the_token_of_image_rows_may_be_missing(checkpoint: tuple[Path, str, str]) -> None:
    """It has no embedding in Gemma 3, and some of its files do not have it."""
    directory, kind, mark = checkpoint
    if kind == "qwen2_5_vl":  # it is the mark of an image, too
        write_text(directory, kind, "less.gguf", **_renamed(directory, "<|vision_start|>"))
        model = GgufModel(directory / "less.gguf")
        model.read_images(directory / VISION)
        with (
            pytest.raises(ModelError, match=r"has no token <\|vision_start\|>, which images need"),
            model.for_transformers(),
        ):
            pass
        return
    write_text(directory, kind, "less.gguf", **_renamed(directory, "<image_soft_token>"))
    prompt = {"prompt": f"def f {mark}and", "multi_modal_data": {"image": pictures(1)[0]}}
    found = []
    for name in (TEXT, "less.gguf"):
        with LLM(str(directory / name), **OPTIONS) as llm:
            [output] = llm.generate(prompt, replace(GREEDY, logprobs=0, repetition_penalty=1.2), use_tqdm=False)
        found.append(output.outputs[0])
    assert found[0].logprobs == found[1].logprobs


def _renamed(directory: Path, token: str) -> dict[str, Any]:
    tokens = vocabulary(directory)["tokenizer.ggml.tokens"]
    return {"tokenizer.ggml.tokens": ["<unused>" if text == token else text for text in tokens]}
