"""The same bits with adapters: whatever else is in the batch, however prompts are cut, on however many threads."""

from __future__ import annotations

import random
from array import array
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.models import EMBEDDED
from quire.models.lora.fitting import prepare
from quire.ops import native
from quire.request import Request, SamplingParams
from tests.engine.test_cache_bits import Bits, bits
from tests.marks import of_long_runs
from tests.models.adapters import embedded_linears, linears, save_adapter
from tests.models.checkpoints import engine, save

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

NAMES = (None, "all", "some", "small")


def asked(loras: tuple[str | None, ...] = NAMES) -> list[Request]:
    """The same prompts every time, with these adapters in turn."""
    rng, found = random.Random(3), []
    stem = [rng.randrange(400) for _ in range(30)]
    for i in range(16):
        tokens = stem[: rng.randint(1, 30)] + [rng.randrange(400) for _ in range(rng.randint(0, 40))]
        params = SamplingParams(temperature=0.7 * (i % 2), max_tokens=6, ignore_eos=True, logprobs=2, seed=i)
        lora = loras[i % len(loras)]
        found.append(Request(f"{i}", array("i", tokens), len(tokens), params, lora=lora))
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        of_long_runs("", {}),
        ("", {"quantization": "int8"}),
        of_long_runs("Llama", {"dtype": "float32"}),
        ("Qwen3Next", {"dtype": "bfloat16"}),
    ],
    ids=["embedded", "embedded, int8", "llama, fp32", "qwen3 next, bf16"],
)
def test_bits(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    directory, shapes = EMBEDDED, embedded_linears()
    if kind:
        directory = tmp_path / "model"
        model = save(directory, kind, vocab_size=500)
        shapes = linears(model)
    plain = [name for name in shapes if "gate" not in name.rpartition("mlp.")[2] or name.endswith("gate_proj")]
    shapes = {name: shapes[name] for name in plain if ".experts." not in name}
    first = sorted(shapes)[0].rpartition(".")[2]
    save_adapter(tmp_path / "all", shapes, 0, dtype=torch.bfloat16)
    save_adapter(tmp_path / "some", shapes, 1, chosen=lambda name: name.endswith(first), r=16)
    save_adapter(tmp_path / "small", shapes, 2, r=1)

    def built(**own: Any) -> Engine:
        made = engine(directory, **({"enable_lora": True, "max_num_seqs": 16} | options | own))
        if made.loras is not None:
            for name in NAMES[1:]:
                made.load_lora(str(name), prepare(made.loras, tmp_path / str(name)))
        return made

    alone = built(num_blocks=256, enable_prefix_caching=False)
    expected: Bits = {}
    for request in asked():
        expected |= bits(alone, [request])
    effect = [expected[f"{i}"] for i in range(16)]
    assert bits(built(num_blocks=256), asked()) == expected
    # Steps of 13 tokens in too few blocks, one of two threads, and guesses.
    threads = torch.get_num_threads()
    for count, blocks, tokens in ((1, 40, 13), (2, 256, 37)):
        torch.set_num_threads(count)
        try:
            assert (
                bits(built(num_blocks=blocks, max_num_batched_tokens=tokens, num_speculative_tokens=2), asked())
                == expected
            )
        finally:
            torch.set_num_threads(threads)
    without = bits(built(num_blocks=256, enable_lora=False), asked((None,)))
    for i, lora in enumerate(NAMES[i % len(NAMES)] for i in range(16)):
        assert (without[f"{i}"] == effect[i]) == (lora is None), (i, lora)


def test_the_native_program_has_the_bits_of_its_operators(tmp_path: Path) -> None:
    """One call of the library, or each operator by itself."""
    from quire.ops.backends.eager import EagerExecutor

    save_adapter(tmp_path / "all", embedded_linears())
    found = []
    for eager in (False, True):
        made = engine(EMBEDDED, enable_lora=True, num_blocks=256)
        decoder: Any = made.runner.model  # type: ignore[attr-defined]
        if eager:
            decoder.layers = EagerExecutor(decoder.backend, decoder.layers.program)
        made.load_lora("all", prepare(made.known_loras(), tmp_path / "all"))
        found.append(bits(made, asked(("all", None))))
    assert found[0] == found[1]


def test_random_mixes(tmp_path: Path) -> None:
    """Adapters that come and go between the requests of others."""
    for seed, name in product(range(3), ("x", "y")):
        save_adapter(tmp_path / f"{name}{seed}", embedded_linears(), seed + 7 * (name == "y"), r=seed + 2)
    made, rng = engine(EMBEDDED, enable_lora=True, max_loras=4, num_blocks=256), random.Random(0)
    paths = sorted(tmp_path.iterdir())
    alone = engine(EMBEDDED, enable_lora=True, max_loras=len(paths), num_blocks=256)
    for path in paths:
        alone.load_lora(path.name, prepare(alone.known_loras(), path))
    found: Bits = {}
    requests: list[Request] = []
    for turn in range(12):
        loras = made.known_loras()
        for _ in range(2):
            if loras.by_name and (len(loras.by_name) == 4 or rng.random() < 0.4):
                made.unload_lora(rng.choice(sorted(loras.by_name)))
        path = rng.choice(paths)
        if path.name not in loras.by_name and len(loras.by_name) + len(loras.left) < 4:
            made.load_lora(path.name, prepare(loras, path))
        for name in rng.sample([None, *sorted(loras.by_name)], k=1 + len(loras.by_name) // 2):
            one = asked((name,))[rng.randrange(16)]
            one.id = f"{turn}-{name}"
            requests.append(one)
            made.add(one)
            found[one.id] = []
        for _ in range(rng.randint(0, 5)):
            for event in made.step():
                assert event.error is None, event.error
                if event.logprobs is not None:
                    found[event.request_id].append((event.token, event.logprobs.logprob, event.logprobs.top))
    while made.has_work:
        for event in made.step():
            if event.logprobs is not None:
                found[event.request_id].append((event.token, event.logprobs.logprob, event.logprobs.top))
    assert not made.known_loras().left
    for one in requests:
        prompt = one.tokens[: one.num_prompt]
        again = Request(one.id, prompt, one.num_prompt, one.sampling, lora=one.lora)
        assert bits(alone, [again])[one.id] == found[one.id], one.id
