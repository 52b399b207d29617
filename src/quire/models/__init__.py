"""Model loading: find a checkpoint, select its implementation, and load the weights.

A checkpoint runs on Quire's own decoder if a family understands every key of its config. Any other checkpoint runs on
transformers' modelling code with Quire's attention, if a trial shows that the two compute the same.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelError, Unsupported, check_installed

check_installed("quire.models", "huggingface_hub", "regex", "safetensors", "tokenizers", "transformers")

from quire.models.decoder import Decoder
from quire.models.decoder_config import DecoderConfig
from quire.models.draft_head import DraftHead
from quire.models.eagle import Eagle, EagleHead, is_eagle, read_eagle
from quire.models.families.mtp import ReadHead
from quire.models.files import CONFIG, Files, Where, files_of
from quire.models.gguf.model import GgufModel
from quire.models.headless import CLASSIFIER, Headless, Prefixed, causal_name, whole_names
from quire.models.hf_config import IMMATERIAL, architectures, check_counts, model_type, shown
from quire.models.hub import EMBEDDED as EMBEDDED
from quire.models.hub import locate as locate
from quire.models.images import SERVED, ImageEncoder, image_fields
from quire.models.lora.fitting import decoder_targets
from quire.models.lora.slots import LoraLimits, Loras
from quire.models.model import Model, WeightBytes
from quire.models.pooling_files import longest_text, read_pooler
from quire.models.quantisation.module import Scheme, Tensors
from quire.models.quantisation.policy import Quantisation, read_scheme
from quire.models.quantisation.stacking import matrix
from quire.models.replaced import NewWeights, ReplacedFiles, replaced
from quire.models.rope import check_factors, longest_rotated
from quire.models.sharding import check_shards
from quire.models.text_part import TextPart, text_part
from quire.models.weights import Family, Weights, expected_bytes, read_json
from quire.ops import Backend
from quire.ops import load as load_backend
from quire.ops.collectives import Communicator
from quire.ops.weights.linear import Embedding
from quire.progress import progress_bar

if TYPE_CHECKING:
    from quire.models.adapter.load import Found

log = logging.getLogger("quire")

# Architecture in config.json -> the module that reads it.
FAMILIES = {
    "AXK2ForCausalLM": "quire.models.families.deepseek",
    "BailingHybridForCausalLM": "quire.models.families.bailing",
    "BambaForCausalLM": "quire.models.families.bamba",
    "BloomForCausalLM": "quire.models.families.bloom",
    "CodeGenForCausalLM": "quire.models.families.codegen",
    "Cohere2ForCausalLM": "quire.models.families.cohere2",
    "CohereForCausalLM": "quire.models.families.cohere2",
    "DeepseekV2ForCausalLM": "quire.models.families.deepseek",
    "DeepseekV32ForCausalLM": "quire.models.families.deepseek",
    "DeepseekV3ForCausalLM": "quire.models.families.deepseek",
    "Dots3NoteForCausalLM": "quire.models.families.dots3_note",
    "Ernie4_5ForCausalLM": "quire.models.families.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "quire.models.families.ernie4_5_moe",
    "Exaone4ForCausalLM": "quire.models.families.exaone4",
    "FalconMambaForCausalLM": "quire.models.families.mamba",
    "JambaForCausalLM": "quire.models.families.jamba",
    "KimiLinearForCausalLM": "quire.models.families.kimi_linear",
    "MambaForCausalLM": "quire.models.families.mamba",
    "OlmoHybridForCausalLM": "quire.models.families.olmo_hybrid",
    "RecurrentGemmaForCausalLM": "quire.models.families.recurrent_gemma",
    "FalconH1ForCausalLM": "quire.models.families.falcon_h1",
    "FalconForCausalLM": "quire.models.families.falcon",
    "GPT2LMHeadModel": "quire.models.families.gpt2",
    "GPTJForCausalLM": "quire.models.families.gptj",
    "GPTNeoXForCausalLM": "quire.models.families.gpt_neox",
    "Gemma2ForCausalLM": "quire.models.families.gemma2",
    "Gemma3ForCausalLM": "quire.models.families.gemma3",
    "Gemma4ForCausalLM": "quire.models.families.gemma4",
    "Glm4ForCausalLM": "quire.models.families.glm4",
    "Glm4MoeForCausalLM": "quire.models.families.glm4_moe",
    "GlmForCausalLM": "quire.models.families.glm4",
    "GlmMoeDsaForCausalLM": "quire.models.families.deepseek",
    "GptOssForCausalLM": "quire.models.families.gpt_oss",
    "GraniteForCausalLM": "quire.models.families.granite",
    "GraniteMoeForCausalLM": "quire.models.families.granitemoe",
    "GraniteMoeHybridForCausalLM": "quire.models.families.granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "quire.models.families.granitemoe",
    "Lfm2ForCausalLM": "quire.models.families.lfm2",
    "Lfm2MoeForCausalLM": "quire.models.families.lfm2_moe",
    "Lfm3ForCausalLM": "quire.models.families.lfm3",
    "Llama4ForCausalLM": "quire.models.families.llama4",
    "LlamaForCausalLM": "quire.models.families.llama",
    "Mamba2ForCausalLM": "quire.models.families.mamba2",
    "MiniMaxForCausalLM": "quire.models.families.minimax",
    "MistralForCausalLM": "quire.models.families.llama",
    "MixtralForCausalLM": "quire.models.families.mixtral",
    "MllamaForCausalLM": "quire.models.families.mllama",
    "MptForCausalLM": "quire.models.families.mpt",
    "NemotronHForCausalLM": "quire.models.families.nemotron_h",
    "NemotronForCausalLM": "quire.models.families.nemotron",
    "OPTForCausalLM": "quire.models.families.opt",
    "Olmo2ForCausalLM": "quire.models.families.olmo2",
    "OpenAIGPTLMHeadModel": "quire.models.families.openai_gpt",
    "Phi3ForCausalLM": "quire.models.families.phi3",
    "Qwen2ForCausalLM": "quire.models.families.qwen2",
    "Qwen3ForCausalLM": "quire.models.families.qwen3",
    "Qwen3_5ForCausalLM": "quire.models.families.qwen3_5",
    "Qwen3_5MoeForCausalLM": "quire.models.families.qwen3_5_moe",
    "Qwen3MoeForCausalLM": "quire.models.families.qwen3_moe",
    "Qwen3NextForCausalLM": "quire.models.families.qwen3_next",
    "SeedOssForCausalLM": "quire.models.families.seed_oss",
    "SmolLM3ForCausalLM": "quire.models.families.smollm3",
    "Starcoder2ForCausalLM": "quire.models.families.starcoder2",
    "Zamba2ForCausalLM": "quire.models.families.zamba",
    "ZambaForCausalLM": "quire.models.families.zamba",
}
ENCODERS = {
    f"{kind}{ending}": "quire.models.families.encoders"
    for kind in "Bert Camembert DebertaV2 DistilBert MPNet ModernBert NomicBert Roberta XLMRoberta".split()
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification")
}

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
PAYS_FROM = 2**28  # bytes of weights; in a smaller model a draft takes as long as the step that it may save
SHOWN_WHILE_READ = 2**29  # bytes of weights from which a progress bar is shown


def check_device(device: str) -> str:
    """Return the device, with its index if it is a GPU: the current device of "cuda" differs between threads.

    Raises Unsupported if the device is unknown or this machine does not have it.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise Unsupported(f"device is {device!r}; it must be cpu, or cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count() or "no"
        raise Unsupported(f"device is {device!r}; this machine has {count} CUDA devices")
    return device if kind == "cpu" or index else f"cuda:{torch.cuda.current_device()}"


def read_config(where: Where) -> tuple[DecoderConfig, torch.dtype]:
    """Return the decoder config and the weights' dtype of a model, or of a config.json.

    Raises ModelError if no family supports it.
    """
    raw, family = _config_and_family(where)
    return family.decoder_config(raw), _dtype("auto", raw)


def expected_weight_bytes(where: Where) -> WeightBytes:
    """Return the bytes that a model's weights take, computed from its configuration alone.

    Raises ModelError if no family supports it.
    """
    raw, family = _config_and_family(where)
    decoder = family.decoder_config(raw)
    return expected_bytes(decoder, family.weight_sources(decoder, frozenset()), _dtype("auto", raw), read_scheme(raw))


def _config_and_family(where: Where) -> tuple[Mapping[str, Any], Family]:
    """Return the raw config and the family of a model, or of a config.json."""
    if isinstance(where, Path) and where.suffix == ".json":
        raw, _ = _described(read_json(where))
        return raw, _family_of(raw, where)
    files = files_of(where)
    raw, _ = _described(files.config())
    return raw, _family_of(raw, files.path)


def _described(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], TextPart | None]:
    """Return the config of the served part of a model, and that part; None: the whole model is served.

    Raises ModelError for counts, names and RoPE factors that are invalid.
    """
    check_counts(config)
    raw, part = text_part(config)
    model_type(raw)
    architectures(raw)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := raw.get(key), dict):
            check_factors(rope)
    return raw, part


