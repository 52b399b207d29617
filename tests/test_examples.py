"""The examples run and say what they promise."""

import importlib.util
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire import LLM, SamplingParams, ops
from quire.errors import BadValue, OutOfBlocks
from tests.models.gguf.writer import write_model
from tests.server.conftest import TEMPLATE
from tests.server.interrupts import obey
from tests.server.serving import serving

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "demo.py": ["tokens", "seconds", "tokens/s", "blocks used", "memory wasted", "def "],
    "offline_batch.py": ["12 tokens, ended by length", "ended by stop", "class Queue:"],
    "streaming.py": ["def parse(line):\n", "--- the first three lines", "blocks in use afterwards: 0"],
    "paged_decode.py": [
        "40 tokens in 3 blocks, error below 1e-5: True",
        "3 tokens in 1 blocks, error below 1e-5: True",
    ],
    "shared_prefix.py": ["4,352 tokens stored instead of 33,024; both ways agree: True"],
    "tiny_engine.py": ["import os\\nimport sys", "class Stack:"],
    "layerwise_cache.py": ["six tokens of two layers in blocks", "agree up to the fork: True, and then differ"],
    "fleet.py": ["[kill -9]", "longest stall", "identical to the undisturbed one"],
    "structured_output.py": ["record: {'name': ", "'kind': ", "version: ", "word: "],
    "lora.py": ["no adapter: ", "rows of one adapter agree: True; texts that differ: 3"],
    "embeddings.py": ["  class Queue:\n", "score agrees: True"],
    "async_llm.py": ["--- class Stack:\n", "--- computed together: True", "--- one line: '"],
    "policy_gradient.py": ["weights  step-1: reward 0.", "ratio exactly 1: True, with", "the reward rose from"],
    "tools.py": ['temperature({"city"', " degrees\nanswer: "],
    "gguf_file.py": ["prompt: 'Name three rivers of Portugal.:'", "answer of model.gguf, "],
    "sampling_tour.py": ["greedy", "min_p 0.2", "2: ", "1: ", "logprob -"],
}
SLOW = {"fleet.py": [pytest.mark.slow, pytest.mark.long]}  # it starts three servers


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in PROMISES])
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: list[str] = []
    with ExitStack() as stack:
        if name == "gguf_file.py":
            arguments = [str(write_model(tmp_path / "model.gguf"))]
        elif name == "policy_gradient.py":
            arguments = ["--steps=3", "--samples=16", "--tokens=8"]
        elif name == "tools.py":
            (tmp_path / "template.jinja").write_text(TEMPLATE)
            server = stack.enter_context(serving(tool_call_parser="hermes", chat_template=tmp_path / "template.jinja"))
            arguments = [f"http://127.0.0.1:{server.port}/v1"]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for promise in PROMISES[name]:
        assert promise in printed
    if name == "policy_gradient.py":
        assert "ratio exactly 1: False" not in printed
        assert printed.endswith(": True\n"), printed


