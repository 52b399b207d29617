"""The directory of a disk cache, with a subdirectory for each model, cache dtype and block size, used by one process.

PATH/CACHEDIR.TAG     marks it as a cache, for backup programs too
PATH/secret           the key that digests are hashed with
PATH/<key>/           blocks of one kind: `lock`, `about.json`, and the files of `DiskStore`
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.cache.disk.store import LOG, NEW_LOG, SLOTS
from quire.errors import ConfigError

TAG = "CACHEDIR.TAG"
SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n# KV cache of Quire: `quire cache clear` removes it\n"
SECRET = "secret"
SECRET_SIZE = 32  # bytes
LOCK = "lock"
ABOUT = "about.json"
OPTION = "kv_disk"


class SlotLocation(NamedTuple):
    """A directory that this process owns until the lock is closed."""

    path: Path
    secret: bytes
    lock: int  # a file descriptor


@dataclass(frozen=True)
class Found:
    """The contents of a disk cache for one model."""

    path: Path
    about: Mapping[str, Any]
    num_bytes: int  # bytes that its files take on the disk
    is_used: bool  # by a process, now


def make_root(path: Path) -> bytes:
    """Create the directory of a disk cache, unless it exists, and read its secret.

    Raises ConfigError if the path is something else, or cannot be written.
    """
    try:
        if not path.exists():
            path.mkdir(mode=0o700, parents=True)
        check_root(path)
        if not (path / TAG).exists():
            _write(path / TAG, SIGNATURE.encode())
        secret = path / SECRET
        if not secret.exists() or secret.stat().st_size != SECRET_SIZE:  # with another one, no block would be found
            _write(secret, secrets.token_bytes(SECRET_SIZE))
        probe = path / f"{LOCK}.{secrets.token_hex(4)}"  # detects at once whether files can be written
        _write(probe, b"")
        probe.unlink()
        return secret.read_bytes()
    except OSError as error:
        raise ConfigError(f"{OPTION} is {str(path)!r}: {_reason(error)}; it must be a directory to write to") from error


def check_root(path: Path) -> None:
    """Raise ConfigError unless the path is the directory of a disk cache, is empty, or does not exist."""
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{OPTION} is {str(path)!r}, a file; it must be a directory")
        if path.exists() and not (path / TAG).exists() and any(path.iterdir()):
            raise ConfigError(
                f"{OPTION} is {str(path)!r}, which has other contents than a KV cache; give a separate directory"
            )
    except OSError as error:
        raise ConfigError(f"{OPTION} is {str(path)!r}: {_reason(error)}; it must be a directory to read") from error


def take(root: Path, secret: bytes, key: str, about: Mapping[str, Any]) -> SlotLocation:
    """Lock the directory of that key, which only one process may use. about: description of the model, for people.

    Raises ConfigError if a process uses it, or it cannot be created.
    """
    path = root / key
    lock = None
    try:
        lock = _locked(path)
        if lock is not None:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            _write(path / ABOUT, json.dumps(about, indent=1).encode())
            return SlotLocation(path, secret, lock)
        holder = _holder(path)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        raise ConfigError(f"{OPTION} is {str(root)!r}: {_reason(error)}; it must be a directory to write to") from error
    raise ConfigError(
        f"{OPTION} is {str(root)!r}, whose blocks of this model process {holder or '(unknown)'} uses; only one at a "
        f"time can, so give this one a separate directory"
    )


def listed(root: Path) -> list[Found]:
    """Return the contents of a disk cache, one entry per model. Raises ConfigError if the path is not a disk cache."""
    check_root(root)
    if not (root / TAG).exists():
        raise ConfigError(f"{str(root)!r} is not a KV cache: there is no {TAG} in it")
    return [_found(path) for path in sorted(root.iterdir()) if path.is_dir() and (path / LOCK).exists()]


def clear(root: Path) -> list[Found]:
    """Remove the contents of a disk cache. Raises ConfigError, and removes nothing, if a process uses some of it."""
    found = listed(root)
    locks: list[int] = []
    try:
        for one in found:
            lock = _locked(one.path)
            if lock is None:
                raise ConfigError(f"{one.path} is used by a process; end it first. Nothing was removed")
            locks.append(lock)
        for one in found:
            for path in one.path.iterdir():
                if path.name in (LOG, NEW_LOG, ABOUT) or path.name.startswith((f"{SLOTS}.", f"{ABOUT}.")):
                    path.unlink()
            (one.path / LOCK).unlink()  # from here on another process may take the directory
            with suppress(OSError):  # it contains foreign files
                one.path.rmdir()
    except OSError as error:
        raise ConfigError(f"{str(root)!r} cannot be cleared: {_reason(error)}") from error
    finally:
        for lock in locks:
            os.close(lock)
    return found


def _locked(path: Path) -> int | None:
    """Lock the directory for this process until the returned file is closed. Return None if another process has it."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # `clear` removed the directory meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path / LOCK):
                return lock
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        os.close(lock)  # `clear` removed it meanwhile, and another process may lock a new one


def _holder(path: Path) -> str:
    """Return the process that owns a directory, according to its lock file; empty if that is gone."""
    try:
        return (path / LOCK).read_text(errors="replace")[:20].strip()
    except FileNotFoundError:
        return ""


def _is_at(file: int, path: Path) -> bool:
    """Return whether the open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _found(path: Path) -> Found:
    try:
        about = json.loads((path / ABOUT).read_text())
    except (OSError, ValueError):
        about = {}
    blocks = 0
    for file in path.iterdir():
        with suppress(OSError):
            blocks += file.stat().st_blocks
    is_used = False
    with suppress(OSError):
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            is_used = True
        finally:
            os.close(lock)
    return Found(path, about if isinstance(about, dict) else {}, 512 * blocks, is_used)


def _write(path: Path, data: bytes) -> None:
    """Write a small file atomically, readable only by its owner."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, data)
        finally:
            os.close(file)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
