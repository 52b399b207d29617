"""Python's garbage collector is as it was after an import."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from quire.importing import uncollected


def fail() -> None:
    """Import something that raises."""
    with uncollected():
        assert not gc.isenabled()
        raise ImportError


def test_it_is_off_meanwhile_and_on_again_even_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_importing_a_public_name_leaves_it_on() -> None:
    code = "import gc, quire; quire.SamplingParams; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
