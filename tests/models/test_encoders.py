"""Encoders: hidden states of transformers' own code, poolings and classifiers of their files, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM
from quire.errors import ConfigError, ModelError, RequestError
from quire.frontend.request_factory import RequestOptions, TokenizedPrompt
from quire.models import read_config
from quire.models.convert import convert
from quire.ops.program import Project
from quire.request import FinishReason
from tests.models.encoders import KINDS, PUBLISHED, save_embedder, saved

LENGTHS = (1, 2, 40, 7, 90, 23)


def texts(vocab_size: int = 97) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(2, vocab_size, (length,), generator=random).tolist() for length in LENGTHS]


def states(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The hidden states of prompts that are embedded in one call."""
    seen: list[torch.Tensor] = []
    pooler = llm.decoder.pooler

    def recorded(hidden: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        seen.extend(hidden[a:b].clone() for a, b in pairwise(ends))
        return pooler(hidden, counts)

    llm.decoder.pooler = recorded  # type: ignore[assignment]
    assert all(output.error is None for output in llm.embed(prompts, use_tqdm=False))
    llm.decoder.pooler = pooler
    return seen


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model, prompts = saved(tmp_path, kind), texts()
    with LLM(str(tmp_path), max_num_batched_tokens=100, block_size=4) as llm:
        found = states(llm, prompts)
        alone = [states(llm, [prompt])[0] for prompt in prompts]
    for prompt, state, own in zip(prompts, found, alone, strict=True):
        expected = model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -len(state) :]  # a decoder's last one
        largest = expected.abs().max()
        assert (state - expected).abs().max() <= 1e-4 * largest, (kind, len(prompt))
        assert torch.equal(state, own)


CLASSIFIERS = (
    "bert",
    "roberta",
    "distilbert",
    "mpnet",
    "nomic",
    "deberta-v3",
    "modernbert, biases",
    "qwen3",
    "mistral",
)


