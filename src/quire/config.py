"""The engine's options. They are frozen, so that a run keeps the options that it was started with.

The metadata of each field describes its option completely: `quire --help` and the checks are generated from it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, get_type_hints

from quire.errors import ConfigError, check_integer, check_known, check_number, checked

log = logging.getLogger("quire")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
         "tib": 2**40}  # fmt: skip
MAX_SPECULATIVE_TOKENS = 7  # with the token before them 8 rows, which take hardly longer than one
MOST_TOKENS = 2_048  # query tokens per step
MOST_TOKENS_ON_GPU = 8_192  # there a step of so few would not use all processors
EMBEDDED_NAME = "quire-embedded"  # the name for clients of the model that comes with Quire
MODEL, SCHEDULING, LOGS = "Model", "Scheduling", "Logs and metrics"  # headings in --help
OPTION = "option"  # key of the Option in a field's metadata


@dataclass(frozen=True)
class Option:
    """Description of a config field, in addition to its type and default."""

    help: str
    lower: int | float | None = None  # smallest value; an int for integers, a float for numbers; None: not checked
    upper: int | float | None = None  # largest value; None: no limit
    choices: tuple[str, ...] = ()  # all valid values; (): checked elsewhere
    aliases: tuple[str, ...] = ()  # other names on the command line
    group: str = ""  # heading in --help; "": that of the class that defines the field


def option(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field with a default and an Option."""
    return field(default=default, metadata={OPTION: Option(help, **about)})


def options_of(config: Any) -> Mapping[str, Option]:
    """Return the Option of each field of a config that has one, by the field's name."""
    return {one.name: one.metadata[OPTION] for one in fields(config) if OPTION in one.metadata}


def group_of(config: type[Any], name: str) -> str:
    """Return the heading under which --help lists a field: its own, else the GROUP of the class that defines it."""
    owner: Any = next(each for each in config.__mro__ if name in inspect.get_annotations(each))
    return options_of(config)[name].group or str(owner.GROUP)


