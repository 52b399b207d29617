"""The engine's options. Frozen: what a run was started with is what it runs with.

Each field says all there is to know of its option: `quire --help` and the checks are made from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.errors import ConfigError, check_integer, check_known, check_number

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
         "tib": 2**40}  # fmt: skip
MAX_SPECULATIVE_TOKENS = 7  # with the token before them, as many rows as take hardly longer than one
MOST_TOKENS = 2048  # query tokens of a step
EMBEDDED_NAME = "quire-embedded"  # what clients call the model that comes with Quire
OPTION = "option"  # where a field's metadata has its Option


@dataclass(frozen=True)
class Option:
    """What there is to know of a field of a config besides its type and default."""

    help: str
    lower: int | float | None = None  # the least value; an int for integers, a float for numbers; None: not checked
    upper: int | float | None = None  # the greatest value; None: any
    choices: tuple[str, ...] = ()  # the values that there are; (): checked elsewhere
    aliases: tuple[str, ...] = ()  # further names on the command line
    variable: str | None = None  # environment variable that gives it on the command line, texts with spaces between


def option(default: Any, help: str, **about: Any) -> Any:
    """A dataclass field with its default and its Option."""
    return field(default=default, metadata={OPTION: Option(help, **about)})


def options_of(config: Any) -> Mapping[str, Option]:
    """The Option of each field of a config that has one, by the field's name."""
    return {one.name: one.metadata[OPTION] for one in fields(config) if OPTION in one.metadata}


