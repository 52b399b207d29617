"""quire bench quantisation: the divergence is what it is said to be, and the command measures every way of rounding."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from quire.cli import app
from quire.frontend.llm import LLM
from quire_bench.engine import quantisation


def test_divergence() -> None:
    wanted = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4], [0.9, 0.05, 0.05]]))
    found = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.4, 0.4], [0.9, 0.05, 0.05]])) + 3
    ids = [0, 1, 2, 2]
    distance = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    one = quantisation.divergence([wanted], [found], [ids])
    assert one.mean == pytest.approx(distance / 3)
    assert one.same_top == pytest.approx(2 / 3)
    # The first of the three tokens is twice as probable as before, the others as probable.
    assert one.perplexity == pytest.approx(math.exp(-math.log(2) / 3))
    same = quantisation.divergence([wanted] * 2, [wanted + 1] * 2, [ids] * 2)
    assert (same.mean, same.p99, same.same_top, same.perplexity) == pytest.approx((0, 0, 1, 1), abs=1e-6)


def test_logits_of_every_position_are_those_of_the_model() -> None:
    llm = LLM(dtype="float32", num_blocks=40)
    ids = list(range(5, 45))
    logits = quantisation.logits_of(llm, [ids])[0]
    (scored,) = llm.loglikelihood([ids[:1]], [ids[1:]])
    logs = torch.log_softmax(logits.double(), -1)[range(39), ids[1:]]
    torch.testing.assert_close(logs, torch.tensor(scored.token_logprobs).double(), rtol=1e-5, atol=1e-5)
    assert "logits" not in vars(llm.decoder)


@pytest.mark.long
@pytest.mark.slow
def test_the_command() -> None:
    done = CliRunner().invoke(app, ["bench", "quantisation", "--windows", "1", "--runs", "1", "--json"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    accuracies, speeds = lines[:4], lines[4:]
    assert [(one["name"], one["context"]) for one in accuracies] == [
        ("int8", 256),
        ("int4", 256),
        ("int8 cache", 256),
        ("int8 cache", 1024),
    ]
    int8, int4 = accuracies[0], accuracies[1]
    assert 0 < int8["whole"]["mean"] < int4["whole"]["mean"] < 1
    assert int4["engine"]["mean"] < int4["format"]["mean"] / 10
    assert [one["name"] for one in speeds] == ["as it is", "int8", "int4", "int8 cache"]
    assert all(rate > 0 for one in speeds for rate in one["tokens_per_second"].values())
