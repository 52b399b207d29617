"""The rows of requests that merely decode: which requests have one, and in which order.

The random runs compare each batch with one that is laid out request by request, and audit the rows.
"""

from __future__ import annotations

import pytest

from quire.engine.decode_rows import DecodeRows
from quire.engine.engine import Engine
from quire.engine.policy import by_priority
from quire.errors import BadValue
from tests.engine.fakes import fake_engine, request


def rows_of(engine: Engine) -> DecodeRows:
    """The settled rows of an engine."""
    rows = engine.scheduler.rows
    assert rows is not None
    rows.settle()
    return rows


def test_requests_join_after_their_first_token_and_leave_at_their_end() -> None:
    engine = fake_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=6))
    engine.add(request("long", [*range(1, 60)], max_tokens=3))
    engine.step()
    assert rows_of(engine).ids == ["a"]  # the other one's prompt takes two steps
    engine.add(request("b", [4], max_tokens=2))
    engine.step()
    assert rows_of(engine).ids == ["a", "long", "b"]
    engine.abort("long")
    assert rows_of(engine).ids == ["a", "b"]
    while engine.has_work:
        engine.step()
    assert rows_of(engine).ids == []


def test_rows_are_in_the_order_of_ranks() -> None:
    engine = fake_engine(order=by_priority)
    for name, priority in (("late", 2), ("early", 1), ("first", 0)):
        one = request(name, [1, 2, 3], max_tokens=9)
        one.priority = priority
        engine.add(one)
        engine.step()
    assert rows_of(engine).ids == ["first", "early", "late"]
    engine.scheduler.audit()


def test_a_request_whose_numbers_do_not_fit_any_more_loses_its_row() -> None:
    engine = fake_engine()
    engine.add(one := request("r", [1, 2, 3], max_tokens=9))
    engine.step()
    rows = rows_of(engine)
    one.tokens.append(5)  # its token before is not computed yet
    with pytest.raises(BadValue, match="length, last token"):
        rows.audit(engine.scheduler.running)
    rows.note(one)
    assert rows_of(engine).ids == []
    del one.tokens[-1]
    rows.note(one)
    assert rows_of(engine).ids == ["r"]


def test_the_random_numbers_of_a_row_do_not_depend_on_the_others() -> None:
    engine = fake_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=60, seed=1))
    alone = []
    for _ in range(40):
        engine.step()
        alone.append(rows_of(engine).uniforms(0)[0])
    engine = fake_engine()
    engine.add(request("b", [7], max_tokens=60, seed=2))
    for _ in range(5):
        engine.step()
    engine.add(request("a", [1, 2, 3], max_tokens=60, seed=1))
    found = []
    for _ in range(40):
        engine.step()
        rows = rows_of(engine)
        found.append(rows.uniforms(0)[rows.ids.index("a")])
    assert found == alone
    assert len(set(found)) == 40
