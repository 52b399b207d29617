"""Draft heads of checkpoints: their hidden states, and that no token depends on them."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch.nn.functional import pad
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from quire import LLM, SamplingParams
from quire.engine import head_drafter
from quire.engine.engine import Engine
from quire.engine.head_drafter import HeadDrafter
from quire.engine.speculation import MAX_FAILURES, Acceptance
from quire.errors import ConfigError, ModelError
from quire.models.draft_head import joined_groups
from quire.models.quantisation.policy import Quantisation
from quire.request import Event, Request
from tests.models.checkpoints import engine, save
from tests.models.gguf.writer import write_gguf
from tests.models.heads import add_head

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8] * 5, [9, 3] * 6, list(range(2, 30)), [4]]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # the layer that the head's is like, and changes of the config
    "Llama": (2, {}),
    "Qwen3_5": (3, {}),  # its states are rolled back to the accepted row
    "Qwen3Next": (3, {}),
    "Glm4Moe": (2, {}),
    "DeepseekV3": (2, {"q_lora_rank": 24}),
    "Ernie4_5_Moe": (0, {}),  # the layer is one without experts
    "GlmMoeDsa": (1, {"indexer_types": ["full", "full", "shared"]}),  # the head has an indexer, the last layer none
}


def drafter_of(made: Engine) -> HeadDrafter:
    return made.runner.drafter  # type: ignore[attr-defined, no-any-return]


def run(made: Engine, **params: Any) -> dict[str, list[Event]]:
    sampling = SamplingParams(**({"max_tokens": 30, "ignore_eos": True, "logprobs": 1} | params))
    for i, prompt in enumerate(PROMPTS):
        made.add(Request(f"r{i}", array("i", prompt), len(prompt), sampling))
    events: dict[str, list[Event]] = {f"r{i}": [] for i in range(len(PROMPTS))}
    while made.has_work:
        for event in made.step():
            assert event.error is None, event.error
            events[event.request_id].append(event)
        made.scheduler.audit()
    assert all(pool.num_used == 0 for pool in made.scheduler.manager.pools)
    return events


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_depends_on_the_drafts(tmp_path: Path, kind: str) -> None:
    """Of a random head, which is nearly always wrong, with room and with preemptions; greedy and sampled."""
    layer, changes = KINDS[kind]
    model = save(tmp_path, kind, **changes)
    add_head(tmp_path, kind, layer, model.config.num_hidden_layers)
    little = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 16}
    for options, params in (({}, {"temperature": 0.0}), (little, {"temperature": 0.7, "seed": 3})):
        plain = run(engine(tmp_path, **options), **params)
        made = engine(tmp_path, num_speculative_tokens=3, draft="head", **options)
        assert run(made, **params) == plain
        assert made.scheduler.speculation is not None
        assert made.scheduler.speculation.num_draft_tokens > 10


def drafts_of(model: Path) -> list[list[int]]:
    made, found = engine(model, num_speculative_tokens=3, draft="head"), list[list[int]]()
    made.scheduler.speculation.most = lambda _: 3  # type: ignore[union-attr, method-assign]
    drafter = drafter_of(made)
    propose = drafter.propose

    def watched(*given: Any) -> Any:
        drafts = propose(*given)
        found.extend([*draft] for draft in drafts)
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    run(made, temperature=0.0, max_tokens=8)
    return found


@pytest.mark.parametrize("kind", ["Qwen3_5", "Glm4Moe", "DeepseekV3"])
def test_the_head_in_a_gguf_file_drafts_the_same(tmp_path: Path, kind: str) -> None:
    """Also if its joining matrix is quantised: then the same as with the numbers that this stores."""
    layer, changes = KINDS[kind]
    model = save(tmp_path, kind, **changes)
    add_head(tmp_path, kind, layer, model.config.num_hidden_layers)
    files = [tmp_path / f"{name}.gguf" for name in ("plain", "quantised", "meant")]
    write_gguf(tmp_path, files[0], kind)
    found = drafts_of(files[0])
    assert found == drafts_of(tmp_path)
    assert sum(map(len, found)) > 20
    kinds = GGMLQuantizationType
    meant = write_gguf(tmp_path, files[1], kind, lambda name: kinds.Q4_0 if "eh_proj" in name else kinds.F32)
    write_gguf(tmp_path, files[2], kind, numbers=meant)
    assert drafts_of(files[1]) == drafts_of(files[2]) != found


def test_an_output_projection_that_is_quantised_already_is_the_heads(tmp_path: Path) -> None:
    model = save(tmp_path, "Glm4Moe", hidden_size=64)
    add_head(tmp_path, "Glm4Moe", 2, model.config.num_hidden_layers)
    write_gguf(tmp_path, tmp_path / "model.gguf", "Glm4Moe", lambda _: GGMLQuantizationType.Q8_0)
    made = engine(tmp_path / "model.gguf", num_speculative_tokens=3, draft="head")
    hidden = torch.randn(9, 64)
    expected = made.runner.model.logits(hidden).argmax(-1)  # type: ignore[attr-defined]
    assert torch.equal(drafter_of(made).head.choose(hidden), expected)


def reused(made: Engine) -> int:
    """The tokens of a prompt that another run of it finds in the cache."""
    one = Request("again", array("i", PROMPTS[2]), len(PROMPTS[2]), SamplingParams(max_tokens=1))
    made.add(one)
    while made.has_work:
        made.step()
    assert one.cache.prefix_report is not None
    return one.cache.prefix_report.num_cached


@pytest.mark.parametrize("kind", ["NaN", "raises"])
def test_a_broken_head_costs_no_request_anything(tmp_path: Path, kind: str) -> None:
    """Its K and V do not mark the model's blocks, and its error does not end a step."""
    save(tmp_path)
    add_head(tmp_path, "Llama", 2, 3)
    plain = run(engine(tmp_path), temperature=0.0)
    made = engine(tmp_path, num_speculative_tokens=3, draft="head")
    head = drafter_of(made).head
    calls = []

    def broken(whole: Any, token_ids: torch.Tensor, positions: torch.Tensor, before: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(token_ids))
        if kind == "raises":
            raise RuntimeError("no memory")
        return whole(token_ids, positions, torch.full_like(before, float("nan")), *rest)

    for name in ("forward", "drafts"):  # row by row, and in one call
        setattr(head, name, partial(broken, getattr(head, name)))
    assert run(made, temperature=0.0) == plain
    assert len(calls) == MAX_FAILURES if kind == "raises" else len(calls) > 10
    again = engine(tmp_path)
    run(again, temperature=0.0)
    found = reused(made), reused(again)
    assert found[0] == found[1] > 0, "as many tokens of the prompts are found again as without a head"