class Own(NamedTuple):
    """A model that runs on Quire's own decoder."""

    raw: Mapping[str, Any]  # config.json
    part: TextPart | None  # the served part of the checkpoint; None: all of it
    family: Family
    config: DecoderConfig
    scheme: Scheme | None  # of quantised weights

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of the cache and of the weights that are not quantised."""
        return _dtype("auto", self.raw)

    def __str__(self) -> str:
        return f"{Decoder.origin if self.config.causal else 'own encoder'}{_of_part(self.part)}"


class Adapted(NamedTuple):
    """A model that runs on transformers' code."""

    raw: Mapping[str, Any]  # config.json
    part: TextPart | None  # the served part of the checkpoint; None: all of it
    found: Found
    reason: str  # why Quire's own decoder does not run it
    scheme: Scheme | None  # of quantised weights

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of the cache and of the weights that are not quantised."""
        return _dtype("auto", self.raw)

    def __str__(self) -> str:
        return f"adapter{self.found.way.note}{_of_part(self.part)}: because {self.reason}"


def _of_part(part: TextPart | None) -> str:
    return "" if part is None else f", {part}"


def choose(where: Where, model_impl: str = "auto") -> Own | Adapted:
    """Select the implementation that runs a model.

    model_impl: "auto", "quire" or "transformers". Raises ModelError, with all reasons, if no implementation can.
    """
    files = files_of(where)
    raw, part = _described(files.config())
    has_weights = isinstance(files, ReplacedFiles) or files.weight_files(part)
    if part is not None and raw.get("tie_word_embeddings") is None and has_weights:
        # The default of this key differs between the whole model, its text part, and releases of transformers.
        raw = {**raw, "tie_word_embeddings": "lm_head.weight" not in files.tensors(part).names}
    scheme = read_scheme(raw)
    reason = "model_impl is 'transformers'"
    is_classifier = _is_classifier(raw, files.path)
    if model_impl != "transformers" or is_classifier:
        try:
            family = _family_of(raw, files.path)
            return Own(raw, part, family, family.decoder_config(raw), scheme)
        except ModelError as error:
            if model_impl == "quire" or is_classifier:
                raise
            reason = str(error)
    from quire.models.adapter.load import find  # the import takes 2 s and Quire's own decoder does not need it

    try:
        return Adapted(raw, part, find(raw), reason, scheme)
    except Unsupported as error:
        raise ModelError(f"{reason}. Nor can transformers' code be served: {error}") from error


def load_model(where: Where, config: EngineConfig, backend: Backend, exchange: Communicator | None = None) -> Model:
    """Load a model with its weights on the device.

    exchange: the communication of the tensor-parallel group; this rank loads its part. None: load the whole model.
    Raises ModelError for a checkpoint that cannot be served, ConfigError for options that it does not support.
    """
    files = files_of(where)
    choice = choose(files, config.model_impl)
    quantisation = Quantisation.of(config, choice.scheme)
    if isinstance(choice, Adapted):
        return _adapted(choice, files, config, backend, quantisation)
    raw, part, family, decoder, _ = choice
    if not decoder.causal:
        quantisation = quantisation.for_encoder()
    usual = min(longest_text(files) or decoder.max_position_embeddings, decoder.max_position_embeddings)
    max_model_len = _max_model_len(config, files.path, usual, longest_sequence(decoder))
    checkpoint = whole_names(files.tensors(part))
    for path in files.weight_files(part):
        _read_ahead(path)
    sources = family.weight_sources(decoder, checkpoint.names)
    if decoder.has_head and isinstance(checkpoint, Prefixed) and not decoder.tied_embeddings:
        decoder = replace(decoder, has_head=False)  # an embedding model that is named like one that writes
    weights = Weights(checkpoint, sources, decoder, _dtype(config.dtype, raw), config.device, quantisation)
    eos_token_ids = _eos_token_ids(raw, files, decoder.vocab_size)
    limits = lora_limits(config)
    drafts = exchange is None or exchange.rank == 0
    eagle = _eagle(config, decoder) if drafts else None
    if eagle is not None:
        decoder = replace(decoder, seen=eagle.seen)
    elif part is not None and exchange is None:
        decoder = replace(decoder, **image_fields(files.config()))
    with _shown(weights, files, part, 0 if exchange is None else exchange.rank) as advance:
        weights.on_read = advance
        own = (max_model_len, eos_token_ids, config.reproducible, limits, exchange, config.most_tokens)
        model = Decoder(decoder, weights, backend, *own)
    model.pooler = read_pooler(files, raw, decoder, model.pooler, backend, config.device)
    model.quantisation, model.weight_bytes, model.origin = quantisation.description, weights.nbytes, str(choice)
    embedding = partial(_whole_embedding, model, weights)
    if drafts and decoder.causal and decoder.has_head and _wants_draft_head(config, model):
        model.draft_head = _draft_head(choice, checkpoint, model, config, quantisation.for_drafts(), embedding)
    if eagle is not None:
        model.draft_head = EagleHead(eagle, model, Quantisation().for_drafts().linears, embedding)
    if limits is not None and model.lora_tables is not None:
        targets = decoder_targets(decoder, sources, model.lora_tables)
        model.loras = Loras(targets, limits, model.dtype, model.device)
        model.loras.part, model.loras.module = part, sources.module
    return model


def find_files(config: EngineConfig) -> Files:
    """Return the files of a config's model. A GGUF file's vision part is that of mmproj, or the one in its directory.

    Raises ModelError if a file is not found or not supported, ConfigError for mmproj without a GGUF file.
    """
    files = files_of(locate(config.model, config.gguf_file))
    if config.mmproj is not None:
        if not isinstance(files, GgufModel):
            raise ConfigError(f"mmproj is {config.mmproj!r}, and {files.path} is no GGUF file; leave it out")
        files.read_images(_locate_mmproj(config.mmproj, config.model))
    elif isinstance(files, GgufModel) and not config.no_mmproj:
        _read_images_nearby(files)
    return files


def _locate_mmproj(name: str, model: str | None) -> Path:
    """Return the path of the file of a vision part: a path, or a name in the model's directory or repository."""
    if (path := Path(name).expanduser()).is_file():
        return path
    if model is None or Path(model).expanduser().is_file():
        raise ModelError(f"mmproj is {name!r}; there is no such file")
    return locate(model, name)


