"""Locating checkpoints: in a directory, or in the hub's cache, with a download if needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from quire.config import EMBEDDED_NAME
from quire.errors import ModelError
from quire.models.recommended import find
from quire.models.weights import read_index
from quire.progress import notice

EMBEDDED = Path(__file__).parent.parent / "embedded"
DESCRIPTION = ("*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json",
               "chat_template.jinja", "*processor_config.json")  # fmt: skip
WEIGHTS = ("*.safetensors",)
NOT_THESE = ("*/*", "consolidated*")  # files with the same weights in other forms
LOOKS_LIKE_A_PATH = re.compile(r"[/~.\\]|.*[/\\].*[/\\]")
GGUF = ".gguf"
ONE_OF_SEVERAL = re.compile(r"(.*)-([0-9]+)-of-([0-9]+)(\..*)")
MOST_MISSING = 1000  # the number of files comes from a file's name, which may state any number
Report: TypeAlias = Callable[[int, int], None]  # takes bytes so far and in all
SHOWN = 3  # missing files that an error names


def locate(model: str | None, gguf_file: str | None = None) -> Path:
    """Return the path of a model: the embedded one (None), a directory, a GGUF file, or a repository in the cache.

    gguf_file: the name of a GGUF file in the directory or the repository; None: no GGUF file, or `model` is its path.

    Files of a repository that the cache lacks are downloaded, unless the hub library is in offline mode. A short name
    is a repository's, see `quire.models.recommended`. Raises ModelError if the model is not found, or cannot be
    downloaded.
    """
    model, gguf_file = _full_name(model, gguf_file)
    if gguf_file is not None:
        return _locate_gguf(model, gguf_file)
    if model is None:
        return EMBEDDED
    if (local := _local(model)) is not None:
        return local
    cached = _cached(model)
    lacking = None if cached is None else missing_files(cached)
    if cached is not None and not lacking:
        return cached
    return _downloaded(model, (*DESCRIPTION, *WEIGHTS), lacking or ())


def locate_description(model: str | None, gguf_file: str | None = None) -> Path:
    """Return the path of a model as `locate` does, but download only its description, without weights.

    A GGUF file contains its description, so the whole file is downloaded.
    """
    model, gguf_file = _full_name(model, gguf_file)
    if gguf_file is not None:
        return _locate_gguf(model, gguf_file)
    if model is None:
        return EMBEDDED
    if (local := _local(model)) is not None:
        return local
    cached = _cached(model)
    if cached is not None and (cached / "config.json").exists():
        return cached
    return _downloaded(model, DESCRIPTION, ())


def _full_name(model: str | None, gguf_file: str | None) -> tuple[str | None, str | None]:
    """Return the repository and the GGUF file of a short name, and other names unchanged. Announce a download.

    A path or a repository of this name takes precedence.
    """
    if model == EMBEDDED_NAME and gguf_file is None and _local(model) is None:
        return None, None
    if model is None or _local(model) is not None or (":" not in model and _cached(model) is not None):
        return model, gguf_file
    if (short := find(model)) is None:
        return model, gguf_file
    cached = _cached(short.repository)
    if cached is None or (missing_files(cached) if short.file is None else not (cached / short.file).is_file()):
        notice(f"{model} is {short}: downloading {short.download / 10**9:.2f} GB")
    return short.repository, gguf_file or short.file


def _locate_gguf(model: str | None, name: str) -> Path:
    """Return the path of a GGUF file in a directory or a repository. Download it and its other parts if needed."""
    if model is None:
        raise ModelError(f"gguf_file is {name!r}, and no model is given; it is a file of a directory or a repository")
    if not name.endswith(GGUF):
        raise ModelError(f"gguf_file is {name!r}; it must be the name of a {GGUF} file")
    local = _local(model)
    if local is not None and local.is_file():
        raise ModelError(f"gguf_file is {name!r}, and {model!r} is a file already; leave one of them out")
    if (directory := local or _cached(model)) is not None and (directory / name).is_file():
        return directory / name
    if directory is None or local is None:
        directory = _downloaded(model, (_parts_of(name),), (name,) if directory is not None else (), excluded=())
    if not (directory / name).is_file():
        found = ", ".join(sorted(path.name for path in directory.glob(f"*{GGUF}"))) or "none"
        raise ModelError(f"{model!r} has no {name!r}; of its GGUF files there are here: {found}")
    return directory / name


def missing_files(directory: Path) -> list[str]:
    """Return the files that an interrupted download lacks, inferred from the others: at most MOST_MISSING."""
    if not (directory / "config.json").exists():
        return ["config.json"]
    if (files := read_index(directory)) is not None:
        return sorted(name for name in set(files.values()) if not (directory / name).exists())
    present = {path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in directory.glob(pattern)}
    if not present:
        return ["weights"]
    matches = filter(None, map(ONE_OF_SEVERAL.fullmatch, present))
    missing: list[str] = []
    for stem, digits, count, suffix in sorted({(m[1], len(m[2]), m[3], m[4]) for m in matches}):
        wanted = (f"{stem}-{i:0{digits}d}-of-{count}{suffix}" for i in range(1, int(count) + 1))
        missing += islice((name for name in wanted if name not in present), MOST_MISSING - len(missing))
    return sorted(missing)


def _local(model: str) -> Path | None:
    """Return a model's local directory or GGUF file; None for a repository. Raises ModelError for an invalid path."""
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.is_file() and path.suffix == GGUF)):
        return path
    if path.is_file():
        raise ModelError(f"{model!r} is a file; a model is given by its directory, or by its {GGUF} file")
    if LOOKS_LIKE_A_PATH.match(model) or (path.suffix == GGUF and "/" not in model):
        raise ModelError(f"there is no {_kind(model)} {model!r}")
    return None