@torch.no_grad()
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    names = {0: "bad", 1: "so-so", 2: "good"}
    model = saved(
        tmp_path, kind, "ForSequenceClassification", id2label=names, label2id={v: k for k, v in names.items()}
    )
    prompts = texts()[2:]
    with LLM(str(tmp_path)) as llm:
        outputs = llm.classify(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert output.outputs.probs == pytest.approx(logits.softmax(0).tolist(), abs=1e-4)
        assert output.outputs.label == names[int(logits.argmax())]


@torch.no_grad()
def test_the_types_of_tokens(tmp_path: Path) -> None:
    """A cross-encoder has one label; the ids of a second text's tokens are beyond those of the vocabulary."""
    model = saved(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    tokens, types = [2, 5, 9, 3, 8, 11, 3], [0, 0, 0, 0, 1, 1, 1]
    expected = model(input_ids=torch.tensor([tokens]), token_type_ids=torch.tensor([types])).logits.sigmoid()
    with LLM(str(tmp_path)) as llm:
        [output] = llm.classify([[token + 97 * kind for token, kind in zip(tokens, types, strict=True)]])
        assert output.outputs.probs == pytest.approx(expected.flatten().tolist(), abs=1e-5)
        assert output.outputs.label is None
        with pytest.raises(RequestError, match=r"prompt\[0\] is 194; token ids of this model lie in 0\.\.193"):
            llm.classify([[194]])
        for call in (llm.generate, llm.embed):
            with pytest.raises(RequestError, match=r"writes no text|classifies texts and has no embeddings"):
                call([[5]])


def module(directory: Path, name: str, kind: str, **config: Any) -> dict[str, Any]:
    (directory / name).mkdir()
    if config:
        (directory / name / "config.json").write_text(json.dumps(config))
    return {"idx": 1, "name": name, "path": name, "type": f"sentence_transformers.models.{kind}"}


FIRST = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    weights = torch.arange(1.0, len(hidden) + 1)[:, None]
    return {
        "cls_token": hidden[0],
        "lasttoken": hidden[-1],
        "max_tokens": hidden.amax(0),
        "mean_tokens": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean_tokens": (hidden * weights).sum(0) / weights.sum(),
    }[mode]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_poolings_of_files(tmp_path: Path, kind: str) -> None:
    """Each pooling, then a dense layer, with and without normalisation; of a decoder, too, whose text is one step."""
    prompts = texts()
    for mode in ("cls_token", "lasttoken", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"):
        directory = tmp_path / mode
        model = saved(directory, kind)
        modules = [FIRST, module(directory, "1_Pooling", "Pooling", **{f"pooling_mode_{mode}": True})]
        dense = {"in_features": 48, "out_features": 20, "activation_function": "torch.nn.modules.activation.Tanh"}
        modules.append(module(directory, "2_Dense", "Dense", **dense))
        weight, bias = torch.randn(20, 48) / 7, torch.randn(20)
        save_file({"linear.weight": weight, "linear.bias": bias}, directory / "2_Dense" / "model.safetensors")
        is_normal = mode == "max_tokens"
        modules += [module(directory, "3_Normalize", "Normalize")] * is_normal
        (directory / "modules.json").write_text(json.dumps(modules))
        with LLM(str(directory), num_blocks=64, max_num_batched_tokens=100) as llm:
            outputs = llm.embed(prompts, use_tqdm=False)
            assert llm.hidden_size == 20
        for prompt, output in zip(prompts, outputs, strict=True):
            hidden = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            expected = torch.tanh(pooled(hidden, mode) @ weight.T + bias)
            if is_normal:
                expected = torch.nn.functional.normalize(expected, dim=0)
            assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4), (mode, len(prompt))


def test_what_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    good = [FIRST, module(tmp_path, "1_Pooling", "Pooling", pooling_mode="mean")]
    cases: list[tuple[Any, str]] = [
        ([FIRST], "has no Pooling; without it a text has no vector"),
        ([*good, FIRST | {"path": "2", "type": "x.models.Word"}], "has the module Word; understood are a Transformer"),
        ([good[1]], "the first module must be a Transformer in the directory"),
        ([FIRST, good[1] | {"path": "../1_Pooling"}], "must be the name of a directory next to it"),
        ("no list", "cannot be read as a list of modules"),
    ]
    for modules, message in cases:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ModelError, match=message):
            LLM(str(tmp_path))
    (tmp_path / "modules.json").write_text(json.dumps(good))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "median"}))
    with pytest.raises(ModelError, match="the pooling is 'median'; it must be one of cls, "):
        LLM(str(tmp_path))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["mean"]}))
    for options, message in (
        (
            {"max_num_batched_tokens": 95},
            "computes a text in one step, so it must be at least max_model_len=96",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and it is an encoder or a classifier"),
        ({"enable_lora": True}, "enable_lora is True; an encoder keeps no cache, has no adapters and writes nothing"),
        ({"preemption": "swap"}, "preemption is 'swap'; an encoder keeps no cache"),
        ({"draft": "head"}, "draft is 'head'; an encoder keeps no cache"),
        ({"max_model_len": 97}, "was made for sequences of up to 96"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tmp_path), **options)
    with LLM(str(tmp_path)) as llm:
        with pytest.raises(RequestError, match="a prompt of 97 tokens; with max_model_len=96 a prompt may"):
            llm.embed([[5] * 97])
        [cut, whole] = [llm.embed([[*range(2, 97), 5][:n]], truncate_prompt_tokens=-1) for n in (97, 96)]
        assert cut[0].outputs == whole[0].outputs
        with pytest.raises(RequestError, match="this model embeds texts and has no classifier"):
            llm.classify([[5]])
        with pytest.raises(RequestError, match="prompt_name is 'query'; this model's prompts are none"):
            llm.embed(["text"], prompt_name="query")


@pytest.mark.parametrize("kind", ["bert", "deberta-v3", "modernbert"])
def test_bits_are_equal_in_any_batch_and_on_any_number_of_threads(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, kind)
    prompts, threads = texts() * 3, torch.get_num_threads()
    with LLM(str(tmp_path), quantization="int8") as rounded, LLM(str(tmp_path), max_num_batched_tokens=97) as llm:
        for model in (llm, rounded):
            [*found] = [output.outputs.embedding for output in model.embed(prompts, use_tqdm=False)]
            try:
                torch.set_num_threads(3)
                alone = [model.embed([prompt], use_tqdm=False)[0].outputs.embedding for prompt in prompts]
            finally:
                torch.set_num_threads(threads)
            assert found == alone
        assert found != [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.mark.parametrize("sizes", [{}, WIDE])
def test_a_converted_model_has_the_modules_after_the_layers(tmp_path: Path, sizes: dict[str, int]) -> None:
    save_embedder(tmp_path / "model", **sizes)
    convert(tmp_path / "model", tmp_path / "int8", "int8")
    found = []
    for directory, options in ((tmp_path / "int8", {}), (tmp_path / "model", {"quantization": "int8"})):
        with LLM(str(directory), **options) as llm:
            assert llm.decoder.pooler.config.source == "modules.json"
            found.append([one.outputs.embedding for one in llm.embed(texts(), prompt_name=None, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "rounded"), [("bert", 128), ("modernbert", 0)])
def test_int8_of_an_encoder_has_scales_of_32_inputs_but_for_values(tmp_path: Path, kind: str, rounded: int) -> None:
    """Weights and rows have; the projection to values is exact, and all of q, k and v if they are one tensor."""
    saved(tmp_path, kind, **WIDE)

    def projected(x: torch.Tensor, quantization: str | None) -> torch.Tensor:
        with LLM(str(tmp_path), quantization=quantization) as llm:
            found = next(one for one in llm.decoder.layers.program.operators if isinstance(one, Project))
            assert (llm.decoder.quantisation or "") == ("int8 at load, groups of 32" if quantization else "")
            return torch.cat([part.linear(x) for part in found.parts], 1)

    def in_groups(numbers: torch.Tensor) -> torch.Tensor:
        groups = numbers.unflatten(1, (-1, 32))
        steps = groups.abs().amax(2, keepdim=True) / 127
        return ((groups / steps).round() * steps).flatten(1)

    x, unit = torch.randn(5, 64), torch.eye(64)
    exact, bias = projected(x, None), projected(torch.zeros(1, 64), None)
    weight = (projected(unit, None) - bias).T
    found, expected = projected(x, "int8"), in_groups(x) @ in_groups(weight).T + bias
    assert torch.equal(found[:, rounded:], exact[:, rounded:])
    assert rounded == 0 or (found - expected)[:, :rounded].abs().max() < 1e-3 * exact.abs().max()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(tmp_path: Path, name: str) -> None:
    raw, longest = PUBLISHED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    config, _ = read_config(path)
    assert config.max_position_embeddings == longest
    assert config.causal == ("Qwen" in name)
    labels = len(raw.get("id2label", ["one", "two"])) if "Sequence" in raw["architectures"][0] else 0
    assert [dense.out_size for dense in config.classifier[-1:]] == [labels] * bool(labels)
    path.write_text(json.dumps(raw | {"new_key": 1}))
    with pytest.raises(ModelError, match="does not understand: new_key=1"):
        read_config(path)


def test_texts_are_scheduled_like_other_requests(tmp_path: Path) -> None:
    """One text fits into a step: the first by priority. One that is aborted computes nothing, and no block is left."""
    saved(tmp_path, "bert")
    with LLM(str(tmp_path), max_num_batched_tokens=100, scheduling_policy="priority") as llm:
        engine, free = llm.engine, llm.engine.scheduler.manager.pools[0].num_free
        for name, priority in (("third", 2), ("first", 0), ("second", 1), ("aborted", 0)):
            prompt, options = TokenizedPrompt(None, [5] * 90), RequestOptions(priority)
            _, [request] = llm.factory.embedding(name, prompt, options)
            engine.add(request)
        engine.abort("aborted-0")
        ended = []
        while engine.has_work:
            events = [event for event in engine.step() if event.finish_reason is not None]
            assert sum(event.hidden_state is not None for event in events) <= 1
            ended += [(event.request_id, event.finish_reason) for event in events]
        assert [name for name, reason in ended if reason is FinishReason.LENGTH] == ["first-0", "second-0", "third-0"]
        assert ("aborted-0", FinishReason.ABORT) in ended
        assert engine.scheduler.manager.pools[0].num_free == free