def check_options(config: Any) -> None:
    """Raise ConfigError for a value that its option does not allow. None is allowed where it is the default."""
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
    """Size and layout of the KV cache: the options of `LLM` that concern it.

    The fields' metadata describe the options, as `quire serve --help` prints them. All are keyword arguments of
    `LLM` and `AsyncLLM`.

    Raises:
        ConfigError: an option has an invalid value, or needs another one that is missing.

    Example:
        ```python
        from quire.config import CacheConfig, EngineConfig

        config = EngineConfig(max_num_seqs=8, cache=CacheConfig(block_size=32, kv_cache_memory="64MiB"))
        print(config.cache.block_size)
        ```
    """

    GROUP: ClassVar[str] = "KV cache"

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
        "Dtype of the KV cache: auto (the model's), int8 (half the size of bf16), or on a GPU fp8.",
        choices=("auto", "int8", "fp8"),
    )
    state_snapshot_interval: int = option(
        512, "Tokens between two states that are kept for reuse, in models with recurrent layers.", lower=1
    )
    # Without it, only samples of one prompt share blocks.
    enable_prefix_caching: bool = option(True, "Reuse the KV blocks of prompts with the same prefix.")
    prompt_cache_share: float = option(
        0.5,
        "Share of the KV cache that the prompts of one prompt_cache_key, or of a client's cache_control, may keep.",
        lower=0.0,
        upper=1.0,
    )
    preemption: str = option(
        "recompute",
        "When blocks run out, drop those of the last request (recompute) or move them to the host (swap).",
        choices=("recompute", "swap"),
    )
    swap_space: int | float | str | None = option(
        None, "Host memory for swapped blocks: bytes or a share. Default: 4GiB."
    )
    kv_disk: str | None = option(
        None, "Directory that stores KV blocks across restarts. Default: none. Its files reveal prompts."
    )
    kv_disk_space: int | float | str | None = option(None, "Disk space for the blocks in --kv-disk. Default: 10GiB.")

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
    """All options of an engine. Names and meanings are vLLM's where it has them.

    The fields' metadata describe the options, as `quire serve --help` prints them. All are keyword arguments of
    `LLM` and `AsyncLLM`, with those of `cache` next to them.

    Raises:
        ConfigError: an option has an invalid value.

    Example:
        ```python
        from quire.config import engine_config

        config = engine_config(max_num_seqs=8, block_size=32, kv_cache_memory="64MiB")
        print(config.max_num_seqs, config.cache.block_size)
        ```
    """

    GROUP: ClassVar[str] = "Engine"

    model: str | None = option(
        None,
        "Directory, GGUF file, repository on the hub, or short name such as qwen3:0.6b. Default: the embedded model.",
        aliases=("-m",),
        group=MODEL,
    )
    gguf_file: str | None = option(None, "Name of the GGUF file to load from a directory or repository.", group=MODEL)
    mmproj: str | None = option(
        None,
        "GGUF file of the vision part: a path, or its name in the model's directory or repository. Default: the "
        "mmproj*.gguf in the directory of the model's GGUF file.",
        group=MODEL,
    )
    no_mmproj: bool = option(
        False, "Serve a GGUF file for text alone: do not look for an mmproj*.gguf next to it.", group=MODEL
    )
    tokenizer: str | None = option(
        None,
        "Directory, GGUF file or repository of the tokenizer and chat template. Default: the model's.",
        group=MODEL,
    )
    dtype: str = option(
        "auto", "Dtype of weights and cache: auto (the checkpoint's), float32, bfloat16 or float16.", group=MODEL
    )
    quantization: str | None = option(
        None,
        "Round a 16-bit checkpoint's weights at load: int4 (groups of 128 inputs) or int8 (one scale per output).",
        choices=("int4", "int8"),
        group=MODEL,
    )
    quantization_head: str | None = option(
        None,
        "Round the output projection at load: int8, int4 or none. Default: int8 with --quantization.",
        choices=("int8", "int4", "none"),
        group=MODEL,
    )
    quantization_activations: str = option(
        "int8",
        "int8: round the inputs of quantised weights; bf16: store and multiply the weights in the model's dtype.",
        choices=("int8", "bf16"),
        group=MODEL,
    )
    model_impl: str = option(
        "auto",
        "quire: Quire's decoder; transformers: its code with Quire's attention; auto: the first that supports it.",
        choices=("auto", "quire", "transformers"),
        group=MODEL,
    )
    device: str = option("cpu", "Device to run on: cpu, cuda or cuda:N.")
    tensor_parallel_size: int = option(
        1, "Number of processes that the model is divided among, on CPUs or GPUs.", lower=1
    )
    attention_backend: str = option(
        "auto", "Attention backend: auto, or a name from `quire info`.", aliases=("--attention",)
    )
    generation_config: str = option(
        "auto",
        "Source of sampling defaults: auto (the checkpoint's generation_config.json), none, or a directory.",
        group=MODEL,
    )
    prefetch: str | None = option(
        None, "How a CPU prefetches weights, and keys and values, as in t0:2560:t1. Default: chosen by the core."
    )
    max_model_len: int | None = option(
        None, "Longest sequence in tokens. Default: the model's own limit.", lower=1, group=MODEL
    )
    max_num_seqs: int = option(256, "Maximum number of sequences that run at the same time.", lower=1, group=SCHEDULING)
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum number of query tokens per step. Default: 2048, on a GPU 8192; while sequences decode, a server on a "
        "CPU computes only as many as take half a second.",
        lower=1,
        group=SCHEDULING,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of requests: fcfs, priority (lowest first) or shortest (prompt).",
        choices=("fcfs", "priority", "shortest"),
        group=SCHEDULING,
    )
    async_scheduling: bool | None = option(
        None,
        "Plan a step while the one before is computed. Default: on, if the device computes without the host.",
        group=SCHEDULING,
    )
    enforce_eager: bool | None = option(
        None,
        "Capture no CUDA graphs: a GPU's engine starts some seconds sooner, and its steps take longer. Default: off; "
        "on with a tensor_parallel_size above 1.",
    )
    draft: str = option(
        "auto",
        "Source of draft tokens: lookup (in the text), head (of the checkpoint), model (draft_model), off, or auto: "
        "lookup, and the draft model or the head of a model with 256 MiB of weights or more. Drafts change no token.",
        choices=("auto", "lookup", "head", "model", "off"),
    )
    draft_model: str | None = option(
        None,
        "Directory, GGUF file or repository of a smaller model with the same vocabulary, which proposes draft tokens.",
    )
    num_speculative_tokens: int | None = option(
        None,
        "Maximum number of draft tokens of a sequence in a step; 0 turns them off. Default: 3, with a draft head or "
        "model 5, on a GPU 0.",
        lower=0,
        upper=MAX_SPECULATIVE_TOKENS,
        aliases=("--spec-tokens",),
        group=SCHEDULING,
    )
    enable_lora: bool = option(False, "Serve LoRA adapters. Implied if any are given.", group="LoRA")
    max_loras: int = option(
        16, "Maximum number of LoRA adapters loaded at the same time.", lower=1, upper=4096, group="LoRA"
    )
    max_lora_rank: int = option(64, "Maximum rank of a LoRA adapter.", lower=1, upper=1024, group="LoRA")
    seed: int = option(
        0, "Seed of the engine. Requests without a seed derive theirs from it.", lower=0, upper=2**63 - 1
    )
    # Results on a CPU are always batch-invariant.
    reproducible: bool = option(
        False, "On a GPU, compute the same bits for a request in every batch, as a CPU always does."
    )
    receipts: str | None = option(
        None,
        "File to which a receipt of each answer is appended, for `quire verify`. Default: none. It reveals prompts.",
        group=LOGS,
    )
    cache: CacheConfig = field(default_factory=CacheConfig)

    @property
    def most_tokens(self) -> int:
        """Maximum number of query tokens per step."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return MOST_TOKENS if self.device == "cpu" else MOST_TOKENS_ON_GPU

    def __post_init__(self) -> None:
        check_options(self)
        if self.draft_model is not None and self.draft not in ("auto", "model"):
            raise ConfigError(f"draft is {self.draft!r}, and draft_model {self.draft_model!r}; leave one of them out")
        if self.draft_model is None and self.draft == "model":
            raise ConfigError("draft is 'model'; draft_model must name the model, and is missing")
        if self.mmproj is not None and self.no_mmproj:
            raise ConfigError(f"mmproj is {self.mmproj!r}, and no_mmproj is True; leave one of them out")
        if self.mmproj is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"mmproj is {self.mmproj!r}, and tensor_parallel_size {self.tensor_parallel_size}; images are served "
                "with a tensor_parallel_size of 1"
            )
        if self.receipts is not None and not (isinstance(self.receipts, str) and self.receipts):
            raise ConfigError(f"receipts is {self.receipts!r}; it must be the path of a file")


class Accepted(NamedTuple):
    """A set of accepted values that is too large to be listed."""

    description: str
    contains: Callable[[Any], bool]


class Foreign(NamedTuple):
    """An option of vLLM's that Quire does not have."""

    harmless: tuple[Any, ...]  # values that describe Quire's behaviour: they are accepted and have no effect
    sentence: str  # the meaning of accepted values here, and the reason why any other value is refused
    is_secret: bool = False  # its value must not be shown
    others: Accepted | None = None  # more accepted values
    own: str | None = None  # the option of Quire's that gets an accepted value
    is_warned: bool = False  # an accepted value may ask for more than it gets, so it is logged as a warning

    def accepts(self, value: object) -> bool:
        """Return whether a value is accepted."""
        return value in self.harmless or (self.others is not None and self.others.contains(value))

    def parse(self, text: str) -> Any:
        """Return the value of a text of the command line."""
        for value in self.harmless:
            if str(value) == text:
                return value
        try:
            return json.loads(text)
        except ValueError:
            return text

    def refusal(self, option: str, value: object) -> str:
        """Return the error message for a value that is refused. `option` names the option."""
        if self.others is not None:
            return f"{option} is {value!r}; {self.sentence}"
        return f"there is no {option}{'' if self.is_secret else f' (it is {value!r})'}; {self.sentence}"


