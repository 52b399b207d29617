"""Every causal language model of the installed transformers in a small, random form: what Quire makes of it.

`python -m tests.models.sweep` writes what it found into the package, where `quire models` reads it, and docs/models.md.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from quire.errors import ModelError
from quire.models import Adapted, Own, choose
from quire.models.adapter.parity_check import randomise
from quire.models.adapter.toy_model import DEPTH, VOCAB, shrink
from quire.models.supported import HOW, PATH, Repository, Supported, Sweep, read
from quire.models.text_part import OTHER_SIDES, WHOLES
from tests.models.checkpoints import engine, probed_logits
from tests.models.published import REPOSITORIES

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SIDED = sorted(WHOLES)
# What a config of that type cannot be without, and its defaults leave out.
DECODERS = (
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
    "roc_bert roformer"
).split()
ENCODER_DECODERS = "bart blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet whisper"
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
GIVEN: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in [*DECODERS, "xlm-roberta", "xlm-roberta-xl"]},
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
        }
    },
    "emu3": {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000.0}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"num_key_value_heads": 8},
    **{name: {"is_decoder": True, "is_encoder_decoder": False} for name in ENCODER_DECODERS.split()},
    "bigbird_pegasus": {"is_decoder": True, "is_encoder_decoder": False, "attention_type": "original_full"},
    **{name: {"text_config": {"rope_parameters": MROPE}} for name in ("qwen2_vl", "qwen2_5_vl")},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
ALL_FORMS = "AWQ, GPTQ, compressed-tensors, FP8; int8, int4 at load"
LOADED_FORMS = "int8, int4 at load, experts as they are"
LENGTHS = (1, 9, 23)
STEP = 12  # tokens: prompts are cut into chunks, mixed with single tokens of the others
TOLERANCE = 1e-4  # of the largest logit


class Row(NamedTuple):
    """What became of a type."""

    supported: Supported
    error: float | None  # the largest difference of two logits from eager attention, over the largest logit


def sweep(name: str) -> Row:
    """Save a small model of that type, load it as usual, and compare it with eager attention.

    Raises AssertionError where it is served and answers something else.
    """
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = Path(place)
        kind = _class(name)
        try:
            config = CONFIG_MAPPING[name](**GIVEN.get(name, {}))
        except Exception as error:
            return Row(Supported(name, "refused", f"its config has no defaults: {_line(error)}"), None)
        config.architectures = [kind.__name__]
        config.save_pretrained(directory)
        return Row(*_tried(name, config.to_dict(), directory)[:2])


def sweep_repository(maker: str, name: str, raw: dict[str, Any]) -> Repository:
    """As `sweep`, with a small copy of a published config: the same keys, fewer layers, smaller sizes."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = Path(place)
        (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        found, _, choice = _tried(name, raw, directory, json.dumps(_small(raw)))
        experts = any("experts" in key for key in (raw.get("text_config") or raw))
        forms = "" if choice is None else LOADED_FORMS if experts and isinstance(choice, Adapted) else ALL_FORMS
        part = "" if choice is None or choice.part is None else ", text part"
        return Repository(maker, name, found.how + part, forms, found.reason)


def _tried(
    name: str, raw: dict[str, Any], directory: Path, small_text: str = ""
) -> tuple[Supported, float | None, Own | Adapted | None]:
    """What becomes of a directory with a config.json, and how far its small copy is from eager attention.

    raw: what the config says; small_text: the config.json of the small copy, if not as transformers saves it.
    """
    try:
        choice = choose(directory)  # of the config alone: some that are refused take long to make
        model = _saved(_small(raw), directory)
        if small_text:
            (directory / "config.json").write_text(small_text, encoding="utf-8")
        made = engine(directory, max_num_batched_tokens=STEP, block_size=4)
    except ModelError as error:
        return Supported(name, "refused", str(error).rpartition("be served: ")[2]), None, None
    how = "own decoder" if isinstance(choice, Own) else f"adapter{choice.found.way.note}"
    return Supported(name, how, ""), _error(made, model), choice


def _class(name: str) -> Any:
    """Of the whole, where a type is one of several sides."""
    config = CONFIG_MAPPING[name]
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if config in mapping and (name in WHOLES or mapping is MODEL_FOR_CAUSAL_LM_MAPPING):
            kinds = mapping[config]
            return kinds[0] if isinstance(kinds, tuple) else kinds
    raise KeyError(name)


def _small(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json made small: of a whole its text part, and one layer in each of its other sides. All in fp32."""
    derived = DERIVED if raw["model_type"].startswith("zamba") else ()
    raw = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype", *derived)}
    if raw["model_type"] not in WHOLES:
        return shrink(raw)
    if "text_config" in raw:
        small = {**raw, "dtype": "float32", "text_config": shrink(raw["text_config"])}
    else:
        small = {**raw, **shrink({key: value for key, value in raw.items() if not OTHER_SIDES.fullmatch(key)})}
    for key, value in raw.items():
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            small[key] = value % VOCAB
        elif key.endswith("_config") and key != "text_config" and isinstance(value, dict):
            small[key] = _one_layer(value, small)
    return small


def _one_layer(side: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The config of a side of one layer, whose results have the size of the text's rows."""
    depth = side.get("num_hidden_layers")
    small = {
        key: value[:1] if isinstance(value, list) and len(value) == depth else value for key, value in side.items()
    }
    small |= dict.fromkeys((*DEPTH, "depth"), 1)
    if "per_layer_config" in side:
        small["per_layer_config"] = {}
    if "adapter_out_dim" in side:
        small["adapter_out_dim"] = whole["text_config"]["hidden_size"]
    return small


def _saved(raw: dict[str, Any], directory: Path) -> Any:
    """The model of a config with its files in the directory; None, and the config alone, where none can be made."""
    try:
        kind, config = _class(raw["model_type"]), CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
        model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except ImportError:  # of what sees: then the text part alone stands for the whole
        model = _text_of(config)
    except Exception:
        return None
    randomise(model)
    model.save_pretrained(directory)
    if config.model_type != model.config.model_type:
        tensors = load_file(directory / "model.safetensors")
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(directory)
    return model


def _text_of(config: Any) -> Any:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config.get_text_config())]
    made = kind._from_config(config.get_text_config(), attn_implementation="eager", dtype=torch.float32)
    return made.eval()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@torch.inference_mode()