def _read_images_nearby(files: GgufModel) -> None:
    """Add the vision part in the directory of a GGUF file. Log a warning if those there do not fit, or several do."""
    fitting, reason = [], ""
    for path in files.mmproj_nearby():
        try:
            files.read_images(path)
            fitting.append(path)
        except ModelError as error:
            reason = reason or str(error)
    if len(fitting) > 1:
        files.mmproj = None
        reason = f"its directory has {', '.join(path.name for path in fitting)}; name one with mmproj"
    if reason and len(fitting) != 1:
        log.warning("%s is served for text alone: %s", files.path.name, reason)


def load_images(
    where: Where, model: Model, config: EngineConfig, backend: Backend
) -> Callable[[], ImageEncoder] | None:
    """Return a function that loads the part of a model that reads images; None: it reads none.

    Raises ModelError, when called, for a checkpoint without the files of an image processor.
    """
    files = files_of(where)
    raw = files.config()
    if model_type(raw) not in SERVED or config.tensor_parallel_size > 1 or not isinstance(model, Decoder):
        return None
    if any(getattr(model.config, name) != value for name, value in image_fields(raw).items()):
        return None
    return partial(ImageEncoder, files, model.dtype, backend if config.device == "cpu" else load_backend("auto", "cpu"))


def load_replaced(files: Files, config: EngineConfig, backend: Backend, new: NewWeights) -> tuple[ReplacedFiles, Model]:
    """Load a model with new weights in place of those of the same names. Return its files as well.

    Raises ModelError for weights that cannot be read or belong to another model. The loaded model is not used.
    """
    changed = replaced(files, new)
    if isinstance(new, (str, Path)) and (Path(new) / CONFIG).exists():
        own, other = (_architecture(where, config) for where in (files, Path(new)))
        if own != other:
            raise ModelError(f"{new} has the config.json of another model than {files.path}; only weights are replaced")
    return changed, load_model(changed, config, backend)


