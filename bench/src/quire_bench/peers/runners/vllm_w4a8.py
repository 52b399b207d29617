"""vLLM's CPU engine with x rounded to 8 bits where weights have 4, which it does on CPUs with AMX."""

from __future__ import annotations

from quire_bench.peers.runners.protocol import serve
from quire_bench.peers.runners.vllm_cpu import starter

if __name__ == "__main__":
    serve(starter(w4a8=True))
