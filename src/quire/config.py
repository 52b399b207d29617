"""The engine's options. Frozen: what a run was started with is what it runs with."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from typing import Any

from quire.errors import ConfigError, check_integer

PREEMPTION = ("recompute", "swap")
POLICIES = ("fcfs", "priority", "shortest")
MODEL_IMPLS = ("auto", "quire", "transformers")
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
         "tib": 2**40}  # fmt: skip


MAX_SPECULATIVE_TOKENS = 7  # with the token before them, as many rows as take hardly longer than one


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much KV cache there is and how it is cut into blocks."""

    block_size: int = 16  # B, tokens a block
    num_blocks: int | None = None  # N; None: as many as the memory holds
    kv_cache_memory: int | float | str = 0.5  # bytes ("2GiB", 2147483648), or a share (0.5, "50%") of the free memory
    enable_prefix_caching: bool = True  # reuse the blocks of equal prefixes; without it only samples of a prompt share
    preemption: str = "recompute"  # when blocks run out, the last request's are dropped, or moved to the host ("swap")
    swap_space: int | float | str | None = None  # on the host, for preemption="swap"; None: 4 GiB

    def __post_init__(self) -> None:
        check_integer(ConfigError, "block_size", self.block_size, 1, 256)
        if self.num_blocks is not None:
            check_integer(ConfigError, "num_blocks", self.num_blocks, 1, 2**31 - 1)
        parse_memory(self.kv_cache_memory, free=2**40)
        if self.preemption not in PREEMPTION:
            raise ConfigError(f"preemption is {self.preemption!r}; it must be {' or '.join(map(repr, PREEMPTION))}")
        if self.swap_space is not None:
            parse_memory(self.swap_space, free=2**40, name="swap_space")
            if self.preemption != "swap":
                raise ConfigError(f"swap_space is {self.swap_space!r}; only preemption='swap' uses it, so give both")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching is {self.enable_prefix_caching!r}; it must be True or False")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is built from. Names and meanings are vLLM's where it has them."""

    model: str | None = None  # a directory or a Hugging Face repository; None: the embedded model
    dtype: str = "auto"  # "auto": the checkpoint's; or "float32", "bfloat16", "float16"
    model_impl: str = "auto"  # "quire": our decoder; "transformers": its code with our attention; "auto": what there is
    device: str = "cpu"
    attention_backend: str = "auto"
    max_model_len: int | None = None  # tokens of the longest sequence; None: what the model was made for
    max_num_seqs: int = 256  # sequences that run at the same time
    max_num_batched_tokens: int = 2048  # query tokens a step
    scheduling_policy: str = "fcfs"  # who comes first: "fcfs", "priority" (lower first) or "shortest" (prompt)
    num_speculative_tokens: int | None = None  # guessed at a time by prompt lookup; None: 3 where rows keep their bits
    seed: int = 0  # requests without a seed of their own derive one from it
    reproducible: bool = False  # on a GPU: the same bits whatever the batch and the chunks; on a CPU that always holds
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            check_integer(ConfigError, "max_model_len", self.max_model_len, 1)
        check_integer(ConfigError, "max_num_seqs", self.max_num_seqs, 1)
        check_integer(ConfigError, "max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.num_speculative_tokens is not None:
            check_integer(ConfigError, "num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        check_integer(ConfigError, "seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.reproducible, bool):
            raise ConfigError(f"reproducible is {self.reproducible!r}; it must be True or False")
        if self.model_impl not in MODEL_IMPLS:
            known = ", ".join(map(repr, MODEL_IMPLS))
            raise ConfigError(f"model_impl is {self.model_impl!r}; it must be one of {known}")
        if self.scheduling_policy not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ConfigError(f"scheduling_policy is {self.scheduling_policy!r}; the policies are {known}")


def engine_config(**options: Any) -> EngineConfig:
    """An EngineConfig from flat options, the cache's included. Raises ConfigError for an unknown one."""
    cache_keys = {f.name for f in fields(CacheConfig)}
    known = cache_keys | {f.name for f in fields(EngineConfig)} - {"cache"}
    if "dtype" in options:  # torch.bfloat16 is as good as "bfloat16"
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(sorted(known))}"
            raise ConfigError(f"there is no engine option {key!r}; {hint}")
    cache = CacheConfig(**{key: value for key, value in options.items() if key in cache_keys})
    return EngineConfig(**{key: value for key, value in options.items() if key not in cache_keys}, cache=cache)


def parse_memory(amount: int | float | str, free: int | None, name: str = "kv_cache_memory") -> int:
    """Bytes meant by "2GiB", "1.5 GB", 2147483648, or by a share ("50%", 0.5) of `free` bytes.

    A bare number up to 1 is a share. Raises ConfigError, which calls the option `name`, for anything else, and for a
    share of an unknown amount (None).
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*|%)", str(amount).strip().lower())
    if match and not isinstance(amount, bool):
        value, unit = float(match[1]), match[2]
        if unit == "%" or (unit == "" and value <= 1):
            share = value / 100 if unit == "%" else value
            if 0 < share <= 1 and free is not None:
                return int(share * free)
            if free is None:
                raise ConfigError(
                    f"{name} is {amount!r}, a share, and this system does not tell how much memory is free; "
                    f"give bytes, as in '2GiB'"
                )
        elif unit in UNITS and value * UNITS[unit] >= 1:
            return int(value * UNITS[unit])
    raise ConfigError(
        f"{name} is {amount!r}; give bytes with a unit, as in '2GiB', or a share of the free memory, as in 0.5 or '50%'"
    )