def _architecture(where: Where, config: EngineConfig) -> object:
    choice = choose(where, config.model_impl)
    if isinstance(choice, Own):
        return choice.config
    return {name: value for name, value in choice.raw.items() if name not in IMMATERIAL}


def _eagle(config: EngineConfig, decoder: DecoderConfig) -> Eagle | None:
    """Return the EAGLE-3 checkpoint that draft_model names; None if it names none."""
    if config.draft_model is None or config.num_speculative_tokens == 0:
        return None
    files = files_of(locate(config.draft_model))
    return read_eagle(files, decoder) if is_eagle(files.config()) else None


def _wants_draft_head(config: EngineConfig, model: Decoder) -> bool:
    """Return whether to use the checkpoint's draft head, if there is one, where drafts leave all results unchanged."""
    if (
        config.num_speculative_tokens == 0
        or config.draft_model is not None
        or not model.backend.batch_invariant(config.device)
    ):
        return False
    return config.draft == "head" or (config.draft == "auto" and model.weight_bytes.total >= PAYS_FROM)


def _whole_embedding(model: Decoder, weights: Weights) -> Embedding:
    """Return the embedding of all tokens, of which a rank's model has a part."""
    if model.exchange is None:
        return model.embedding
    return model.backend.linears(str(model.device), False).embedding(matrix(weights["embedding"]))


