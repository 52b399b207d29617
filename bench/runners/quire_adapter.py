"""Quire with transformers' modelling code in place of its own decoder."""

from __future__ import annotations

from bench.runners.protocol import serve
from bench.runners.quire_engine import starter

if __name__ == "__main__":
    serve(starter("transformers"))
