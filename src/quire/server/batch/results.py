"""Results: the files of a batch's answers and errors, which continue where a killed process has stopped."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from quire.errors import ConfigError
from quire.server.batch.lines import ID_PREFIX, LineParser, Result

ID = re.compile(rb'\{"id":"(' + ID_PREFIX.encode() + rb'[0-9a-f]+)"')
ANSWERED = b'"error":null}\n'  # the end of a result that is no error
STANDARD = Path("-")  # stdin or stdout


class NotThisBatch(ConfigError):
    """An output has a result that is not the batch's."""


class Output:
    """A file of results. Only whole lines count: a killed process may leave a part of one."""

    def __init__(self, path: Path) -> None:
        """Open a file, or make it. Raises ConfigError if it cannot be written, or another process writes it."""
        self.path = path
        self.position = 0  # bytes of the results before the next one
        self.number = 1  # line of the next result
        self.next_id: str | None = None  # of the next result that was written earlier; None: nothing follows
        self.next_is_error = False
        self._next = b""
        self._reader: BinaryIO | None = None
        self.fd = 1 if path == STANDARD else _open(path)
        self.is_file = path != STANDARD and stat.S_ISREG(os.fstat(self.fd).st_mode)
        if not self.is_file:  # nothing to continue in a pipe or a terminal
            return
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(
                f"{path} is written by another batch; wait for its end, or choose another file"
            ) from error
        self._reader = os.fdopen(self.fd, "rb", closefd=False)
        self._read()

    @property
    def is_empty(self) -> bool:
        """True if the file has nothing to continue."""
        return not self.is_file or os.fstat(self.fd).st_size == 0

    def advance(self) -> None:
        """Go to the result after the next one."""
        self.position += len(self._next)
        self.number += 1
        self._read()

    def _read(self) -> None:
        self._next = b"" if self._reader is None else self._reader.readline()
        found = ID.match(self._next)
        self.next_id = None if not self._next.endswith(b"\n") else "" if found is None else found[1].decode()
        self.next_is_error = not self._next.endswith(ANSWERED)

    def cut(self, position: int) -> None:
        """Remove all results after a position, and continue there."""
        if self.is_file:
            os.ftruncate(self.fd, position)
            os.lseek(self.fd, position, os.SEEK_SET)

    def write(self, data: bytes) -> None:
        """Append bytes, all or none. Raises OSError."""
        if self.path == STANDARD:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        start, view = os.lseek(self.fd, 0, os.SEEK_CUR) if self.is_file else 0, memoryview(data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError:
            self.cut(start)
            raise

    def sync(self) -> None:
        """Wait until all that was written is on the disk. Raises OSError."""
        if self.is_file:
            os.fsync(self.fd)

    def close(self) -> None:
        """Close the file."""
        if self.path != STANDARD:
            os.close(self.fd)


class Results:
    """The answers and the errors of a batch, each in the order of the lines."""

    def __init__(self, answers: Path, errors: Path) -> None:
        """Open both files, which may be the same. Raises ConfigError."""
        self._answers = Output(answers)
        try:
            self._errors = self._answers if errors == answers else Output(errors)
        except ConfigError:
            self._answers.close()
            raise
        self._outputs = [*dict.fromkeys((self._answers, self._errors))]
        self.num_answers = 0
        self.num_errors = 0

    @property
    def count(self) -> int:
        """The number of lines that have a result."""
        return self.num_answers + self.num_errors

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to continue."""
        return all(output.is_empty for output in self._outputs)

    def resume(self, lines: Iterable[bytes], parser: LineParser) -> int:
        """Find the first line without a result, remove the results after it, and return the bytes of lines before it.

        Each result is compared with its line by its id. After a power cut one of the files may lack more than the
        other, so results of later lines are computed again. Raises NotThisBatch, and changes nothing, for a result of
        no line.
        """
        done, number = 0, 0
        ends: list[int] | None = None
        for raw in lines:
            number += 1
            if ends is None:
                line = parser.parse(raw)
                if line is None or self._skip(line.id, counted=True):
                    done += len(raw)
                    continue
                parser.number -= 1
                ends = [output.position for output in self._outputs]
            if all(output.next_id is None for output in self._outputs):
                break
            if raw.strip():
                self._skip(parser.id_of(raw.strip(), number))
        for output in self._outputs:
            if output.next_id is not None:
                raise NotThisBatch(
                    f"{output.path} exists, and its line {output.number} is not a result of this batch: "
                    f"{parser.others}; choose another file, or remove this one"
                )
        for output, end in zip(self._outputs, ends or [output.position for output in self._outputs], strict=True):
            output.cut(end)
        return done

    def _skip(self, name: str, *, counted: bool = False) -> bool:
        """Advance the output whose next result has this id. Return False if no output has it."""
        for output in self._outputs:
            if output.next_id == name:
                self.num_errors += counted and output.next_is_error
                self.num_answers += counted and not output.next_is_error
                output.advance()
                return True
        return False

    def write(self, results: Sequence[Result]) -> None:
        """Append results. Raises OSError, for example if the disk is full."""
        for is_error, group in groupby(results, key=lambda result: result.is_error):
            encoded = [result.encoded for result in group]
            output = self._errors if is_error else self._answers
            try:
                output.write(b"".join(encoded))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(output.path)) from error
            self.num_errors += len(encoded) * is_error
            self.num_answers += len(encoded) * (not is_error)

    def sync(self) -> None:
        """Wait until all results are on the disk. Raises OSError."""
        for output in self._outputs:
            output.sync()

    def close(self, *, drop_empty_errors: bool = False) -> None:
        """Close the files. drop_empty_errors: remove the file of errors if it is empty."""
        if drop_empty_errors and self._errors is not self._answers and self._errors.is_file and self._errors.is_empty:
            with suppress(OSError):
                self._errors.path.unlink()
        for output in self._outputs:
            output.close()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