def check_options(config: Any) -> None:
    """Raise ConfigError for a value that is none of its option's. None is allowed where it is the default."""
    for one in fields(config):
        about: Option | None = one.metadata.get(OPTION)
        name, value = one.name, getattr(config, one.name)
        if about is None or (value is None and one.default is None):
            continue
        if (isinstance(one.default, bool) or one.type == "bool | None") and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be True or False")
        if isinstance(about.lower, float):
            check_number(ConfigError, name, value, about.lower, float("inf") if about.upper is None else about.upper)
        elif about.lower is not None:
            check_integer(ConfigError, name, value, about.lower, None if about.upper is None else int(about.upper))
        if about.choices and value not in about.choices:
            known = [repr(choice) for choice in about.choices]
            wanted = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
            raise ConfigError(f"{name} is {value!r}; it must be {wanted}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much KV cache there is and how it is cut into blocks."""

    block_size: int = option(16, "Tokens per KV block.", lower=1, upper=256)
    num_blocks: int | None = option(
        None,
        "Number of KV blocks. Overrides --kv-cache-memory.",
        lower=1,
        upper=2**31 - 1,
        aliases=("--num-gpu-blocks-override",),
    )
    kv_cache_memory: int | float | str = option(
        0.5,
        "Memory of the KV cache: bytes (2GiB) or a share of the free memory (50%).",
        aliases=("--kv-cache-memory-bytes",),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Dtype of the KV cache: auto (the one computed in), int8 (half of bf16), or on a GPU fp8.",
        choices=("auto", "int8", "fp8"),
    )
    state_snapshot_interval: int = option(
        512, "Of layers that keep a state: tokens from one state that is kept for reuse to the next.", lower=1
    )
    # Without it, only samples of one prompt share blocks.
    enable_prefix_caching: bool = option(True, "Reuse the KV blocks of prompts that begin alike.")
    preemption: str = option(
        "recompute",
        "When blocks run out, the last request's are dropped (recompute) or moved to the host (swap).",
        choices=("recompute", "swap"),
    )
    swap_space: int | float | str | None = option(
        None, "Host memory for swapped blocks: bytes or a share. Default: 4GiB."
    )
    kv_disk: str | None = option(
        None, "Directory that keeps KV blocks for later and for the next start. Default: none. It reveals prompts."
    )
    kv_disk_space: int | float | str | None = option(None, "Disk space that these blocks may take. Default: 10GiB.")

    def __post_init__(self) -> None:
        check_options(self)
        parse_memory(self.kv_cache_memory, free=2**40)
        if self.swap_space is not None:
            parse_memory(self.swap_space, free=2**40, name="swap_space")
            if self.preemption != "swap":
                raise ConfigError(f"swap_space is {self.swap_space!r}; only preemption='swap' uses it, so give both")
        if self.kv_disk_space is not None:
            if self.kv_disk is None:
                raise ConfigError(f"kv_disk_space is {self.kv_disk_space!r}; only kv_disk uses it, so give both")
            try:
                parse_memory(self.kv_disk_space, free=None, name="kv_disk_space")
            except ConfigError:
                raise ConfigError(
                    f"kv_disk_space is {self.kv_disk_space!r}; give bytes with a unit, as in '50GiB'"
                ) from None
        if self.kv_disk is not None and not (isinstance(self.kv_disk, str) and self.kv_disk):
            raise ConfigError(f"kv_disk is {self.kv_disk!r}; it must be the path of a directory")
        if self.kv_disk is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_disk keeps blocks of the prefix cache, and enable_prefix_caching is False; leave one out"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is built from. Names and meanings are vLLM's where it has them."""

    model: str | None = option(
        None, "Directory, GGUF file, or repository name on the hub. Default: the embedded model.", aliases=("-m",)
    )
    gguf_file: str | None = option(None, "The GGUF file to take of a directory or repository, by its name there.")
    tokenizer: str | None = option(
        None, "Take the tokenizer and chat template of this directory, GGUF file or repository. Default: the model's."
    )
    dtype: str = option("auto", "Dtype of weights and cache: auto (the checkpoint's), float32, bfloat16 or float16.")
    quantization: str | None = option(
        None,
        "Round a 16-bit checkpoint's weights at load: int4 (groups of 128 inputs) or int8 (a scale an output).",
        choices=("int4", "int8"),
    )
    quantization_head: str | None = option(
        None,
        "Round the output projection at load: int8, int4 or none. Default: int8 with --quantization.",
        choices=("int8", "int4", "none"),
    )
    quantization_activations: str = option(
        "int8",
        "int8: round what quantised weights are multiplied with; bf16: hold and multiply them in the model's dtype.",
        choices=("int8", "bf16"),
    )
    model_impl: str = option(
        "auto",
        "quire: its decoder; transformers: its code with our attention; auto: what there is.",
        choices=("auto", "quire", "transformers"),
    )
    device: str = option("cpu", "Device to run on: cpu, cuda or cuda:N.")
    tensor_parallel_size: int = option(
        1, "Processes that compute the model together, each a part of it, on CPUs.", lower=1
    )
    attention_backend: str = option(
        "auto", "Attention backend: auto, or a name from `quire info`.", aliases=("--attention",)
    )
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from: auto (the checkpoint's generation_config.json), none, or a directory.",
    )
    prefetch: str | None = option(
        None, "How a CPU fetches weights, and keys and values: as in t0:2560:t1. Default: what suits the core."
    )
    max_model_len: int | None = option(
        None, "Longest sequence in tokens. Default: what the model was made for.", lower=1
    )
    max_num_seqs: int = option(256, "Most sequences that run at the same time.", lower=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Most query tokens per step. Default: 2048; a server on a CPU computes fewer while sequences decode, as many "
        "as take it half a second.",
        lower=1,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Who comes first: fcfs, priority (lowest first) or shortest (prompt).",
        choices=("fcfs", "priority", "shortest"),
    )
    async_scheduling: bool | None = option(
        None, "Plan a step while the one before is computed. Default: where a GPU computes alone."
    )
    num_speculative_tokens: int | None = option(
        None,
        "Tokens that prompt lookup guesses at a time; 0 for none. Default: 3, on a GPU 0.",
        lower=0,
        upper=MAX_SPECULATIVE_TOKENS,
        aliases=("--spec-tokens",),
    )
    enable_lora: bool = option(False, "Serve LoRA adapters. Implied where some are given.")
    max_loras: int = option(16, "Most LoRA adapters that are loaded at the same time.", lower=1, upper=4096)
    max_lora_rank: int = option(64, "Largest rank of a LoRA adapter.", lower=1, upper=1024)
    seed: int = option(
        0, "Seed of the engine. Requests without a seed derive theirs from it.", lower=0, upper=2**63 - 1
    )
    # On a CPU that always holds.
    reproducible: bool = option(False, "Give a request the same bits in every batch on a GPU too.")
    cache: CacheConfig = field(default_factory=CacheConfig)

    @property
    def most_tokens(self) -> int:
        """Query tokens that a step may have."""
        return MOST_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    def __post_init__(self) -> None:
        check_options(self)


class Foreign(NamedTuple):
    """An option of vLLM's that is none here."""

    harmless: tuple[Any, ...]  # values that ask for what holds anyway: they are taken, and change nothing
    sentence: str  # what is said of any other value
    is_secret: bool = False  # so that its value is not shown

    def refusal(self, option: str, value: object) -> str:
        """What is said of another value. option: what is not there."""
        return f"there is no {option}{'' if self.is_secret else f' (it is {value!r})'}; {self.sentence}"


ONE_DEVICE = "tensor_parallel_size divides a model among processes, and `quire fleet` serves several replicas of it"
ONLY_TEXT = "models are served for text alone"
# By the names of vLLM's Python interface; on the command line a dash stands for each underscore.
FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "nnodes"), Foreign((1,), ONE_DEVICE))
    | dict.fromkeys(
        ("enable_expert_parallel", "disable_custom_all_reduce", "ray_workers_use_nsight"),
        Foreign((None, False), ONE_DEVICE),
    )
    | {"distributed_executor_backend": Foreign((None, "uni", "mp"), ONE_DEVICE)}
    | dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs"), Foreign((None, {}), ONLY_TEXT))
    | {"allowed_local_media_path": Foreign((None, ""), ONLY_TEXT)}
    | dict.fromkeys(
        ("enforce_eager", "disable_log_stats", "use_tqdm_on_load", "disable_cascade_attn"),
        Foreign((None, True, False), "it must be True or False, and has no effect here"),
    )
    | {
        "calculate_kv_scales": Foreign((None, False), "kv_cache_dtype='int8' takes its scales from what it holds"),
        "chat_template": Foreign((None,), "`quire serve` takes --chat-template"),
        "compilation_config": Foreign((None, 0, {}), "steps are native calls, or CUDA graphs, and nothing is compiled"),
        "config_format": Foreign((None, "auto", "hf"), "a checkpoint has a config.json"),
        "cpu_offload_gb": Foreign((None, 0), "weights lie where the model is computed, all of them"),
        "disable_sliding_window": Foreign((None, False), "a model with windows is computed with its windows"),
        "download_dir": Foreign((None,), "downloads go to the hub's cache, which the variable HF_HOME moves"),
        "enable_chunked_prefill": Foreign((None, True), "long prompts are always computed in pieces"),
        "enable_sleep_mode": Foreign((None, False), "close() frees the memory, and a new LLM takes it again"),
        "gpu_memory_utilization": Foreign(
            (None,), "kv_cache_memory says how much memory the KV cache takes: '8GiB', or a share as 0.5"
        ),
        "hf_overrides": Foreign((None, {}), "a checkpoint's config.json is taken as it stands"),
        "hf_token": Foreign((None, False), "the hub's library reads the variable HF_TOKEN", is_secret=True),
        "kv_cache_memory_bytes": Foreign((None,), "it is called kv_cache_memory"),
        "kv_transfer_config": Foreign(
            (None,), "kv_disk keeps blocks on a disk; `quire fleet` sends requests to the blocks"
        ),
        "load_format": Foreign((None, "auto", "safetensors"), "the files say what they are"),
        "logits_processors": Foreign((None, []), "SamplingParams say which tokens may be drawn"),
        "max_logprobs": Foreign((None,), "LLM reports as many as are asked for; `quire serve` takes --max-logprobs"),
        "max_seq_len_to_capture": Foreign((None,), "CUDA graphs are made for all lengths up to max_model_len"),
        "num_gpu_blocks_override": Foreign((None,), "it is called num_blocks"),
        "num_scheduler_steps": Foreign((None, 1), "a step is planned at a time; see async_scheduling"),
        "override_pooler_config": Foreign((None,), "an embedding is the last token's hidden state, of length 1"),
        "quantization_param_path": Foreign((None,), "a checkpoint's scales stand in it"),
        "revision": Foreign((None, "main"), "download the revision, and give its directory as the model"),
        "code_revision": Foreign((None,), "no code of a checkpoint is run"),
        "rope_scaling": Foreign((None, {}), "angles are those of the checkpoint's config.json"),
        "rope_theta": Foreign((None,), "angles are those of the checkpoint's config.json"),
        "runner": Foreign((None, "auto", "generate"), "LLM.embed and LLM.score need no other model"),
        "served_model_name": Foreign((None,), "names are for clients: `quire serve` takes --served-model-name"),
        "skip_tokenizer_init": Foreign((None, False), "a tokenizer is read where the checkpoint has one"),
        "speculative_config": Foreign((None,), "prompt lookup guesses num_speculative_tokens; there is no draft model"),
        "task": Foreign((None, "auto", "generate"), "LLM.embed and LLM.score need no other model"),
        "tokenizer_mode": Foreign((None, "auto", "hf"), "the tokenizer is the checkpoint's tokenizer.json"),
        "tokenizer_revision": Foreign((None, "main"), "the tokenizer is the checkpoint's tokenizer.json"),
        "trust_remote_code": Foreign(
            (None, False), "no code of a checkpoint is run; model_impl='transformers' takes transformers' own"
        ),
        "use_v2_block_manager": Foreign((None, True), "there is one block manager"),
    }
)


