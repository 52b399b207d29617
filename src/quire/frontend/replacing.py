"""Replace the weights of a loaded model, and free its memory while it is not needed.

New weights are loaded in full before anything is changed, by the loader of the model's files. They are used from the
engine's next step on. Loading may run on any thread, everything else on the engine's.
"""

from __future__ import annotations

import gc
from typing import NamedTuple, Protocol, cast

import torch

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError, EngineAsleep, ModelError
from quire.fingerprint.fingerprint import Fingerprint
from quire.fingerprint.weights import weights_digest
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.receipts import Receipts
from quire.models import load_model, load_replaced
from quire.models.files import Files
from quire.models.model import Model
from quire.models.replaced import NewWeights, ReplacedFiles
from quire.ops import Backend
from quire.parallel.group import ProcessGroup

LEVELS = (1, 2)  # of sleep


class Parts(Protocol):
    """The parts of an `LLM` that are used here."""

    config: EngineConfig
    files: Files
    backend: Backend
    group: ProcessGroup | None
    decoder: Model
    engine: Engine
    processor: OutputProcessor
    num_replacements: int
    receipts: Receipts | None

    def read_images(self) -> None:
        """Read images with the vision part of the current weights."""


class Loaded(NamedTuple):
    """A model that was loaded to be used by an LLM."""

    model: Model
    files: Files
    before: Files  # those of the LLM when it was loaded
    version: str | None = None  # of its weights; None: to be counted


class DroppedModel:
    """Placeholder for the model of an LLM that sleeps without weights."""

    def __getattr__(self, name: str) -> object:
        raise EngineAsleep


def load_new(llm: Parts, new: NewWeights, version: str | None) -> Loaded:
    """Load new weights for an LLM. Raises the errors of `LLM.update_weights`; the LLM is not changed."""
    _check_single(llm)
    _check_no_adapters(llm)
    if version is not None and (not isinstance(version, str) or not version):
        raise ConfigError(f"version is {version!r}; it must be a text of at least one character")
    if version == llm.engine.weights_version:
        raise ConfigError(f"version is {version!r}, which the current weights have; give another one, or none")
    before = llm.files
    files, model = load_replaced(before, llm.config, llm.backend, new)
    llm.engine.check_replacement(model)
    return Loaded(model, files, before, version)


def use_new(llm: Parts, loaded: Loaded) -> str:
    """Use loaded weights from the next step on. Return their version.

    Raises ConfigError if other weights were used since they were loaded.
    """
    if loaded.before is not llm.files:
        raise ConfigError("the weights were replaced or dropped by another call meanwhile; replace them again")
    number = llm.num_replacements + 1
    version = loaded.version or str(number + (str(number) == llm.engine.weights_version))
    digest = None if llm.receipts is None else weights_digest(loaded.files)
    llm.engine.replace_weights(loaded.model, version)
    llm.processor.replace_weights(version)
    llm.decoder, llm.files = loaded.model, loaded.files
    llm.read_images()
    llm.num_replacements += 1
    if llm.receipts is not None and digest is not None:
        llm.receipts.fingerprint = Fingerprint({**llm.receipts.fingerprint.parts, "weights": digest})
    _give_back(llm)
    return version


def sleep(llm: Parts, level: int) -> None:
    """Free the memory of an LLM's blocks, at level 2 also of its weights. See `LLM.sleep`."""
    if level not in LEVELS or isinstance(level, bool):
        raise ConfigError(f"level is {level!r}; it must be 1 (free the KV cache) or 2 (free the weights as well)")
    _check_single(llm)
    if level == 2 and not is_dropped(llm):
        _check_no_adapters(llm)
    drops = level == 2 or is_dropped(llm)
    llm.engine.sleep(None if drops else llm.decoder)
    if drops and not is_dropped(llm):
        llm.decoder = cast(Model, DroppedModel())
        if isinstance(llm.files, ReplacedFiles) and not llm.files.is_on_disk:
            llm.files = ReplacedFiles(llm.files.path, ())
    _give_back(llm)


def is_dropped(llm: Parts) -> bool:
    """Return whether an LLM sleeps without weights."""
    return isinstance(llm.decoder, DroppedModel)


def load_dropped(llm: Parts) -> Loaded | None:
    """Load the weights that `sleep` dropped; None if it kept them. Raises ModelError if they were in memory only."""
    if not is_dropped(llm):
        return None
    if isinstance(llm.files, ReplacedFiles) and not llm.files.is_on_disk:
        raise ModelError(
            f"the weights of version {llm.engine.weights_version!r} were given from memory, and sleep(level=2) dropped "
            "them; call update_weights with all tensors or a directory before wake_up"
        )
    return Loaded(load_model(llm.files, llm.config, llm.backend), llm.files, llm.files)


def wake_up(llm: Parts, loaded: Loaded | None) -> None:
    """End the sleep. loaded: the result of `load_dropped`, which is not used if weights were replaced meanwhile."""
    if is_dropped(llm) and loaded is not None and loaded.before is llm.files:
        llm.decoder = loaded.model
    if llm.engine.is_asleep:
        llm.engine.wake_up(llm.decoder)


def _check_single(llm: Parts) -> None:
    """Raise ConfigError for an LLM whose weights or blocks are in several processes."""
    if llm.group is not None:
        raise ConfigError(
            f"tensor_parallel_size is {llm.config.tensor_parallel_size}; several processes that compute a model keep "
            "their weights and memory until they end, so start them again"
        )


def _check_no_adapters(llm: Parts) -> None:
    """Raise ConfigError for an LLM with adapters, which are fitted to the layers of its model."""
    if llm.engine.loras is not None:
        raise ConfigError(
            "enable_lora is True; the weights of a model with adapters can be neither replaced nor dropped, so leave "
            "the option out, or replace the adapter (load_inplace) in place of the weights"
        )


def _give_back(llm: Parts) -> None:
    """Return unused memory to the system."""
    gc.collect()  # a model's parts refer to one another
    if llm.config.device != "cpu":
        torch.cuda.empty_cache()