def test_what_the_demo_writes_is_no_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the first thing that a newcomer sees. Nothing of a text is there three times, its shortest lines aside."""
    runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    texts = [text for text in capsys.readouterr().out.split("─" * 10) if text.strip("─\n ")][:-1]
    assert len(texts) == 4
    for text in texts:
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 8]
        assert len(lines) >= 3, text
        assert max(map(lines.count, lines)) < 3, text
        assert not re.search(r"(\w+\W+)\1\1", text), text


@pytest.mark.slow
@pytest.mark.long
def test_the_fleet_leaves_no_server_at_an_interrupt() -> None:
    with subprocess.Popen([sys.executable, EXAMPLES / "fleet.py"], stdout=subprocess.DEVNULL, preexec_fn=obey) as demo:
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
        while len(found := children.read_text().split()) < 3:  # two replicas, and then the gateway
            assert demo.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)  # or the third one is there before the example knows of it
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) != 0
    assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module; what it does when it is run is not done."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)  # dataclasses look there
    spec.loader.exec_module(found)
    return found


# --------------------------------------------------------------------------------------------- the tiny engine


def test_the_tiny_engine_is_tiny_and_imports_operators_alone() -> None:
    text = (EXAMPLES / "tiny_engine.py").read_text()
    assert len(text.splitlines()) <= 100
    assert [line for line in text.splitlines() if "quire" in line and "import" in line] == [
        "import quire",
        "from quire import ops",
    ]


@pytest.mark.slow
def test_the_tiny_engine_says_what_the_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts through three seats, greedily, beside `LLM` in fp32."""
    tiny, llm = module("tiny_engine", monkeypatch), LLM(dtype="float32", num_blocks=64)
    texts = ["import os\n", "def main(argv):\n    if len(argv) > 1:\n", "x", "class Stack:\n    def __init__(self):\n"]
    prompts = [llm.tokenizer.encode(text) for text in texts]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    wanted = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    monkeypatch.setattr(tiny, "NUM_BLOCKS", 8)  # room for three at a time, not for four without reuse
    model = tiny.Model(Path(tiny.quire.__file__).parent / "embedded")
    answers = tiny.generate(model, prompts, 20)
    assert answers == [list(output.outputs[0].token_ids) for output in wanted]


# --------------------------------------------------------------------------------------- the cache, layer by layer


def filled(cache, name: str, num_tokens: int, seed: int) -> torch.Tensor:
    """Register a prefill of every layer; its K and V [L, 2, 1, Hkv, T, D]."""
    tokens = torch.randn(2, 2, 1, 2, num_tokens, 8, generator=torch.Generator().manual_seed(seed))
    for layer, (key, value) in enumerate(tokens):
        cache.register_prefill_layer(layer, name, key, value)
    return tokens


