"""The backend of GPUs."""

from quire.ops.triton.backend import TritonBackend

BACKEND = TritonBackend()
