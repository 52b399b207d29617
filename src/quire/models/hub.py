"""Where a checkpoint stands: in a directory, or in the hub's cache, which is filled from the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quire.errors import ModelError
from quire.models.weights import INDEX, read_json

EMBEDDED = Path(__file__).parent.parent / "embedded"
DESCRIPTION = ("*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json",
               "chat_template.jinja")  # fmt: skip
WEIGHTS = ("*.safetensors",)
NOT_THESE = ("*/*", "consolidated*")  # the same weights in other forms
LOOKS_LIKE_A_PATH = re.compile(r"[/~.\\]|.*[/\\].*[/\\]")
GGUF = ".gguf"
ONE_OF_SEVERAL = re.compile(r"(.*)-([0-9]+)-of-([0-9]+)(\..*)")
SHOWN = 3  # missing files that an error names


def locate(model: str | None, gguf_file: str | None = None) -> Path:
    """Where a model is: the embedded one (None), a directory, a GGUF file, or a repository in the hub's cache.

    gguf_file: a GGUF file's name in the directory or the repository; None: it is no GGUF file, or given as `model`.

    A repository of which the cache lacks files is downloaded, unless the hub library is set to be offline; what is
    there of it already is not downloaded again. Raises ModelError where there is none of these.
    """
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
    """As `locate`, but of a repository that is not in the cache only what describes it: no weights are downloaded.

    A GGUF file describes itself, so all of it is.
    """
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


def _locate_gguf(model: str | None, name: str) -> Path:
    """A GGUF file in a directory or a repository, with those that belong to it."""
    if model is None:
        raise ModelError(f"gguf_file is {name!r}, and no model is given; it is a file of a directory or a repository")
    if not name.endswith(GGUF):
        raise ModelError(f"gguf_file is {name!r}; it must be the name of a {GGUF} file")
    match = ONE_OF_SEVERAL.fullmatch(name)
    pattern = name if match is None else f"{match[1]}-*-of-{match[3]}{GGUF}"
    local = _local(model)
    if local is not None and local.is_file():
        raise ModelError(f"gguf_file is {name!r}, and {model!r} is a file already; leave one of them out")
    if (directory := local or _cached(model)) is not None and (directory / name).is_file():
        return directory / name
    if directory is None or local is None:
        directory = _downloaded(model, (pattern,), (name,) if directory is not None else (), excluded=())
    if not (directory / name).is_file():
        found = ", ".join(sorted(path.name for path in directory.glob(f"*{GGUF}"))) or "none"
        raise ModelError(f"{model!r} has no {name!r}; of its GGUF files there are here: {found}")
    return directory / name


def missing_files(directory: Path) -> list[str]:
    """What a download that was interrupted has left out, as far as the files that are there tell."""
    if not (directory / "config.json").exists():
        return ["config.json"]
    if (directory / INDEX).exists():
        wanted = set(read_json(directory / INDEX)["weight_map"].values())
        return sorted(name for name in wanted if not (directory / name).exists())
    present = {path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in directory.glob(pattern)}
    if not present:
        return ["weights"]
    wanted = set()
    for match in filter(None, map(ONE_OF_SEVERAL.fullmatch, present)):
        stem, number, count, suffix = match.groups()
        wanted |= {f"{stem}-{i:0{len(number)}d}-of-{count}{suffix}" for i in range(1, int(count) + 1)}
    return sorted(wanted - present)


def _local(model: str) -> Path | None:
    """The directory or GGUF file of a model that is no repository. Raises ModelError for a path with neither."""
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.is_file() and path.suffix == GGUF)):
        return path
    if path.is_file():
        raise ModelError(f"{model!r} is a file; a model is given by its directory, or by its {GGUF} file")
    if LOOKS_LIKE_A_PATH.match(model):
        raise ModelError(f"there is no directory {model!r}")
    return None


def _cached(model: str) -> Path | None:
    from huggingface_hub import snapshot_download  # 0.3 s to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelError(
            f"{model!r} is neither a directory nor the name of a Hugging Face repository, which is OWNER/NAME"
        ) from error


def _downloaded(
    model: str, patterns: Sequence[str], lacking: Sequence[str], excluded: Sequence[str] = NOT_THESE
) -> Path:
    """The repository's files, after the hub was asked for those that are not there. lacking: of these, for an error."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=list(excluded)))
    except GatedRepoError as error:
        raise ModelError(
            f"{model!r} is a repository that wants to know its users: ask at https://huggingface.co/{model}, then run "
            f"`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model!r} is not a directory, and the hub has no such repository, or a private one: check the name, or "
            f"run `hf auth login`"
        ) from error
    except Exception as error:  # a network's ways to fail are many
        cause = error
        while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        state = (
            f"its copy in the hub's cache lacks {', '.join(lacking[:SHOWN])}{more}"
            if lacking
            else ("it is not in the hub's cache")
        )
        raise ModelError(
            f"{model!r} is not a directory, {state}, and it could not be downloaded ({type(cause).__name__}). Give a "
            f"directory, set HF_ENDPOINT to a mirror of the hub, or give no model for the one that comes with Quire"
        ) from error
