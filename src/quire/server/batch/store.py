"""Store: the files and batches of a server, in SQLite and a folder of the data directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

VERSION = 1  # of the tables
TABLE = "CREATE TABLE objects (number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, kind TEXT, value TEXT)"
FILE, BATCH = "file", "batch"  # the kinds of objects
OPEN = ("validating", "in_progress", "cancelling")  # states of a batch that has not ended


class Store:
    """Keeps objects by id, each with its owner: the identity of a client. Contents of files are in a folder."""

    def __init__(self, directory: Path) -> None:
        """Open a data directory, or make it. Raises ConfigError if it cannot be used, or another server uses it."""
        self._contents = directory / "files"
        try:
            if not directory.exists():
                directory.mkdir(0o700, parents=True, exist_ok=True)
            self._contents.mkdir(0o700, exist_ok=True)
            self._path = directory / "quire.sqlite"
            self._path.touch(0o600)
            # They are of clients: no other user is to read them, also if the directory was open to all before.
            self._contents.chmod(0o700)
            self._path.chmod(0o600)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"data_dir {directory} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"data_dir {directory} is used by another server; give each its own") from error
        try:
            self._database = sqlite3.connect(self._path, check_same_thread=False)  # the event loop alone uses it
            [(version,)] = self._database.execute("PRAGMA user_version")
            if version == 0:
                with self._database:
                    self._database.execute(TABLE)
                    self._database.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            os.close(self._lock)
            raise ConfigError(f"data_dir {directory} cannot be used: {self._path.name}: {error}") from error
        if version not in (0, VERSION):
            self.close()
            raise ConfigError(f"data_dir {directory} is of another version of Quire; give another directory")
        self._drop_strays()

    def close(self) -> None:
        """Close the directory, so that another server can use it."""
        self._database.close()
        os.close(self._lock)

    def content(self, name: str) -> Path:
        """Return the path of a file's content. name: the file's id."""
        return self._contents / name

    def put(self, owner: str, *objects: Mapping[str, Any]) -> None:
        """Add objects, or replace them, all at once. Raises OSError."""
        rows = [(one["id"], owner, one["object"], json.dumps(one)) for one in objects]
        upsert = (
            "INSERT INTO objects (id, owner, kind, value) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET value = excluded.value"
        )
        try:
            with self._database:
                self._database.executemany(upsert, rows)
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error), str(self._path)) from error

    def get(self, owner: str, kind: str, name: str) -> Any:
        """Return an owner's object; None if it is unknown."""
        if not name.isascii():  # no id is, and a text may have half of a character
            return None
        found = self._database.execute(
            "SELECT value FROM objects WHERE id = ? AND kind = ? AND owner = ?", (name, kind, owner)
        ).fetchone()
        return None if found is None else json.loads(found[0])

    def delete(self, name: str) -> None:
        """Remove a file. Raises OSError."""
        try:
            with self._database:
                self._database.execute("DELETE FROM objects WHERE id = ?", (name,))
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error), str(self._path)) from error
        self.content(name).unlink(missing_ok=True)

    def listed(
        self,
        owner: str,
        kind: str,
        after: str | None,
        limit: int,
        *,
        oldest_first: bool = False,
        purpose: str | None = None,
    ) -> list[Any]:
        """Return up to `limit` objects of an owner that come after another in the order of their creation."""
        sign, order = (">", "ASC") if oldest_first else ("<", "DESC")
        query = (
            "SELECT value FROM objects WHERE owner = ? AND kind = ? "
            f"AND (? IS NULL OR number {sign} (SELECT number FROM objects WHERE id = ?)) "
            f"AND (? IS NULL OR json_extract(value, '$.purpose') = ?) ORDER BY number {order} LIMIT ?"
        )
        found = self._database.execute(query, (owner, kind, after, after, purpose, purpose, limit))
        return [json.loads(value) for (value,) in found]

    def size(self, owner: str) -> int:
        """Return the bytes of all files of an owner."""
        query = "SELECT coalesce(sum(json_extract(value, '$.bytes')), 0) FROM objects WHERE owner = ? AND kind = ?"
        [(size,)] = self._database.execute(query, (owner, FILE))
        return int(size)

    def batches(self) -> list[tuple[str, Any]]:
        """Return all batches with their owners, the oldest first."""
        found = self._database.execute("SELECT owner, value FROM objects WHERE kind = ? ORDER BY number", (BATCH,))
        return [(owner, json.loads(value)) for owner, value in found]

    def _drop_strays(self) -> None:
        """Remove contents that no object has: of an upload or a deletion that was interrupted."""
        known = {name for (name,) in self._database.execute("SELECT id FROM objects")}
        known |= {name for _, one in self.batches() if one["status"] in OPEN for name in result_files(one["id"])}
        for path in self._contents.iterdir():
            if path.name not in known:
                path.unlink()


def result_files(batch: str) -> tuple[str, str]:
    """Return the ids of the files of a batch's answers and errors."""
    name = batch.removeprefix("batch_")
    return f"file-output-{name}", f"file-errors-{name}"
