"""A step on a GPU waits once. A GPU's draws, which look at no number, draw the same tokens as a CPU's.

That the host waits for nothing is shown with the device "meta", whose tensors have no values: a look at one raises.
What would not raise, a copy that waits, is watched for.
"""

from __future__ import annotations

import importlib
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire import ops
from quire.cache.storage import KVCache, group_spec
from quire.engine import runner as runner_module
from quire.engine import sampler
from quire.engine.flatten import Buffers, flatten, sampling_rows
from quire.engine.plan import Plan
from quire.engine.runner import Runner
from quire.engine.sampler import sample
from quire.engine.transfer import send, staging, views
from quire.models import FAMILIES
from quire.models.batch import SamplingRows
from quire.models.decoder import Decoder
from quire.models.decoder_config import weight_shapes
from quire.ops.backends.reference import ReferenceBackend
from quire.ops.weights.linear import Linears
from quire.request import Request, SamplingParams
from tests.marks import spread
from tests.models.checkpoints import save

OPS = ops.load("reference")
SCALES = {"all equal": 0.0, "flat": 0.1, "usual": 3.0, "steep": 40.0}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.2},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 5.0, "top_k": 3},
    {"top_k": 200},
    {"top_k": 1},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0, "top_p": 0.3},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "top_p": 0.8},
    {"min_tokens": 9, "stop_token_ids": [3, 5]},
)


def requests(count: int, first: int = 0) -> list[Request]:
    """Of all kinds, one after the other."""
    found = []
    for i in range(first, first + count):
        params = SamplingParams(**VARIANTS[i % len(VARIANTS)])
        tokens = array("i", [i % 50, 7, i % 11])
        found.append(Request(f"{i}", tokens, 1, params, seed=i, ending_tokens=frozenset(params.stop_tokens)))
    return found


