"""Adapters: what they add, in which families and by whose layers, and what is no adapter of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cache.events import BlockStored
from quire.cli import app
from quire.engine.beam import BeamSearchParams
from quire.errors import ConfigError, ModelError, QuireError, RequestError
from quire.models import EMBEDDED
from quire.models.lora.fitting import prepare
from quire.models.lora.peft import CONFIG, TENSORS, read_adapter
from tests.marks import of_long_runs
from tests.models.adapters import embedded_linears, linears, plain, save_adapter, save_merged
from tests.models.checkpoints import TINY, save
from tests.models.test_text_part import save_whole

PROMPTS = [[5, 9], [7, 3, 9, 11], list(range(2, 40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
# Families whose weights stand in other orders, stacks or layouts than Llama's.
KINDS = ["Llama", "GPT2", "Cohere", "Qwen3Next", "DeepseekV3"]
MORE = ["Qwen3", "Gemma2", "Phi3", "GPTNeoX", "Falcon", "Bloom", "CodeGen", "GPTJ", "OPT", "Mpt", "Gemma4", "Llama4",
        "Ernie4_5_Moe", "Qwen3Moe", "GptOss", "Qwen3_5", "Lfm2", "Bamba", "GraniteMoeHybrid", "Glm4Moe",
        "FalconH1", "Mamba2", "MiniMax", "KimiLinear", "NemotronH", "Lfm3", "BailingHybrid", "AXK2",
        "Jamba"]  # fmt: skip


def logprobs(llm: LLM, lora: str | None = None) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens that follow the prompts, and the logprobs of all."""
    tokens, found = [], []
    for output in llm.generate(PROMPTS, GREEDY, lora=lora, use_tqdm=False):
        assert output.outputs[0].error is None, output.outputs[0].error
        tokens.append(output.outputs[0].token_ids)
        positions = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        whole = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
        found += [each[token].logprob for each, token in zip(positions, whole, strict=True) if each is not None]
    return tokens, torch.tensor(found)


# ----------------------------------------------------------------------------------------------- what they add


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "impl"),
    [(kind, "quire") for kind in KINDS]
    + [of_long_runs("Llama", "transformers"), ("GPT2", "transformers")]
    + [of_long_runs(kind, "quire") for kind in MORE],
)
def test_an_adapter_is_its_product_in_the_weights(tmp_path: Path, kind: str, impl: str) -> None:
    """In fp32: what a model with the adapter computes is what a model computes whose weights have it within."""
    model = save(tmp_path / "model", kind)
    shapes = linears(model)
    added = save_adapter(tmp_path / "adapter", shapes, chosen=plain, spread=0.1)
    options: dict[str, Any] = {"model_impl": impl, "num_blocks": 128, "max_num_batched_tokens": 16}
    llm = LLM(str(tmp_path / "model"), lora={"x": tmp_path / "adapter"}, **options)
    before = logprobs(llm)
    save_merged(model, added, tmp_path / "merged")
    tokens, expected = logprobs(LLM(str(tmp_path / "merged"), **options))
    found_tokens, found = logprobs(llm, "x")
    assert found_tokens == tokens
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert (found - before[1]).abs().max() > 0.1  # the adapter matters
    again = logprobs(llm)
    assert again[0] == before[0]
    assert torch.equal(again[1], before[1])
    assert torch.equal(before[1], logprobs(LLM(str(tmp_path / "model"), **options))[1])


def some_ranks(name: str) -> int:
    return 9 if name.endswith("q_proj") else 2 if name.endswith("down_proj") else 5


CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear", "rank_of": lambda _: 6},
    "a pattern": {"target_modules": r".*\.[02]\.self_attn\.(q|v)_proj",
                  "chosen": lambda n: "1." not in n and n.endswith(("q_proj", "v_proj"))},
    "names of ends, not all layers": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1],
                                      "chosen": lambda n: ".1." in n and n.endswith(("k_proj", "up_proj"))},
    "rslora": {"use_rslora": True, "chosen": lambda n: n.endswith("o_proj")},
    "patterns of ranks and alphas": {
        "r": 5, "rank_pattern": {"q_proj": 9, r"layers\.\d\.mlp\.down_proj": 2}, "alpha_pattern": {"mlp.up_proj": 31},
        "rank_of": some_ranks},
}  # fmt: skip


