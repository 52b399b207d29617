"""What of a test's many runs belongs to the inner loop, and what to the long one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import chain, combinations, product
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=Hashable)


def quick(values: Iterable[Any], count: int, usual: int | None = None) -> list[Any]:
    """Parameters of which the first `count` run in `make test-fast`, and the others are slow.

    usual: as many run in `make test`, and the others with `pytest --long` alone. None: all.
    """

    def marks(i: int) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * (i >= count) + [pytest.mark.long] * (usual is not None and i >= usual)

    return [pytest.param(value, marks=marks(i)) for i, value in enumerate(values)]


def of_long_runs(*values: Any) -> Any:
    """A test's parameters that are more of the same: `pytest --long` alone runs them."""
    return pytest.param(*values, marks=pytest.mark.long)


def spread(one_in: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of the axes as parameters, of which one in so many runs in `make test`, and all with `pytest --long`.

    Those run whose places on the axes add up to a multiple: each two values of different axes meet in one of them, if
    there is a third axis of at least `one_in` values.
    """
    ways = [list(enumerate(axis)) for axis in axes]
    found = []
    for way in product(*ways):
        places, values = zip(*way, strict=True)
        marks = [pytest.mark.long] * (sum(places) % one_in != 0)
        found.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return found


def meetings(cases: Mapping[Case, Mapping[str, object]], together: int) -> set[Case]:
    """Return cases, with a value for each parameter, in which all values meet that meet in any of the cases.

    Args:
        cases: the values of each case's parameters, by name.
        together: the number of parameters whose values are to meet.
    """
    met = {
        case: set(combinations(sorted(values.items()), min(together, len(values)))) for case, values in cases.items()
    }
    missing = set(chain.from_iterable(met.values()))
    found = set()
    while missing:
        found.add(case := max(met, key=lambda case: len(met[case] & missing)))
        missing -= met[case]
    return found
