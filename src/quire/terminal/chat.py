"""A chat in a terminal: answers messages and executes commands."""

from __future__ import annotations

import difflib
import mimetypes
import shlex
import signal
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from quire.errors import QuireError
from quire.sandbox.images import read_file
from quire.terminal.display import DIM, shown
from quire.terminal.partner import Message, Partner, TooLong
from quire.terminal.reading import QUOTES, Reader

if TYPE_CHECKING:
    from rich.console import Console

PYTHON = "```python\n"  # precedes the answers of a model that writes only code


class Ended(Exception):
    """The user wants to end the chat."""


@dataclass
class Chat:
    """A conversation with a model."""

    partner: Partner
    console: Console  # for answers
    notes: Console  # for all other output
    markdown: bool  # whether to render answers as markdown, if the terminal can
    system: str = ""  # the system message; empty: none
    messages: list[Message] = field(default_factory=list)  # the conversation without the system message
    images: list[dict[str, Any]] = field(default_factory=list)  # parts of the next message
    num_new_tokens: int = 0

    COMMANDS: ClassVar[dict[str, tuple[str, str]]] = {  # argument and description of each
        "/system": (" TEXT", "set the system message; without TEXT show it"),
        "/image": (" PATH", "add an image to the next message; without PATH forget those that were added"),
        "/clear": ("", "forget the conversation, except the system message"),
        "/stats": ("", "show the tokens and times of the last answer"),
        "/help": ("", "show this"),
        "/exit": ("", "end; so does Ctrl-D"),
    }
    ALSO: ClassVar[dict[str, str]] = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}

    def run(self) -> None:
        """Read and answer messages until the user ends the chat."""
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
                except KeyboardInterrupt:  # before the answer has begun, or at a second Ctrl-C
                    self.note("(stopped)")
                except QuireError as error:
                    self.note(f"error: {error}", "red")

    def take(self, text: str) -> None:
        """Execute a command or answer a message. Raises Ended, and QuireError if the message cannot be answered."""
        if not text.strip():
            return
        if text.startswith("/") and "\n" not in text:
            self._obey(*text.partition(" ")[::2])
        else:
            self.answer(text)

    def answer(self, text: str) -> None:
        """Answer a message. Ctrl-C ends the answer early, and its text so far stays in the conversation.

        Raises QuireError if the message cannot be answered. Then neither the message, with its images, nor a partial
        answer becomes part of the conversation.
        """
        images, self.images = self.images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        self.messages.append({"role": "user", "content": content})
        try:
            said = self._shown()
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": said})

    def note(self, text: str, style: str = DIM) -> None:
        """Print a note that is not part of the conversation."""
        self.notes.print(text, style=style, markup=False, highlight=False)

    # -------------------------------------------------------------------------------------------------- answers

    def _shown(self) -> str:
        """Show the model's answer, and return its text without the reasoning."""
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
            "/image": self._add_images,
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

    def _add_images(self, text: str) -> None:
        try:
            words = [text] if Path(text).is_file() else shlex.split(text)  # a path with spaces, or as a shell reads it
            paths = [Path(word).expanduser() for word in words]
        except (OSError, ValueError, RuntimeError) as error:
            raise QuireError(f"{text[:80]!r} is no path: {error}; quote it as in a shell") from error
        urls = [
            f"data:{mimetypes.guess_type(path.name)[0] or 'image/png'};base64,{b64encode(read_file(path)).decode()}"
            for path in paths
        ]
        self.images = (
            [*self.images, *({"type": "image_url", "image_url": {"url": url}} for url in urls)] if urls else []
        )
        self.note(f"The next message has {len(self.images) or 'no'} image{'' if len(self.images) == 1 else 's'}.")

    def _clear(self, _: str) -> None:
        self.messages.clear()
        self.images.clear()
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
    """Handle interrupts with `handler` inside the block."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Call `stop` at the first interrupt inside the block, and raise the second one. Yields the signals received."""
    came: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        stop()

    with _handling(handle):
        yield came
