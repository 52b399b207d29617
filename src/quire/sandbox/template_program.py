"""A sandbox's program: render chat templates with transformers.

Jinja's sandbox, in which transformers renders, keeps a template away from Python; the process's limits protect the
machine. The sandbox loads this file by its path, so it imports nothing from quire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

MAX_ERROR = 500  # characters of an error


def prepare(max_characters: int) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """Return the function that renders: a request is the arguments of transformers' function for one conversation.

    The answer has one entry: "text", or "raised", an error that the template itself raised, or "error", any other
    error.
    """

    def render(request: Mapping[str, Any]) -> dict[str, str]:
        try:
            [text], _ = render_jinja_template(**request)
        except MemoryError:
            raise
        except Exception as error:  # a template can fail like any program
            if type(error) is TemplateError:  # Jinja's own errors are subclasses of it
                return {"raised": f"{error}"[:MAX_ERROR]}
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            return {"error": f"{kind}{error}"[:MAX_ERROR]}
        if len(text) > max_characters:
            return {"error": f"it makes more than {max_characters:,} characters"}
        return {"text": text}

    return render
