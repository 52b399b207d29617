"""quire bench constraints: rows with a schema take part in the steps that are timed."""

from __future__ import annotations

import pytest

from quire import LLM
from quire.errors import RequestError
from quire_bench.engine.constraints import measure


@pytest.mark.slow
def test_some_rows_keep_to_the_schema() -> None:
    llm = LLM(num_blocks=128, max_num_seqs=4, num_speculative_tokens=0)
    found = measure(llm, streams=4, constrained=2, steps=3, rounds=1)
    assert (found.streams, found.constrained) == (4, 2)
    assert found.rate > 0
    assert found.ratio == pytest.approx(found.rate / found.plain_rate)
    assert not llm.engine.has_work
    llm.tokenizer = None
    with pytest.raises(RequestError, match="no tokenizer"):
        measure(llm, 4, 2, 3, 1)