def _is_number(value: object, lower: float, upper: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and lower < value <= upper


def _is_speculative(config: object) -> bool:
    known = {"method", "model", "num_speculative_tokens"}
    return isinstance(config, Mapping) and known.issuperset(config) and config.get("method") in (None, *METHODS)


# vLLM's methods of speculative decoding, with the value of `draft`.
METHODS = {"draft_model": "model", "eagle3": "model", "mtp": "head", "ngram": "lookup"}
SHARE = Accepted("a number above 0, up to 1", lambda value: _is_number(value, 0, 1))
COUNT = Accepted("a positive number", lambda value: _is_number(value, 0, float("inf")))
LIMITS = Accepted("a dictionary", lambda value: isinstance(value, Mapping))
ONE_DEVICE = "tensor_parallel_size divides a model among processes, and `quire fleet` serves several replicas of it"
SWAP_SPACE = "a number above 1 is in GiB, as in vLLM; without preemption='swap' it has no effect"
OWN_MEDIA = "images are read by the checkpoint's own settings, and given as data or, in Python, by paths"
# By the names of vLLM's Python interface; the command line has a dash in place of each underscore.
FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "nnodes"), Foreign((1,), ONE_DEVICE))
    | dict.fromkeys(
        ("enable_expert_parallel", "disable_custom_all_reduce", "ray_workers_use_nsight"),
        Foreign((None, False), ONE_DEVICE),
    )
    | {"distributed_executor_backend": Foreign((None, "uni", "mp"), ONE_DEVICE)}
    | {"mm_processor_kwargs": Foreign((None, {}), OWN_MEDIA)}
    | {"allowed_local_media_path": Foreign((None, ""), OWN_MEDIA)}
    | {"allowed_media_domains": Foreign((None, []), "`quire serve` takes --allowed-media-domains")}
    | {
        "limit_mm_per_prompt": Foreign((None, {}), "a prompt may have up to 64 images here", others=LIMITS),
    }
    | dict.fromkeys(
        ("use_tqdm_on_load", "disable_cascade_attn", "disable_log_requests"),
        Foreign((None, True, False), "it must be True or False, and has no effect here"),
    )
    | dict.fromkeys(
        ("runner", "task"),
        Foreign(
            (None, "auto", "generate", "pooling", "embed", "embedding", "score", "classify"),
            "the checkpoint decides whether a model generates, embeds or classifies",
        ),
    )
    | {
        "calculate_kv_scales": Foreign(
            (None, False), "kv_cache_dtype='int8' computes its scales from the stored values"
        ),
        "chat_template": Foreign((None,), "`quire serve` takes --chat-template"),
        "compilation_config": Foreign((None, 0, {}), "steps are native calls, or CUDA graphs, and nothing is compiled"),
        "config_format": Foreign((None, "auto", "hf"), "a checkpoint has a config.json"),
        "cpu_offload_gb": Foreign((None, 0), "all weights are in the memory of the device that computes the model"),
        "convert": Foreign(
            (None, "auto", "none", "embed", "classify"), "the checkpoint decides whether a model embeds or classifies"
        ),
        "disable_log_stats": Foreign(
            (None, True, False), "give True or False: LLM.get_metrics needs False, and `quire serve` has --no-log-stats"
        ),
        "disable_sliding_window": Foreign((None, False), "a model with windows is computed with its windows"),
        "download_dir": Foreign((None,), "downloads go to the hub's cache, which the variable HF_HOME moves"),
        "enable_log_requests": Foreign((None, False), "`quire serve` takes --enable-log-requests"),
        "enable_prompt_embeds": Foreign((None, False), "prompts are texts or token ids"),
        "enable_chunked_prefill": Foreign((None, True), "long prompts are always computed in chunks"),
        "enable_sleep_mode": Foreign((None, False, True), "LLM.sleep can always free the memory"),
        "gpu_memory_utilization": Foreign(
            (None,),
            "on a GPU a number above 0, up to 1, sets kv_cache_memory, the KV cache's share of the memory that is free "
            "after the weights; on a CPU it has no effect: kv_cache_memory sets the memory, as in '8GiB' or 0.5",
            others=SHARE,
        ),
        "hf_overrides": Foreign((None, {}), "a checkpoint's config.json is used unchanged"),
        "hf_token": Foreign((None, False), "the hub's library reads the variable HF_TOKEN", is_secret=True),
        "kv_cache_memory_bytes": Foreign((None,), "it sets kv_cache_memory", others=COUNT, own="kv_cache_memory"),
        "kv_transfer_config": Foreign(
            (None,), "kv_disk keeps blocks on a disk; `quire fleet` sends requests to the blocks"
        ),
        "load_format": Foreign((None, "auto", "safetensors"), "the files determine the format"),
        "logits_processors": Foreign(
            (None, []), "SamplingParams restrict the tokens: logit_bias, bad_words and others"
        ),
        "max_logprobs": Foreign((None,), "LLM reports as many as are asked for; `quire serve` takes --max-logprobs"),
        "max_num_partial_prefills": Foreign((None, 1), "all prompts that fit into a step are computed in it"),
        "max_parallel_loading_workers": Foreign((None,), "weights are loaded by one process"),
        **dict.fromkeys(
            ("max_seq_len_to_capture", "max_context_len_to_capture"),
            Foreign((None,), "CUDA graphs are made for all lengths up to max_model_len", others=COUNT),
        ),
        "num_gpu_blocks_override": Foreign((None,), "it sets num_blocks", others=COUNT, own="num_blocks"),
        "num_scheduler_steps": Foreign((None, 1), "steps are planned one at a time; see async_scheduling"),
        **dict.fromkeys(
            ("override_pooler_config", "pooler_config"),
            Foreign(
                (None,),
                "the pooling is that of the checkpoint's files, else the last token's hidden state",
            ),
        ),
        "preemption_mode": Foreign((None, "recompute"), "it is called preemption"),
        "quantization_param_path": Foreign((None,), "scales are read from the checkpoint"),
        "revision": Foreign((None, "main"), "download the revision, and give its directory as the model"),
        "code_revision": Foreign((None,), "no code of a checkpoint is run"),
        "rope_scaling": Foreign((None, {}), "angles are those of the checkpoint's config.json"),
        "rope_theta": Foreign((None,), "angles are those of the checkpoint's config.json"),
        "served_model_name": Foreign((None,), "names are for clients: `quire serve` takes --served-model-name"),
        "structured_outputs_config": Foreign((None, {}), "llguidance handles all grammars"),
        "guided_decoding_backend": Foreign((None, "auto", "guidance"), "llguidance handles all grammars"),
        "skip_tokenizer_init": Foreign((None, False), "the tokenizer is read if the checkpoint has one"),
        "speculative_config": Foreign(
            (None,),
            "its model sets draft_model, its num_speculative_tokens that option, and its method draft; of the methods, "
            f"{', '.join(METHODS)} are known, and no other key",
            others=Accepted("a dictionary", _is_speculative),
        ),
        "tokenizer_mode": Foreign((None, "auto", "hf"), "the tokenizer is the checkpoint's tokenizer.json"),
        "tokenizer_revision": Foreign((None, "main"), "the tokenizer is the checkpoint's tokenizer.json"),
        "trust_remote_code": Foreign(
            (None, False, True),
            "no code of a checkpoint is run; model_impl='transformers' uses transformers' own",
            is_warned=True,
        ),
        "use_v2_block_manager": Foreign((None, True), "there is one block manager"),
    }
)


