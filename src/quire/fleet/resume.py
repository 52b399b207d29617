"""Resume: the limits for answers that another replica continues."""

from __future__ import annotations

NUM_CHECKED = 4  # delivered tokens that another replica draws again; in one step if draft tokens are allowed
MOST_LOST = 8  # replicas: a request that kills its replicas must not kill the whole fleet


def why_to_end(resume: str, num_lost: int, request: str, replica: str) -> str | None:
    """Return the reason why a request must end with its replica; None if another replica continues it.

    resume: see GatewayConfig. num_lost: replicas that were lost with it in a row. request, replica: for the message.
    """
    if resume == "never":
        return f"{replica} was lost, and --resume is 'never'"
    if num_lost > MOST_LOST:
        return f"{num_lost} replicas in a row were lost with {request}, the last one at {replica}"
    return None
