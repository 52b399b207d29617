"""The types of models that are served are those that the package and the documents list, and none answers wrongly."""

from importlib.metadata import version

import pytest

from quire.models import FAMILIES
from quire.models.supported import read
from tests.models.sweep import DOCS, TYPES, document, sweep

SHARDS = 24
LISTED = {found.name: found for found in read().types}


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_each_type(shard: int) -> None:
    """Whoever is served agrees with eager attention: `sweep` asserts that."""
    for name in TYPES[shard::SHARDS]:
        found = sweep(name).supported
        if version("transformers") == read().transformers:
            assert found._replace(reason="") == LISTED[name]._replace(reason=""), found.reason
        if found.how == "refused":
            assert found.reason


def test_enough_are_served() -> None:
    assert sum(found.how != "refused" for found in LISTED.values()) >= 80
    own = {found.name for found in LISTED.values() if found.how == "own decoder"}
    assert len(own) >= len(set(FAMILIES.values()))


def test_the_page_is_the_sweep() -> None:
    assert DOCS.read_text(encoding="utf-8") == document(read())
