"""What an engine is built of on a GPU, and how much of its memory the cache may take. No GPU is needed for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import ops
from quire.cache.storage import bytes_per_block
from quire.config import engine_config
from quire.engine import engine as engine_module
from quire.engine.engine import FIXED_RESERVE, LOGIT_BYTES, Engine, build_engine, working_memory
from quire.engine.loops import OverlappedLoop, SequentialLoop
from quire.errors import ConfigError, Unsupported
from quire.models import EMBEDDED, load_model
from quire.models.batch import Batch
from quire.models.decoder_config import ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.ops import native
from quire.ops.cpu.executor import NativeExecutor
from tests.models.checkpoints import engine, save

GIB = 2**30
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 500_000.0,
}  # fmt: skip


def test_working_memory_grows_with_what_a_step_holds() -> None:
    decoder = llama.decoder_config(LLAMA_8B)
    memory = working_memory(decoder, 2, 2_048)
    assert 1.5 * GIB < memory < 2.5 * GIB
    widest = 2_048 * 2 * 14_336 * 2  # gate and up of all tokens
    assert memory > 256 * 128_256 * 4 + widest
    assert working_memory(decoder, 2, 4_096) - memory > widest
    assert working_memory(decoder, 4, 2_048) - memory > widest


def on_gpu(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    backend: str = "triton",
    layers: tuple[LayerConfig, ...] | None = None,
    **options: Any,
) -> Engine:
    """The embedded model's engine as it would be on a GPU with so much free memory; runners do nothing."""
    model = load_model(EMBEDDED, engine_config(), ops.load())
    if layers is not None:
        model.config = replace(model.config, layers=layers)
    monkeypatch.setattr(engine_module, "free_memory", lambda device="cpu": free if device == "cuda" else 64 * GIB)
    monkeypatch.setattr(engine_module, "KVCache", lambda *given: SimpleNamespace(given=given))
    runner = {"kind": "eager", "drafter": None}
    monkeypatch.setattr(engine_module, "Runner", lambda *given: SimpleNamespace(**runner, specs=given[3]))
    monkeypatch.setattr(engine_module, "CudaCapture", lambda device: device)

    class Graphs(SimpleNamespace):
        """Counts the graphs that are captured when the engine is built."""

        captured = 0

        def capture_all(self, batch: Batch) -> None:
            assert batch.token_ids.shape[0] == 0
            self.captured += 1

    monkeypatch.setattr(engine_module, "GraphRunner", lambda eager, *given: Graphs(kind="graphs", eager=eager))
    return build_engine(
        model,
        SimpleNamespace(name=backend, graphable=backend == "triton", batch_invariant=lambda device: False),
        engine_config(device="cuda", **options),
    )  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_cache_leaves_room_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load_model(EMBEDDED, engine_config(), ops.load()).config
    a_block = bytes_per_block(decoder.groups, 16, llama_dtype())
    reserve = working_memory(decoder, llama_dtype().itemsize, 8_192) + FIXED_RESERVE
    served = on_gpu(monkeypatch, reserve + 200 * a_block, kv_cache_memory="100%")
    assert served.scheduler.manager.num_blocks == 200
    served = on_gpu(monkeypatch, reserve + 200 * a_block)
    assert served.scheduler.manager.num_blocks == 100
    assert on_gpu(monkeypatch, reserve + 9 * a_block, num_blocks=9).scheduler.manager.num_blocks == 9
    with pytest.raises(ConfigError, match="num_blocks=9 asks for"):
        on_gpu(monkeypatch, reserve + 9 * a_block - 1, num_blocks=9)


def test_a_cpu_keeps_room_for_a_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(EMBEDDED, engine_config(), ops.load())
    a_block = bytes_per_block(model.config.groups, 16, llama_dtype())
    reserve = working_memory(model.config, llama_dtype().itemsize, 512)
    options = {"kv_cache_memory": "100%", "max_num_batched_tokens": 512}
    monkeypatch.setattr(engine_module, "free_memory", lambda device="cpu": reserve + 200 * a_block)
    served = build_engine(model, ops.load(), engine_config(**options))
    assert served.scheduler.manager.num_blocks == 200
    monkeypatch.setattr(engine_module, "free_memory", lambda device="cpu": reserve - 1)
    with pytest.raises(ConfigError, match="are kept for activations and logits; a smaller max_num_batched_tokens"):
        build_engine(model, ops.load(), engine_config(**options))
    if isinstance(model.layers, NativeExecutor):
        program, size = model.layers, llama_dtype().itemsize
        program._reserve(512)
        room = 512 * 2 * model.config.hidden_size * size + program._scratch.nbytes + program._copy.nbytes
        assert room < reserve - 256 * model.config.vocab_size * LOGIT_BYTES


