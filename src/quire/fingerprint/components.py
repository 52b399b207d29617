"""The parts of a fingerprint: if all of them agree, blocks and answers have the same bits."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

from quire.cache.manager import BlockManager
from quire.cache.storage import cache_dtype
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.fingerprint.fingerprint import BITS_VERSION, short_digest
from quire.fingerprint.probe import probe
from quire.fingerprint.weights import weights_digest
from quire.models.decoder import Decoder
from quire.models.files import Files
from quire.models.model import Model
from quire.ops import Backend

NONE = "none"


def bits_parts(
    model: Model, files: Files, backend: Backend, config: EngineConfig, manager: BlockManager
) -> dict[str, str]:
    """Return the parts of a fingerprint that K, V and states depend on. Takes a fraction of a second.

    Only a part of the weights is read, see `weights_digest`. The engine is not used, so it may be running.

    Raises ConfigError if a row's bits depend on its batch, and ModelError if files can no longer be read.
    """
    check_batch_invariant(model, files, backend, config)
    return model_parts(model, files, backend, config) | {
        "block_size": str(manager.block_size),
        "cache salt": short_digest(manager.lookup.salt.encode()),
    }


def model_parts(model: Model, files: Files, backend: Backend, config: EngineConfig) -> dict[str, str]:
    """Return the parts of the model alone, without a cache. Raises ModelError if files can no longer be read."""
    probed = {f"bits of {kind}": digest for kind, digest in probe(model, backend, config).items()}
    return named_parts(model, files, backend, config) | probed


def named_parts(model: Model, files: Files, backend: Backend, config: EngineConfig) -> dict[str, str]:
    """Return the parts of `model_parts` that need no computation.

    Raises ModelError if files can no longer be read.
    """
    is_own = isinstance(model, Decoder)
    groups = model.whole.groups if model.draft_head is None else model.draft_head.whole_groups
    return {
        "weights": weights_digest(files),
        "config": short_digest(json.dumps(files.config(), sort_keys=True).encode()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantisation or NONE,
        "kv_cache_dtype": str(cache_dtype(config.cache, model.dtype)).removeprefix("torch."),
        "cache groups": short_digest(repr(groups).encode()),
        "max_model_len": str(model.max_model_len),
        "backend": backend.name,
        "layers": "own" if is_own else "transformers",
        "bits version": str(BITS_VERSION),
        **{library: library_version(library) for library in ("torch", *(() if is_own else ("transformers",)))},
    }


def check_batch_invariant(model: Model, files: Files, backend: Backend, config: EngineConfig) -> None:
    """Raise ConfigError if a row's bits depend on its batch."""
    if not model.rows_are_batch_invariant:
        raise ConfigError(
            f"{files.path} has no fingerprint: in layers that transformers computes, a row's bits may depend on "
            "the batch, so no other replica could continue a request. A fleet needs a model of Quire's own layers "
            "(`quire models` lists them)"
        )
    if config.reproducible or backend.batch_invariant(config.device):
        return
    if not backend.limits.reproducible:
        raise ConfigError(
            f"attention_backend is {backend.name!r}, which does not give the same bits in every batch, so no other "
            "replica could continue a request; leave it out, so that the device's own backend serves"
        )
    raise ConfigError(
        f"reproducible is False; on {config.device!r} a row's bits then depend on the batch, so no other replica "
        "could continue a request. Set reproducible=True (--reproducible)"
    )


def library_version(library: str) -> str:
    """Return the installed version. Raises ConfigError if it is not known."""
    try:
        return version(library)
    except PackageNotFoundError:  # built into an application without package metadata
        raise ConfigError(f"the version of {library} is not known; install it as a package") from None
