"""Answers on terminals of all kinds."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from quire.terminal.display import console_at, shown

ANSWER = """# Title

Some *text* with `code`, and a list:

* one
* two, of which there is so much to say that it does not fit into a line of a terminal

```python
def f(x):
    return x
```

Last words."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on(width: int, height: int = 24, answer: str = ANSWER, fence: str = "", **options: object) -> str:
    """What a terminal of that size is sent, in pieces of three characters."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=width, height=height, **options)  # type: ignore[arg-type]
    with shown(console, True, fence) as display:
        display.think("hm")
        for i in range(0, len(answer), 3):
            display.say(answer[i : i + 3])
    return sent.getvalue()


@pytest.mark.parametrize("width", [8, 20, 80])
@pytest.mark.parametrize("height", [0, 1, 24])
def test_markdown_is_rendered_at_any_size(width: int, height: int) -> None:
    text = ESCAPES.sub("", on(width, height))
    for words in ("Title", "Some text with code, and a list:", "def f(x): return x", "Last words."):
        assert "".join(words.split()) in "".join(text.split()), words
    assert "```" not in text.splitlines()[-1]


def test_without_colours_none_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9[0-7])(?:;\d+)*m", on(80))
    monkeypatch.delenv("NO_COLOR")
    assert re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9[0-7])(?:;\d+)*m", on(80))


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("3", 80), ("20", 20)])
def test_a_terminal_without_a_width_counts_as_a_usual_one(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "0")
    assert console_at().width == console_at(stderr=True).width == width


def test_a_dumb_terminal_gets_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert on(80) == ""
    assert capsys.readouterr().out == f"Thinking: hm\n\n{ANSWER}\n"


def test_what_is_no_terminal_gets_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(Console(file=io.StringIO()), True) as display:
        display.think("hm")
        display.say("yes\n")
    assert capsys.readouterr().out == "yes\n"


def test_a_block_higher_than_the_terminal_is_whole_in_the_end() -> None:
    lines = [f"line_{i} = {i}" for i in range(60)]
    text = ESCAPES.sub("", on(80, 10, "\n".join(lines), fence="```python\n"))
    end = text[text.rindex("line_0 = 0") :]
    assert end.split() == " ".join(lines).split()
