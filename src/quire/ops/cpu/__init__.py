"""The CPU backend."""

from quire.ops.cpu.backend import CpuBackend

BACKEND = CpuBackend()
