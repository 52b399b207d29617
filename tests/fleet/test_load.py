"""What a replica reports of its load, from which a fleet is scaled."""

from __future__ import annotations

import pytest

from quire.fleet.scaling import Meter
from tests.server.serving import serving

SECRET = {"Authorization": "Bearer s3cret"}


@pytest.mark.slow
def test_a_replica_reports_what_it_computed_for_those_who_know_the_secret() -> None:
    with serving(fleet_secret="s3cret") as server:
        assert server.get("/fleet/state").status == 401

        def state() -> dict[str, float]:
            return dict(server.ask("GET", "/fleet/state", headers=SECRET).json())

        first = state()
        assert (first["prompt_tokens"], first["decoded_tokens"], first["seconds_a_step"]) == (0, 0, 0.0)
        meter = Meter()
        assert meter.read(first, 0.0) is None
        asked = {"prompt": "import os\n" * 16, "max_tokens": 40, "ignore_eos": True}
        usage = [server.post("/v1/completions", **asked).json()["usage"] for _ in range(2)]
        cached = usage[1]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        load = meter.read(state(), 2.0)
        assert load is not None
        prompts = 2 * usage[0]["prompt_tokens"] - cached  # what came from the cache was not computed
        assert 2 * load.prompt_tokens_a_second == pytest.approx(prompts, abs=60)  # drafts are rows, too
        assert 0 < 2 * load.decoded_tokens_a_second <= 80
        assert load.waiting_tokens == 0
        assert load.demand > 0