@pytest.mark.parametrize(("kind", "long"), [("Llama", 6), ("Llama", 256), ("Ernie4_5_Moe", 256)])
def test_hidden_states_are_those_of_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, long: int
) -> None:
    """Of every row of a prompt in chunks, against transformers' layer in fp32, with weights that are not rounded.

    With the prompt's steps, or later in as many rows at a time.
    """
    monkeypatch.setattr(head_drafter, "LONG", long)
    monkeypatch.setattr(head_drafter, "STEPS_KEPT", 6)
    monkeypatch.setattr(Quantisation, "for_drafts", lambda own: own)
    model = save(tmp_path, kind)
    add_head(tmp_path, kind, KINDS[kind][0], model.config.num_hidden_layers)
    made = engine(tmp_path, num_speculative_tokens=3, draft="head", max_num_batched_tokens=7)
    head, found = drafter_of(made).head, []
    forward = head.forward

    def watched(*given: Any) -> torch.Tensor:
        rows = forward(*given[:5])  # all of them
        found.append(rows)
        return rows if given[5] is None else rows[given[5]]

    head.forward = watched  # type: ignore[method-assign]
    tokens = PROMPTS[2]
    made.add(Request("r", array("i", tokens), len(tokens), SamplingParams(max_tokens=10, ignore_eos=True)))
    while made.has_work:
        made.step()
    rows = torch.cat(found)[: len(tokens)]
    torch.testing.assert_close(rows, expected(model, tmp_path, tokens), atol=1e-4, rtol=1e-4)
    assert [len(one) for one in found[:4]] == [7, 7, 7, 7], "chunks of 7 tokens"


