"""A second model that proposes tokens: that no token depends on it, and that it computes each token once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.config import engine_config
from quire.engine.model_drafter import ModelDrafter
from quire.errors import ConfigError
from quire.frontend import draft_model
from quire.models import EMBEDDED
from tests.models.adapters import embedded_linears, save_adapter
from tests.models.checkpoints import save

pytestmark = pytest.mark.slow

PROMPTS: list[Any] = [[5, 6, 7, 8] * 5, [9, 3] * 6, list(range(2, 60)), [4]]
LITTLE = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 16, "max_num_seqs": 4}


def llm(model: Path, draft: Path | None = None, **options: Any) -> LLM:
    own: dict[str, Any] = {"draft": "off"} if draft is None else {"draft": "model", "draft_model": str(draft)}
    return LLM(str(model), **({"num_blocks": 64, "num_speculative_tokens": 3} | own | options))


def outputs(made: LLM, prompts: list[Any], **params: Any) -> list[Any]:
    """The samples of each prompt, with all bookkeeping verified."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1} | params))
    found = [one.outputs for one in made.generate(prompts, sampling)]
    made.engine.scheduler.audit()
    assert all(pool.num_used == 0 for pool in made.engine.scheduler.manager.pools)
    return found


def drafter(made: LLM) -> ModelDrafter:
    assert made.engine.scheduler.speculation is not None
    [found] = made.engine.scheduler.speculation.drafters
    assert isinstance(found, ModelDrafter)
    return found


def counts(made: LLM) -> tuple[int, int]:
    """Draft tokens so far, and those that were accepted."""
    assert made.engine.scheduler.speculation is not None
    return made.engine.scheduler.speculation.num_draft_tokens, made.engine.scheduler.speculation.num_right


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Qwen3_5"])
def test_no_token_depends_on_a_random_draft_model(tmp_path: Path, kind: str) -> None:
    """It is nearly always wrong; with room and with preemption by both ways, greedy and sampled, several samples."""
    save(tmp_path / "model", kind)
    save(tmp_path / "draft", num_hidden_layers=1, hidden_size=24)
    sizes = {"max_num_seqs": 4} if kind == "Qwen3_5" else LITTLE
    for options, params in (
        ({}, {}),
        (sizes, {"temperature": 0.7, "seed": 3, "n": 2}),
        (sizes | {"preemption": "swap", "swap_space": "1MiB"}, {"prompt_logprobs": 1}),
    ):
        plain = outputs(llm(tmp_path / "model", **options), PROMPTS, **params)
        drafting = llm(tmp_path / "model", tmp_path / "draft", **options)
        assert outputs(drafting, PROMPTS, **params) == plain
        assert counts(drafting)[0] > 10


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_a_draft_model_that_is_the_model_is_always_right(tmp_path: Path, kind: str) -> None:
    """So its keys and values are those of the request's tokens: in chunks, after prefix hits and evictions, too.

    It computes no token twice, and those of a prefix that it has computed not at all.
    """
    save(tmp_path, kind, **({"sliding_window": 9} if kind == "Gemma2" else {}))
    made = llm(tmp_path, tmp_path, max_num_batched_tokens=16)
    plain = llm(tmp_path)
    assert outputs(made, PROMPTS[2:3]) == outputs(plain, PROMPTS[2:3])
    asked, right = counts(made)
    assert asked == right > 15
    assert drafter(made).num_computed <= 58 + 30
    before = drafter(made).num_computed
    assert outputs(made, [PROMPTS[2] + [7]]) == outputs(plain, [PROMPTS[2] + [7]])
    assert drafter(made).num_computed - before <= 59 - 48 + 30, "48 tokens of the prompt are in its blocks"
    few: dict[str, Any] = {"block_size": 4, "num_blocks": 22, "max_model_len": 88, "max_num_seqs": 4}
    little = llm(tmp_path, tmp_path, **few)
    assert outputs(little, PROMPTS) == outputs(llm(tmp_path, **few), PROMPTS)
    assert little.engine.scheduler.num_preemptions > 0
    asked, right = counts(little)
    assert asked == right > 15
    shadows = [shadow.own for shadow in drafter(little)._shadows.values()]
    assert sum(pool.num_used for pool in drafter(little).manager.pools) > 0
    drafter(little)._release(*drafter(little)._shadows)
    assert not any(shadow.cache.block_ids for shadow in shadows)
    assert all(pool.num_used == 0 for pool in drafter(little).manager.pools)


