"""The models that are served are those that the package and the documents list, and none answers wrongly."""

from importlib.metadata import version

import pytest

from quire.models import FAMILIES
from quire.models.supported import HOW, read
from tests.marks import quick
from tests.models.published import REPOSITORIES
from tests.models.sweep import DOCS, SIDED, SOUGHT, TYPES, document, sweep, sweep_repository

SHARDS = 48
NAMES = sorted({*TYPES, *SIDED})
LISTED = {found.name: found for found in read().types}
MAKERS = sorted(REPOSITORIES, key=lambda maker: len(REPOSITORIES[maker]))  # those of few are quick
PUBLISHED = {found.name: found for found in read().repositories}


@pytest.mark.slow
@pytest.mark.parametrize("shard", quick(range(SHARDS), SHARDS, usual=1))
def test_each_type(shard: int) -> None:
    """What is served agrees with eager attention: `sweep` asserts that."""
    for name in NAMES[-1 - shard :: -SHARDS]:
        found = sweep(name).supported
        if version("transformers") == read().transformers:
            assert found._replace(reason="") == LISTED[name]._replace(reason=""), found.reason
        if found.how == "refused":
            assert found.reason


@pytest.mark.slow
@pytest.mark.parametrize("maker", quick(MAKERS, len(MAKERS), usual=3))
def test_each_published_checkpoint(maker: str) -> None:
    """As it is listed, and as eager attention."""
    for name, raw in REPOSITORIES[maker].items():
        found = sweep_repository(maker, name, raw)
        assert found._replace(reason="") == PUBLISHED[name]._replace(reason=""), found.reason
        if found.how == "refused":
            assert found.reason


def test_all_are_listed() -> None:
    assert list(LISTED) == NAMES
    assert list(PUBLISHED) == [name for some in REPOSITORIES.values() for name in some]
    assert {found.how for found in LISTED.values()} <= set(HOW)


def test_the_page_begins_with_names_of_types() -> None:
    assert {name for types in SOUGHT.values() for name in types.split()} <= LISTED.keys()


def test_enough_are_served() -> None:
    assert sum(LISTED[name].how != "refused" for name in TYPES) >= 170
    assert sum(found.how != "refused" for found in PUBLISHED.values()) >= 40
    own = {found.name for found in LISTED.values() if found.how == "own decoder"}
    assert len(own) >= len(set(FAMILIES.values()))


def test_the_page_is_the_sweep() -> None:
    assert DOCS.read_text(encoding="utf-8") == document(read())