def both(logits: torch.Tensor, rows: SamplingRows, patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    looking = sample(logits.clone(), rows, OPS).tolist()
    patch.setattr(sampler, "_draw_looking", sampler._draw_blindly)
    blindly = sample(logits.clone(), rows, OPS).tolist()
    patch.undo()
    return looking, blindly


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "scale", "tied"), spread(4, [60, 1_003, 40_000], SCALES, [False, True]))
def test_both_ways_draw_the_same(vocabulary: int, scale: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    count = max(28, 2_000_000 // vocabulary // 14 * 14 // 5)
    logits = torch.randn(count, vocabulary, generator=generator) * SCALES[scale]
    if tied:
        logits = logits.round()
    logits[3, 5] = torch.nan
    logits[8] = -torch.inf
    logits[9, 4] = torch.inf
    logits[20, 10:] = -torch.inf
    looking, blindly = both(logits, sampling_rows(requests(count)), monkeypatch)
    assert blindly == looking
    assert [row for row, token in enumerate(looking) if token == -1] == [3, 8, 9]


def test_few_rows_at_a_time_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    rows = sampling_rows(requests(50))
    whole = both(logits, rows, monkeypatch)[1]
    for numbers in (1, 300, 299 * 7, 50 * 300):
        monkeypatch.setattr(sampler, "DRAWN_NUMBERS", numbers)
        monkeypatch.setattr(sampler, "_draw_looking", sampler._draw_blindly)
        assert sample(logits.clone(), rows, OPS).tolist() == whole


def test_random_numbers_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(140, 300, generator=torch.Generator().manual_seed(2)).round()
    rows = sampling_rows(requests(140))
    for value in (0.0, 0.25, 0.5, 1 - 2**-53):
        rows.uniforms.fill_(value)
        looking, blindly = both(logits, rows, monkeypatch)
        assert blindly == looking


class Watch(TorchDispatchMode):
    """Raises where a copy between host and device would make the host wait. Counts the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            out, source, waits = args[0], args[1], not (len(args) > 2 and args[2])
        else:
            source = next((x for x in args if isinstance(x, torch.Tensor)), None)
            waits = not (kwargs or {}).get("non_blocking", False)
        if source is not None and isinstance(out, torch.Tensor) and out.device != source.device:
            assert not waits, f"{func} from {source.device} to {out.device} waits"
            self.copies += 1
        return out


def test_a_look_or_a_copy_that_waits_would_be_found() -> None:
    far = torch.empty(3, device="meta")
    for look in (far[0].item, lambda: far[far > 0], far.nonzero, far.tolist):
        with pytest.raises((RuntimeError, NotImplementedError)):
            look()
    with Watch() as watch:
        for waiting in (lambda: torch.zeros(3).to("meta"), lambda: far.copy_(torch.zeros(3))):
            with pytest.raises(AssertionError, match="waits"):
                waiting()
        torch.zeros(3).to("meta", non_blocking=True)
        far.copy_(torch.zeros(3), non_blocking=True)
    assert watch.copies == 2


@pytest.mark.parametrize(("first", "count", "copies"), [(1, 1, 0), (0, 1, 1), (4, 1, 1), (0, 11, 1), (0, 56, 2)])
def test_sampling_waits_for_nothing(first: int, count: int, copies: int) -> None:
    """One copy for all that is drawn, one for penalties and forbidden tokens, none where both are missing."""
    rows = sampling_rows(requests(count, first))
    logits = torch.empty(count, 70_000, device="meta")
    with Watch() as watch:
        tokens = sample(logits, rows, OPS)
    assert tokens.device.type == "meta"
    assert tokens.shape == (count,)
    assert watch.copies == copies


class LeftOut(ReferenceBackend):
    """The reference without attention, for tensors that cannot be read."""

    def linears(self, device: str, reproducible: bool = False) -> Linears:
        return Linears()

    def write_kv(self, *arguments: Any) -> None:
        pass

    def attention(self, q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return torch.empty_like(q)


def far_model(raw: dict[str, Any]) -> Decoder:
    """A model whose weights lie where they cannot be read, and whose attention is left out."""
    config = importlib.import_module(FAMILIES[raw["architectures"][0]]).decoder_config(raw)
    weights = {
        name: torch.empty(shape, dtype=torch.float32 if "norm." in name else torch.bfloat16, device="meta")
        for name, shape in weight_shapes(config).items()
    }
    return Decoder(config, weights, LeftOut(), 200)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma2", "Bloom", "Qwen3"])
@pytest.mark.parametrize("num_new", [1, 7], ids=["decode", "prefill"])
def test_a_step_waits_once_for_what_was_drawn(
    kind: str, num_new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, kind)
    model = far_model(json.loads((tmp_path / "config.json").read_text()))
    config = model.config
    specs = [group_spec(replace(group, window=None), 16, 90, torch.bfloat16, device="meta") for group in config.groups]
    cache = KVCache(config.groups, 90, 16, torch.bfloat16, "meta")
    runner = Runner(model, cache, OPS, specs, 512, 80, 12)
    asked = requests(70)
    plan = Plan()
    for i, request in enumerate(asked):
        request.tokens = array("i", range(7))
        request.cache.num_computed, request.cache.block_ids = 7 - num_new, [array("i", [i]) for _ in config.groups]
        plan.add(request, num_new)
    buffers = Buffers(config.groups, 16, 512, 80, 12)
    drawn: list[torch.Tensor] = []

    def read(parts: list[torch.Tensor]) -> torch.Tensor:
        drawn.extend(parts)
        return torch.zeros(sum(map(len, parts)), dtype=torch.int64)

    monkeypatch.setattr(runner_module, "MAX_LOGIT_ROWS", 32)
    monkeypatch.setattr(
        runner_module.torch, "cat", lambda parts, cat=torch.cat: read(parts) if parts[0].is_meta else cat(parts)
    )
    with Watch() as watch:
        output = runner.run(flatten(plan, buffers))
    assert len(output.tokens) == 70
    assert [len(part) for part in drawn] == [32, 32, 6]
    # Token ids with positions and the rows that need logits; two for each part, as above.
    assert watch.copies == 1 + 2 * len(drawn)


def test_tensors_that_travel_together_keep_their_numbers() -> None:
    tensors = [torch.arange(3), torch.rand(5), torch.empty(0), torch.tensor([True]), torch.rand(2, 3).double()]
    assert all(sent is given for sent, given in zip(send(tensors, torch.device("cpu")), tensors, strict=True))
    sent = send(tensors, torch.device("meta"))
    assert [(x.shape, x.dtype, x.is_meta) for x in sent] == [(x.shape, x.dtype, True) for x in tensors]
    packed = staging(1_000, torch.uint8, torch.device("cpu"))
    for home, tensor in zip(views(packed, tensors), tensors, strict=True):
        home.copy_(tensor)
    assert all(torch.equal(x, y) for x, y in zip(views(packed, tensors), tensors, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    logits = torch.randn(560, 1_003, generator=torch.Generator().manual_seed(3)) * 3
    rows = sampling_rows(requests(560))
    there = logits.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(there, rows, OPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.tolist() == sample(logits, rows, OPS).tolist()
