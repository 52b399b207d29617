"""Fingerprint of a loaded model: a digest of its files, options, libraries and computed bits.

An option of EngineConfig or CacheConfig is included with its resolved value, so `auto` and the value that it resolves
to give the same fingerprint. Or it is left out, since no token, logprob or digest of a block depends on it:

    in    dtype, kv_cache_dtype                  the types that numbers are rounded to
          quantization, quantization_head, quantization_activations
          block_size                             digests are of whole blocks
          lora                                   the adapters, by name and weights
          max_model_len                          ends sequences, and chooses longrope's factors
          attention_backend, model_impl          the operators and layers that compute
    out   model, gguf_file, mmproj, no_mmproj, tokenizer
                                                 paths of the files; their contents are in
          tensor_parallel_size                   how many processes compute: no sum is divided among them
          device, prefetch                       the GPU, how memory is fetched; its results are probed
          reproducible                           if bits depend on it, there is no fingerprint without it
          max_num_seqs, max_num_batched_tokens, scheduling_policy, async_scheduling, draft, draft_model,
          num_speculative_tokens
                                                 the rows of a batch: results are batch-invariant. A draft head that is
                                                 loaded is in, since its keys and values lie in the blocks
          enforce_eager                          whether a GPU captures the same kernels as graphs
          enable_lora, max_loras, max_lora_rank  limits of further adapters
          generation_config                      a gateway sends all of a request's sampling with it
          receipts                               where they are written
          seed                                   for requests without one; a gateway gives one to each
          num_blocks, kv_cache_memory, enable_prefix_caching, preemption, swap_space, state_snapshot_interval,
          kv_disk, kv_disk_space, prompt_cache_share
                                                 blocks that are kept, moved or recomputed, with the same bits
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch

from quire.config import EngineConfig
from quire.engine.engine import FIRST_VERSION, Engine
from quire.errors import ConfigError, QuireError
from quire.fingerprint.components import NONE, bits_parts, check_batch_invariant, library_version, named_parts
from quire.fingerprint.fingerprint import Fingerprint, short_digest
from quire.fingerprint.weights import weights_digest
from quire.frontend.tokenizer import Tokenizer
from quire.models.files import Files
from quire.models.hf_config import model_type
from quire.models.images import SERVED
from quire.models.model import Model
from quire.ops import Backend

log = logging.getLogger("quire")

NOT_IN_RECEIPTS = ("adapters", "block_size", "cache salt", "images", "pooling", "weights version")
LIBRARIES = ("tokenizers", "llguidance")  # they tokenize texts and constrain the next token
IMAGE_LIBRARIES = ("pillow", "torchvision", "transformers")  # they decode, resize and encode images


class Loaded(Protocol):
    """The parts of an `LLM` that its fingerprint depends on."""

    config: EngineConfig
    files: Files
    text_files: Files
    backend: Backend
    decoder: Model
    engine: Engine

    @property
    def weights_version(self) -> str:
        """The version of the current weights."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the model has one."""


def replica_fingerprint(llm: Loaded, template: str | None) -> Fingerprint:
    """Return the fingerprint of a loaded model. Takes less than a second.

    Only a part of the weights is read, see `weights_digest`. The engine is not used, so it may be running.
    template: the source of the chat template.

    Raises ConfigError if the model is not batch-invariant, since no other replica could continue its requests, and
    ModelError for files that cannot be read any more.
    """
    own = (llm.decoder, llm.files, llm.backend, llm.config)
    parts = bits_parts(*own, llm.engine.scheduler.manager)
    return Fingerprint(
        parts | _text_parts(llm, template) | _adapters_part(lora_digests(llm)) | _version_part(llm.weights_version)
    )


