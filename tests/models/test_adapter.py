"""Models that transformers' code computes, with paged attention in it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.mistral import modeling_mistral

from quire import ops
from quire.config import engine_config
from quire.errors import ConfigError, ModelError, Unsupported
from quire.models import choose, load_model
from quire.models.adapter import modules
from quire.models.adapter.attention import NAME
from quire.models.adapter.model import AdaptedModel
from quire.models.adapter.parity_check import check, packed, randomise
from quire.models.adapter.toy_model import shrink
from tests.marks import of_long_runs
from tests.models.checkpoints import SHORT, TINY, assert_texts_do_not_depend, engine, probed_logits, save
from tests.models.test_loading import change_config

pytestmark = pytest.mark.slow

PROMPTS = [[5], [7, 3, 9, 11], list(range(2, 40))]
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}


def adapted_engine(directory: Path, **options: Any) -> Any:
    return engine(directory, **({"model_impl": "transformers"} | options))


def loaded(directory: Path, **options: Any) -> Any:
    return load_model(directory, engine_config(**({"model_impl": "transformers"} | options)), ops.load())


# --------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("Gemma2", "cpu"), ("GPT2", "reference"), of_long_runs("Llama", "cpu"), of_long_runs("Qwen3", "reference")],
)
def test_it_agrees_with_our_decoder(tmp_path: Path, kind: str, backend: str) -> None:
    save(tmp_path, kind)
    options = {"attention_backend": backend, "max_num_batched_tokens": 16}
    (ours, our_tokens), (theirs, their_tokens) = (
        probed_logits(engine(tmp_path, model_impl=impl, **options), PROMPTS, max_tokens=6)
        for impl in ("quire", "transformers")
    )
    assert our_tokens == their_tokens
    for text, logits in ours.found.items():
        torch.testing.assert_close(theirs.found[text], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Llama", torch.bfloat16), of_long_runs("Llama", torch.float32), of_long_runs("GPT2", torch.bfloat16)],
)
def test_a_row_has_the_same_bits_in_every_batch(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    save(tmp_path, kind, dtype)
    together, tokens = probed_logits(adapted_engine(tmp_path, max_num_batched_tokens=24), PROMPTS, max_tokens=5)
    for i, prompt in enumerate(PROMPTS):
        alone, its = probed_logits(adapted_engine(tmp_path, max_num_batched_tokens=64), [prompt], max_tokens=5)
        assert its["r0"] == tokens[f"r{i}"]
        assert all(torch.equal(together.found[text], logits) for text, logits in alone.found.items())


def test_prefix_hits_guesses_and_preemption_change_nothing(tmp_path: Path) -> None:
    save(tmp_path)
    assert_texts_do_not_depend(tmp_path, {"num_speculative_tokens": 0}, {"num_blocks": 30}, model_impl="transformers")


def test_longrope_goes_by_max_model_len(tmp_path: Path) -> None:
    """The side is fixed at load, so a short prompt has the angles of a long one."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }
    save(tmp_path, "Phi3", rope_parameters=rope, pad_token_id=0, sliding_window=None)
    short, long = (
        probed_logits(adapted_engine(tmp_path, max_model_len=length), [PROMPTS[1]], 2)[0].found[tuple(PROMPTS[1])]
        for length in (32, 128)
    )
    kind = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.inference_mode():
        expected = kind(torch.tensor([PROMPTS[1]])).logits[0, -1]
    torch.testing.assert_close(short, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(short, long, atol=1e-2)


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_model_that_would_answer_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a layer does not tell its window; eager attention has it in its mask."""
    original = modeling_mistral.ALL_ATTENTION_FUNCTIONS[NAME]

    def forgetful(*args: Any, sliding_window: int | None = None, **options: Any) -> Any:
        return original(*args, **options)

    config = transformers.MistralConfig(**TINY, sliding_window=9)
    kind = transformers.MistralForCausalLM
    assert check(kind, config, ops.load()).error < 1e-4
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, NAME, forgetful)
    with pytest.raises(Unsupported, match="gives other results than with eager attention: logits up to"):
        check(kind, config, ops.load())


@torch.no_grad()
def test_dynamic_rope_is_plain_up_to_max_position_embeddings(tmp_path: Path) -> None:
    """And no sequence gets longer through the adapter."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e3}
    theirs = save(tmp_path, rope_parameters=rope, max_position_embeddings=40)
    prompts = [torch.arange(2, 2 + length).tolist() for length in (38, 7)]
    made = engine(tmp_path, model_impl="transformers", block_size=4, max_num_batched_tokens=16)
    probe, _ = probed_logits(made, prompts, max_tokens=1)
    for prompt in prompts:
        expected = theirs(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(probe.found[tuple(prompt)], expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="was made for sequences of up to 40"):
        engine(tmp_path, model_impl="transformers", max_model_len=41)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("Rwkv", {}, "it keeps a state in addition to keys and values"),
        ("Reformer", {}, "does not let its attention be replaced; one sequence at a time, "),
        ("Bart", {}, "it is the decoder of an encoder-decoder model"),
        ("BigBird", {"is_decoder": True}, "its attention is sparse in long sequences; 'original_full' would be served"),
        ("XLNet", {"d_head": 16}, "one sequence at a time, "),
    ],
)
def test_reasons(tmp_path: Path, kind: str, changes: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    config.architectures = [f"{kind}ForCausalLM"]
    raw = shrink(config.to_dict()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelError, match=f"Nor can transformers' code be served: .*{reason}"):
        choose(tmp_path)


def test_a_type_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["XForCausalLM"], "model_type": "x"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"XForCausalLM, for which there is no decoder.*knows no model of type 'x'"):
        choose(tmp_path)
    with pytest.raises(ModelError, match=r"there is no decoder here \(`quire models` lists all\)$"):
        choose(tmp_path, "quire")


