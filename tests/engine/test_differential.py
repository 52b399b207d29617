"""Random requests on random engines get what they get alone, bit for bit: see tests.engine.differential."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from quire.engine.committer import Committer
from quire.ops import native
from quire.request import Event, Request
from tests.engine.differential import Report, Targets, run
from tests.marks import of_long_runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

SEEDS = (31, 85, 86, 94, 105)  # with windows, latents and states
# What these have seen, so that they prove something about it.
SEEN = (
    """
preempted, cached tokens, right drafts, read from the disk, aborted, gone on, BlocksForked, BlocksSwappedIn
embedded, scored, searched, adapted, guided, overlapped, int8 cache
""".replace("\n", ", ")
    .strip(", ")
    .split(", ")
)
WITH_SEARCHES, WITHOUT_A_TOKEN = 5, 7  # seeds: with adapters; with a prompt's logprobs, and no token that may be drawn


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("seeds", [SEEDS, of_long_runs(range(100))], ids=["few", "many"])
def test_requests_get_what_they_get_alone(targets: Targets, seeds: Sequence[int]) -> None:
    report = Report()
    for seed in seeds:
        run(seed, targets, report)
    assert not report.failures, "\n".join(report.failures)
    has_grammars = find_spec("llguidance") is not None
    assert not [what for what in SEEN if not report.counts[what] and (has_grammars or what != "guided")]


def test_faults_are_seen(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that lose their adapter, and logprobs that are lost with a request's end: two faults that there were."""
    inherit, end = Request.inherit, Committer._end_without_number

    def without_adapter(child: Request, parent: Request) -> None:
        inherit(child, parent)
        child.lora_slot = -1

    def without_logprobs(committer: Committer, request: Request, of_prompt: object = ()) -> Event:
        return end(committer, request)

    monkeypatch.setattr(Request, "inherit", without_adapter)
    monkeypatch.setattr(Committer, "_end_without_number", without_logprobs)
    for seed, seen in ((WITH_SEARCHES, ("alone", "scored")), (WITHOUT_A_TOKEN, ("prompt logprobs",))):
        report = Report()
        run(seed, targets, report)
        assert all(any(what in failure for failure in report.failures) for what in seen), report.failures
