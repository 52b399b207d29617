"""GGUF files of encoders, written as llama.cpp's converter writes them, against the checkpoints that they are from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from quire import LLM
from quire.errors import ModelError
from quire.models.files import Directory
from quire.models.gguf.architectures import ARCHITECTURES
from tests.models.encoders import save_embedder, save_tokenizer, saved

TEXTS = ["A cat sat on the mat.", "", "what, no dog?", "0 1 2 3 4 5", "the CAT"]


def write(directory: Path, path: Path, name: str, kind: Kind, causal: bool = False) -> None:
    config, architecture = json.loads((directory / "config.json").read_text()), ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(causal)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if name == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    tokenizer = Directory(directory).tokenizer()
    assert tokenizer is not None
    tokens = [str(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("bert")
    is_special = [token.startswith("[") for token in tokens]
    plain = [token.removeprefix("##") if token.startswith("##") else f"\u2581{token}" for token in tokens]
    marked = [token if own else one for token, one, own in zip(tokens, plain, is_special, strict=True)]
    writer.add_token_list(marked)
    writer.add_token_types([3 if own else 1 for own in is_special])
    for key, token in (("unknown", "[UNK]"), ("seperator", "[SEP]"), ("cls", "[CLS]")):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokens.index(token))
    places = {str(theirs): ours for ours, theirs in architecture.ends.items()}
    for i in range(config["num_hidden_layers"]):
        prefix = architecture.prefix.format(i)
        places |= {f"{prefix}{theirs}": f"blk.{i}.{ours}" for ours, theirs in architecture.layer.items()}
    weights = load_file(directory / "model.safetensors")
    for key, tensor in weights.items():
        module, _, suffix = key.rpartition(".")
        if module in places:
            own = kind if tensor.ndim == 2 and "blk" in places[module] else Kind.F32
            data = tensor if own is Kind.F32 else gguf.quants.quantize(tensor, own)
            writer.add_tensor(f"{places[module]}.{suffix}", data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("name", "kind"), [("bert", Kind.F32), ("bert", Kind.Q8_0), ("nomic-bert", Kind.F32)])
def test_embeddings_are_those_of_the_checkpoint(tmp_path: Path, name: str, kind: Kind) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160}  # whole blocks of 32
    if name == "bert":
        save_embedder(tmp_path, **sizes)
    else:
        saved(tmp_path, "nomic", **sizes)
        save_tokenizer(tmp_path)
    write(tmp_path, tmp_path / "model.gguf", name, kind)
    with LLM(str(tmp_path)) as original, LLM(str(tmp_path / "model.gguf")) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        for one, other in zip(outputs, original.embed(TEXTS, use_tqdm=False), strict=True):
            assert one.prompt_token_ids == other.prompt_token_ids
            vectors = (np.array(x.outputs.embedding) for x in (one, other))
            first, second = (vector / np.linalg.norm(vector) for vector in vectors)
            assert first @ second >= (1 - 1e-6 if kind is Kind.F32 else 0.999)
        assert llm.decoder.pooler.config.mode == "mean"


def test_what_is_refused(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    write(tmp_path, tmp_path / "model.gguf", "bert", Kind.F32, causal=True)
    with pytest.raises(ModelError, match=r"bert\.attention\.causal is True; it must be false"):
        LLM(str(tmp_path / "model.gguf"))
