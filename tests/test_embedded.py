"""The model that comes with Quire: its card's numbers, recomputed."""

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.models import EMBEDDED

HELD_OUT = Path(__file__).parent / "data" / "heldout"
WINDOW = 1023  # tokens after the start token
CARD = json.loads((EMBEDDED / "card.json").read_text())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_num_batched_tokens=256, kv_cache_memory="1GiB")


@pytest.mark.slow
def test_the_held_out_loss_is_the_cards(llm: LLM, long: bool) -> None:
    """Nats a byte over windows of 1,023 tokens, each after a start token. Without --long: over one in eight of them."""
    windows = []
    for path in sorted(HELD_OUT.glob("*.txt")):
        text = path.read_bytes().decode()
        start, *tokens = llm.tokenizer.encode(text)
        windows += [[start, *tokens[i : i + WINDOW]] for i in range(0, len(tokens), WINDOW)]
    windows = windows[:: 1 if long else 8]
    num_bytes = sum(len(llm.tokenizer.decode(window[1:]).encode()) for window in windows)
    # A prompt leaves room for one token more, so a window's last token is looked up among the candidates for it.
    everything = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=llm.engine.vocab_size)
    outputs = llm.generate([window[:-1] for window in windows], everything)
    nats = 0.0
    for window, output in zip(windows, outputs, strict=True):
        positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        nats -= sum(position[token].logprob for token, position in zip(window[1:], positions, strict=True))
    assert nats / num_bytes == pytest.approx(CARD["heldout_nats_per_byte"], rel=0.002 if long else 0.05)


def test_it_beats_the_ngram_clearly() -> None:
    assert CARD["heldout_nats_per_byte"] < 0.85 * CARD["ngram_nats_per_byte"]


def test_size_and_licence() -> None:
    assert (EMBEDDED / "model.safetensors").stat().st_size <= 10_000_000
    with safe_open(EMBEDDED / "model.safetensors", framework="pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    head = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert sum(sizes.values()) - head == CARD["parameters"] <= 4_000_000
    assert 0 < head <= 600_000
    card = (EMBEDDED / "README.md").read_text()
    assert "Python Software Foundation" in card
    assert str(CARD["heldout_nats_per_byte"]) in card
    assert str(CARD["ngram_nats_per_byte"]) in card


def test_any_text_survives_the_tokenizer(llm: LLM) -> None:
    for text in ("def f(x):\n\treturn  x\n\n\n", "žluťoučký 漢字 🙂", "\x00\x7f\r\n  ", "<|endoftext"):
        assert llm.tokenizer.decode(llm.tokenizer.encode(text)[1:]) == text
