"""These tests need Triton, which there is for Linux alone."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") is not None else ["test_*.py"]
