"""Models in the hub's cache: list and remove downloaded models."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.models.hub import GGUF, missing_files
from quire.models.recommended import find

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

FOLDER = "models--"  # prefix of the folder of a model's repository; a slash in the name is written as two dashes
SHORT = 8  # characters of an abbreviated commit


@dataclass(frozen=True)
class CachedModel:
    """One revision of a repository in the cache, complete or not."""

    name: str
    commit: str
    refs: tuple[str, ...]  # branches and tags that name it
    path: Path
    size: int  # bytes
    modified: float  # s since 1970
    gguf_files: tuple[str, ...]
    missing: tuple[str, ...]  # files that are needed to serve it and are not in the cache


def cached_names() -> list[str]:
    """Return the names of the models' repositories in the cache. Only folders are listed, no file is read."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"{FOLDER}*"))
    return [folder.name.removeprefix(FOLDER).replace("--", "/") for folder in folders]


def cached_models() -> tuple[list[CachedModel], list[str]]:
    """Return all revisions of all models in the cache, sorted by name, and warnings about unreadable entries."""
    found = _scanned()
    if found is None:
        return [], []
    models = [
        _model(repository.repo_id, revision)
        for repository in found.repos
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(models, key=lambda model: (model.name.lower(), -model.modified)), [str(one) for one in found.warnings]


class Removal:
    """A set of models to remove from the cache."""

    def __init__(self, names: Sequence[str], revision: str | None = None) -> None:
        """Look up the models. revision: a commit, the beginning of one, or a branch; None: all revisions.

        Raises ModelError for a repository or a revision that is not in the cache.
        """
        models, _ = cached_models()
        self.models: list[CachedModel] = []
        for name in names:
            short = find(name) if ":" in name else None
            name = name if short is None else short.repository
            own = [model for model in models if model.name == name]
            if not own:
                close = difflib.get_close_matches(name, {model.name for model in models}, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "quire list shows its models"
                raise ModelError(f"{name!r} is not in the hub's cache; {hint}")
            if revision is not None and not (own := [one for one in own if _is_called(one, revision)]):
                raise ModelError(f"{name!r} has no revision {revision!r} in the hub's cache; quire list shows them")
            self.models += own
        found = _scanned()
        if found is None:
            raise ModelError("the hub's cache is gone")
        self._strategy: Any = found.delete_revisions(*{model.commit for model in self.models})
        self.nbytes: int = self._strategy.expected_freed_size  # without files that other revisions share

    def run(self) -> None:
        """Remove the models."""
        self._strategy.execute()


def _scanned() -> HFCacheInfo | None:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _model(name: str, revision: Any) -> CachedModel:
    path = Path(revision.snapshot_path)
    files = sorted(str(file.file_path.relative_to(path)) for file in revision.files)
    gguf = tuple(file for file in files if file.endswith(GGUF))
    return CachedModel(
        name=name,
        commit=revision.commit_hash,
        refs=tuple(sorted(revision.refs)),
        path=path,
        size=revision.size_on_disk,
        modified=revision.last_modified,
        gguf_files=gguf,
        missing=() if gguf else tuple(missing_files(path)),
    )


def _is_called(model: CachedModel, revision: str) -> bool:
    return revision in model.refs or (len(revision) >= SHORT // 2 and model.commit.startswith(revision))
