"""Who is measured, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.workloads import WORKLOADS
from quire_bench.workloads import Workload, workload

GGUF = ("q8_0", "q4_0", "q4_k_m")  # kinds of files that llama.cpp's quantiser writes
READY = "ready"  # the workload that takes a fresh process each time, to the first token


class Engine(NamedTuple):
    """One that is measured."""

    title: str
    runner: str  # the module that its interpreter runs, and its arguments
    environment: str = ""  # the engine whose interpreter that is; "": its own
    cpu_flag: str = ""  # of /proc/cpuinfo, without which it does as that engine does; "": none


ENGINES = {  # in the order of their turns
    "quire": Engine("Quire", "quire_bench.peers.runners.quire_engine"),
    "vllm": Engine("vLLM-CPU", "quire_bench.peers.runners.vllm_cpu"),
    "openvino": Engine("OpenVINO GenAI", "quire_bench.peers.runners.openvino_genai"),
    "llama-cpp": Engine("llama.cpp", "quire_bench.peers.runners.llama_cpp"),
    "adapter": Engine("Quire with transformers' code", "quire_bench.peers.runners.quire_engine transformers"),
    "continuous": Engine("transformers' continuous batching", "quire_bench.peers.runners.hf_continuous"),
    "openvino-dynamic": Engine(
        "OpenVINO GenAI, rounding activations", "quire_bench.peers.runners.openvino_genai dynamic", "openvino"
    ),
    "llama-cpp-k": Engine("llama.cpp, Q4_K_M", "quire_bench.peers.runners.llama_cpp", "llama-cpp"),
    "mistralrs": Engine("mistral.rs", "quire_bench.peers.runners.mistral_rs"),
    "vllm-w4a8": Engine(
        "vLLM-CPU, rounding activations", "quire_bench.peers.runners.vllm_cpu w4a8", "vllm", "amx_tile"
    ),
}
PEERS = tuple(name for name, engine in ENGINES.items() if name != "quire" and not engine.environment)


@dataclass(frozen=True)
class Case:
    """A workload on a model: the peers that take part, with the ratio that Quire is to reach, if there is one."""

    workload: str
    model: str
    peers: Mapping[str, float | None]
    weights_read: float | None = None  # the share of the read bandwidth at which Quire is to read the weights
    quantization: str | None = None  # of all engines' weights: int8, int4; of one checkpoint for all: awq, GGUF

    @property
    def variant(self) -> str:
        """The model, and how its weights are rounded."""
        return self.model if self.quantization is None else f"{self.model} {self.quantization}"

    @property
    def at_load(self) -> str | None:
        """The rounding that engines apply while they load a checkpoint, or None."""
        return None if self.quantization in ("awq", *GGUF) else self.quantization

    @property
    def engines(self) -> set[str]:
        """All that take part."""
        return {"quire", *self.peers}

    @property
    def work(self) -> Workload:
        """The prompts."""
        return workload(self.workload) if self.workload != READY else Workload(READY, workload("single").prompts, [1])

    @property
    def shares_prefix(self) -> bool:
        """Return whether prompts begin alike; only then prefix caching is on."""
        return self.workload != READY and WORKLOADS[self.workload][1] > 0


CASES = (
    Case("rose", "gpt2", {"vllm": 2.2, "openvino": 1.2}),
    Case("mixed", "smol135", {"vllm": 2.0, "openvino": 1.3, "adapter": 1.15, "continuous": None}),
    Case("decode", "smol135", {"vllm": 2.0, "openvino": 1.5, "llama-cpp": 2.0, "adapter": 1.15}),
    Case(
        "single",
        "smol135",
        {"vllm": 2.0, "openvino": 1.4, "llama-cpp": 1.2, "adapter": 1.15},
        0.6,
    ),
    Case("prefix", "smol135", {"vllm": 2.0, "openvino": 6.0}),
    Case("single", "llama1b", {"vllm": 2.0, "openvino": 1.4, "llama-cpp": 1.2}, 0.8),
    Case("decode", "llama1b", {"vllm": None, "openvino": None, "llama-cpp": None}),
    Case(READY, "smol135", {"vllm": 10.0, "openvino": 1.0, "llama-cpp": None}),
    Case(
        "single",
        "llama1b",
        {"openvino": 1.2, "openvino-dynamic": 1.2, "llama-cpp": 1.1, "mistralrs": 1.2},
        quantization="int8",
    ),
    *(
        Case(work, "llama1b", {"openvino": 1.2, "openvino-dynamic": 1.2}, quantization="int8")
        for work in ("decode", "mixed")
    ),
    Case(
        "single",
        "llama1b",
        {"openvino": 1.2, "openvino-dynamic": 1.2, "llama-cpp": 1.2, "llama-cpp-k": 1.3, "mistralrs": 1.3},
        quantization="int4",
    ),
    *(
        Case(work, "llama1b", {"openvino": 1.2, "openvino-dynamic": 1.2}, quantization="int4")
        for work in ("decode", "mixed")
    ),
    *(
        Case(work, "smol135", {"openvino": 1.2, "openvino-dynamic": 1.2}, quantization=quantization)
        for quantization in ("int8", "int4")
        for work in ("single", "decode", "mixed")
    ),
    *(
        Case(work, model, {"vllm": 1.3, "llama-cpp": target})
        for model in ("qwen35_08b", "qwen35_2b")
        for work, target in (("single", 1.3), ("decode", 3.0))
    ),
    Case("prefix", "qwen35_08b", {"vllm": 1.3}),
    *(
        Case(work, model, {"vllm": target, "vllm-w4a8": target}, quantization="awq")
        for model in ("llama1b", "smol135")
        for work, target in (("single", None), ("decode", 1.5))
    ),
    *(
        Case(work, model, {"llama-cpp": target}, quantization=kind)
        for model in ("llama1b", "smol135")
        for kind, single in zip(GGUF, (1.1, 1.2, 1.3), strict=True)
        for work, target in (("single", single), ("prefill", 2.0), ("decode", 3.0), (READY, None))
    ),
)