@pytest.mark.slow
def test_configs_of_peft(tmp_path: Path) -> None:
    """Which modules, which ranks and which scales, as PEFT means them; several adapters in one batch."""
    model = save(tmp_path / "model")
    shapes, paths, added = linears(model), {}, {}
    for seed, (name, case) in enumerate(CASES.items()):
        paths[name] = tmp_path / name.replace(" ", "_")
        added[name] = save_adapter(paths[name], shapes, seed, spread=0.1, **case)
    llm = LLM(str(tmp_path / "model"), lora=paths, num_blocks=128)
    for name, own in added.items():
        save_merged(save(tmp_path / "model"), own, tmp_path / "merged")
        expected = logprobs(LLM(str(tmp_path / "merged"), num_blocks=128))
        found = logprobs(llm, name)
        assert found[0] == expected[0], name
        torch.testing.assert_close(found[1], expected[1], rtol=2e-4, atol=2e-4, msg=name)
    mixed = llm.generate(PROMPTS, GREEDY, lora=["rslora", None, "all-linear"], use_tqdm=False)
    alone = [
        llm.generate(p, GREEDY, lora=n, use_tqdm=False)[0]
        for p, n in zip(PROMPTS, ("rslora", None, "all-linear"), strict=True)
    ]
    assert [one.outputs[0].token_ids for one in mixed] == [one.outputs[0].token_ids for one in alone]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_have_adapters(tmp_path: Path, quantization: str) -> None:
    """What is added does not depend on how the weights are held."""
    shapes = embedded_linears()
    save_adapter(tmp_path / "x", shapes, spread=0.05)
    llm = LLM(lora={"x": tmp_path / "x"}, quantization=quantization, num_blocks=128)
    whole = LLM(lora={"x": tmp_path / "x"}, num_blocks=128)
    prompt, greedy = "def fib(n):\n    return", SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def mean(of: LLM, lora: str | None) -> float:
        [output] = of.generate(prompt, greedy, lora=lora, use_tqdm=False)
        pairs = zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=True)
        found = [each[token].logprob for each, token in pairs if each is not None]
        return sum(found) / len(found)

    effect, rounding = mean(whole, "x") - mean(whole, None), mean(llm, None) - mean(whole, None)
    assert abs(effect) > 0.1
    assert abs(mean(llm, "x") - mean(whole, "x")) < 3 * abs(rounding) + 0.2 * abs(effect)


# ------------------------------------------------------------------------------------ the interface, and the cache


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of the embedded model."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(directory / name, embedded_linears(), seed, spread=0.08)
    return directory


@pytest.mark.slow
def test_blocks_are_those_of_the_same_weights(adapters: Path) -> None:
    """A prefix is found again with the same adapter, under whatever name, and with no other one."""
    llm = LLM(lora={"a": adapters / "a"}, num_blocks=256, max_loras=2)
    prompt, short = list(range(300, 364)), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def cached(lora: str | None, salt: str = "") -> int | None:
        given = {"prompt_token_ids": prompt, "cache_salt": salt}
        return llm.generate(given, short, lora=lora, use_tqdm=False)[0].num_cached_tokens

    assert [cached(None), cached(None), cached("a"), cached("a")] == [0, 64, 0, 64]
    stored: list[str | None] = []
    llm.engine.listen(lambda event: stored.append(event.lora) if isinstance(event, BlockStored) else None)
    digest = llm.engine.known_loras()["a"].digest
    assert cached(None, f"{digest}\0") == 0  # nothing in a salt stands for an adapter
    llm.unload_lora("a")
    llm.load_lora("a", adapters / "b")
    assert cached("a") == 0
    llm.load_lora("again", adapters / "a")
    assert cached("again") == 64
    assert set(stored) == {None, "a"}
    with pytest.raises(ConfigError, match="max_loras is 2"):
        llm.load_lora("c", adapters / "c")