def _kind(model: str) -> str:
    return "file" if model.endswith(GGUF) else "directory"


def _cached(model: str) -> Path | None:
    from huggingface_hub import snapshot_download  # 0.3 s to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError as error:
        # A copy is incomplete if it lacks any file of the repository, also those that are never downloaded.
        path = getattr(error, "snapshot_path", None)
        return None if path is None else Path(path)
    except HFValidationError as error:
        raise ModelError(
            f"{model!r} is neither a directory nor the name of a Hugging Face repository, which is OWNER/NAME"
        ) from error


def pull(model: str, revision: str | None = None, gguf_file: str | None = None, report: Report | None = None) -> Path:
    """Download the missing files of a repository's model into the hub's cache. Return its path.

    revision: a branch, tag or commit; None: main. gguf_file: download this GGUF file alone, with its other parts.
    report: called with the bytes so far and those of all files as data arrives, on several threads; it may raise an
    error, which ends the download.
    Raises ModelError if the hub has no such repository, revision or file, if the repository has only GGUF files and
    gguf_file is not given, or if the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    if (short := find(model)) is not None:
        model, gguf_file = short.repository, gguf_file or short.file

    with _asking(model, "could not be looked up on the hub"):
        names = [file.rfilename for file in HfApi().model_info(model, revision=revision).siblings or ()]
    gguf = sorted(name for name in names if name.endswith(GGUF))
    if gguf_file is not None:
        if gguf_file not in gguf:
            raise ModelError(f"{model!r} has no GGUF file {gguf_file!r}; it has {', '.join(gguf) or 'none'}")
        directory = _downloaded(model, (_parts_of(gguf_file),), (), excluded=(), revision=revision, report=report)
        return directory / gguf_file
    if "config.json" not in names:
        if not gguf:
            raise ModelError(f"{model!r} has no config.json and no GGUF file, so it is no model that can be served")
        raise ModelError(f"{model!r} has GGUF files alone; name one with --gguf-file: {', '.join(gguf)}")
    return _downloaded(model, (*DESCRIPTION, *WEIGHTS), (), revision=revision, report=report)


def _parts_of(gguf_file: str) -> str:
    """Return the name pattern of all parts of a GGUF file, which may be split into several files."""
    match = ONE_OF_SEVERAL.fullmatch(gguf_file)
    return gguf_file if match is None else f"{match[1]}-*-of-{match[3]}{GGUF}"


def _downloaded(
    model: str,
    patterns: Sequence[str],
    lacking: Sequence[str],
    excluded: Sequence[str] = NOT_THESE,
    revision: str | None = None,
    report: Report | None = None,
) -> Path:
    """Download the missing files of a repository and return its directory. lacking: names for the error message."""
    from huggingface_hub import snapshot_download

    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    state = (
        f"its copy in the hub's cache lacks {', '.join(lacking[:SHOWN])}{more}"
        if lacking
        else "it is not in the hub's cache"
    )
    which: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(excluded)}
    with _asking(model, f"is not a {_kind(model)}, {state}, and it could not be downloaded"):
        if report is not None:
            return Path(snapshot_download(model, revision=revision, tqdm_class=_reporting(report), **which))
        with _bars_at_terminals():
            return Path(snapshot_download(model, revision=revision, **which))


def _reporting(report: Report) -> type[Any]:
    """Return a class of progress bars that are reported instead of drawn."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reported(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": False, "file": StringIO()})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.unit == "B" and self.total:  # there are others, which count files
                report(int(self.n), int(self.total))
            return drawn

        def display(self, *_: Any, **__: Any) -> bool:
            return True

    return Reported


@contextmanager
def _bars_at_terminals() -> Iterator[None]:
    """Disable the progress bars of the hub's library within this context, unless standard error is a terminal."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _asking(model: str, state: str) -> Iterator[None]:
    """Convert any error of a request to the hub to a ModelError. state: the text if the hub cannot be reached."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{model!r} is a gated repository: request access at https://huggingface.co/{model}, then run "
            f"`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model!r} is not a {_kind(model)}, and the hub has no such repository, or a private one: check the name, "
            f"or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model!r} has no such revision; give one of its branches, tags or commits") from error
    except HFValidationError as error:
        raise ModelError(f"{model!r} is not the name of a Hugging Face repository, which is OWNER/NAME") from error
    except Exception as error:  # a network fails with many types of errors
        cause = error
        while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise ModelError(
            f"{model!r} {state} ({type(cause).__name__}). Give a directory, set HF_ENDPOINT to a "
            f"mirror of the hub, or give no model for the one that comes with Quire"
        ) from error
