"""GraphRunner: the same tokens and logprobs as the eager runner, whatever is padded, replayed, or left to run eagerly.

Without a GPU a capture is a function that is simply called again: buckets, padding, plans and inputs are the same.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import ops
from quire.config import engine_config
from quire.engine import runner as runner_module
from quire.engine.engine import Engine, build_engine
from quire.engine.graphs import LARGEST, CudaCapture, GraphRunner, bucket_sizes
from quire.engine.plan import Plan
from quire.engine.runner import Runner
from quire.errors import Unsupported
from quire.models import load_model, load_replaced
from quire.models.files import files_of
from quire.ops import native
from quire.request import Request, SamplingParams, TokenLogprobs
from tests.engine.runs import poison
from tests.marks import of_long_runs, quick, spread
from tests.models.checkpoints import engine, save

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

VOCABULARY = 300
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}),
    "gemma2, windows": (
        "Gemma2",
        {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 24, "sliding_window": 11,
         "query_pre_attn_scalar": 24},
    ),
}  # fmt: skip
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "prompt_logprobs": 1},
)
Found = dict[str, list[tuple[int | None, TokenLogprobs | None, tuple[TokenLogprobs, ...]]]]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = SHAPES[request.param]
    directory = tmp_path_factory.mktemp("model")
    save(directory, kind, torch.bfloat16, vocab_size=VOCABULARY, **changes)
    return directory


class Twin:
    """Calls the function again in place of a graph. Counts captures, and replays by their number of rows."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays: Counter[int] = Counter()

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        for _ in range(2):  # warm up
            function()

        def replay() -> Tensor:
            hidden = function()
            self.replays[len(hidden)] += 1
            return hidden

        return replay


def graphed(directory: Path, capture: Callable[..., Any], **options: Any) -> Engine:
    """An engine whose runner replays."""
    served = engine(directory, **options)
    eager = served.runner
    assert isinstance(eager, Runner)
    served.runner = GraphRunner(eager, eager.plans[0].max_seqs, eager.plans[0].max_blocks, capture)
    return served


def asked(rng: random.Random, count: int) -> list[Request]:
    requests = []
    for i in range(count):
        tokens = array("i", [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 30]))])
        params = SamplingParams(max_tokens=rng.randint(1, 14), ignore_eos=True, seed=i, **rng.choice(SAMPLING))
        requests.append(Request(f"{i}", tokens, len(tokens), params))
    return requests


