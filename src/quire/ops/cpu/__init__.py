"""The backend of an ordinary CPU."""

from quire.ops.cpu.backend import CpuBackend

BACKEND = CpuBackend()
