"""Checkpoints that load, and the errors of those that do not."""

import gc
import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire import LLM, SamplingParams
from quire.config import engine_config
from quire.errors import ConfigError, ModelError
from quire.models import load_model, locate, read_config
from quire.models.decoder_config import weight_shapes
from quire.models.hub import locate_description
from quire.models.rope import rope_table
from quire.ops import load, native
from quire.ops.program import Normalize
from quire.ops.weights.linear import product_dtype
from tests.marks import of_long_runs
from tests.models.checkpoints import NEOX, TINY, engine, probed_logits, save

PROMPT = [5, 6, 7, 8, 9]


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "DELETE"}))


def tokens(directory: Path, **options: Any) -> list[int]:
    return probed_logits(engine(directory, **options), [PROMPT], max_tokens=8)[1]["r0"]


def refused(directory: Path, match: str, error: type[ValueError] = ModelError, **options: Any) -> None:
    config = engine_config(**{"model_impl": "quire"} | options)
    with pytest.raises(error, match=match):
        load_model(directory, config, load())


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    model = save(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert tokens(tmp_path / "many") == tokens(tmp_path / "one")


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_weights_are_copied_into_aligned_memory(tmp_path: Path, saved: torch.dtype) -> None:
    """Straight out of the file they would stand wherever the header before them ends."""
    save(tmp_path, vocab_size=96, tie_word_embeddings=False, dtype=saved)
    model = engine(tmp_path, dtype="float32").runner.model
    norms = [operator.weight for operator in model.layers.program.operators if isinstance(operator, Normalize)]
    assert len(norms) == 2 * model.config.num_layers + 1
    for weight in (model.embedding.weight, *norms):
        assert weight.dtype is torch.float32
        assert weight.data_ptr() % 64 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "stored", "kernels"),
    [
        ("quire", (True, torch.bfloat16), "own"),
        ("quire", (False, torch.float32), "oneDNN"),
        ("transformers", (False, torch.float32), "own"),
        of_long_runs("transformers", (True, torch.bfloat16), "oneDNN"),
    ],
)
def test_no_weight_is_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impl: str, stored: tuple[bool, torch.dtype], kernels: str
) -> None:
    """All tensors that are there after loading and were not before are as large together as the parameters.

    Where the processor has no products of bf16, oneDNN's have weights in fp32, and so has a tied embedding.
    """
    tied, saved = stored
    if kernels == "oneDNN":
        monkeypatch.setattr(native, "unavailable", lambda: "not here")
    # Vectors and tiles: nothing is padded.
    whole = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    save(tmp_path, **whole, tie_word_embeddings=tied, dtype=saved)
    backend = load("reference")
    before = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]  # kept: ids must not come again
    known = {id(one) for one in before}
    kept = load_model(tmp_path, engine_config(dtype="bfloat16", max_model_len=16, model_impl=impl), backend)
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in known]
    bytes_at = {  # a layout of oneDNN's has no address; norms and RoPE's tables are small here
        one.data_ptr() if one.layout is torch.strided else id(one): one.nbytes
        for one in found
        if one.nbytes >= 4096 and not one.is_meta
    }
    config = read_config(tmp_path)[0]
    multiplied = product_dtype(torch.bfloat16) if kernels == "oneDNN" else torch.bfloat16
    assert multiplied is not None
    expected = sum(
        math.prod(shape) * (multiplied if tied or "embed" not in name else torch.bfloat16).itemsize
        for name, shape in weight_shapes(config).items()
        if "norm." not in name
    )
    assert sum(bytes_at.values()) == expected, kept.config


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(1, None, {1}), ([1, 2], None, {1, 2}), (None, None, set()), (1, 5, {5}), (1, [5, 6, 97, -1], {5, 6})],
)
def test_end_tokens(tmp_path: Path, config: Any, generation: Any, expected: set[int]) -> None:
    """generation_config.json knows better than config.json; what the vocabulary lacks is passed over."""
    save(tmp_path)
    change_config(tmp_path, eos_token_id=config)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert engine(tmp_path).eos_token_ids == expected


