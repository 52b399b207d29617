"""The same bits with adapters: whatever else is in the batch, however prompts are cut, on however many threads."""

from __future__ import annotations

import random
from array import array
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.models import EMBEDDED
from quire.models.lora.fitting import prepare
from quire.ops import native
from quire.request import Request, SamplingParams
from tests.engine.test_cache_bits import Bits, bits
from tests.models.adapters import embedded_linears, save_adapter
from tests.models.checkpoints import engine

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
