"""What a loaded model is to a fleet: the fingerprint of its files, options, libraries and bits.

An option of EngineConfig or CacheConfig is in a part as what it comes to, so that `auto` and its outcome are one. Or it
is left out, since no token, logprob or digest of a block depends on it:

    in    dtype, kv_cache_dtype                  what numbers are rounded to
          quantization, quantization_head, quantization_activations
          block_size                             digests are of whole blocks
          lora                                   the adapters, by name and weights
          max_model_len                          ends sequences, and chooses longrope's factors
          attention_backend, model_impl          whose operators and layers compute
    out   model, gguf_file, tokenizer            where the files lie; their contents are in
          device, prefetch                       which GPU, how memory is fetched; what is computed there is probed
          reproducible                           where bits need it, there is no fingerprint without it
          max_num_seqs, max_num_batched_tokens, scheduling_policy, async_scheduling, num_speculative_tokens
                                                 which rows are computed together: they keep their bits
          enable_lora, max_loras, max_lora_rank  what else could be loaded
          generation_config                      a gateway sends all of a request's sampling with it
          seed                                   of requests without one; a gateway gives one to each
          num_blocks, kv_cache_memory, enable_prefix_caching, preemption, swap_space, state_snapshot_interval
                                                 what is kept, moved or computed again, with the same bits
"""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire.cache.storage import cache_dtype
from quire.errors import ConfigError, ModelError
from quire.fleet.fingerprint import BITS_VERSION, Fingerprint, short_digest
from quire.fleet.probe import probe
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.models.files import Where, files_of

PAGE = 4096  # bytes
MAX_PAGES = 64  # of each file of weights that are read
LENGTH = 8  # bytes at a safetensors file's start that say how long its header is
LIBRARIES = ("torch", "tokenizers", "llguidance")  # that compute, cut texts into tokens, and say which token may follow
NONE = "none"


def replica_fingerprint(llm: LLM, template: str | None) -> Fingerprint:
    """The fingerprint of a loaded model with that chat template, by its source. Takes a part of a second.

    Of weights only a part is read, see `weights_digest`. Nothing of the engine is used, so it may be running.

    Raises ConfigError where a request's bits depend on its batch, so that no other replica can go on with it, and
    ModelError for files that cannot be read any more.
    """
    _check_bits_are_kept(llm)
    model, manager = llm.decoder, llm.engine.scheduler.manager
    is_own = isinstance(model, Decoder)
    libraries = LIBRARIES if is_own else (*LIBRARIES, "transformers")
    parts = {
        "weights": weights_digest(llm.files),
        "config": short_digest(json.dumps(llm.files.config(), sort_keys=True).encode()),
        "tokenizer": NONE if llm.tokenizer is None else short_digest(llm.tokenizer.json().encode()),
        "template": NONE if template is None else short_digest(template.encode(errors="surrogatepass")),
        "adapters": short_digest(json.dumps(lora_digests(llm), sort_keys=True).encode()),
        "end tokens": short_digest(repr(sorted(model.eos_token_ids)).encode()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantisation or NONE,
        "kv_cache_dtype": str(cache_dtype(llm.config.cache, model.dtype)).removeprefix("torch."),
        "block_size": str(manager.block_size),
        "cache groups": short_digest(repr(manager.groups).encode()),
        "cache salt": short_digest(manager.lookup.salt.encode()),
        "max_model_len": str(model.max_model_len),
        "backend": llm.backend.name,
        "layers": "own" if is_own else "transformers",
        "bits version": str(BITS_VERSION),
        **{library: _version(library) for library in libraries},
        **{f"bits of {kind}": digest for kind, digest in probe(model, llm.backend, llm.config).items()},
    }
    return Fingerprint(parts)


def lora_digests(llm: LLM) -> dict[str, str]:
    """The digests of the adapters' weights, by name."""
    loras = llm.engine.loras
    return {} if loras is None else {name: lora.digest for name, lora in loras.by_name.items()}


def _check_bits_are_kept(llm: LLM) -> None:
    if not llm.decoder.rows_keep_bits:
        raise ConfigError(
            f"{llm.files.path} has no fingerprint: with what transformers computes of it, a row's bits may depend on "
            "the batch, so no other replica could go on with a request. A fleet needs a model of Quire's own layers "
            "(`quire models` lists them)"
        )
    if llm.config.reproducible or llm.backend.keeps_bits(llm.config.device):
        return
    if not llm.backend.limits.reproducible:
        raise ConfigError(
            f"attention_backend is {llm.backend.name!r}, which does not give the same bits in every batch, so no other "
            "replica could go on with a request; leave it out, so that the device's own backend serves"
        )
    raise ConfigError(
        f"reproducible is False; on {llm.config.device!r} a row's bits then depend on the batch, so no other replica "
        "could go on with a request. Set reproducible=True (--reproducible)"
    )


def weights_digest(where: Where) -> str:
    """16 hexadecimal digits for a model's weights.

    Of each file its name, its size, the header that names its tensors (safetensors), and MAX_PAGES pages, evenly from
    the first to the last; links are followed. Two trainings of a model differ in them all. A change of single bytes
    between these pages is not seen.

    Raises ModelError where there are no weights, or a file cannot be read.
    """
    files = files_of(where)
    paths = files.weight_files()
    if not paths:
        raise ModelError(f"{files.path} holds no weights; a replica is known by the files that its model was read from")
    return short_digest(b"".join(_sampled(path) for path in paths))


def _sampled(path: Path) -> bytes:
    """What of a file of weights counts, each piece with its length before it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = [path.name.encode(errors="surrogateescape"), str(size).encode()]
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(LENGTH), "little")
                if length > size - LENGTH:
                    raise ModelError(f"{path} has {size} bytes, and says that its header has {length}")
                found.append(file.read(length))
            for page in sampled_pages(-(-size // PAGE)):
                file.seek(page * PAGE)
                found.append(file.read(PAGE))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return b"".join(len(part).to_bytes(8, "little") + part for part in found)


def sampled_pages(count: int) -> list[int]:
    """The pages that are read of a file with so many: all, or MAX_PAGES from the first to the last."""
    if count <= MAX_PAGES:
        return list(range(count))
    return [i * (count - 1) // (MAX_PAGES - 1) for i in range(MAX_PAGES)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # built into an application that has no list of its packages
        raise ConfigError(f"the version of {library} is not known; install it as a package") from None