def test_the_old_forms_of_rope_and_dtype_mean_the_same(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for directory in (new, old):
        save(
            directory, rope_parameters={"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}, dtype=torch.bfloat16
        )
    change_config(old, rope_parameters="DELETE", rope_theta=77.0, rope_scaling={"type": "linear", "factor": 3.0},
                  dtype="DELETE", torch_dtype="bfloat16")  # fmt: skip
    assert tokens(old) == tokens(new)


def test_a_config_that_says_nothing_of_rope_means_the_default(tmp_path: Path) -> None:
    save(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    expected = tokens(tmp_path)
    change_config(tmp_path, rope_parameters="DELETE")
    assert read_config(tmp_path)[0].ropes == ({}, {}, {})
    assert tokens(tmp_path) == expected


def test_redundant_tensors_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    expected = tokens(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, tmp_path / "model.safetensors")
    assert tokens(tmp_path) == expected


@pytest.mark.parametrize("form", ["bare", "under model", "without prefix", "with masks", "of 2019"])
def test_gpt2_from_an_old_state_dict(tmp_path: Path, form: str) -> None:
    model = save(tmp_path / "new", "GPT2")
    save(tmp_path / "old", "GPT2")
    (tmp_path / "old" / "model.safetensors").unlink()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if form == "without prefix":
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    if form == "with masks":
        for i in range(3):
            state[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 256, 256).tril().bool()
            state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    name = "model.pt" if form == "under model" else "pytorch_model.bin"
    content = {"model": state} if form == "under model" else state
    torch.save(content, tmp_path / "old" / name, _use_new_zipfile_serialization=form != "of 2019")
    assert tokens(tmp_path / "old") == tokens(tmp_path / "new")


@pytest.mark.parametrize("head", ["embed_out.weight", "lm_head.weight"])
def test_gpt_neox_with_the_buffers_of_old_checkpoints(tmp_path: Path, head: str) -> None:
    """Its output projection has had two names."""
    save(tmp_path, "GPTNeoX")
    expected = tokens(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    [theirs] = {"embed_out.weight", "lm_head.weight"} & weights.keys()
    weights[head] = weights.pop(theirs)
    for i in range(3):
        prefix = f"gpt_neox.layers.{i}.attention."
        weights[f"{prefix}bias"] = torch.ones(1, 1, 256, 256).tril().bool()
        weights[f"{prefix}masked_bias"] = torch.tensor(-1e9)
        weights[f"{prefix}rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors")
    assert tokens(tmp_path) == expected


def test_the_old_forms_of_gemma3_mean_the_same(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
    for directory in (new, old):
        save(directory, "Gemma3", sliding_window=3, sliding_window_pattern=2, rope_parameters=ropes)
    change_config(old, rope_parameters="DELETE", layer_types="DELETE", _sliding_window_pattern=5,
                  sliding_window_pattern=2, rope_theta=900.0, rope_local_base_freq=40,
                  rope_scaling={"rope_type": "linear", "factor": 3.0})  # fmt: skip
    assert tokens(old) == tokens(new)
    assert read_config(old)[0].windows == (3, None, 3) == read_config(new)[0].windows
    change_config(old, rope_theta="DELETE", rope_local_base_freq="DELETE", rope_scaling="DELETE")
    config, _ = read_config(old)
    assert config.ropes == ({"rope_theta": 10_000.0}, {"rope_theta": 1_000_000.0}, {"rope_theta": 10_000.0})


def test_the_old_forms_of_phi3_mean_the_same(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    factors = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    for directory in (new, old):
        save(directory, "Phi3", rope_parameters={"rope_type": "longrope", "rope_theta": 500.0, **factors})
    own = "microsoft/Phi-3-mini-128k-instruct--"  # as transformers saves what it loaded from there
    change_config(old, rope_parameters="DELETE", rope_theta=500.0, rope_scaling={"type": "su", **factors},
                  auto_map={"AutoConfig": "configuration_phi3.Phi3Config",
                            "AutoModelForCausalLM": f"{own}modeling_phi3.Phi3ForCausalLM"})  # fmt: skip
    assert tokens(old) == tokens(new)
    assert tokens(old, max_model_len=32) == tokens(new, max_model_len=32) != tokens(new)


def test_the_original_length_is_nothing_to_a_rope_that_is_not_scaled_by_it(tmp_path: Path) -> None:
    save(tmp_path, "Phi3")
    expected = tokens(tmp_path)
    change_config(tmp_path, original_max_position_embeddings=16)
    assert tokens(tmp_path) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("Gemma3", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; family 'gemma3' serves 'gelu_pyt"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0; .* serves None only"),
        ("Gemma3", {"final_logit_softcapping": -1.0}, r"final_logit_softcapping is -1\.0; it must be a positive"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "serves one object for each of full_attention"),
        ("Gemma3", {"rope_parameters": {"full_attention": 1.0}}, r"rope_parameters' full_attention is 1\.0; it must"),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            r"partial_rotary_factor is 0\.5; family 'gemma3' serves 1\.0 only",
        ),
        (
            "Gemma3",
            {"layer_types": ["full_attention"]},
            "layer_types is .*; it must be a list with full_attention or sliding_attention for each of 3 layers",
        ),
        ("Phi3", {"attention_bias": True}, "attention_bias is True; family 'phi3' serves False only"),
        ("Phi3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; family 'phi3' serves 'silu' only"),
        ("Phi3", {"interpolate_factor": 2}, "interpolate_factor is 2; family 'phi3' serves 1 only"),
        (
            "Phi3",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope type is 'yarn'; family 'phi3' serves default",
        ),
        (
            "Phi3",
            {"auto_map": {"AutoModelForCausalLM": "own.Own"}},
            "auto_map is .*own.Own.*; family 'phi3' implements",
        ),
        ("Olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; family 'olmo2' serves 'silu' only"),
        ("Olmo2", {"clip_qkv": 8.0}, r"family 'olmo2' does not understand: clip_qkv=8\.0"),
        ("Granite", {"residual_multiplier": "x"}, "residual_multiplier is 'x'; it must be a positive number"),
        ("Granite", {"partial_rotary_factor": 0.5}, r"is 0\.5; family 'granite' serves 1\.0 only"),
        (
            "SmolLM3",
            {"no_rope_layers": [1, 0]},
            r"no_rope_layers is \[1, 0\]; it must be a list with a 0 or a 1 for each of 3",
        ),
        ("SmolLM3", {"no_rope_layers": [1, 0, 2]}, r"no_rope_layers is \[1, 0, 2\]; it must be a list with a 0 or a 1"),
        ("SmolLM3", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention, which needs a sliding_window"),
        ("Starcoder2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; .* serves 'gelu_pytorch_tanh' only"),
        ("Starcoder2", {"mlp_type": "gated"}, "mlp_type is 'gated'; family 'starcoder2' serves 'default' only"),
        ("Starcoder2", {"norm_type": "rms"}, "norm_type is 'rms'; family 'starcoder2' serves 'layer_norm' only"),
        ("GPTNeoX", {"hidden_act": "relu"}, "hidden_act is 'relu'; family 'gpt_neox' serves 'gelu_new'"),
        ("GPTNeoX", {"num_attention_heads": 7}, "num_attention_heads is 7, which does not divide the hidden size 96"),
        ("GPTNeoX", {"num_key_value_heads": 2}, "family 'gpt_neox' does not understand: num_key_value_heads=2"),
        ("GPTNeoX", {"rope_parameters": None, "rotary_pct": 0.2}, "of a head of 16 it is to rotate 3"),
    ],
)
def test_what_a_family_does_not_serve_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], match: str
) -> None:
    save(tmp_path, kind)
    change_config(tmp_path, **changes)
    refused(tmp_path, match)


def test_a_decoder_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    config, _ = read_config(tmp_path)
    attention = config.layers[0].mixer
    with pytest.raises(ModelError, match="6 query heads cannot share 4 KV heads evenly"):
        replace(attention, num_kv_heads=4)
    with pytest.raises(ModelError, match="parallel branches without norms of their inputs"):
        replace(config, branches="parallel", input_norms=False)


class TestRefused:
    @pytest.fixture(autouse=True)
    def _saved(self, tmp_path: Path) -> None:
        save(tmp_path)

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        change_config(tmp_path, architectures=["RwkvForCausalLM"])
        refused(tmp_path, "RwkvForCausalLM, for which there is no decoder here")

    def test_cross_encoder(self, tmp_path: Path) -> None:
        change_config(tmp_path, architectures=["LlamaForTokenClassification"])
        for way in ("auto", "quire", "transformers"):
            refused(tmp_path, "a LlamaForTokenClassification, whose head scores tokens", model_impl=way)

    def test_modelling_code_of_its_own(self, tmp_path: Path) -> None:
        change_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
        refused(tmp_path, "does not understand: auto_map=")

    def test_config_key_that_is_not_understood(self, tmp_path: Path) -> None:
        change_config(tmp_path, query_scale={"bits": 4}, logit_scale=2.0)
        refused(tmp_path, r"does not understand: logit_scale=2\.0, query_scale=.*It understands .*head_dim")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; family 'llama' serves 'silu' only"),
            ({"rope_interleaved": True}, "rope_interleaved is True; family 'llama' serves False only"),
            ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; it must be a positive number"),
            ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
            ({"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
            (
                {"rope_parameters": None, "rope_theta": "1e4"},
                "rope's rope_theta is '1e4'; it must",
            ),
            ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope's factor is '2'"),
            ({"hidden_size": "48"}, "hidden_size is '48'; it must be a positive integer"),
            ({"num_hidden_layers": "DELETE"}, "num_hidden_layers is None"),
            ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' lacks factor"),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}}, "not understood: alpha"),
            ({"rope_parameters": {"rope_type": "nonsense"}}, "'nonsense' is not supported; supported: default, linear"),
            ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks factor"),
            ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "not understood: mrope_section"),
            (
                {"rope_parameters": {"partial_rotary_factor": 0.5}},
                r"partial_rotary_factor is 0\.5; family 'llama' serves 1\.0 only",
            ),
            ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; family 'llama' serves 1\.0 only"),
            ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5; it must be at most 1"),
            ({"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'; it must be a positive number"),
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
        refused(tmp_path, rf"{norm} has shape \(47,\); config\.json asks for \(48,\)")
        rows = weights["model.layers.0.self_attn.q_proj.weight"], weights["model.layers.0.self_attn.k_proj.weight"]
        swapped = {"model.layers.0.self_attn.q_proj.weight": rows[1], "model.layers.0.self_attn.k_proj.weight": rows[0]}
        save_file(weights | swapped, path)  # the same number of rows in all
        refused(tmp_path, r"q_proj\.weight has shape \(32, 48\); config\.json asks for \(96, 48\)")

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
        refused(tmp_path, "model.safetensors cannot be read as weights")
        (tmp_path / "model.safetensors").unlink()
        refused(tmp_path, r"holds no weights \(model\.safetensors, .*\); it holds config\.json")
        torch.save({"a": torch.ones(1), "epoch": 3}, tmp_path / "model.pt")
        refused(tmp_path, r"model\.pt holds no state dict")
        (tmp_path / "model.pt").write_bytes(b"")
        refused(tmp_path, r"model\.pt cannot be read as weights")
        (tmp_path / "model.pt").write_bytes(pickle.dumps(Path("x"), protocol=2))
        refused(tmp_path, r"model\.pt cannot be read as weights")
        (tmp_path / "config.json").write_text("[1]")
        refused(tmp_path, r"config\.json holds a list")
        (tmp_path / "config.json").write_text("{")
        refused(tmp_path, r"config\.json cannot be read as JSON")

    def test_options(self, tmp_path: Path) -> None:
        refused(tmp_path, "max_model_len is 257; .* up to 256", ConfigError, max_model_len=257)
        refused(tmp_path, "dtype is 'int8'; it must be auto or one of float32", ConfigError, dtype="int8")


def test_a_misshapen_bloom_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "Bloom")
    weights = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.1.self_attention.query_key_value.weight"
    save_file(weights | {name: torch.ones(100, 48)}, tmp_path / "model.safetensors")
    refused(tmp_path, rf"{name} has shape \(100, 48\); config\.json asks for \(144, 48\)")
    change_config(tmp_path, n_head=7)
    refused(tmp_path, "n_head is 7, which does not divide the hidden size 48")


def test_misshapen_experts_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "Mixtral")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    save_file(weights | {name: torch.ones(79, 48)}, tmp_path / "model.safetensors")
    refused(tmp_path, rf"{name} has shape \(79, 48\); config\.json asks for \(80, 48\)")
    save_file({key: weight for key, weight in weights.items() if key != name}, tmp_path / "model.safetensors")
    refused(tmp_path, f"lacks 1 tensors, among them {name}")


@pytest.mark.parametrize("window", ["x", 0, -1, True])
def test_a_window_is_a_positive_integer(tmp_path: Path, window: Any) -> None:
    save(tmp_path, "Mistral")
    change_config(tmp_path, sliding_window=window)
    refused(tmp_path, f"sliding_window is {window!r}; it must be a positive integer")


def test_names_that_are_no_model(tmp_path: Path) -> None:
    for name, words in (
        ("no such directory", "is neither a directory nor the name of a Hugging Face repository"),
        ("/nowhere/at/all", "there is no directory '/nowhere/at/all'"),
        ("./nowhere", "there is no directory './nowhere'"),
        (str(Path(__file__)), "is a file; a model is given by its directory, or by its .gguf file"),
    ):
        for find in (locate, locate_description):
            with pytest.raises(ModelError, match=re.escape(words)):
                find(name)


def test_the_embedded_model_has_a_name() -> None:
    assert locate("quire-embedded") == locate_description("quire-embedded") == locate(None)


def snapshot(hub: Path, *files: str) -> Path:
    """A repository in the layout of the hub's cache, with these files."""
    repository = hub / "models--someone--large"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("abc123")
    directory = repository / "snapshots" / "abc123"
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        (directory / name).write_text("{}")
    return directory


def test_a_download_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked again for what is missing, and for nothing where all is there."""
    real, asked = huggingface_hub.snapshot_download, []

    def download(model: str, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            return real(model, local_files_only=True, cache_dir=tmp_path)
        asked.append(options["allow_patterns"])
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    shards = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    for added, lacking in (
        ([], "it is not in the hub's cache"),
        (["tokenizer.json"], "lacks config.json"),
        (["config.json"], "lacks weights"),
        (shards[:1], f"lacks {', '.join(shards[1:4])} and 1 more"),  # no index yet
        (["model.safetensors.index.json"], f"lacks {', '.join(shards[1:4])} and 1 more"),
        (shards[1:4], f"lacks {shards[4]},"),
    ):
        if added:
            directory = snapshot(tmp_path, *added)
        if "model.safetensors.index.json" in added:
            (directory / added[0]).write_text(
                json.dumps({"weight_map": {str(i): name for i, name in enumerate(shards)}})
            )
        with pytest.raises(ModelError, match=re.escape(lacking)) as caught:
            locate("someone/large")
        assert "could not be downloaded (ConnectionError). Give a directory" in str(caught.value)
    assert len(asked) == 6
    assert locate_description("someone/large") == directory
    snapshot(tmp_path, shards[4])
    assert locate("someone/large") == directory
    assert len(asked) == 6
    for path in directory.iterdir():
        path.unlink()
    with pytest.raises(ModelError):
        locate_description("someone/large")
    assert "*.safetensors" not in asked[-1]


@pytest.mark.slow
def test_a_model_in_the_hub_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's own layout: refs/main names a commit, snapshots/<commit> holds the files."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    save(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))  # as HF_HOME says
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert locate("someone/tiny") == repository / "snapshots" / "abc123"
    with pytest.raises(ModelError, match="'someone/else' is not a directory, it is not in the hub's cache"):
        locate("someone/else")


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.2, "mscale_all_dim": 0.8, "beta_fast": 20, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "longrope", "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0] * 8,
     "original_max_position_embeddings": 512},
    {"rope_type": "longrope", "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0] * 8,
     "original_max_position_embeddings": 64, "factor": 8.0},
    {"rope_type": "longrope", "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0] * 8,
     "original_max_position_embeddings": 512, "attention_factor": 1.1},
]  # fmt: skip


@pytest.mark.parametrize("parameters", ROPES, ids=str)
def test_rope_variants_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**(TINY | {"rope_parameters": parameters | {"rope_theta": 5000.0}}))
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), torch.arange(60)[None])
    ours = rope_table(config.rope_parameters, 16, max_position_embeddings=256, max_model_len=60)
    for expected, found in zip((cos, sin), ours, strict=True):
        torch.testing.assert_close(found, expected[0, :, :8], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.25, 0.8])
@pytest.mark.parametrize("parameters", ROPES[:7], ids=str)
def test_rope_of_a_part_of_each_head_is_that_of_transformers(parameters: dict[str, Any], share: float) -> None:
    parameters = parameters | {"rope_theta": 5000.0, "partial_rotary_factor": share}
    config = transformers.GPTNeoXConfig(**(NEOX | {"hidden_size": 240, "rope_parameters": parameters}))
    cos, sin = GPTNeoXRotaryEmbedding(config)(torch.zeros(1), torch.arange(60)[None])
    ours = rope_table(config.rope_parameters, 40, max_position_embeddings=256, max_model_len=60)
    half = int(40 * share) // 2
    for expected, found in zip((cos, sin), ours, strict=True):
        assert found.shape == (60, half)
        torch.testing.assert_close(found, expected[0, :, :half], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("share", "dims"), [(0.3, 3), (0.05, 0)])
def test_rope_rotates_pairs(share: float, dims: int) -> None:
    with pytest.raises(ModelError, match=f"pairs of dimensions, and of a head of 10 it is to rotate {dims}"):
        rope_table({"partial_rotary_factor": share}, 10, max_position_embeddings=8, max_model_len=3)


def test_yarn_reaches_beyond_the_position_embeddings(tmp_path: Path) -> None:
    save(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256})
    config = engine_config(max_model_len=1024)
    assert load_model(tmp_path, config, load()).max_model_len == 1024
    refused(tmp_path, "max_model_len is 1025; .* up to 1024", ConfigError, max_model_len=1025)


def test_rope_needs_no_more_than_its_theta() -> None:
    cos, sin = rope_table({}, head_dim=4, max_position_embeddings=8, max_model_len=3)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


@pytest.fixture(scope="module")
def smol135(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The shape of a 135M model, 5 of its 30 layers: 9 heads of 64, 3 KV heads, a vocabulary of 49,152."""
    directory = tmp_path_factory.mktemp("smol135")
    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 5,
             "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
             "tie_word_embeddings": True, "rope_theta": 100_000}  # fmt: skip
    return directory, save(directory, **shape)


@pytest.mark.slow
@pytest.mark.long
@torch.no_grad()
def test_a_full_shape_runs_2k_of_context(smol135: tuple[Path, Any]) -> None:
    directory, theirs = smol135
    prompt = torch.randint(2, 2000, (2040,), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM(str(directory), max_model_len=2048, max_num_batched_tokens=256, kv_cache_memory="1GiB")
    [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=8, logprobs=2))
    ours = output.outputs[0]
    assert len(ours.token_ids) == 8
    tokens = torch.tensor([prompt + ours.token_ids[:-1]])
    logprobs = torch.log_softmax(theirs(tokens, logits_to_keep=8).logits[0], -1)
    for expected, token, reported in zip(logprobs, ours.token_ids, ours.logprobs or [], strict=True):
        assert reported[token].logprob == pytest.approx(expected[token].item(), abs=2e-3)
        best, second = expected.topk(2).values
        assert token == expected.argmax() or best - second < 1e-3


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    files = dict.fromkeys(weights, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"b\.safetensors cannot be read as weights"):
        engine(tmp_path)
