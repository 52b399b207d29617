"""What Python hands to the native library: random calls end as the reference does, in a result or an error."""

from __future__ import annotations

from collections import Counter

from tests.ops import fuzz_boundary


def test_random_calls_end_as_those_of_the_reference(backend):
    ends = Counter(fuzz_boundary.check(seed, backend) for seed in range(420))
    assert min(ends[end] for end in ("result", "BadShape", "BadDtype", "BadStride", "BadValue")) >= 5, ends
