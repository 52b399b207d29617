"""What is said of requests that end with an error."""

from __future__ import annotations

from quire.engine.plan import GENERATE
from quire.errors import RequestError
from quire.request import Request, Task


def cannot_draw(request: Request) -> RequestError | None:
    """Why none of the tokens that the request may draw can be drawn. None: it may draw any, or draws none."""
    at = f"at position {len(request.tokens)}"
    if request.guide is not None:
        return RequestError(f"no token that the grammar allows may be drawn and has a finite logit {at}")
    if request.constraints is not None and request.task is GENERATE:
        return RequestError(f"no token that allowed_token_ids and bad_words leave has a finite logit {at}")
    return None


def no_number(request: Request) -> str:
    """What the model gave no finite number for."""
    lacks = {Task.LOGLIKELIHOOD: "logit within the prompt", Task.EMBED: "hidden state after the prompt"}
    return f"the model gave no finite {lacks.get(request.task, f'logit at position {len(request.tokens)}')}"


def difference(request: Request, drawn: int) -> str:
    """Another token was drawn than the one that was delivered, which is the request's last one."""
    at = len(request.tokens) - 1
    return (
        f"the token at position {at} was delivered as {request.tokens[at]} before the request was interrupted, and is "
        f"{drawn} here: what goes on here would not be the same answer"
    )