def engine_config(**options: Any) -> EngineConfig:
    """Return an EngineConfig from flat options, the cache's included. None is the default of any option.

    Options of vLLM's are accepted if their values describe Quire's behaviour, such as `pipeline_parallel_size=1`. One
    log line reports the meaning of each. Raises ConfigError for an unknown option or an invalid value.
    """
    options = {name: value for name, value in options.items() if value is not None}
    cache_keys = {f.name for f in fields(CacheConfig)}
    known = cache_keys | {f.name for f in fields(EngineConfig)} - {"cache"}
    if "dtype" in options:  # torch.bfloat16 is the same as "bfloat16"
        dtype = str(options["dtype"]).removeprefix("torch.")
        options["dtype"] = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    for name in ("kv_disk", "receipts"):
        if isinstance(options.get(name), os.PathLike):
            options[name] = os.fspath(options[name])
    options = _without_foreign(options, known)
    close = {name: difflib.get_close_matches(name, FOREIGN, n=1, cutoff=0.8) for name in options}
    meant = {name: f"did you mean {found[0]!r}?" for name, found in close.items() if found}
    check_known(ConfigError, "there is no engine option", options, known, meant)
    cache = CacheConfig(**{key: value for key, value in options.items() if key in cache_keys})
    return EngineConfig(**{key: value for key, value in options.items() if key not in cache_keys}, cache=cache)