def test_a_failing_draft_model_costs_no_request_anything(tmp_path: Path) -> None:
    save(tmp_path)
    made = llm(tmp_path, tmp_path)
    run, calls = drafter(made).runner.run, []

    def failing(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) % 4 == 0:
            raise RuntimeError("no memory")
        return run(batch)

    drafter(made).runner.run = failing  # type: ignore[method-assign]
    assert outputs(made, PROMPTS) == outputs(llm(tmp_path), PROMPTS)
    assert len(calls) == 12, "after three failures it is left alone"
    assert all(pool.num_used == 0 for pool in drafter(made).manager.pools)


def test_grammars_penalties_and_adapters_have_drafts_of_the_model(tmp_path: Path) -> None:
    """The embedded model for itself: drafts ignore all of these, and the tokens do not."""
    regex = StructuredOutputsParams(regex=r"(def [a-z]{3,9}\(self\):\n    pass\n){2,4}")
    for params in ({"structured_outputs": regex}, {"repetition_penalty": 1.2}, {"temperature": 0.6, "seed": 2}):
        drafting, own = llm(EMBEDDED, EMBEDDED), {"repetition_penalty": 1.0} | params
        prompts = ["class Stack:\n"] * 2
        assert outputs(drafting, prompts, **own) == outputs(llm(EMBEDDED), prompts, **own)
        assert counts(drafting)[1] > 5
    [output] = drafting.generate("x = ", SamplingParams(max_tokens=20, temperature=0.0, n=2))
    assert output.metrics is not None
    assert output.metrics.num_draft_tokens >= output.metrics.num_accepted_tokens > 10


def with_another_token(directory: Path) -> Path:
    """The embedded model, with two tokens exchanged."""
    directory.mkdir()
    for path in EMBEDDED.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    raw = json.loads((directory / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    one, other = list(vocab)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    return directory


def test_models_that_cannot_draft_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.frontend.llm.load_model", lambda *_: pytest.fail("weights were read"))
    save(tmp_path / "model")
    save(tmp_path / "other", vocab_size=99)
    save(tmp_path / "hybrid", "Qwen3_5")
    exchanged = with_another_token(tmp_path / "exchanged")
    for model, draft, message in (
        ("model", "other", "its vocabulary has 99 tokens, and the model's 97"),
        ("model", "hybrid", "a Qwen3_5ForCausalLM; it has layers that keep a state, and a draft model must consist of"),
        (EMBEDDED, exchanged, r"whose vocabulary is not the model's: it differs in token \d+ \('.+', here '.+'\), \d+"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm(tmp_path / model, tmp_path / draft)
    with pytest.raises(ConfigError, match="not 'reference' on 'cpu'"):
        llm(EMBEDDED, EMBEDDED, attention_backend="reference")
    monkeypatch.setattr(draft_model, "free_memory", lambda _: 1_000_000)
    with pytest.raises(ConfigError, match=r"its weights take \d+ MiB and the model's \d+ MiB, and only 1 MiB are free"):
        llm(EMBEDDED, EMBEDDED)
    for options, message in (
        ({"draft": "model"}, "draft is 'model'; draft_model must name the model"),
        ({"draft": "head", "draft_model": "x"}, "draft is 'head', and draft_model 'x'; leave one of them out"),
        ({"speculative_config": {"method": "medusa"}}, r"its method draft; of the methods, draft_model, eagle3, mtp"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_config(**options)


def test_requests_with_adapters_have_drafts_of_the_head(tmp_path: Path) -> None:
    """Their tokens are those of the adapter; it is so slight that most drafts are right."""
    save_adapter(tmp_path, embedded_linears(), spread=0.03)
    own: dict[str, Any] = {"lora": {"slight": tmp_path}, "num_blocks": 128, "num_speculative_tokens": 3}
    prompts = ["class Stack:\n    def ", "import os\nimport "]
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1, repetition_penalty=1.0)
    found = []
    for draft in ("off", "head"):
        made = LLM(**own | {"draft": draft})
        found.append([one.outputs for one in made.generate(prompts, sampling, lora=["slight", None], use_tqdm=False)])
    assert found[0] == found[1]
    num_drafted, num_right = counts(made)
    assert num_drafted > num_right > 20
    base = made.generate(prompts[:1], sampling, use_tqdm=False)[0].outputs
    assert base[0].logprobs != found[0][0][0].logprobs


def test_the_speculative_config_of_vllm_sets_these_options() -> None:
    config = engine_config(speculative_config={"model": "small", "num_speculative_tokens": 4})
    assert (config.draft, config.draft_model, config.num_speculative_tokens) == ("auto", "small", 4)
    assert engine_config(speculative_config={"method": "ngram"}).draft == "lookup"
