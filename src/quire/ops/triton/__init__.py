"""The GPU backend."""

from quire.ops.triton.backend import TritonBackend

BACKEND = TritonBackend()
