"""Random configs of every own family: what Quire computes of each, and what transformers does.

A seed draws a family, a small config of it with odd values, how its config.json is spelled, prompts and options of the
engine. Every row's logits are compared with transformers in fp32. A refusal is a difference, too.

`python -m tests.models.random_configs 1000` runs as many seeds; a first seed and a family may follow. It prints a
program that shows a difference, without the keys that the difference does not need.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from quire.models import Own, choose
from quire.models.lora.fitting import prepare
from tests.models.adapters import linears, merge, plain, save_adapter
from tests.models.checkpoints import CONFIGS, engine, made, probed_logits
from tests.models.draws import KINDS, LAYERS, Config


class Case(NamedTuple):
    """What a seed draws."""

    kind: str  # of transformers' class
    config: Config  # what its config class is given
    saved: bool  # config.json is what transformers saves of it, not what it was given
    seed: int  # of the weights and the tokens
    lengths: tuple[int, ...]  # of the prompts
    options: dict[str, Any]  # of the engine
    adapted: bool = False  # with a LoRA adapter


# Of all families; none changes a logit.
BOOKKEEPING = {
    "bos_token_id": 0, "eos_token_id": [1, 3], "torch_dtype": "float32", "use_cache": False,
    "attention_dropout": 0.0, "initializer_range": 0.5, "_name_or_path": "x/y", "transformers_version": "4.31.0",
    "output_attentions": False, "pretraining_tp": 2,
}  # fmt: skip


NOT_ADAPTED = ("Zamba", "Zamba2")  # several layers share modules


def config_class(kind: str) -> Any:
    """Transformers' own."""
    return getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))


def drawn(seed: int, kind: str | None = None) -> Case:
    """What a seed draws. kind: of this family; None: one family after the other."""
    draw = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)] if kind is None else kind
    family = KINDS[kind]
    config = {"pad_token_id": 0} | family.sizes(draw, family)
    theirs = config_class(kind)
    usual = getattr(theirs, "head_dim", None)
    if family.head_dim and isinstance(usual, int) and draw.random() < 0.1:
        config["head_dim"] = usual  # and left out below
    may_be_null = {key for key, kind_of in theirs.__annotations__.items() if "None" in str(kind_of)}
    if "head_dim" in may_be_null and usual is None and draw.random() < 0.1:
        config["head_dim"] = None
        config["hidden_size"] = config["num_attention_heads"] * family.even * draw.choice([2, 3, 5])
    for key, choices in family.options.items():
        if key in family.always or draw.random() < 0.5:
            config[key] = choices(draw, config) if callable(choices) else draw.choice(choices)
            if key in may_be_null and key not in family.always and draw.random() < 0.1:
                config[key] = None
    if family.rope is not None and draw.random() < 0.75:
        config |= family.rope(draw, config)
    if usual is not None and config.get("head_dim") == usual:
        del config["head_dim"]
    if "num_key_value_heads" in may_be_null and draw.random() < 0.1:
        config["num_key_value_heads"] = None
    if draw.random() < 0.1:
        config.pop("max_position_embeddings", None)
    config |= {key: value for key, value in BOOKKEEPING.items() if draw.random() < 0.2}
    options = {
        "block_size": draw.choice([1, 2, 4, 8, 16]),
        "max_num_batched_tokens": draw.choice([3, 5, 8, 16, 64]),
        "model_impl": draw.choice(["auto", "quire"]),
    }
    lengths = tuple(draw.choice([5, 6, 7, 9, 12, 17, 18, 31, 40]) for _ in range(draw.randint(1, 3)))
    is_saved, is_adapted = draw.random() < 0.5, draw.random() < 0.1
    return Case(kind, config, is_saved, seed, lengths, options, is_adapted and kind not in NOT_ADAPTED)