def _draft_head(
    choice: Own,
    checkpoint: Tensors,
    model: Decoder,
    config: EngineConfig,
    quantisation: Quantisation,
    embedding: Callable[[], Embedding],
) -> DraftHead | None:
    """Return the checkpoint's draft head, None if it has none.

    Raises ModelError if the option asks for a head that is missing or unreadable.
    """
    found, read = None, cast(ReadHead, getattr(choice.family, "draft_head", lambda *_: None))
    try:
        found = read(choice.raw, choice.config, checkpoint.names)
        if found is None:
            raise ModelError(f"{checkpoint.path} has no draft head that Quire knows")
        weights = Weights(checkpoint, found.sources, found.config, model.dtype, config.device, quantisation)
        return DraftHead(found.config, weights, model, embedding())
    except ModelError as error:
        if config.draft == "head":
            raise ModelError(f"draft is 'head': {error}") from error
        if found is not None:
            log.warning("the draft head is left out: %s", error)
        return None


def check_parallel(where: Where, config: EngineConfig, backend: Backend) -> None:
    """Raise ConfigError if this model does not support the tensor_parallel_size of the config."""
    choice = choose(where, config.model_impl)
    refused = {
        "its layers are transformers' own": isinstance(choice, Adapted),
        "it is an encoder or a classifier": isinstance(choice, Own)
        and (not choice.config.causal or bool(choice.config.classifier)),
        f"attention_backend is {backend.name!r}": backend.name != ("cpu" if config.device == "cpu" else "triton"),
        "enable_lora is True": config.enable_lora,
        f"kv_disk is {config.cache.kv_disk!r}": config.cache.kv_disk is not None,
    }
    for why, holds in refused.items():
        if holds:
            raise ConfigError(
                f"tensor_parallel_size is {config.tensor_parallel_size}, and {why}; several processes compute Quire's "
                "own decoders with the backend 'cpu', or 'triton' on GPUs, without LoRA adapters and kv_disk"
            )
    if isinstance(choice, Own):
        check_shards(choice.config, config.tensor_parallel_size)