@pytest.mark.slow
def test_every_method_computes_what_the_merged_weights_compute(tmp_path: Path) -> None:
    """Vectors, scores and beams, with an adapter and without."""
    model = save(tmp_path / "model")
    added = save_adapter(tmp_path / "adapter", linears(model), spread=0.1)
    options: dict[str, Any] = {"num_blocks": 128, "max_num_batched_tokens": 16}
    both = LLM(str(tmp_path / "model"), lora={"x": tmp_path / "adapter"}, **options)
    plain_model = LLM(str(tmp_path / "model"), **options)
    save_merged(model, added, tmp_path / "merged")
    for lora, alone in (("x", LLM(str(tmp_path / "merged"), **options)), (None, plain_model)):
        for expected, found in zip(values(alone), values(both, lora), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def values(llm: LLM, lora: str | None = None) -> list[torch.Tensor]:
    """The vectors, logprobs, scores and beams of some prompts."""
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    vectors = [one.outputs.embedding for one in llm.embed(given, lora=lora, use_tqdm=False)]
    logs = llm.loglikelihood(given, [[3, 8, 5]] * len(given), lora=lora, use_tqdm=False)
    scores = [one.outputs.score for one in llm.score(given[0], given[1:], lora=lora, use_tqdm=False)]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    beams = [one.sequences for one in llm.beam_search(given, params, lora=lora)]
    return [
        torch.tensor(vectors),
        torch.tensor([one.token_logprobs for one in logs]),
        torch.tensor(scores),
        torch.tensor([[found.tokens[-6:] for found in one] for one in beams]),
        torch.tensor([[found.cum_logprob for found in one] for one in beams]),
    ]


@pytest.mark.slow
def test_answers_with_adapters_are_the_same_streamed_and_whole(adapters: Path) -> None:
    llm = LLM(lora={"a": adapters / "a"}, num_blocks=256)
    prompts = ["def f(x):", "import os"]
    streamed = list(llm.stream(prompts, SamplingParams(temperature=0.0, max_tokens=4), lora="a"))
    whole = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), lora="a", use_tqdm=False)
    assert {one.request_id: one.outputs[0].token_ids for one in streamed if one.finished}
    assert [one.outputs[0].token_ids for one in whole] == [
        next(one for one in streamed if one.finished and one.prompt == prompt).outputs[0].token_ids
        for prompt in prompts
    ]
    for lora, sentence in (
        ("b", "there is no adapter 'b'; loaded are: 'a'"),
        (["a"], "2 prompts were given with 1 ada"),
    ):
        with pytest.raises(RequestError, match=sentence):
            llm.generate(prompts, lora=lora, use_tqdm=False)
    with pytest.raises(RequestError, match="enable_lora=True"):
        LLM(num_blocks=64).generate("x", lora="a", use_tqdm=False)


