"""Measurements of Quire: `quire bench`, and `python -m quire_bench.peers` beside other engines."""
