"""The directory of a disk cache: in it one for each model, cache dtype and block size, which one process has.

PATH/CACHEDIR.TAG     says that it is a cache, to backup programs too
PATH/secret           what digests are hashed with
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


class Place(NamedTuple):
    """A directory that this process has, until the lock is closed."""

    path: Path
    secret: bytes
    lock: int  # a file


@dataclass(frozen=True)
class Found:
    """What there is of one model."""

    path: Path
    about: Mapping[str, Any]
    num_bytes: int  # that its files take on the disk
    is_used: bool  # by a process, now


def make_root(path: Path) -> bytes:
    """Make the directory of a disk cache, unless it is there, and read its secret.

    Raises ConfigError where the path is something else, or cannot be written.
    """
    try:
        if not path.exists():
            path.mkdir(mode=0o700, parents=True)
        check_root(path)
        if not (path / TAG).exists():
            _write(path / TAG, SIGNATURE.encode())
        secret = path / SECRET
        if not secret.exists() or secret.stat().st_size != SECRET_SIZE:  # with another one, nothing is found
            _write(secret, secrets.token_bytes(SECRET_SIZE))
        probe = path / f"{LOCK}.{secrets.token_hex(4)}"  # says at once whether anything can be written
        _write(probe, b"")
        probe.unlink()
        return secret.read_bytes()
    except OSError as error:
        raise ConfigError(f"{OPTION} is {str(path)!r}: {_reason(error)}; it must be a directory to write to") from error


def check_root(path: Path) -> None:
    """Raise ConfigError for what is no directory of a disk cache, and no empty one that may become one."""
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{OPTION} is {str(path)!r}, a file; it must be a directory")
        if path.exists() and not (path / TAG).exists() and any(path.iterdir()):
            raise ConfigError(
                f"{OPTION} is {str(path)!r}, which holds something else than a KV cache; give a directory of its own"
            )
    except OSError as error:
        raise ConfigError(f"{OPTION} is {str(path)!r}: {_reason(error)}; it must be a directory to read") from error


def take(root: Path, secret: bytes, key: str, about: Mapping[str, Any]) -> Place:
    """Take the directory of that key, which no other process may have. about: of the model, for people.

    Raises ConfigError where a process has it, or it cannot be made.
    """
    path = root / key
    lock = None
    try:
        lock = _locked(path)
        if lock is not None:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            _write(path / ABOUT, json.dumps(about, indent=1).encode())
            return Place(path, secret, lock)
        holder = _holder(path)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        raise ConfigError(f"{OPTION} is {str(root)!r}: {_reason(error)}; it must be a directory to write to") from error
    raise ConfigError(
        f"{OPTION} is {str(root)!r}, whose blocks of this model process {holder or '(unknown)'} uses; only one at a "
        f"time can, so give this one a directory of its own"
    )


def listed(root: Path) -> list[Found]:
    """What a disk cache holds, a model each. Raises ConfigError where the path is none."""
    check_root(root)
    if not (root / TAG).exists():
        raise ConfigError(f"{str(root)!r} is no KV cache: there is no {TAG} in it")
    return [_found(path) for path in sorted(root.iterdir()) if path.is_dir() and (path / LOCK).exists()]


def clear(root: Path) -> list[Found]:
    """Remove what a disk cache holds. Raises ConfigError, removing nothing, where a process uses some of it."""
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
            (one.path / LOCK).unlink()  # from here on another process may have the directory
            with suppress(OSError):  # somebody put something else there
                one.path.rmdir()
    except OSError as error:
        raise ConfigError(f"{str(root)!r} cannot be cleared: {_reason(error)}") from error
    finally:
        for lock in locks:
            os.close(lock)
    return found


def _locked(path: Path) -> int | None:
    """The file whose lock makes the directory this process's until it is closed. None: a process has it."""
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
    """The process that has a directory, as its lock says; empty where that is gone."""
    try:
        return (path / LOCK).read_text(errors="replace")[:20].strip()
    except FileNotFoundError:
        return ""


def _is_at(file: int, path: Path) -> bool:
    """Return whether the open file is the one of that path."""
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
    """Write a small file, whole or not at all, readable by its owner alone."""
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
