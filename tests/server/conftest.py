"""Servers of the embedded model for all tests that leave them as they were."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Serving, serving

TEMPLATE = """{% for tool in tools or [] %}# {{ tool | tojson }}
{% endfor %}# mood={{ mood }} effort={{ reasoning_effort }} thinking={{ enable_thinking }}
{% for m in messages %}# {{ m.role }}:{{ m.reasoning_content or "" }}:{{ m.content }}
{% for c in m.tool_calls or [] %}{% set f = c.function %}# {{ c.id }}={{ f.name }}:{{ f.arguments | dictsort }}
{% endfor %}{% endfor %}{% if add_generation_prompt %}def answer():
{% endif %}"""


@pytest.fixture(scope="session")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One that is known to think and to call, and whose prompts show all that its template sees."""
    template: Path = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TEMPLATE)
    with serving(
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        chat_template=template,
        default_chat_template_kwargs='{"mood": "calm"}',
        enable_auto_tool_choice=True,
        ollama=True,
    ) as running:
        yield running