def run(served: Engine, requests: list[Request], between: Callable[[Engine], None] = lambda served: None) -> Found:
    """Add a request or two between steps until all have come; what each gets."""
    found: Found = {request.id: [] for request in requests}
    pending = list(requests)
    rng = random.Random(len(requests))
    for request in pending[: len(pending) // 2]:
        served.add(request)
    del pending[: len(pending) // 2]
    while pending or served.has_work:
        for _ in range(min(len(pending), rng.choice([0, 0, 0, 1, 2]))):
            served.add(pending.pop())
        between(served)
        for event in served.step():
            assert event.error is None, event.error
            found[event.request_id].append((event.token, event.logprobs, event.prompt_logprobs))
    served.scheduler.audit()
    return found


def test_the_sizes_of_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_sizes(100)[-4:] == [64, 80, 96, 100]
    for most in range(1, 1_500, 7):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == min(most, LARGEST)
        assert all(big <= max(2 * small, small + 8) and big - small <= 32 for small, big in pairwise(sizes))


@pytest.mark.parametrize("count", quick([1, 3, 8, 9, 17, 2, 4, 5, 7, 16], 5, 5))
def test_a_bucket_and_its_edges(model: Path, count: int) -> None:
    """That many sequences at a time, fewer and fewer."""

    def requests() -> list[Request]:
        rng = random.Random(count)
        found = asked(rng, count)
        for i, request in enumerate(found):
            found[i] = Request(request.id, array("i", [i + 1]), 1, request.sampling)
        return found

    twin = Twin()
    served = graphed(model, twin)
    assert run(served, requests()) == run(engine(model), requests())
    assert twin.replays
    assert isinstance(served.runner, GraphRunner)
    largest = served.runner.sizes[-1]  # which is captured before any other
    assert twin.captures == len({largest, *twin.replays})


@pytest.mark.parametrize(
    ("model", "options"),
    spread(
        2,
        SHAPES,
        [
            {"num_blocks": 200, "max_num_batched_tokens": 5, "max_num_seqs": 5},
            {"num_blocks": 14, "block_size": 8, "max_num_seqs": 11},
            {"num_blocks": 60, "block_size": 1, "preemption": "swap", "swap_space": "8MiB", "max_num_seqs": 9},
        ],
    )
    + [
        of_long_runs(shape, options)
        for shape in SHAPES
        for options in (
            {"num_blocks": 200},
            {"num_blocks": 14, "block_size": 8, "preemption": "swap", "swap_space": "8MiB"},
        )
    ],
    indirect=["model"],
)
def test_random_runs(model: Path, options: dict[str, Any], long: bool) -> None:
    for seed in range(3 if long else 1):
        twin = Twin()
        served = graphed(model, twin, **options)
        moved: list[object] = []
        served.listen(lambda event, moved=moved: moved.append(type(event).__name__))
        expected = run(engine(model, **options), asked(random.Random(seed), 24))
        assert run(served, asked(random.Random(seed), 24), poison) == expected
        assert sum(twin.replays.values()) > 10
        assert (served.scheduler.num_preemptions > 0) == (options["num_blocks"] < 200)
        assert ("BlocksSwappedIn" in moved) == ("swap_space" in options)


def test_parts_of_logit_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine(model), asked(random.Random(1), 12))
    monkeypatch.setattr(runner_module, "MAX_LOGIT_ROWS", 3)
    assert run(graphed(model, Twin()), asked(random.Random(1), 12)) == expected


def test_all_sizes_are_captured_before_the_first_step(model: Path) -> None:
    twin = Twin()
    served = graphed(model, twin)
    assert isinstance(served.runner, GraphRunner)
    served.runner.capture_all(served.flatten(Plan()))
    assert twin.captures == len(served.runner.sizes) > 3
    assert run(served, asked(random.Random(3), 12), poison) == run(engine(model), asked(random.Random(3), 12))
    assert sum(twin.replays.values()) > 0
    assert twin.captures == len(served.runner.sizes)


@pytest.mark.parametrize("succeeding", [0, 2])
def test_a_capture_that_fails_leaves_the_engine_serving(
    model: Path, succeeding: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs that there are serve on; nothing further is tried."""
    twin = Twin()

    def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if twin.captures == succeeding:
            function()
            twin.captures += 1
            raise RuntimeError("no capture today")
        return twin(function)

    served = graphed(model, capture)
    assert isinstance(served.runner, GraphRunner)
    eager, calls = served.runner.runner, Counter[str]()
    move, launch = eager.move, served.runner.launch
    eager.move = lambda batch: (calls.update(["move"]), move(batch))  # type: ignore[method-assign,return-value]
    served.runner.launch = lambda batch: (calls.update(["launch"]), launch(batch))[1]  # type: ignore[method-assign]
    expected = run(engine(model), asked(random.Random(2), 16))
    assert run(served, asked(random.Random(2), 16), poison) == expected
    assert calls["move"] == calls["launch"] > 0
    assert twin.captures == succeeding + 1
    assert len({served.runner.sizes[-1], *twin.replays}) == max(1, succeeding)
    assert [record.message for record in caplog.records if "run eagerly" in record.message] != []
    assert "no capture today" in caplog.text


def test_plans_that_cannot_be_made_leave_the_engine_serving(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = graphed(model, Twin())
    assert isinstance(served.runner, GraphRunner)

    def refused(*sizes: int) -> Any:
        raise MemoryError("no room for a plan")

    served.runner.runner.make_plans = refused  # type: ignore[method-assign]
    expected = run(engine(model), asked(random.Random(2), 8))
    assert run(served, asked(random.Random(2), 8)) == expected
    assert "no room for a plan" in caplog.text


def test_steps_whose_work_a_plan_has_no_room_for_run_eagerly(model: Path) -> None:
    twin = Twin()
    served = graphed(model, twin)
    graphs = served.runner
    assert isinstance(graphs, GraphRunner)
    make_plans, refused = graphs.runner.make_plans, []

    def narrow(*sizes: int) -> Any:
        plans = make_plans(*sizes)
        for plan in plans:

            def update(starts: Tensor, lens: Tensor, *rest: Any, real: Any = plan.update_trusted) -> None:
                if int(lens.sum()) % 2:
                    refused.append(len(lens))
                    raise Unsupported("too much work")
                real(starts, lens, *rest)

            plan.update_trusted = update
        return plans

    graphs.runner.make_plans = narrow  # type: ignore[method-assign]
    expected = run(engine(model), asked(random.Random(3), 16))
    assert run(served, asked(random.Random(3), 16), poison) == expected
    assert refused
    assert twin.replays


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if reason := ops.unavailable("triton", "cuda"):
        pytest.skip(reason)
    return torch.device("cuda")


def on_gpu(directory: Path, **options: Any) -> Engine:
    config = engine_config(**({"num_blocks": 200, "device": "cuda", "attention_backend": "triton"} | options))
    backend = ops.load("triton", "cuda")
    return build_engine(load_model(directory, config, backend), backend, config)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 14, "preemption": "swap", "swap_space": "8MiB"}, {"max_num_batched_tokens": 16}],
    ids=str,
)
def test_on_a_gpu(gpu: torch.device, model: Path, options: dict[str, Any]) -> None:
    """Reproducible: what a graph gives is, bit for bit, what the eager runner gives."""
    options = {"reproducible": True, "block_size": 8} | options
    served = on_gpu(model, **options)
    assert isinstance(served.runner, GraphRunner)
    eager = on_gpu(model, **options)
    assert isinstance(eager.runner, GraphRunner)
    eager.runner = eager.runner.runner
    expected = run(eager, asked(random.Random(4), 40))
    assert run(served, asked(random.Random(4), 40), poison) == expected
    replayed = [bucket for bucket in served.runner._buckets.values() if bucket.replay is not None]
    assert len(replayed) > 3


def test_a_capture_on_a_gpu_that_fails(gpu: torch.device) -> None:
    capture = CudaCapture(gpu)
    x = torch.arange(4, device=gpu)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: x[: int(x[1])])  # reads a number on the host
    assert torch.cuda.current_stream() == before
    replay = capture(lambda: x + 1)
    x += 10
    assert replay().tolist() == [11, 12, 13, 14]


def test_graphs_of_old_weights_and_memory_are_not_replayed(tmp_path: Path) -> None:
    """After a replacement and a sleep, steps are captured again, with the bits of a fresh engine."""

    def requests() -> list[Request]:
        return asked(random.Random(1), 4)

    path = tmp_path / "model.safetensors"
    save(tmp_path, "Llama", torch.bfloat16, vocab_size=VOCABULARY)
    twin = Twin()
    served = graphed(tmp_path, twin)
    old = run(served, requests())
    new = {name: 1.5 * tensor for name, tensor in load_file(path).items()}
    config = engine_config(num_blocks=64, num_speculative_tokens=0)
    _, replacement = load_replaced(files_of(tmp_path), config, ops.load("auto", "cpu"), new)
    save_file(new, path, {"format": "pt"})
    fresh, count = run(engine(tmp_path), requests()), twin.captures
    assert count > 0
    served.replace_weights(replacement, "1")
    assert run(served, requests()) == fresh != old
    assert twin.captures > count
    served.sleep(replacement)
    served.wake_up(replacement)
    assert run(served, requests()) == fresh
