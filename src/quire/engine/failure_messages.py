"""Error messages of requests that end with an error."""

from __future__ import annotations

from quire.engine.plan import GENERATE
from quire.errors import RequestError
from quire.request import Request, Task


def cannot_draw(request: Request) -> RequestError | None:
    """Return the error of a request none of whose allowed tokens can be drawn.

    Return None if it may draw any token, or draws none.
    """
    at = f"at position {len(request.tokens)}"
    if request.guide is not None:
        return RequestError(f"no token that the grammar allows may be drawn and has a finite logit {at}")
    if request.constraints is not None and request.task is GENERATE:
        return RequestError(f"no token that allowed_token_ids and bad_words leave has a finite logit {at}")
    return None


def no_number(request: Request) -> str:
    """Return the message for a request whose model output is not finite."""
    lacks = {Task.LOGLIKELIHOOD: "logit within the prompt", Task.EMBED: "hidden state after the prompt"}
    return f"the model gave no finite {lacks.get(request.task, f'logit at position {len(request.tokens)}')}"


def difference(request: Request, drawn: int) -> str:
    """Return the message for a drawn token that differs from the delivered one, which is the request's last token."""
    at = len(request.tokens) - 1
    return (
        f"the token at position {at} was delivered as {request.tokens[at]} before the request was interrupted, and is "
        f"{drawn} here: a continuation from here would differ from the original answer"
    )
