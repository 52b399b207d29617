"""EAGLE-3 checkpoints: their hidden states, that no token depends on them, and the checkpoints that do not fit."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention, silu

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.models import eagle
from quire.request import Request
from tests.models.checkpoints import save
from tests.models.heads import save_eagle

pytestmark = pytest.mark.slow

PROMPTS: list[Any] = [[5, 6, 7, 8] * 5, [9, 3] * 6, list(range(2, 30)), [4]]
H = 48


def llm(model: Path, draft: Path | None = None, **options: Any) -> LLM:
    own: dict[str, Any] = {"draft": "off"} if draft is None else {"draft": "model", "draft_model": str(draft)}
    return LLM(str(model), **({"num_blocks": 64, "num_speculative_tokens": 3} | own | options))


def outputs(made: LLM, **params: Any) -> list[Any]:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1} | params))
    found = [one.outputs for one in made.generate(PROMPTS, sampling)]
    made.engine.scheduler.audit()
    return found


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor) -> Tensor:
    """RoPE of [heads, T, D] at positions from 0 on."""
    D, T = x.shape[-1], x.shape[-2]
    angles = torch.arange(T)[:, None] / 10_000 ** (torch.arange(0, D, 2) / D)
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def expected(model: Any, own: dict[str, Tensor], tokens: list[int], after_norm: bool) -> tuple[Tensor, Tensor]:
    """The layer's result for these tokens, and the model's token that it proposes after each."""
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): one for name, one in own.items()}
    with torch.no_grad():
        seen = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        embedded = model.model.embed_tokens(torch.tensor(tokens))
    before = pad(torch.cat([seen[i][0] for i in (2, 3, 4)], -1), (0, 0, 1, 0))[:-1] @ w["fc"].T
    residual = rms(before, w["hidden_norm"]) if after_norm else before
    joined = torch.cat([rms(embedded, w["input_layernorm"]), rms(before, w["hidden_norm"])], -1)
    q, k, v = ((joined @ w[f"self_attn.{name}_proj"].T).unflatten(1, (-1, 16)).transpose(0, 1) for name in "qkv")
    attended = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
    hidden = residual + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj"].T
    row = rms(hidden, w["post_attention_layernorm"])
    hidden = hidden + (silu(row @ w["mlp.gate_proj"].T) * (row @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    drafted = (rms(hidden, w["norm"]) @ w["lm_head"].T).argmax(-1)
    return hidden, drafted + w["d2t"][drafted]


@pytest.mark.parametrize("after_norm", [False, True])
def test_hidden_states_are_those_of_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_norm: bool
) -> None:
    """Of every row of a prompt in chunks, in fp32 and not rounded; and the tokens are those of the model."""
    monkeypatch.setattr("quire.models.quantisation.policy.Quantisation.for_drafts", lambda own: own)
    monkeypatch.setattr("quire.engine.head_drafter.STEPS_KEPT", 6)
    model = save(tmp_path / "model", num_hidden_layers=7)
    own = save_eagle(tmp_path / "eagle", norm_before_residual=after_norm)
    made = llm(tmp_path / "model", tmp_path / "eagle", max_num_batched_tokens=7)
    head, found = made.engine.runner.drafter.head, []  # type: ignore[attr-defined]
    forward = head.forward

    def watched(*given: Any) -> Tensor:
        rows: Tensor = forward(*given[:5])
        found.append(rows)
        return rows if given[5] is None else rows[given[5]]

    head.forward = watched
    tokens = PROMPTS[2]
    made.engine.add(Request("r", array("i", tokens), len(tokens), SamplingParams(max_tokens=10, ignore_eos=True)))
    while made.engine.has_work:
        made.engine.step()
    hidden, drafted = expected(model, own, tokens, after_norm)
    rows = torch.cat(found)[: len(tokens)]
    torch.testing.assert_close(rows, hidden, atol=1e-4, rtol=1e-4)
    assert head.choose(rows).tolist() == drafted.tolist()
    assert len({*drafted.tolist()}) > 5


def test_no_token_depends_on_the_drafts(tmp_path: Path) -> None:
    """With room and with preemptions, greedy and sampled."""
    save(tmp_path / "model", num_hidden_layers=7)
    save_eagle(tmp_path / "eagle")
    little = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 16, "max_model_len": 128}
    for options, params in (({}, {}), (little, {"temperature": 0.7, "seed": 3})):
        made = llm(tmp_path / "model", tmp_path / "eagle", **options)
        assert outputs(made, **params) == outputs(llm(tmp_path / "model", **options), **params)
        assert made.engine.scheduler.speculation is not None
        assert made.engine.scheduler.speculation.num_draft_tokens > 10


def test_one_call_drafts_the_same_as_row_after_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model", num_hidden_layers=7)
    save_eagle(tmp_path / "eagle")
    found: list[list[Any]] = []
    for one_call in (True, False):
        made = llm(tmp_path / "model", tmp_path / "eagle")
        drafter, own = made.engine.runner.drafter, list[Any]()  # type: ignore[attr-defined]
        propose = drafter.propose

        def watched(*given: Any, propose: Any = propose, own: Any = own) -> Any:
            drafts = propose(*given)
            own.append([[*draft] for draft in drafts])
            return drafts

        monkeypatch.setattr(made.engine.scheduler.speculation, "most", lambda _: 3)
        monkeypatch.setattr(drafter._acceptance, "cheap", lambda _: 3)
        monkeypatch.setattr(drafter, "propose", watched)
        if one_call:
            monkeypatch.setattr(drafter.head, "choose", lambda _: pytest.fail("row after row"))
        else:
            monkeypatch.setattr(drafter.head, "drafts", lambda *_: None)
        outputs(made)
        found.append(own)
    assert found[0] == found[1]
    assert max(len(draft) for drafts in found[0] for draft in drafts) == 3


def test_other_layouts_and_those_of_other_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.llm.load_model", lambda *_: pytest.fail("weights were read"))
    save(tmp_path / "model", num_hidden_layers=7)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"architectures": ["EagleModel"]}, r"is EagleModel; of the EAGLE layouts, Quire reads LlamaForCausalLME"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE-3 layout has one layer"),
        ({}, {"vocab_size": 99}, "is for a vocabulary of 99 tokens; the model has 97"),
        ({}, {"eagle_config": {eagle.LAYERS: [1, 3, 7]}}, r"layers \[1, 3, 7\]; it must be three of the model's 7"),
        ({"fc.weight": torch.zeros(H, 3 * 64)}, {}, r"fc.weight of shape \(48, 192\), .* model it must be \(48, 144\)"),
        ({"d2t": None}, {}, "is not EAGLE-3 for this model: it lacks d2t"),
        ({"midlayer.gate.weight": torch.zeros(3)}, {}, "has midlayer.gate.weight, which that layout has not"),
    ]  # fmt: skip
    for i, (changes, config, message) in enumerate(cases):
        save_eagle(tmp_path / str(i), changes, **config)
        with pytest.raises(ModelError, match=message):
            llm(tmp_path / "model", tmp_path / str(i))
    with pytest.raises(ConfigError, match=r"an EAGLE checkpoint; it needs Quire's own decoder"):
        llm(tmp_path / "model", tmp_path / "0", model_impl="transformers")