def test_who_computes_it_is_told(tmp_path: Path) -> None:
    save(tmp_path)
    assert str(choose(tmp_path)) == "own decoder"
    change_config(tmp_path, logit_scale=2.0)
    assert str(choose(tmp_path)).startswith("adapter: because config.json has keys that family 'llama' does not")
    assert str(choose(tmp_path, "transformers")) == "adapter: because model_impl is 'transformers'"
    with pytest.raises(ConfigError, match="model_impl is 'vllm'; it must be one of 'auto', 'quire', 'transformers'"):
        engine_config(model_impl="vllm")


@pytest.mark.parametrize(("change", "what"), [("lost", "missing keys"), ("more", "unexpected keys")])
def test_weights_that_do_not_fit(tmp_path: Path, change: str, what: str) -> None:
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "lost":
        del weights["model.layers.1.mlp.up_proj.weight"]
    else:
        weights["model.layers.1.mlp.extra.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has 1 {what}, among them model.layers.1.mlp"):
        loaded(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        loaded(tmp_path)


def test_attention_outside_of_the_engine(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**TINY), attn_implementation=NAME)
    with pytest.raises(Unsupported, match="is the attention of models that Quire's engine has loaded"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_a_longer_sequence_than_it_was_made_for(tmp_path: Path) -> None:
    save(tmp_path)
    assert loaded(tmp_path).max_model_len == 256
    with pytest.raises(ConfigError, match=r"max_model_len is 257; .* was made for sequences of up to 256"):
        loaded(tmp_path, max_model_len=257)


# --------------------------------------------------------------------------------------------------- its weights


def test_products_of_others_are_not_reproducible(tmp_path: Path) -> None:
    save(tmp_path, "GraniteMoeShared", **MOE)
    model = loaded(tmp_path)
    assert isinstance(model, AdaptedModel)
    assert not model.rows_are_batch_invariant
    assert model.rows_depend is not None
    assert model.rows_depend.endswith("is multiplied by transformers")
    assert adapted_engine(tmp_path, num_speculative_tokens=None).scheduler.speculation is None
    with pytest.raises(ConfigError, match="speculative decoding needs batch-invariant results"):
        adapted_engine(tmp_path, num_speculative_tokens=2)
    with pytest.raises(Unsupported, match="reproducible is True; a row's bits may depend"):
        adapted_engine(tmp_path, reproducible=True)


def test_weights_lie_in_memory_of_their_own(tmp_path: Path) -> None:
    """Once the model is loaded, no file of it is mapped."""
    save(tmp_path)
    model = loaded(tmp_path)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert model.rows_are_batch_invariant  # and it is still there


def test_unowned_slots_are_never_read(tmp_path: Path) -> None:
    """The trial's cache is NaN but for what was written."""
    save(tmp_path)
    model = loaded(tmp_path)
    texts = [torch.arange(2, 2 + n) for n in (11, 5, 13)]
    with torch.inference_mode():
        assert all(torch.isfinite(logits).all() for _, logits in packed(model, texts))


@pytest.mark.parametrize(
    ("kind", "changes"), [("Phi", {"tie_word_embeddings": True}), ("Electra", {"is_decoder": True})]
)
def test_a_tied_projection_with_a_bias(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """It is held once, and the bias is added after it."""
    small = shrink(getattr(transformers, f"{kind}Config")(**changes).to_dict())
    config = getattr(transformers, f"{kind}Config").from_dict(small)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    ours = adapted_engine(tmp_path)
    tables = [one for one in ours.runner.model._backbone.modules() if isinstance(one, torch.nn.Embedding)]
    assert all(len(one.weight) != config.vocab_size for one in tables)
    probe, _ = probed_logits(ours, [PROMPTS[1]], 1)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1]
    torch.testing.assert_close(probe.found[tuple(PROMPTS[1])], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", ["mish", "silu", *map(of_long_runs, ["quick_gelu", "sigmoid", "relu", "gelu"])])
def test_whose_bits_depend_on_the_batch(tmp_path: Path, function: str) -> None:
    """Torch computes some functions otherwise at the end of an array; ours stand in for some of them."""
    config = transformers.OPTConfig(
        vocab_size=96, hidden_size=48, ffn_dim=50, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=48, max_position_embeddings=64, activation_function=function,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    ours = loaded(tmp_path, max_model_len=64)
    assert ours.rows_are_batch_invariant == (function in ("quick_gelu", "silu", "relu", "gelu")), ours.rows_depend
    if ours.rows_are_batch_invariant:
        together, _ = probed_logits(adapted_engine(tmp_path, max_num_batched_tokens=24), PROMPTS, max_tokens=5)
        for prompt in PROMPTS:
            alone, _ = probed_logits(adapted_engine(tmp_path, max_num_batched_tokens=64), [prompt], max_tokens=5)
            assert all(torch.equal(together.found[text], logits) for text, logits in alone.found.items())


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_activations_have_the_same_bits_with_any_number_of_threads(function: str) -> None:
    theirs = transformers.activations.ACT2FN[function]
    model = torch.nn.Sequential(theirs)
    modules.replace_activations(model, ops.load("cpu"))
    x, threads = 5 * torch.randn(500, 1153, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    assert torch.allclose(model(x), theirs(x), rtol=1e-5, atol=1e-5)
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(model(x).view(torch.int32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["GPT2", *map(of_long_runs, ["Llama", "Gemma2", "Qwen3"])])
def test_common_models_keep_their_bits(tmp_path: Path, kind: str) -> None:
    save(tmp_path, kind)
    ours = loaded(tmp_path)
    assert ours.rows_are_batch_invariant, ours.rows_depend


def test_a_small_vocabulary(tmp_path: Path) -> None:
    """As models of characters or amino acids have it: the trial draws its tokens from it."""
    config = transformers.StableLmConfig(**SHORT | {"vocab_size": 40, "hidden_size": 48})
    model = transformers.StableLmForCausalLM(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    ours = engine(tmp_path)
    assert isinstance(ours.runner.model, AdaptedModel)
    prompt = list(range(2, 40))
    probe, _ = probed_logits(ours, [prompt], max_tokens=1)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(probe.found[tuple(prompt)], expected, rtol=1e-4, atol=1e-4)


def test_what_a_small_copy_keeps() -> None:
    """Longrope's factors fit the rotated part, windows beyond reach stay there, and layers that differ stay so."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    long = {**factors, "factor": 1.0, "rope_theta": 1e4, "original_max_position_embeddings": 32768}
    minicpm = transformers.MiniCPM3Config(rope_parameters=long)
    assert check(transformers.MiniCPM3ForCausalLM, minicpm, ops.load()).error < 1e-4
    phimoe = transformers.PhimoeConfig(sliding_window=131072, max_position_embeddings=131072)
    assert check(transformers.PhimoeForCausalLM, phimoe, ops.load()).error < 5e-4
    assert check(transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(), ops.load()).error < 5e-4


def test_masks_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    small = shrink(transformers.GPTBigCodeConfig().to_dict())
    model = transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig.from_dict(small))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(loaded(tmp_path), AdaptedModel)


def test_tables_of_angles_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    save(tmp_path, "Phi3", rope_parameters=rope, pad_token_id=0, sliding_window=None)
    whole, _ = probed_logits(adapted_engine(tmp_path, max_model_len=128), PROMPTS, 3)
    monkeypatch.setattr(modules, "CHUNK", 7)
    parts, _ = probed_logits(adapted_engine(tmp_path, max_model_len=128), PROMPTS, 3)
    for text, logits in whole.found.items():  # cosines at other places of an array have other last bits
        torch.testing.assert_close(parts.found[text], logits, rtol=1e-4, atol=1e-4)