@pytest.mark.slow
def test_an_adapter_leaves_when_its_last_request_has_ended(adapters: Path) -> None:
    """Requests that have begun go on with the weights that they began with."""
    llm = LLM(lora={"a": adapters / "a"}, num_blocks=256, max_loras=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [expected] = llm.generate("def f(x):", params, lora="a", use_tqdm=False)
    stream = llm.stream("def f(x):", params, lora="a")
    next(stream)
    llm.unload_lora("a")
    with pytest.raises(ConfigError, match="requests that still run"):
        llm.load_lora("a", adapters / "b")
    *_, last = stream
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.load_lora("a", adapters / "b")
    [other] = llm.generate("def f(x):", params, lora="a", use_tqdm=False)
    of_b = LLM(lora={"b": adapters / "b"}, num_blocks=256)
    assert other.outputs[0].token_ids == of_b.generate("def f(x):", params, lora="b")[0].outputs[0].token_ids


@pytest.mark.parametrize("is_used", [False, True])
def test_an_adapter_that_is_loaded_in_part_leaves_nothing(adapters: Path, is_used: bool) -> None:
    """Whether or not a request still has the one that it was to replace."""
    llm = LLM(lora={"a": adapters / "a"}, num_blocks=64, max_loras=2)
    loras = llm.engine.known_loras()
    cleared: list[set[int]] = [set() for _ in loras._tables]
    prepared = prepare(loras, adapters / "b")
    last = prepared.parts[-1][0]
    with pytest.MonkeyPatch.context() as patch:
        for table, slots in zip(loras._tables, cleared, strict=True):
            patch.setattr(table, "clear", slots.add)
        patch.setattr(last, "put", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            loras.put("a", prepared, {loras["a"].slot} if is_used else (), replace=True)
    assert cleared == [{1 if is_used else 0}] * len(cleared)
    assert not loras.left
    assert list(loras.by_name) == (["a"] if is_used else [])
    assert loras.put("b", prepared).slot == (1 if is_used else 0)


# ---------------------------------------------------------------------------------------------------- bad adapters


def renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


Q = "base_model.model.model.layers.0.self_attn.q_proj"
# What is done to config and tensors, and the sentence.
WRONG: list[tuple[Callable[[dict[str, Any], dict[str, Any]], Any], type[QuireError], str]] = [
    (lambda c, t: c.update(use_dora=True), ModelError, "use_dora is True: DoRA"),
    (lambda c, t: c.update(modules_to_save=["lm_head"]), ModelError, r"modules_to_save is \['lm_head'\]"),
    (lambda c, t: c.update(bias="all"), ModelError, "bias is 'all'; served is 'none'"),
    (lambda c, t: c.update(lora_bias=True), ModelError, "lora_bias is True"),
    (lambda c, t: c.update(peft_type="LOHA"), ModelError, "peft_type is 'LOHA'"),
    (lambda c, t: c.update(task_type="SEQ_CLS"), ModelError, "task_type is 'SEQ_CLS'"),
    (lambda c, t: c.update(init_lora_weights="pissa"), ModelError, "init_lora_weights is 'pissa'"),
    (lambda c, t: c.update(layer_replication=[[0, 2]]), ModelError, "layer_replication"),
    (lambda c, t: c.update(trainable_token_indices=[3]), ModelError, "trainable_token_indices"),
    (lambda c, t: c.update(use_telepathy=1), ModelError, "use_telepathy is 1, which is not understood"),
    (lambda c, t: c.update(r="8"), ModelError, "r is '8'; it must be an integer above 0"),
    (lambda c, t: c.update(r=7), ModelError, "its rank is 7"),
    (lambda c, t: c.update(rank_pattern={"q_proj": 3}), ModelError, "its rank is 3"),
    (lambda c, t: c.update(alpha_pattern={"(": 3}), ModelError, "which is no pattern"),
    (lambda c, t: c.update(alpha_pattern={"q_proj": "x"}), ModelError, r"alpha_pattern\['q_proj'\] is 'x'"),
    (lambda c, t: c.update(rank_pattern={"q_proj": 0}), ModelError, r"rank_pattern\['q_proj'\] is 0; .* an integer"),
    (lambda c, t: c.update(target_modules="(["), ModelError, r"target_modules has '\(\[', which is no pattern"),
    (lambda c, t: c.update(exclude_modules=5), ModelError, "exclude_modules is 5; it must be a text or a list"),
    (lambda c, t: c.update(layers_to_transform="0"), ModelError, "layers_to_transform is '0'; it must be"),
    (lambda c, t: c.update(layers_to_transform=[True]), ModelError, r"layers_to_transform is \[True\]; it must be"),
    (lambda c, t: c.update(layers_pattern="(a)"), ModelError, r"layers_pattern has '\(a\)'; it must be the name"),
    (lambda c, t: c.update(lora_alpha=10**400), ModelError, "lora_alpha is 10+.*; it must be a positive number"),
    (lambda c, t: c.update(r=10**400), ModelError, "r is 10+.*; it must be an integer above 0"),
    (lambda c, t: c.update(target_modules=[["q"]]), ModelError, r"target_modules is \[\['q'\]\]; it must be a text"),
    (lambda c, t: c.update(rank_pattern=["q"]), ModelError, r"rank_pattern is \['q'\]; it must be an object"),
    (lambda c, t: c.update(target_modules=["k_proj"]), ModelError, "which its target_modules do not name"),
    (lambda c, t: t.pop(f"{Q}.lora_B.weight"), ModelError, "lacks lora_B of model.layers.0.self_attn.q_proj"),
    (lambda c, t: [t.pop(f"{Q}.lora_{h}.weight") for h in "AB"], ModelError, "lacks the tensors of 1 modules"),
    (lambda c, t: t.clear(), ModelError, "holds no tensor"),
    (lambda c, t: t.update(renamed({f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"]}, "lora_A.weight",
                                   "lora_magnitude_vector")), ModelError, "DoRA is not served"),
    (lambda c, t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), ModelError,
     "modules_to_save are not"),
    (lambda c, t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}), ModelError,
     "embeddings are not served"),
    (lambda c, t: t.update(renamed({k: v.clone() for k, v in t.items() if k.startswith(Q)}, Q,
                                   "base_model.model.lm_head")) or c["target_modules"].append("lm_head"),
     ModelError, "adapter of lm_head: it is no linear of a layer"),
    (lambda c, t: t.update({f"{Q}.lora_A.weight": torch.ones(6, 5)}), ModelError, "is of another model"),
    (lambda c, t: t.update({f"{Q}.lora_A.weight": torch.ones(6)}), ModelError, "expected a matrix"),
    (lambda c, t: t.update(renamed({k: v.clone() for k, v in t.items() if k.startswith(Q)}, "layers.0", "layers.99")),
     ModelError, "which this model does not have; its linears are down_proj, gate_proj"),
    (lambda c, t: c.update(r=65) or t.update({k: torch.ones(65, v.shape[1]) if "_A" in k else torch.ones(len(v), 65)
                                              for k, v in t.items()}), ConfigError, "max_lora_rank is 64"),
]  # fmt: skip