def engine_config(**options: Any) -> EngineConfig:
    """An EngineConfig from flat options, the cache's included. Raises ConfigError for an unknown one.

    Those of vLLM's that ask for what holds anyway are taken.
    """
    cache_keys = {f.name for f in fields(CacheConfig)}
    known = cache_keys | {f.name for f in fields(EngineConfig)} - {"cache"}
    if "dtype" in options:  # torch.bfloat16 is as good as "bfloat16"
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    if isinstance(options.get("kv_disk"), os.PathLike):
        options["kv_disk"] = os.fspath(options["kv_disk"])
    asked = {name: value for name, value in options.items() if name in FOREIGN and name not in known}
    for name, value in asked.items():
        if value not in FOREIGN[name].harmless:
            raise ConfigError(FOREIGN[name].refusal(f"engine option {name!r}", value))
    options = {name: value for name, value in options.items() if name not in asked}
    if options.get("seed", 0) is None:  # vLLM's default
        del options["seed"]
    check_known(ConfigError, "there is no engine option", options, known, {})
    cache = CacheConfig(**{key: value for key, value in options.items() if key in cache_keys})
    return EngineConfig(**{key: value for key, value in options.items() if key not in cache_keys}, cache=cache)


def parse_loras(texts: Sequence[str]) -> dict[str, str]:
    """Directories of adapters by their names, from texts as NAME=PATH. Raises ConfigError for anything else."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"lora contains {text!r}; it must be NAME=PATH")
        if name in found:
            raise ConfigError(f"lora contains the name {name!r} twice; each adapter needs a name of its own")
        found[name] = path
    return found


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
                    f"{name} is {amount!r}, a share, and this system does not report how much memory is free; "
                    f"give bytes, as in '2GiB'"
                )
        elif unit in UNITS and value * UNITS[unit] >= 1:
            return int(value * UNITS[unit])
    raise ConfigError(
        f"{name} is {amount!r}; give bytes with a unit, as in '2GiB', or a share of the free memory, as in 0.5 or '50%'"
    )