def _without_foreign(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options without those of vLLM's, whose meaning is logged. Raises ConfigError for a refused one."""
    own = {name: value for name, value in options.items() if name in known or name not in FOREIGN}
    meanings: dict[int, list[str]] = {logging.INFO: [], logging.WARNING: []}  # by the level of the log
    for name, value in options.items():
        if name in own:
            continue
        foreign = FOREIGN[name]
        if not foreign.accepts(value):
            raise ConfigError(foreign.refusal(f"engine option {name!r}", value))
        target = foreign.own
        if name == "speculative_config" and value:
            given = {"draft": METHODS.get(value.get("method")), "draft_model": value.get("model")}
            given["num_speculative_tokens"] = value.get("num_speculative_tokens")
            own = {key: one for key, one in given.items() if one is not None} | own
        if name == "gpu_memory_utilization" and own.get("device", "cpu") != "cpu" and "num_blocks" not in own:
            target = "kv_cache_memory"
        if target is not None:
            own.setdefault(target, value)
        level = logging.WARNING if foreign.is_warned and value else logging.INFO
        meanings[level].append(f"{name}={value!r}: {foreign.sentence}")
    space = str(own.get("swap_space", ""))
    if re.fullmatch(r"\d{1,4}(\.\d*)?", space):
        if own.get("preemption") != "swap" or float(space) == 0:
            del own["swap_space"]
        elif float(space) > 1:
            own["swap_space"] = f"{space}GiB"
        meanings[logging.INFO].append(f"swap_space={space}: {SWAP_SPACE}")
    for level, found in meanings.items():
        if found:
            log.log(level, "arguments of vLLM's: %s", "; ".join(found))
    return own


def takes_options(init: F) -> F:
    """Give an __init__ with **options a signature that names every option, with its type and its default."""
    signature = inspect.signature(init, eval_str=True)
    *own, rest = signature.parameters.values()
    given = {one.name for one in own}
    named = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for config in (EngineConfig, CacheConfig)
        for hints in [get_type_hints(config)]
        for one in fields(config)
        if one.name in options_of(config) and one.name not in given
    ]
    init.__signature__ = signature.replace(parameters=[*own, *named, rest])  # type: ignore[attr-defined]
    return init


