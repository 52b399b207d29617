"""The scheduler without a model: what stands in for the tokens that one would draw."""

from __future__ import annotations

from quire.engine.plan import Plan, StepOutput

TOKEN = 1


def sampled(plan: Plan) -> StepOutput:
    """The same token for each request that samples in this step."""
    return StepOutput({item.request.id: TOKEN for item in plan.items if item.samples})