def same(cache, name: str, tokens: torch.Tensor) -> None:
    for layer, (key, value) in enumerate(tokens):
        k, v = cache.gather_sequence(layer, name)
        assert torch.equal(k, key)
        assert torch.equal(v, value)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_prefill_append_and_gather(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    cache = module("layerwise_cache", monkeypatch).LayerwiseCache(2, 8, 2, 4, 8)
    tokens = filled(cache, "a", num_tokens, 1)
    same(cache, "a", tokens)
    for i in range(6):
        new = torch.randn(2, 2, 1, 2, 1, 8, generator=torch.Generator().manual_seed(i))
        for layer, (key, value) in enumerate(new):
            cache.append_token(layer, "a", key[0, :, 0], value[0, :, 0])
        tokens = torch.cat([tokens, new], dim=4)
        same(cache, "a", tokens)
        assert len(cache.block_table("a")) == -(-tokens.shape[4] // 4)
    cache.free("a")
    assert cache.manager.pools[0].num_free == 8


def test_an_append_copies_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = module("layerwise_cache", monkeypatch).LayerwiseCache(2, 8, 2, 4, 8)
    tokens = filled(cache, "a", 6, 1)
    cache.fork("a", "b")
    assert cache.block_table("a") == cache.block_table("b")
    grown = {}
    for i, name in enumerate("ab"):
        new = torch.randn(2, 2, 1, 2, 1, 8, generator=torch.Generator().manual_seed(10 + i))
        for layer, (key, value) in enumerate(new):
            cache.append_token(layer, name, key[0, :, 0], value[0, :, 0])
        grown[name] = torch.cat([tokens, new], dim=4)
    for name in "ab":
        same(cache, name, grown[name])
    a, b = cache.block_table("a"), cache.block_table("b")
    assert a[0] == b[0]  # the full block is still shared
    assert a[1] != b[1]
    assert cache.manager.pools[0].num_free == 8 - 3
    cache.free("a")
    same(cache, "b", grown["b"])
    cache.free("b")
    assert cache.manager.pools[0].num_free == 8


def test_a_fork_at_the_edge_of_a_block_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = module("layerwise_cache", monkeypatch).LayerwiseCache(2, 8, 2, 4, 8)
    filled(cache, "a", 8, 1)
    cache.fork("a", "b")
    for name in "ab":
        for layer in range(2):
            cache.append_token(layer, name, torch.ones(2, 8), torch.ones(2, 8))
    assert cache.block_table("a")[:2] == cache.block_table("b")[:2]
    assert cache.manager.pools[0].num_free == 8 - 4


def test_its_blocks_are_what_attention_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = module("layerwise_cache", monkeypatch).LayerwiseCache(2, 8, 2, 4, 8)
    filled(cache, "a", 7, 1)
    k, v = cache.gather_sequence(1, "a")
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(3))
    kv = cache.memory.layer(1)
    paged = ops.paged_decode(q, kv.k, kv.v, torch.tensor([cache.block_table("a")]), torch.tensor([7]))
    rows = (x[0].transpose(0, 1) for x in (k, v))
    assert torch.allclose(paged, ops.varlen_attention(q, *rows, torch.tensor([0, 1]), torch.tensor([0, 7]), 1, 7))


def test_what_the_cache_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = module("layerwise_cache", monkeypatch).LayerwiseCache(2, 2, 2, 4, 8)
    filled(cache, "a", 4, 1)
    with pytest.raises(BadValue, match="layer 0 of 'a' has 4 tokens; a prefill comes first"):
        filled(cache, "a", 4, 1)
    cache.append_token(0, "a", torch.ones(2, 8), torch.ones(2, 8))
    with pytest.raises(BadValue, match="layer 0 of 'a' would be two tokens ahead"):
        cache.append_token(0, "a", torch.ones(2, 8), torch.ones(2, 8))
    with pytest.raises(OutOfBlocks, match="'b' needs room for 3 tokens"):
        filled(cache, "b", 3, 1)
    assert cache.manager.pools[0].num_free == 0
    cache.free("a")
    filled(cache, "b", 3, 1)


def test_a_fork_needs_all_layers_at_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = module("layerwise_cache", monkeypatch).LayerwiseCache(2, 8, 2, 4, 8)
    tokens = filled(cache, "a", 6, 1)
    row = torch.ones(2, 8)
    cache.append_token(0, "a", row, row)
    with pytest.raises(BadValue, match=r"the layers of 'a' have \[7, 6\] tokens; a fork needs all at one place"):
        cache.fork("a", "b")
    cache.append_token(1, "a", row, row)
    with pytest.raises(BadValue, match="there is a sequence 'a' already"):
        cache.fork("a", "a")
    for call, message in (
        (lambda: cache.gather_sequence(0, "c"), "there is no sequence 'c'; there are: a"),
        (lambda: cache.append_token(0, "c", row, row), "there is no sequence 'c'"),
        (lambda: cache.fork("c", "d"), "there is no sequence 'c'"),
        (lambda: cache.free("c"), "there is no sequence 'c'"),
        (lambda: cache.append_token(0, "a", row[:1], row), r"key has shape \(1, 8\); expected \(2, 8\)"),
        (lambda: cache.append_token(0, "a", row, row[0]), "value has shape"),
        (lambda: cache.register_prefill_layer(0, "e", tokens[0, 0][0], tokens[0, 0]), "key has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    cache.register_prefill_layer(0, "f", *tokens[0])
    with pytest.raises(BadValue, match="layer 1 of 'f' has no tokens yet; register its prefill first"):
        cache.append_token(1, "f", row, row)
    with pytest.raises(BadValue, match="key has 5 tokens; the other layers of 'f' have 6"):
        cache.register_prefill_layer(1, "f", *tokens[1][:, :, :, :5])
    for name in "af":
        cache.free(name)
    assert cache.manager.pools[0].num_free == 8
