"""A chat in a terminal: what is typed is answered, or is a command."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

from quire.errors import QuireError
from quire.terminal.display import DIM, shown
from quire.terminal.partner import Message, Partner, TooLong
from quire.terminal.reading import QUOTES, Reader

if TYPE_CHECKING:
    from rich.console import Console

PYTHON = "```python\n"  # begins the answers of a model that writes code alone


class Ended(Exception):
    """The user wants to end the chat."""


@dataclass
class Chat:
    """A conversation with a model."""

    partner: Partner
    console: Console  # for answers
    notes: Console  # for all else
    markdown: bool  # whether answers are rendered as such, where the terminal can show it
    system: str = ""  # the system message; empty: none
    messages: list[Message] = field(default_factory=list)  # what was said, the system's message aside
    num_new_tokens: int = 0

    COMMANDS: ClassVar[dict[str, tuple[str, str]]] = {  # what follows each, and what it does
        "/system": (" TEXT", "set the system message; without TEXT show it"),
        "/clear": ("", "forget the conversation; what /system said stays"),
        "/stats": ("", "show what the last answer cost"),
        "/help": ("", "show this"),
        "/exit": ("", "end; so does Ctrl-D"),
    }
    ALSO: ClassVar[dict[str, str]] = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}

    def run(self) -> None:
        """Read and answer until the user ends it."""
        reader = Reader([*self.COMMANDS, *self.ALSO])
        with _handling(signal.default_int_handler):
            was_interrupted = False
            while True:
                try:
                    text = reader.read()
                except EOFError:
                    self.notes.print()
                    return
                except KeyboardInterrupt:
                    if was_interrupted:
                        self.notes.print()
                        return
                    was_interrupted = True
                    self.note("\nCtrl-C again, Ctrl-D or /exit ends the chat.")
                    continue
                was_interrupted = False
                try:
                    self.take(text)
                except Ended:
                    return
                except KeyboardInterrupt:  # before the answer has begun, or where it does not stop
                    self.note("(stopped)")
                except QuireError as error:
                    self.note(f"error: {error}", "red")

    def take(self, text: str) -> None:
        """Do what a command says, or answer a message. Raises Ended; QuireError for what cannot be answered."""
        if not text.strip():
            return
        if text.startswith("/") and "\n" not in text:
            self._obey(*text.partition(" ")[::2])
        else:
            self.answer(text)

    def answer(self, text: str) -> None:
        """Answer a message. At Ctrl-C the answer ends where it is, and stays in the conversation.

        Raises QuireError for what cannot be answered; the message is then taken back, and what was shown of an answer
        is not part of the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            said = self._shown()
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": said})

    def note(self, text: str, style: str = DIM) -> None:
        """Say something that is no part of the conversation."""
        self.notes.print(text, style=style, markup=False, highlight=False)

    # -------------------------------------------------------------------------------------------------- answers

    def _shown(self) -> str:
        """Show what the model answers; what it says of it."""
        while True:
            try:
                return self._one_answer()
            except TooLong as error:
                if len(self.messages) < 3:
                    raise
                del self.messages[:2]
                self.note(f"({error}; its oldest message and answer are left out)")

    def _one_answer(self) -> str:
        partner, parts = self.partner, list[str]()
        before: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        markdown = self.markdown and partner.has_template
        fence = PYTHON if partner.writes_code else ""
        with _stopping(partner.stop) as stopped, shown(self.console, markdown, fence) as display:
            for piece in partner.answer([*before, *self.messages]):
                if piece.is_thought:
                    display.think(piece.text)
                else:
                    display.say(piece.text)
                    parts.append(piece.text)
        usage = partner.usage
        self.num_new_tokens += 0 if usage is None else usage.new_tokens
        if stopped:
            self.note("(stopped)")
        elif usage is not None and usage.finish_reason == "length":
            self.note("(the answer ends here since it may have no more tokens)")
        return "".join(parts)

    # ------------------------------------------------------------------------------------------------- commands

    def _obey(self, name: str, rest: str) -> None:
        obey: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/clear": self._clear,
            "/stats": self._show_stats,
            "/help": self._help,
            "/exit": self._end,
        }
        name = self.ALSO.get(name, name)
        if name not in obey:
            close = difflib.get_close_matches(name, obey, n=1)
            hint = f"did you mean {close[0]}?" if close else "/help lists all"
            raise QuireError(f"there is no command {name}; {hint} (a message that begins with / goes between {QUOTES})")
        obey[name](rest.strip())

    def _set_system(self, text: str) -> None:
        if text:
            self.system = text.removeprefix(QUOTES).removesuffix(QUOTES)
            self.note("The system message is sent from the next message on.")
        else:
            self.note(self.system or "There is no system message.")

    def _clear(self, _: str) -> None:
        self.messages.clear()
        self.note("The conversation is forgotten.")

    def _show_stats(self, _: str) -> None:
        usage = self.partner.usage
        if usage is None:
            self.note("Nothing was answered yet.")
            return
        self.note(f"last answer  {usage}")
        self.note(
            f"in all       {self.num_new_tokens:,} new tokens; the conversation has {len(self.messages):,} messages"
        )

    def _help(self, _: str) -> None:
        for name, (follows, what) in self.COMMANDS.items():
            self.note(f"{name + follows:13s} {what}")
        self.note(f"{QUOTES:13s} begins a message of several lines, and ends it")
        self.note(f"{'Ctrl-C':13s} stops an answer; twice at the prompt it ends the chat")

    def _end(self, _: str) -> None:
        raise Ended


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within it an interrupt is handled so."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Within it the first interrupt stops an answer, and the second one is raised. Yields the signals that came."""
    came: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        stop()

    with _handling(handle):
        yield came
