"""What stands in the hub's cache."""

from __future__ import annotations

from pathlib import Path

FOLDER = "models--"  # what the folder of a model's repository begins with; slashes are written as two dashes


def cached_names() -> list[str]:
    """The names of the models' repositories in the cache, by its folders alone: no file is looked at."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"{FOLDER}*"))
    return [folder.name.removeprefix(FOLDER).replace("--", "/") for folder in folders]