def llama_dtype() -> Any:
    """The dtype of the embedded model."""
    return load_model(EMBEDDED, engine_config(), ops.load()).dtype


def test_graphs_are_for_backends_that_read_everything_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: Any = on_gpu(monkeypatch, 8 * GIB).runner
    assert (graphs.kind, graphs.captured) == ("graphs", 1)
    assert on_gpu(monkeypatch, 8 * GIB, enforce_eager=True).runner.kind == "eager"  # type: ignore[attr-defined]
    assert on_gpu(monkeypatch, 8 * GIB, backend="reference").runner.kind == "eager"  # type: ignore[attr-defined]


def test_steps_of_experts_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows an expert gets is known on the host only, which a graph does not ask."""
    experts = ExpertsConfig(count=4, per_token=2, mlp=MlpConfig(size=8), renormalised=True)
    layers = llama.decoder_config(LLAMA_8B).layers
    served = on_gpu(monkeypatch, 8 * GIB, layers=(replace(layers[0], mlp=experts), *layers[1:]))
    assert served.runner.kind == "eager"  # type: ignore[attr-defined]


def test_experts_take_memory_too() -> None:
    dense = llama.decoder_config(LLAMA_8B)
    memory = []
    for per_token in (1, 8):
        experts = ExpertsConfig(count=8, per_token=per_token, mlp=MlpConfig(size=14_336), renormalised=True)
        layers = replace(dense.layers[0], mlp=experts), *dense.layers[1:]
        memory.append(working_memory(replace(dense, layers=layers), 2, 2_048))
    assert working_memory(dense, 2, 2_048) < memory[0]
    assert memory[1] - memory[0] > 7 * 2_048 * 2 * (
        3 * 14_336 + 2 * 4_096
    )  # gate, up and activation; the row, the result


@pytest.mark.slow
@pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_what_experts_compute_in_is_counted(tmp_path: Path, kind: str, dtype: str) -> None:
    save(tmp_path, kind)
    model = engine(tmp_path, dtype=dtype).runner.model
    program, size = model.layers, model.dtype.itemsize
    rooms = []
    for rows in (101, 201):  # there are a few spare rows
        program._reserve(rows)
        tensors = (program._scratch, program._copy, *program._experts._tensors)
        rooms.append(sum(tensor.nbytes for tensor in tensors))
    a_row = 2 * model.config.hidden_size * size + (rooms[1] - rooms[0]) / 100
    assert a_row < working_memory(model.config, size, 1) - working_memory(model.config, size, 0)


def test_reproducibility_reaches_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (True, False):
        served = on_gpu(monkeypatch, 8 * GIB, reproducible=asked)
        assert [spec.reproducible for spec in served.runner.eager.specs] == [asked]  # type: ignore[attr-defined]


def test_on_a_cpu_reproducibility_may_be_asked_for_where_it_holds() -> None:
    directory = Path(EMBEDDED)
    assert engine(directory, reproducible=True).runner.plans[0].spec.reproducible  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="'reference' does not give the same bits"):
        engine(directory, reproducible=True, attention_backend="reference")


def test_steps_overlap_where_the_device_computes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(on_gpu(monkeypatch, 8 * GIB).loop, OverlappedLoop)
    assert isinstance(on_gpu(monkeypatch, 8 * GIB, async_scheduling=False).loop, SequentialLoop)
    assert isinstance(on_gpu(monkeypatch, 8 * GIB, backend="reference").loop, SequentialLoop)
    with pytest.raises(ConfigError, match="async_scheduling is True"):
        on_gpu(monkeypatch, 8 * GIB, backend="reference", async_scheduling=True)
    monkeypatch.undo()
    model = load_model(EMBEDDED, engine_config(), ops.load())
    assert isinstance(build_engine(model, ops.load(), engine_config(num_blocks=9)).loop, SequentialLoop)
    with pytest.raises(ConfigError, match="the host takes part in computing a step on 'cpu'"):
        build_engine(model, ops.load(), engine_config(num_blocks=9, async_scheduling=True))
