"""OpenVINO GenAI with activations rounded to 8 bits, which it does not do by itself where the CPU multiplies bf16."""

from __future__ import annotations

from quire_bench.peers.runners.openvino_genai import starter
from quire_bench.peers.runners.protocol import serve

if __name__ == "__main__":
    serve(starter({"DYNAMIC_QUANTIZATION_GROUP_SIZE": "32", "INFERENCE_PRECISION_HINT": "f32"}))