def _error(made: Any, eager: Any) -> float:
    generator = torch.Generator().manual_seed(3)
    padding = getattr(eager.config.get_text_config(), "pad_token_id", None)  # some count positions without it
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts = [[token if token != padding else 2 + (padding == 2) for token in prompt] for prompt in prompts]
    probe, tokens = probed_logits(made, prompts, max_tokens=4)
    assert {"prefill", "decode"} in probe.steps, "no step had prompts and single tokens"
    worst, largest = 0.0, 0.0
    for i, prompt in enumerate(prompts):
        text = prompt + tokens[f"r{i}"]
        expected = eager(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
        for end in range(1, len(text)):
            worst = max(worst, float((probe.found[tuple(text[:end])] - expected[end - 1]).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    assert worst <= TOLERANCE * max(1.0, largest), f"logits up to {largest} differ by {worst}"
    return worst / max(1.0, largest)


# Names that readers look for, and their types.
SOUGHT = {
    "Qwen 3, 3.5, 3-Next, 3-VL": "qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next qwen3_vl",
    "Llama 3, 3.2 Vision, 4": "llama mllama llama4",
    "Gemma 3, 3n, 4": "gemma3 gemma3n gemma4",
    "gpt-oss": "gpt_oss",
    "DeepSeek V3, R1": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32",
    "DeepSeek V4": "deepseek_v4",
    "GLM 4.5, 4.6": "glm4_moe",
    "GLM 5": "glm_moe_dsa",
    "A.X K2": "axk2",
    "Mistral, Ministral, Mixtral": "mistral mistral3 ministral3 mixtral",
    "Phi 3, 4, 4 multimodal": "phi3 phimoe phi4_multimodal",
    "Granite 4": "granitemoehybrid",
    "LFM 2": "lfm2 lfm2_moe",
    "MiniMax M2": "minimax_m2",
    "MiniMax 01": "minimax",
    "Kimi Linear": "kimi_linear",
    "Ling 3": "bailing_hybrid",
    "LongCat Flash": "longcat_flash",
    "Nemotron-H": "nemotron_h",
    "Falcon-H1": "falcon_h1",
    "Jamba": "jamba",
    "Zamba, Zamba 2": "zamba zamba2",
    "OLMo 3": "olmo3",
    "SmolLM 3": "smollm3",
}

PAGE = """# Models

| model | types in config.json | computed by |
|---|---|---|
{sought}

`quire info --model NAME` shows which code computes a checkpoint, or why it is refused, and its requirements on
this machine: parameters, memory, and the expected tokens a second. It downloads no weights.

- **own decoder**: Quire's, the fastest. A family is chosen only if it understands every key of the config.
- **adapter**: transformers' modelling code with Quire's paged attention and linears. Before a checkpoint is served, a
  small random copy of it computes a mixed batch and must agree with eager attention, to 1e-4 of the largest logit.
- **adapter, one sequence at a time**: if transformers does not let attention be replaced, its code computes each
  sequence of a step separately. Keys and values are in Quire's blocks, so prefixes are shared and requests preempted
  as usual. The same trial is made. It is slower, and a row's bits may depend on the chunks of its prompt.
- **refused**, with the reason.

Of a multimodal checkpoint, such as `Gemma3ForConditionalGeneration`, the **text part** is served. The
weights of the other parts are not read. Some types [read images](images.md) too.

`LLM(model, model_impl="quire")` or `model_impl="transformers"` selects one of the two. Products that are not plain
linears (experts, convolutions) are computed by transformers in the adapter: then the model is not batch-invariant, and
speculative decoding is off.

Two kinds of RoPE, longrope and dynamic, change with the length of a sequence. Quire uses the angles of a sequence of
`max_model_len` tokens for all sequences, so an answer does not depend on the batch. Dynamic RoPE is plain up to the
checkpoint's `max_position_embeddings`, which is the usual `max_model_len`. A larger one, up to `factor` times that,
slows the rotation at all positions.

`max_model_len` may be up to `factor` times `max_position_embeddings` with linear RoPE too, and up to `factor` times
`original_max_position_embeddings` with yarn. With llama3 and longrope `max_position_embeddings` is the limit.
`quire info` shows it.

The attention of DeepSeek-V3.2, GLM-5 and A.X K2 is sparse: an indexer scores the keys before each token, which attends
to the `index_topk` best of them, ties to the lower position. Up to that number of tokens the result is dense
attention's, to the bit. Layers of GLM-5 that share an earlier layer's choice are served, too. The indexer's key of each
token is in the blocks of the KV cache, in the model's dtype, so `kv_cache_dtype` must be `auto`. The scores are in
fp32: the Hadamard rotation and the FP8 of the original kernel are left out, as in transformers. Backends with an
indexer are `cpu`, `reference` and `gather`: on a GPU, select one of the last two with `attention_backend`. GGUF files
of these models are refused.

Zamba's blocks of attention are stored and loaded once, however many layers use them. LoRA adapters of them are refused.

`python -m tests.models.sweep` writes this page with transformers {release}; `quire models` prints the same.

## Published checkpoints

Each was tried with a small random copy: the keys of its published config.json with fewer layers and smaller sizes, in
a mixed batch of prompts, chunks and single tokens. [Quantised weights](quantisation.md) have a separate page.

| repository | computed by | quantised weights |
|---|---|---|
{repositories}
{refused_repositories}
## Types of models

Below are the {count} types of causal language models of transformers {release}, each tried likewise with its default
config: {own} on Quire's decoder, {adapter} through the adapter, {apart} through it one sequence at a time, {refused}
refused. Multimodal checkpoints are listed separately: of {wholes} types the text part is served. A published
checkpoint may have options that its type's defaults lack; then it is refused with the reason.

**Own decoder**: {own_names}.

**Adapter**: {adapter_names}.

**Adapter, one sequence at a time**: {apart_names}.

**Text part**: {whole_names}.

| refused | because |
|---|---|
{reasons}
"""


def document(found: Sweep) -> str:
    """docs/models.md."""
    types = [row for row in found.types if row.name in TYPES]
    wholes = [row for row in found.types if row.name in WHOLES and row.how != "refused"]
    own, adapted, apart, refused = ([row for row in types if row.how == how] for how in HOW)
    served = [one for one in found.repositories if one.how != "refused"]

    def names(rows: list[Supported]) -> str:
        return ", ".join(row.name for row in rows if row.name not in WHOLES)

    return PAGE.format(
        release=found.transformers,
        sought="\n".join(_sought(name, found) for name in SOUGHT),
        count=len(types),
        own=len(own),
        adapter=len(adapted),
        apart=len(apart),
        refused=len(refused),
        wholes=len(wholes),
        own_names=names(own),
        adapter_names=names(adapted),
        apart_names=names(apart),
        whole_names=", ".join(f"{row.name} ({row.how})" for row in wholes),
        repositories="\n".join(f"| {one.name} | {one.how} | {one.forms} |" for one in served),
        refused_repositories=_refused(found.repositories),
        reasons="\n".join(f"| {row.name} | {_cell(row.reason)} |" for row in found.types if row.how == "refused"),
    )


def _sought(name: str, found: Sweep) -> str:
    """A line of the first table."""
    rows = [row for row in found.types if row.name in SOUGHT[name].split()]
    hows: dict[str, list[str]] = {}
    for row in rows:
        hows.setdefault(f"refused: {_cell(row.reason)}" if row.how == "refused" else row.how, []).append(row.name)
    each = [how if len(hows) == 1 else f"{how} ({', '.join(names)})" for how, names in hows.items()]
    return f"| {name} | {', '.join(row.name for row in rows)} | {'; '.join(each)} |"


def _refused(repositories: Iterable[Repository]) -> str:
    """A table of those that are refused, where there are any."""
    rows = [f"| {one.name} | {_cell(one.reason)} |" for one in repositories if one.how == "refused"]
    return "\n".join(["", "Refused:", "", "| repository | because |", "|---|---|", *rows, ""]) if rows else ""


def _cell(reason: str) -> str:
    """A reason in a table, without the directory of the trial."""
    return re.sub(r"/\S*/tmp\w+", "the checkpoint", reason.replace("|", "/"))


# Keys of Zamba that follow from others.
DERIVED = ("attention_hidden_size", "attention_head_dim", "mamba_headdim", "hybrid_layer_ids")


def _hush() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> None:
    """Write what there is."""
    names = sorted({*TYPES, *SIDED})
    published = [(maker, *one) for maker, some in REPOSITORIES.items() for one in some.items()]
    with get_context("spawn").Pool(initializer=_hush, maxtasksperchild=20) as pool:
        repositories, types = [], []
        for found in pool.starmap(sweep_repository, published, chunksize=1):
            repositories.append(found)
            print(*found, flush=True)
        for row in pool.imap(sweep, names):
            types.append(row.supported)
            print(*row.supported, "" if row.error is None else f"{row.error:.1e}", flush=True)
    content = {"transformers": version("transformers"), "repositories": repositories, "types": types}
    PATH.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
    DOCS.write_text(document(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
