"""What stands in the hub's cache: models that were downloaded."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.models.hub import GGUF, missing_files

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

FOLDER = "models--"  # what the folder of a model's repository begins with; slashes are written as two dashes
SHORT = 8  # characters of a commit that tell it from others


@dataclass(frozen=True)
class CachedModel:
    """One revision of a repository, as far as it is in the cache."""

    name: str
    commit: str
    refs: tuple[str, ...]  # branches and tags that name it
    path: Path
    size: int  # bytes
    modified: float  # s since 1970
    gguf_files: tuple[str, ...]
    missing: tuple[str, ...]  # files without which it cannot be served


def cached_names() -> list[str]:
    """The names of the models' repositories in the cache, by its folders alone: no file is looked at."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"{FOLDER}*"))
    return [folder.name.removeprefix(FOLDER).replace("--", "/") for folder in folders]


def cached_models() -> tuple[list[CachedModel], list[str]]:
    """All revisions of all models in the cache, by name, and what of the cache could not be read."""
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
    """What is about to be removed from the cache."""

    def __init__(self, names: Sequence[str], revision: str | None = None) -> None:
        """revision: a commit, or the beginning of one, or a branch; None: all of each.

        Raises ModelError for a repository or a revision that is not there.
        """
        models, _ = cached_models()
        self.models: list[CachedModel] = []
        for name in names:
            own = [model for model in models if model.name == name]
            if not own:
                close = difflib.get_close_matches(name, {model.name for model in models}, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "quire list shows what is there"
                raise ModelError(f"{name!r} is not in the hub's cache; {hint}")
            if revision is not None and not (own := [one for one in own if _is_called(one, revision)]):
                raise ModelError(f"{name!r} has no revision {revision!r} in the hub's cache; quire list shows them")
            self.models += own
        found = _scanned()
        if found is None:
            raise ModelError("the hub's cache is gone")
        self._strategy: Any = found.delete_revisions(*{model.commit for model in self.models})
        self.nbytes: int = self._strategy.expected_freed_size  # that nothing else in the cache uses

    def run(self) -> None:
        """Remove it."""
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
