"""Memory in huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from quire.ops.memory import HUGE_PAGE, SMALL, in_huge_pages, mapped

MAPS = Path("/proc/self/maps")


def mappings() -> list[tuple[int, int]]:
    """From where to where this process has memory."""
    lines = MAPS.read_text().splitlines()
    return [(int(start, 16), int(end, 16)) for start, end in (line.split()[0].split("-") for line in lines)]


def test_it_holds_zeros_from_a_huge_page_on() -> None:
    for shape in ((3,), (5, 7), (HUGE_PAGE,), (2, HUGE_PAGE + 1)):
        for touched in (0, 10, 10**9):
            memory = in_huge_pages(shape, torch.float16, touched)
            assert memory.shape == shape
            assert memory.dtype == torch.float16
            assert memory.data_ptr() % HUGE_PAGE == 0
            assert not memory.any()
            memory.fill_(1)


def test_nothing_takes_no_memory() -> None:
    assert in_huge_pages((0, 5), torch.float32).shape == (0, 5)


@pytest.mark.parametrize("size", [0, 1, SMALL - 2, SMALL, HUGE_PAGE - 2, HUGE_PAGE, HUGE_PAGE + 2])
def test_mapped_memory_is_aligned_and_goes_back(size: int) -> None:
    memory = mapped((size // 2, 1), torch.bfloat16)
    assert (memory.shape, memory.dtype) == ((size // 2, 1), torch.bfloat16)
    assert memory.data_ptr() % 64 == 0
    memory.fill_(1)
    assert memory.sum(dtype=torch.float32) == size // 2
    if size < SMALL or not MAPS.exists():
        return
    first = memory.data_ptr()
    assert any(start <= first and first + size <= end for start, end in mappings())
    view = memory[1:]
    del memory
    assert any(start <= first < end for start, end in mappings()), "a view holds it"
    del view
    assert not any(start <= first < end for start, end in mappings())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux is asked for huge pages")
def test_huge_pages_are_asked_for_and_the_memory_is_shared_with_nobody() -> None:
    """Linux gives shared memory none by default."""
    memory = in_huge_pages((4 * HUGE_PAGE,), torch.uint8)
    for mapping in re.findall(r"^[0-9a-f]+-[0-9a-f]+ .*\n(?:\w+:.*\n)+", Path("/proc/self/smaps").read_text(), re.M):
        start, end = (int(address, 16) for address in mapping.split(" ")[0].split("-"))
        if start <= memory.data_ptr() < end:
            flags = mapping.rsplit("VmFlags:", 1)[1].split()
            assert "hg" in flags
            assert "sh" not in flags
            return
    raise AssertionError("the kernel does not list this memory")
