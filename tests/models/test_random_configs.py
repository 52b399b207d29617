"""Some seeds of `python -m tests.models.random_configs`: with `--long` four of each family."""

from __future__ import annotations

import pytest

from quire.models import FAMILIES
from quire.models.families import gemma2
from tests.marks import quick
from tests.models.checkpoints import TINY
from tests.models.draws import KINDS
from tests.models.random_configs import Case, drawn, program, smallest, wrong

SEEDS = sorted(range(4 * len(KINDS)), key=lambda seed: (seed // len(KINDS), seed % 3, seed))  # different families first


@pytest.mark.parametrize("seed", quick(SEEDS, 5, usual=15))
def test_a_seed(seed: int) -> None:
    """Or the next one of its family where transformers does not compute what is drawn, such as a null multiplier."""
    for one in range(seed, 10 * len(KINDS), len(KINDS)):
        case = drawn(one)
        try:
            difference = wrong(case)
        except Exception:
            continue
        assert not difference, f"seed {one}: {difference}\n{program(case)}"
        return
    pytest.fail("transformers computes none of them")


# Families that the sweep and test_families compare with transformers, each with a few configs.
NOT_DRAWN = {"BailingHybridForCausalLM", "Dots3NoteForCausalLM", "MllamaForCausalLM", "OpenAIGPTLMHeadModel"}


def test_each_family_is_drawn() -> None:
    kinds = {"GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM" for kind in KINDS}
    assert kinds | NOT_DRAWN == FAMILIES.keys()
    assert {drawn(seed).kind for seed in SEEDS} == KINDS.keys()


@pytest.mark.slow
def test_a_difference_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms that are read wrongly, and in few words: without the keys that do not matter."""
    sizes = {key: value for key, value in TINY.items() if not key.endswith("_id")} | {"num_hidden_layers": 1}
    case = Case("Gemma2", sizes | {"rms_norm_eps": 1e-5}, True, 3, (6,), {"block_size": 4})
    assert not wrong(case)
    monkeypatch.setattr(gemma2, "one_plus", lambda name, part, tensor: tensor)
    assert "AssertionError: logits up to" in wrong(case)
    fewer = smallest(case)
    assert "rms_norm_eps" not in fewer.config
    with pytest.raises(AssertionError, match="logits up to"):
        exec(program(fewer))