@torch.no_grad()
def check(case: Case) -> None:
    """Raise AssertionError where Quire and transformers differ, and Quire's error where it refuses what is drawn."""
    config = config_class(case.kind)(**case.config)
    theirs = made(case.kind, config, case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    vocab_size = case.config["vocab_size"]
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in case.lengths]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        theirs.save_pretrained(directory)
        if not case.saved:
            named = {"architectures": [type(theirs).__name__], "model_type": config.model_type}
            (directory / "config.json").write_text(json.dumps(named | case.config), encoding="utf-8")
        choice = choose(directory)
        assert isinstance(choice, Own), f"left to the adapter: {choice.reason}"
        longest = getattr(config, "max_position_embeddings", None)  # None: the family has no limit
        assert longest in (None, choice.config.max_position_embeddings), f"the longest sequence should be {longest}"
        options = {"num_blocks": 1 + -(-50 // case.options["block_size"]) * len(prompts) * 4, "max_model_len": 64}
        ours = engine(directory, **options, **case.options, enable_lora=case.adapted)
        if case.adapted:
            added = save_adapter(directory / "adapter", linears(theirs), case.seed, chosen=plain, spread=0.1)
            ours.load_lora("adapter", prepare(ours.known_loras(), directory / "adapter"))
            merge(theirs, added)
    probe, generated = probed_logits(ours, prompts, max_tokens=3, lora="adapter" if case.adapted else None)
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt + generated[f"r{i}"]])
        expected = theirs(tokens, use_cache=False).logits[0]
        rows = [probe.found.get(tuple(tokens[0, : n + 1].tolist())) for n in range(tokens.shape[1] - 1)]
        # A prompt of which windows of 1 see the last token alone is not computed before that.
        computed = [n for n, row in enumerate(rows) if row is not None]
        assert computed[-1] == len(rows) - 1
        found = torch.stack([row for row in rows if row is not None])
        error, most = (found - expected[computed]).abs().max(), expected.abs().max()
        if not error <= TOLERANCE * max(1.0, most):
            rounding = (moved(theirs, tokens, generator) - expected).abs().max()
            assert error <= 2.5 * rounding, f"logits up to {most:.3g} differ by {error:.3g}; rounding is {rounding:.1g}"


def moved(model: Any, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Logits of the model in fp64 with its weights moved by about fp32's rounding: [8, 1, T, V].

    Theirs and ours lie on either side of the exact logits. Where a model magnifies rounding, or two experts have almost
    the same score, these show how far from one another that may be.
    """
    found, weights = [], {name: weight.double() for name, weight in model.state_dict().items()}
    model.double()
    for _ in range(8):
        factors = {n: 1 + 2e-6 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in weights.items()}
        model.load_state_dict({name: weight * factors[name] for name, weight in weights.items()})
        found.append(model(tokens, use_cache=False).logits)
    model.load_state_dict(weights)
    model.float()
    return torch.stack(found)


TOLERANCE = 1e-4  # of the largest logit; fp32 rounds these small models by 1e-6 to 1e-5 of it


def wrong(case: Case) -> str:
    """What is wrong with a case, in a line; empty: nothing. Raises what transformers raises of the config."""
    try:
        check(case)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any("/transformers/" in frame.filename for frame in frames) and "quire/models" not in frames[-1].filename:
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def alike(one: str, other: str) -> bool:
    """Whether two say the same, numbers and names of files aside."""
    return re.sub(r"[\d.]+|/tmp/\S+", "", one)[:60] == re.sub(r"[\d.]+|/tmp/\S+", "", other)[:60]


def smallest(case: Case) -> Case:
    """The case without what its difference does not need."""
    difference = wrong(case)
    changes: list[dict[str, Any]] = [{"adapted": False}, {"lengths": case.lengths[:1]}, {"saved": True}]
    for change in changes + [{"without": key} for key in case.config if key not in SIZES]:
        left_out = change.pop("without", None)
        fewer = case._replace(**change, config={key: value for key, value in case.config.items() if key != left_out})
        if fewer == case:
            continue
        with suppress(Exception):
            case = fewer if alike(wrong(fewer), difference) else case
    return case


SIZES = {"vocab_size", "hidden_size", "intermediate_size", LAYERS, "num_attention_heads", "head_dim"}


def program(case: Case) -> str:
    """A program that shows what is wrong with a case."""
    return f"from tests.models.random_configs import Case, check\n\ncheck({case!r})".replace("inf]", 'float("inf")]')


def quiet() -> None:
    """Let transformers say nothing, and torch take one thread."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> None:
    count, first = (int(sys.argv[i]) if len(sys.argv) > i else (1000, 0)[i - 1] for i in (1, 2))
    kind = sys.argv[3] if len(sys.argv) > 3 else None
    quiet()
    found: Counter[str] = Counter()
    start = time.monotonic()
    for seed in range(first, first + count):
        case = drawn(seed, kind)
        try:
            difference = wrong(case)
        except Exception as error:
            found[f"{case.kind}: {type(error).__name__}: {str(error)[:100]!r}"] += 1
            continue
        if difference:
            found["WRONG"] += 1
            print(f"seed {seed}: {case.kind}: {difference}\n{program(smallest(case))}\n", flush=True)
    num_wrong = found.pop("WRONG", 0)
    print(f"{found.total()} configs that transformers does not compute", *found, sep="\n    ")
    print(f"{count} configs in {time.monotonic() - start:.0f} s; {num_wrong or 'nothing'} wrong")
    raise SystemExit(num_wrong > 0)


if __name__ == "__main__":
    main()