def system_fingerprint(llm: Loaded, template: str | None, loras: Mapping[str, str]) -> Fingerprint | None:
    """Return the fingerprint for the `system_fingerprint` of answers. If it is unknown, log that and return None.

    It is that of `replica_fingerprint`. A model that is not batch-invariant has none of these; then nothing is probed,
    and the device's name is a part instead. The engine may be running and may load adapters.

    Args:
        llm: the loaded model.
        template: the chat template's source.
        loras: the digests of the adapters' weights, by name.
    """
    own = (llm.decoder, llm.files, llm.backend, llm.config)
    try:
        try:
            check_batch_invariant(*own)
        except ConfigError:
            parts = named_parts(*own) | {"device": _device_name(llm.config.device)}
        else:
            parts = bits_parts(*own, llm.engine.scheduler.manager)
        return Fingerprint(
            parts | _text_parts(llm, template) | _adapters_part(loras) | _version_part(llm.weights_version)
        )
    except Exception as error:  # answers are valid without it
        trace = None if isinstance(error, QuireError) else error
        log.warning("answers have no system_fingerprint: %s", error, exc_info=trace)
        return None


def with_adapters(fingerprint: Fingerprint, loras: Mapping[str, str]) -> Fingerprint:
    """Return the fingerprint of the replica with these adapters. loras: digests of their weights, by name."""
    return Fingerprint({**fingerprint.parts, **_adapters_part(loras)})


def with_weights(fingerprint: Fingerprint, files: Files, version: str) -> Fingerprint:
    """Return the fingerprint of the replica with the weights of these files and of that version."""
    return Fingerprint({**fingerprint.parts, "weights": weights_digest(files), **_version_part(version)})


def _version_part(version: str) -> dict[str, str]:
    """Return the version of weights that were replaced; nothing for those of the model's files."""
    return {} if version == FIRST_VERSION else {"weights version": short_digest(version.encode(errors="replace"))}


def _adapters_part(loras: Mapping[str, str]) -> dict[str, str]:
    return {"adapters": short_digest(json.dumps(loras, sort_keys=True).encode())}


def _text_parts(llm: Loaded, template: str | None) -> dict[str, str]:
    """Return the parts for texts, vectors, libraries and new weights. Raises ConfigError for an unknown version."""
    return {
        **_version_part(llm.weights_version),
        "tokenizer": NONE if llm.tokenizer is None else short_digest(llm.tokenizer.json().encode()),
        "template": template_digest(template),
        "pooling": short_digest(json.dumps(asdict(llm.decoder.pooler.config), sort_keys=True).encode()),
        "end tokens": short_digest(repr(sorted(llm.decoder.eos_token_ids)).encode()),
        **{library: library_version(library) for library in LIBRARIES},
        **_images_part(llm.files),
    }


def _images_part(files: Files) -> dict[str, str]:
    """Return the part for the rows of images; nothing if the model reads none.

    The vision part of a GGUF file is among the weights, with the settings of its processor.
    """
    if model_type(files.config()) not in SERVED:
        return {}
    parts = [path.read_bytes() for path in sorted(files.path.glob("*processor_config.json"))]
    for library in IMAGE_LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{library} {version(library)}".encode())
    return {"images": short_digest(b"\0".join(parts))}


def receipts_fingerprint(llm: Loaded) -> Fingerprint:
    """Return the fingerprint for receipts. Raises the errors of `replica_fingerprint`.

    Parts that cannot change a token or logprob are left out, and the adapters, of which the request names its own. The
    version and the instruction set are parts in addition, to explain differences.
    """
    template = llm.text_files.template()
    whole = replica_fingerprint(llm, None if template is None else template[1])
    parts = {name: value for name, value in whole.parts.items() if name not in NOT_IN_RECEIPTS}
    added = {"quire": library_version("quire"), "instruction set": llm.backend.instruction_set or NONE}
    return Fingerprint(parts | added)


def template_digest(template: str | None) -> str:
    """Return the digest of a chat template's source."""
    return NONE if template is None else short_digest(template.encode(errors="surrogatepass"))


def _device_name(device: str) -> str:
    return device if device == "cpu" else torch.cuda.get_device_name(device)


def lora_digests(llm: Loaded) -> dict[str, str]:
    """Return the digests of the adapters' weights, by name. No other thread may load an adapter meanwhile."""
    loras = llm.engine.loras
    return {} if loras is None else {name: lora.digest for name, lora in loras.by_name.items()}