def describes_options(cls: type[T]) -> type[T]:
    """Add the help of every option to a class's docstring, below the one of **options."""
    lines = [
        fill(f"{name}: {about.help}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for config in (EngineConfig, CacheConfig)
        for name, about in options_of(config).items()
        if name != "model"
    ]
    before, marker, after = (cls.__doc__ or "").partition("\n\n    Raises:")
    cls.__doc__ = "\n".join([before, *lines]) + marker + after
    return cls


def _with_every_argument(cls: type[T]) -> type[T]:
    """Make a class a dataclass with every option of `LLM`, Quire's and vLLM's, each None by default."""
    configs = (EngineConfig, CacheConfig)
    names = dict.fromkeys([*(name for config in configs for name in options_of(config)), *FOREIGN])
    cls.__annotations__ = dict.fromkeys(names, Any)
    for name in names:
        setattr(cls, name, None)
    return checked(ConfigError, "there is no engine option", {})(dataclass(cls))


@_with_every_argument
class EngineArgs:
    """The arguments of an engine, as vLLM's scripts collect them: `LLM(**dataclasses.asdict(EngineArgs(...)))`.

    Args:
        model: see `LLM`.
        **options: see `LLM`. None is the default of each.

    Example:
        ```python
        from dataclasses import asdict

        from quire import LLM, EngineArgs

        with LLM(**asdict(EngineArgs(num_blocks=128, max_num_seqs=8))) as llm:
            print(llm.config.max_num_seqs)
        ```
    """

    if TYPE_CHECKING:

        def __init__(self, model: str | None = None, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM.from_engine_args`, see `EngineArgs`."""


def parse_loras(texts: Sequence[str]) -> dict[str, str]:
    """Return the directories of adapters by name, from texts NAME=PATH. Raises ConfigError for anything else."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"lora contains {text!r}; it must be NAME=PATH")
        if name in found:
            raise ConfigError(f"lora contains the name {name!r} twice; each adapter needs its own name")
        found[name] = path
    return found


def parse_memory(amount: int | float | str, free: int | None, name: str = "kv_cache_memory") -> int:
    """Return the bytes of an amount such as "2GiB", "1.5 GB", 2147483648, or of a share ("50%", 0.5) of `free` bytes.

    A bare number up to 1 is a share. Raises ConfigError, which names the option `name`, for anything else, and for a
    share if `free is None`.
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
