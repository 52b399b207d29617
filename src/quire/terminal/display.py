"""Display of a growing answer: as plain text, or as rendered markdown if the terminal supports it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown

SHORTEST = 0.08  # seconds, least time between two frames of an answer
SHARE = 10  # drawing may take 1 / SHARE of the time, since the model may need the same processor
CODE = "ansi_dark"  # the terminal's own colours, which suit its background
DIM = "dim"
NARROWEST, USUAL = 8, 80  # columns


def console_at(*, stderr: bool = False) -> Console:
    """Return the terminal of this process. A terminal that reports no width gets the usual one."""
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.width >= NARROWEST else Console(stderr=stderr, width=USUAL)


class Display(Protocol):
    """Shows one answer."""

    def think(self, text: str) -> None:
        """Add to the model's reasoning."""

    def say(self, text: str) -> None:
        """Add to the answer."""


@contextmanager
def shown(console: Console, markdown: bool, fence: str = "") -> Iterator[Display]:
    """Show an answer, which is complete at the end of the block.

    markdown: render it, if the terminal can. fence: text to insert before it, such as the beginning of a code block.
    """
    if not markdown or not console.is_terminal or console.is_dumb_terminal:
        plain = PlainDisplay(console.is_terminal)
        try:
            yield plain
        finally:
            plain.end()
        return
    display = MarkdownDisplay(console)
    if fence:
        display.say(fence)
    try:
        yield display
    finally:
        display.end()


class PlainDisplay:
    """Writes an answer as it arrives. Reasoning is written only to a terminal."""

    def __init__(self, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self._is_thinking = False
        self._line_is_open = False

    def think(self, text: str) -> None:
        """Add to the model's reasoning."""
        if self._shows_reasoning:
            self._write(text if self._is_thinking else f"Thinking: {text}")
            self._is_thinking = True

    def say(self, text: str) -> None:
        """Add to the answer."""
        if self._is_thinking:
            self._is_thinking = False
            self._write("\n\n")
        self._write(text)

    def end(self) -> None:
        """End the last line."""
        if self._line_is_open:
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._line_is_open = not text.endswith("\n") if text else self._line_is_open


class MarkdownDisplay:
    """Renders an answer's markdown.

    Complete blocks are printed once. The last block is redrawn while it grows; if it is higher than the terminal, only
    its end is visible.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._text = ""  # the part of the answer that has not been printed
        self._is_thinking = False
        self._next = 0.0  # s of time.monotonic(), when the next frame may be drawn
        self._live: Live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def think(self, text: str) -> None:
        """Add to the model's reasoning."""
        self._is_thinking = True
        self._console.print(text, style=DIM, end="", markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Add to the answer."""
        if self._is_thinking:
            self._is_thinking = False
            self._console.print("\n")
        self._text += text
        now = time.monotonic()
        if now >= self._next:
            self._draw()
            took = time.monotonic() - now
            self._next = now + max(SHORTEST, SHARE * took)

    def end(self) -> None:
        """Print the rest."""
        if self._is_thinking:
            self._console.print()
        if self._live.is_started:
            self._live.update("", refresh=True)
            self._live.stop()
        if self._text.strip():
            self._console.print(_rendered(self._text))
        self._text = ""

    def _draw(self) -> None:
        from rich.text import Text

        self._live.start()
        complete = self._complete()
        if complete:
            self._live.update("")
            self._console.print(_rendered(self._text[:complete]))
            self._console.print()
            self._text = self._text[complete:]
        lines = self._console.render_lines(_rendered(self._text), pad=False)
        last = lines[-max(1, self._console.height - 2) :]
        picture = Text("\n", end="").join(
            Text.assemble(*((segment.text, segment.style or "") for segment in line), end="") for line in last
        )
        self._live.update(picture, refresh=True)

    def _complete(self) -> int:
        """Return the number of characters in the blocks that can no longer change: all except the last one."""
        from rich.markdown import Markdown

        starts = [token.map[0] for token in Markdown(self._text).parsed if token.level == 0 and token.map]
        if not starts or starts[-1] == 0:
            return 0
        return sum(map(len, self._text.splitlines(keepends=True)[: starts[-1]]))


def _rendered(text: str) -> Markdown:
    """Return rich's markdown, but with code blocks without padding, which would be copied with the code."""
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import Syntax

    class Code(CodeBlock):
        def __rich_console__(self, _: object, __: object) -> Iterator[Syntax]:
            yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=CODE, word_wrap=True)

    class Rendered(Markdown):
        elements = Markdown.elements | {"fence": Code, "code_block": Code}

    return Rendered(text)