def expected(model: Any, directory: Path, tokens: list[int]) -> torch.Tensor:
    """The hidden states of the head for these tokens, as its layout says."""
    weights, config = load_file(directory / "model.safetensors"), model.config
    names = {name: name.removeprefix("mtp.") for name in weights if name.startswith("mtp.")}
    if is_ernie := config.model_type == "ernie4_5_moe":
        ends = {"emb_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "linear_proj": "fc"}
        names = {f"model.mtp_{theirs}.0.weight": f"{ours}.weight" for theirs, ours in ends.items()}
        names |= {name: name.replace("model.mtp_block", "layers") for name in weights if "mtp_block" in name}
        names["model.norm.weight"] = "norm.weight"
    own = {ours: weights[theirs] for theirs, ours in names.items()}
    ids = torch.tensor([tokens])
    layer = (ernie.Ernie4_5_MoeDecoderLayer if is_ernie else LlamaDecoderLayer)(config, 0)
    layer.load_state_dict({name.removeprefix("layers.0."): one for name, one in own.items() if "layers.0." in name})

    def normalised(name: str, x: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.weight.data = own[f"{name}.weight"]
        return norm(x)  # type: ignore[no-any-return]

    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        before = normalised("pre_fc_norm_hidden", pad(hidden[:, :-1], (0, 0, 1, 0)))
        embedded = normalised("pre_fc_norm_embedding", model.model.embed_tokens(ids))
        joined = torch.cat([embedded, before], -1) @ own["fc.weight"].T
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((1, 1, len(tokens), len(tokens)), float("-inf")).triu(1)
        angles = (ernie.Ernie4_5_MoeRotaryEmbedding if is_ernie else LlamaRotaryEmbedding)(config)(joined, positions)
        return normalised("norm", layer(joined, attention_mask=mask, position_embeddings=angles))[0]


def test_a_long_step_leaves_rows_to_the_head_that_it_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is in the cache has its last row computed again, and the head has not computed that one yet."""
    monkeypatch.setattr(head_drafter, "LONG", 16)
    save(tmp_path)
    add_head(tmp_path, "Llama", 2, 3)
    made = engine(tmp_path, num_speculative_tokens=3, draft="head", block_size=4)
    drafter, prompt, once = drafter_of(made), list(range(2, 18)), SamplingParams(max_tokens=1)
    made.add(Request("first", array("i", prompt), 16, once))
    made.step()
    assert drafter._pending.sum() == 16
    made.add(Request("again", array("i", prompt), 16, once))
    made.add(Request("long", array("i", range(20, 60)), 40, once))
    made.step()
    assert drafter.num_computed == 41, "the step of 41 rows is long"
    assert drafter._pending.sum() == 16, "none of the first prompt's rows was written"


@pytest.mark.parametrize("kind", ["Llama", "Glm4Moe", "DeepseekV3"])
def test_one_call_drafts_the_same_as_row_after_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """For requests with different numbers of draft tokens. The rows that are left to compute are the same, too."""
    monkeypatch.setattr(Acceptance, "cheap", lambda _, request: 1 + int(request.id[1:]) % 3)
    model = save(tmp_path, kind, **KINDS[kind][1])
    add_head(tmp_path, kind, 2, model.config.num_hidden_layers)
    found: list[list[Any]] = []
    left: list[list[Any]] = [[], []]
    for one_call in (True, False):
        made, own = engine(tmp_path, num_speculative_tokens=3, draft="head"), list[Any]()
        made.scheduler.speculation.most = lambda _: 3  # type: ignore[union-attr, method-assign]
        drafter = drafter_of(made)
        propose = drafter.propose

        def watched(*given: Any, propose: Any = propose, own: Any = own, drafter: Any = drafter) -> Any:
            own += (drafts := propose(*given))
            left[len(found)].append(drafter._pending.nonzero()[0].tolist())
            return drafts

        monkeypatch.setattr(drafter, "propose", watched)
        if one_call:
            monkeypatch.setattr(drafter.head, "choose", lambda _: pytest.fail("row after row"))
        else:
            monkeypatch.setattr(drafter.head, "drafts", lambda *_: None)
        run(made, temperature=0.0)
        found.append([[*draft] for draft in own])
    assert found[0] == found[1]
    assert left[0] == left[1]
    assert {len(draft) for draft in found[0]} >= {1, 2, 3}


def test_a_head_that_is_right_halves_the_steps(tmp_path: Path) -> None:
    """The embedded model's, on text like that it was trained on."""
    steps = []
    for draft in ("off", "head"):
        llm = LLM(num_blocks=200, draft=draft, num_speculative_tokens=3)
        params = SamplingParams(max_tokens=100, temperature=0.0, repetition_penalty=1.0)
        before = llm.engine.scheduler.num_plans
        outputs = llm.generate(["import os\nimport json\n\n\ndef read_config(path):\n", "class Stack:\n"], params)
        steps.append(llm.engine.scheduler.num_plans - before)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [100, 100]
    assert steps[1] < 0.6 * steps[0]


def test_layers_of_the_head_join_a_group_of_the_model_or_follow(tmp_path: Path) -> None:
    save(tmp_path / "llama")
    add_head(tmp_path / "llama", "Llama", 2, 3)
    made = engine(tmp_path / "llama", num_speculative_tokens=3, draft="head")
    assert [group.layers for group in made.scheduler.manager.groups] == [(0, 1, 2, 3)]
    save(tmp_path / "gated", "Qwen3_5", num_key_value_heads=2)
    add_head(tmp_path / "gated", "Qwen3_5", 3, 4)
    config = engine(tmp_path / "gated").runner.model.config  # type: ignore[attr-defined]
    other = replace(config, layers=config.layers[3:], joins_hidden=True)
    groups, plans = joined_groups(config, other)
    assert [group.layers for group in groups] == [(3, 4), (0, 1, 2), (0, 1, 2)]
    assert plans == [0]
    wider = replace(other, layers=(replace(other.layers[0], mixer=replace(other.layers[0].mixer, num_kv_heads=6)),))
    groups, plans = joined_groups(config, wider)
    assert [group.layers for group in groups] == [(3,), (4,), (0, 1, 2), (0, 1, 2)]
    assert plans == [1]


def test_a_missing_head_is_an_error_only_if_it_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path)
    assert drafter_of(engine(tmp_path, num_speculative_tokens=3)) is None
    with pytest.raises(ConfigError, match="draft is 'head'; speculative decoding needs batch-invariant results"):
        engine(tmp_path, num_speculative_tokens=None, draft="head", attention_backend="reference")
    with pytest.raises(ModelError, match=r"draft is 'head': .* has no draft head that Quire knows"):
        engine(tmp_path, num_speculative_tokens=3, draft="head")