@pytest.mark.slow
def test_what_is_no_adapter_of_the_model(tmp_path: Path, adapters: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each with a sentence that says what it is about; nothing is loaded."""
    llm = LLM(enable_lora=True, num_blocks=64)
    for change, error, sentence in WRONG:
        config, tensors = json.loads((adapters / "a" / CONFIG).read_text()), load_file(adapters / "a" / TENSORS)
        change(config, tensors)
        (tmp_path / CONFIG).write_text(json.dumps(config))
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / TENSORS)
        with pytest.raises(error, match=sentence):
            llm.load_lora("x", tmp_path)
    (tmp_path / TENSORS).write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read as weights"):
        llm.load_lora("x", tmp_path)
    with pytest.raises(ModelError, match=r"is no PEFT adapter: it has no adapter_model\.safetensors"):
        llm.load_lora("x", EMBEDDED)
    for unreadable in (tmp_path / ("x" * 5_000), tmp_path / "none", Path("a\0b")):
        with pytest.raises(
            ModelError, match=r"is no PEFT adapter: it has no adapter_model\.safetensors that can be read$"
        ):
            llm.load_lora("x", unreadable)
    assert [name in caplog.text for name in ("config.json", "tokenizer.json")] == [True, True]  # of EMBEDDED
    with pytest.raises(ConfigError, match="enable_lora=True"):
        LLM(num_blocks=64).load_lora("x", adapters / "a")
    llm.load_lora("x", adapters / "a")
    with pytest.raises(ConfigError, match="there is an adapter 'x' already"):
        llm.load_lora("x", adapters / "b")
    assert list(llm.engine.known_loras().by_name) == ["x"]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|v_proj)",
        r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*self_attn.[qv]_proj",
        r"^(?:.*?(?:language|layers).*?(?:self_attn|attention|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))$",
    ],
)
def test_patterns_as_they_are_published(tmp_path: Path, adapters: Path, pattern: str) -> None:
    config = json.loads((adapters / "a" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"target_modules": pattern}))
    (tmp_path / TENSORS).write_bytes((adapters / "a" / TENSORS).read_bytes())
    found = read_adapter(tmp_path)
    names = [f"model.layers.{i}.self_attn.{kind}_proj" for i in range(12) for kind in "qkvo"] + ["lm_head"]
    assert [found.is_meant_for(name) for name in names] == [re.fullmatch(pattern, name) is not None for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_the_text_part_of_a_whole(tmp_path: Path, impl: str) -> None:
    """Modules as they are called in the whole, or in a model of its own."""
    save_whole(tmp_path / "model")
    inside = {f"model.language_model.layers.{i}.self_attn.q_proj": (TINY["hidden_size"], 96) for i in range(3)}
    alone = {name.replace("language_model.", ""): shape for name, shape in inside.items()}
    seeing = {"model.vision_tower.encoder.layers.0.self_attn.q_proj": (8, 8)}
    save_adapter(tmp_path / "inside", inside)
    save_adapter(tmp_path / "seeing", seeing)
    added = save_adapter(tmp_path / "alone", alone)
    options: dict[str, Any] = {"model_impl": impl, "num_blocks": 128, "dtype": "float32"}
    llm = LLM(str(tmp_path / "model"), lora={name: tmp_path / name for name in ("inside", "alone")}, **options)
    first, second = logprobs(llm, "inside"), logprobs(llm, "alone")
    assert torch.equal(first[1], second[1])
    save_merged(save(tmp_path / "text", "Gemma3"), added, tmp_path / "merged")
    expected = logprobs(LLM(str(tmp_path / "merged"), **options))
    assert first[0] == expected[0]
    torch.testing.assert_close(first[1], expected[1], rtol=2e-4, atol=2e-4)
    with pytest.raises(ModelError, match="which is not of the model's text part"):
        llm.load_lora("seeing", tmp_path / "seeing")


@pytest.mark.slow
def test_linears_without_adapters_are_named(tmp_path: Path) -> None:
    for kind, part, why in (("Qwen3Moe", "mlp.gate", "it chooses experts"), ("DeepseekV3", "kv_b_proj", "is folded")):
        model = save(tmp_path / kind, kind)
        save_adapter(
            tmp_path / "x",
            linears(model) | {"model.layers.1.mlp.gate": (48, 8)},
            chosen=lambda n, p=part: n.endswith(p),
        )
        with pytest.raises(ModelError, match=why):
            LLM(str(tmp_path / kind), lora={"x": tmp_path / "x"}, num_blocks=64)


def test_the_command_takes_an_adapter(adapters: Path) -> None:
    command = ["generate", "def f(x):", "--max-tokens", "8", "--temperature", "0", "--num-blocks", "64"]
    result = CliRunner().invoke(app, [*command, "--lora", f"a={adapters / 'a'}"])
    assert result.exit_code == 0, result.output
    llm = LLM(lora={"a": adapters / "a"}, num_blocks=64)
    [expected] = llm.generate("def f(x):", SamplingParams(temperature=0.0, max_tokens=8), lora="a")
    assert expected.outputs[0].text in result.stdout
    result = CliRunner().invoke(app, [*command, "--lora", "a"])
    assert result.exit_code == 1
    assert "lora contains 'a'; it must be NAME=PATH" in result.output


def test_the_digest_is_of_the_weights(tmp_path: Path) -> None:
    shapes = embedded_linears()
    for name, seed, alpha in (("a", 0, 12), ("b", 0, 12), ("c", 1, 12), ("d", 0, 13)):
        save_adapter(tmp_path / name, shapes, seed, lora_alpha=alpha)
    digests = [read_adapter(tmp_path / name).digest for name in "abcd"]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