def _read_ahead(path: Path) -> None:
    """Ask the system to read a file in the background while earlier weights are packed, if it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _shown(
    weights: Weights, files: Files, part: TextPart | None, rank: int
) -> AbstractContextManager[Callable[[], None]]:
    """Return a progress bar over the weights for rank 0, if there are SHOWN_WHILE_READ bytes to read."""
    size = sum(path.stat().st_size for path in files.weight_files(part))
    return progress_bar("weights", len(weights)) if size >= SHOWN_WHILE_READ and not rank else nullcontext(lambda: None)


def _adapted(
    choice: Adapted, files: Files, config: EngineConfig, backend: Backend, quantisation: Quantisation
) -> Model:
    from quire.models.adapter import load as adapter

    raw, found = choice.raw, choice.found
    longest = adapter.longest_sequence(found.config)
    max_model_len = _max_model_len(config, files.path, longest, longest)
    eos_token_ids = _eos_token_ids(raw, files, found.config.get_text_config().vocab_size)
    dtype = _dtype(config.dtype, raw)
    try:
        model = adapter.load(
            files.tensors(choice.part),
            found,
            backend,
            dtype,
            config.device,
            max_model_len,
            eos_token_ids,
            config.reproducible,
            quantisation,
            lora_limits(config),
        )
    except Unsupported as error:
        raise ModelError(f"{choice.reason}. Nor can transformers' {found.model.__name__} be served: {error}") from error
    model.origin = str(choice)
    if model.loras is not None:
        model.loras.part = choice.part
    return model


def lora_limits(config: EngineConfig) -> LoraLimits | None:
    """Return the limits of LoRA adapters; None if LoRA is disabled."""
    return LoraLimits(config.max_loras, config.max_lora_rank) if config.enable_lora else None


def _max_model_len(config: EngineConfig, path: Path, usual: int, longest: int) -> int:
    max_model_len = config.max_model_len or usual
    if max_model_len > longest:
        raise ConfigError(f"max_model_len is {max_model_len}; {path.name} was made for sequences of up to {longest}")
    return max_model_len


def _is_classifier(raw: Mapping[str, Any], directory: Path) -> bool:
    """Return whether a head scores a whole text. Raises ModelError for a head that scores each token."""
    for name in architectures(raw):
        if name.endswith(("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")):
            raise ModelError(
                f"{directory} is a {name}, whose head scores tokens or several texts; models here generate, embed, or "
                f"score a text or a pair of texts (...{CLASSIFIER})"
            )
    return any(name.endswith(CLASSIFIER) for name in architectures(raw))


def _family_of(raw: Mapping[str, Any], directory: Path) -> Family:
    names = architectures(raw)
    for name in names:
        if (module := FAMILIES.get(name) or ENCODERS.get(name)) is not None:
            return cast(Family, importlib.import_module(module))
        if (causal := causal_name(name)) in FAMILIES:
            family = cast(Family, importlib.import_module(FAMILIES[causal]))
            return Headless(family, causal, classifies=name.endswith(CLASSIFIER))
    found = ", ".join(names[:3]) or f"model_type {model_type(raw)!r}, without an architecture"
    raise ModelError(f"{directory} is a {found}, for which there is no decoder here (`quire models` lists all)")


def longest_sequence(decoder: DecoderConfig) -> int:
    """Return the longest sequence, in tokens, that the positions of all layers support."""
    longest = decoder.max_position_embeddings
    return min((longest_rotated(rope, longest) for rope in decoder.ropes if rope is not None), default=longest)


def _dtype(name: str, raw: Mapping[str, Any]) -> torch.dtype:
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be auto or one of {', '.join(DTYPES)}")
    if name == "auto":
        name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype is {shown(name)}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _eos_token_ids(raw: Mapping[str, Any], files: Files, vocab_size: int) -> frozenset[int]:
    """Return the tokens that end generation: those of generation_config.json, else those of config.json."""
    found = files.generation().get("eos_token_id")
    ids = raw.get("eos_token_id") if found is None else found
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int for token in listed):
        raise ModelError(f"{files.path}: eos_token_id is {shown(ids)}; it must be a token's number, or a list of these")
    return frozenset(token for token in listed if 0 <= token < vocab_size)  # others can never be sampled
