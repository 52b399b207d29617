"""Quire with transformers' modelling code in place of its own decoder."""

from __future__ import annotations

from quire_bench.peers.runners.protocol import serve
from quire_bench.peers.runners.quire_engine import starter

if __name__ == "__main__":
    serve(starter("transformers"))
