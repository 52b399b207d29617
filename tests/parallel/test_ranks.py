"""A model that several ranks compute has the bits of the model that one computes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from quire.cache.storage import bytes_per_block
from quire.config import engine_config
from quire.engine import engine as engine_module
from quire.engine.engine import DRAFT_SHARE, Engine, groups_of
from quire.engine.graphs import bucket_sizes
from quire.engine.model_drafter import ModelDrafter
from quire.engine.runner import Runner
from quire.errors import ConfigError
from quire.fingerprint.components import named_parts
from quire.models import EMBEDDED, read_config
from quire.models.decoder import Decoder
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.eagle import LAYERS
from quire.models.files import files_of
from quire.models.sharding import Shard, check_shards
from quire.ops import load, native
from quire.ops.collectives import Communicator, SharedEmbedding, own_share, shares
from quire.ops.weights.linear import PlainEmbedding
from quire.parallel import worker
from quire.request import Request, SamplingParams
from tests.engine.test_cache_bits import asked, bits
from tests.engine.test_graphs import Twin
from tests.marks import of_long_runs, spread
from tests.models.checkpoints import save
from tests.models.gguf import test_models as gguf
from tests.models.heads import add_head, save_eagle
from tests.models.quantisation import test_formats, test_fp8, test_mxfp4
from tests.models.test_families import FAMILIES, VARIANTS
from tests.parallel.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

OPTIONS = {"max_num_batched_tokens": 16}
WIDE: Mapping[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
REFUSED = {("falcon, groups of heads, one norm", 4)}  # 3 KV heads
# Between them these have all that ranks divide: heads of each kind of attention, channels, experts, tables, states.
USUAL = (
    ("multi query, odd group", 4), ("bloom", 4), ("falcon, groups of heads, one norm", 4), ("phi3", 2), ("llama4", 4),
    ("qwen3 moe, all experts", 2), ("gpt oss", 4), ("gemma4, v is k, no rows of layers", 4), ("lfm2", 4),
    ("glm 5, shared indexers", 4), ("qwen3_5, one head of keys, other share", 4),
    ("granitemoehybrid, rope, multipliers", 4),
)  # fmt: skip


def answers(engine: Engine) -> dict[str, list[Any]]:
    """What requests in mixed steps get: tokens, and logprobs of these and of the prompt."""
    found: dict[str, list[Any]] = {}
    for i, length in enumerate((1, 9, 23)):
        params = SamplingParams(
            temperature=0.8 * (i == 1), max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1, seed=i
        )
        tokens = array("i", [(7 * i + 5 * j) % 90 for j in range(length)])
        engine.add(Request(f"{i}", tokens, length, params))
        found[f"{i}"] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found[event.request_id].append((event.token, event.logprobs, event.prompt_logprobs))
    return found


def check(directory: Path, size: int, **options: Any) -> None:
    wanted = on_ranks(directory, 1, answers, **OPTIONS, **options)
    assert on_ranks(directory, size, answers, **OPTIONS, **options) == wanted


@pytest.mark.parametrize(
    ("name", "size"), [one if one in USUAL else of_long_runs(*one) for one in product(VARIANTS, (2, 4))]
)
def test_variants(tmp_path: Path, name: str, size: int) -> None:
    """Heads, channels and tokens that ranks cannot have as many of each, too."""
    kind, changes = VARIANTS[name]
    save(tmp_path, kind, torch.bfloat16, **changes)
    if (name, size) in REFUSED:
        with pytest.raises(ConfigError, match="tensor_parallel_size is 4; it must be up to 3, the KV heads of layer 0"):
            check_shards(read_config(tmp_path)[0], size)
    else:
        check(tmp_path, size)


@pytest.mark.parametrize(("family", "dtype"), spread(21, FAMILIES, (torch.float32, torch.float16)))
def test_dtypes(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    kind, changes = FAMILIES[family]
    save(tmp_path, kind, dtype, **changes)
    check(tmp_path, 2)


@pytest.mark.parametrize("kind", ["Llama", *map(of_long_runs, ["Gemma2", "Qwen3Moe", "GptOss"]), "Qwen3_5"])
def test_eight_ranks(tmp_path: Path, kind: str) -> None:
    save(tmp_path, kind, torch.bfloat16, **WIDE)
    check(tmp_path, 8)


def some(cases: Iterable[str], *usual: str) -> list[Any]:
    return [case if case in usual else of_long_runs(case) for case in cases]


@pytest.mark.parametrize("case", some(test_formats.CASES, "gptq, act-order", "gptq, last group smaller", "bytes"))
def test_integers(tmp_path: Path, case: str) -> None:
    config, one = test_formats.CASES[case]
    made = test_formats.write(
        tmp_path, config, one(len(case)), intermediate_size=160 if "smaller" in case else 384, **WIDE
    )
    check(made.directory, 4, dtype="bfloat16")


@pytest.mark.parametrize("case", some(test_fp8.CASES, "labs, blocks", "channel"))
def test_fp8_weights(tmp_path: Path, case: str) -> None:
    check(test_fp8.published(tmp_path, case)[0], 4)


def test_mxfp4_weights(tmp_path: Path) -> None:
    check(test_mxfp4.published(tmp_path), 2)


@pytest.mark.parametrize("name", some(gguf.QUANTISED, "mixtral", "qwen35"))
def test_gguf_files(tmp_path: Path, name: str) -> None:
    kind, changes = gguf.QUANTISED[name]
    save(tmp_path, kind, **changes)
    gguf.write_gguf(tmp_path, tmp_path / "model.gguf", kind, partial(gguf.mixed, kind))
    check(tmp_path / "model.gguf", 2)


@pytest.mark.parametrize(("quantization", "activations"), spread(2, ["int8", "int4"], ["int8", "bf16"]))
def test_rounded_at_load(quantization: str, activations: str) -> None:
    check(EMBEDDED, 2, quantization=quantization, quantization_activations=activations)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        of_long_runs({"num_speculative_tokens": 3}),
        {"num_blocks": 24, "preemption": "swap", "swap_space": "8MiB"},
        {"num_blocks": 24, "num_speculative_tokens": 3},
        {"num_blocks": 24, "preemption": "swap", "swap_space": "8MiB", "num_speculative_tokens": 3, "draft": "head"},
        of_long_runs({"enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_what_the_engine_does(options: dict[str, Any]) -> None:
    """Samples that share blocks, prefixes, guesses, preemption, a cache of integers."""

    def run(engine: Engine) -> Any:
        return bits(engine, [request for members in asked(12) for request in members])

    common = {"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 64} | options
    assert on_ranks(EMBEDDED, 2, run, **common) == on_ranks(EMBEDDED, 1, run, **common)


# Groups of the head between those of windows or before states; joined groups; embeddings that are tied or scaled.
@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        ("Llama", "head"), ("DeepseekV3", "head"), ("Qwen3_5", "head"),
        ("Llama", "eagle"), ("Gemma2", "eagle"), ("Lfm2", "eagle"),
        ("Llama", "model"),
    ],
)  # fmt: skip
def test_drafts_of_the_first_rank(tmp_path: Path, kind: str, draft: str) -> None:
    """It computes a head and a draft model alone: the drafts are the same, too."""
    model, options = tmp_path / "model", {"num_speculative_tokens": 3, "draft": draft}
    saved = save(model, kind, torch.bfloat16, **({"q_lora_rank": 24} if kind == "DeepseekV3" else {}))
    if draft == "head":
        add_head(model, kind, saved.config.num_hidden_layers - 1, saved.config.num_hidden_layers)
    if draft == "eagle":
        own = {name: getattr(saved.config, name) for name in ("hidden_size", "vocab_size")}
        save_eagle(tmp_path / "eagle", eagle_config={LAYERS: [0, 1, 2]}, **own)
    if draft != "head":
        options |= {"draft": "model", "draft_model": str(model if draft == "model" else tmp_path / "eagle")}

    def run(engine: Engine) -> Any:
        assert engine.scheduler.speculation is not None
        [drafter], proposed = engine.scheduler.speculation.drafters, list[Any]()
        propose = drafter.propose

        def watched(*given: Any) -> Any:
            proposed.append(propose(*given))
            return proposed[-1]

        drafter.propose = watched  # type: ignore[method-assign]
        return answers(engine), proposed

    wanted = on_ranks(model, 1, run, **OPTIONS, **options)
    assert on_ranks(model, 2, run, **OPTIONS, **options) == wanted
    assert sum(len(tokens) for drafts in wanted[1] for tokens in drafts) > 3
    assert wanted[0] == on_ranks(model, 1, answers, **OPTIONS)


def test_steps_that_all_ranks_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, with the exchanges in the graphs, whose twins are called again."""
    twins: list[Twin] = []

    def twin(_: torch.device) -> Twin:
        twins.append(Twin())
        return twins[-1]

    def run(engine: Engine) -> Any:
        return bits(engine, [request for members in asked(12) for request in members])

    common = {"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    wanted = on_ranks(EMBEDDED, 1, run, **common)
    for module in (engine_module, worker):
        monkeypatch.setattr(module, "uses_graphs", lambda *_: True)
    monkeypatch.setattr(engine_module, "CudaCapture", twin)
    assert on_ranks(EMBEDDED, 2, run, **common) == wanted
    first, second = twins
    assert first.captures == second.captures == len(bucket_sizes(8))
    assert first.replays == second.replays
    assert sum(first.replays.values()) > 10


def test_a_number_that_is_not_finite_is_seen_whichever_rank_computes_it(tmp_path: Path) -> None:
    model = save(tmp_path, "Llama", torch.float32, **WIDE)
    model.model.layers[1].self_attn.v_proj.weight.data[-1] = float("inf")  # of the last rank
    model.save_pretrained(tmp_path)

    def errors(engine: Engine) -> list[str]:
        engine.add(Request("0", array("i", [5, 6, 7]), 3, SamplingParams(max_tokens=2)))
        found = []
        while engine.has_work:
            found += [str(event.error) for event in engine.step() if event.error is not None]
        return found

    assert on_ranks(tmp_path, 2, errors) == on_ranks(tmp_path, 1, errors) != []


def test_a_rank_holds_its_part_of_an_embedding_alone(tmp_path: Path) -> None:
    save(tmp_path, "Llama", torch.float32, tie_word_embeddings=False)

    def held(engine: Engine) -> int:
        assert isinstance(engine.runner, Runner)
        model = engine.runner.model
        assert isinstance(model, Decoder)
        assert isinstance(model.embedding, SharedEmbedding)
        assert isinstance(model.embedding.part, PlainEmbedding)
        return model.embedding.part.weight.untyped_storage().nbytes()

    assert on_ranks(tmp_path, 2, held) == 49 * 48 * 4  # of 97 rows


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_all_ranks_fill_the_memory(size: int) -> None:
    """Only the first rank's have a layer of the head."""

    def held(engine: Engine) -> tuple[int, int]:
        assert isinstance(engine.runner, Runner)
        model = engine.runner.model
        first, others = (bytes_per_block(groups, 16, model.dtype) for groups in (groups_of(model), model.config.groups))
        return engine.scheduler.manager.num_blocks, first + (size - 1) * others

    options = {"num_blocks": None, "kv_cache_memory": "4MiB", "num_speculative_tokens": 3, "draft": "head"}
    num_blocks, block_bytes = on_ranks(EMBEDDED, size, held, **options)
    assert num_blocks == 2**22 // block_bytes


def test_a_head_has_a_part_in_the_fingerprint_of_any_number_of_ranks() -> None:
    def groups(engine: Engine) -> str:
        assert isinstance(engine.runner, Runner)
        model, config = engine.runner.model, engine_config()
        return named_parts(model, files_of(EMBEDDED), load("cpu"), config)["cache groups"]

    with_head = {"num_speculative_tokens": 3, "draft": "head"}
    assert on_ranks(EMBEDDED, 2, groups, **with_head) == on_ranks(EMBEDDED, 1, groups, **with_head)
    assert on_ranks(EMBEDDED, 1, groups) == on_ranks(EMBEDDED, 2, groups) != on_ranks(EMBEDDED, 2, groups, **with_head)


def test_a_draft_model_takes_a_part_of_what_all_ranks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank may have loaded its weights before the others."""
    free = 2**27
    monkeypatch.setattr(engine_module, "free_memory", lambda *_: 100 * free)
    monkeypatch.setattr(worker, "free_memory", lambda *_: free)

    def held(engine: Engine) -> tuple[int, int]:
        assert engine.scheduler.speculation is not None
        [drafter] = engine.scheduler.speculation.drafters
        assert isinstance(drafter, ModelDrafter)
        model = drafter.runner.model
        return drafter.manager.num_blocks, bytes_per_block(groups_of(model), 16, model.dtype)

    options = {"num_blocks": None, "kv_cache_memory": "4MiB", "draft": "model", "draft_model": str(EMBEDDED)}
    num_blocks, block_bytes = on_ranks(EMBEDDED, 2, held, num_speculative_tokens=3, **OPTIONS, **options)
    assert num_blocks == free // DRAFT_SHARE // block_bytes


# ------------------------------------------------------------------------------------------------------------ shares


@dataclass
class _Rank:
    """Stands in for an exchange that nothing goes through."""

    rank: int
    size: int


@pytest.mark.parametrize(("count", "size"), [*product((1, 2, 3, 7, 8, 97), (1, 2, 3, 4, 8))])
def test_shares_are_all_of_them_and_nearly_even(count: int, size: int) -> None:
    found = [own_share(count, rank, size) for rank in range(size)]
    assert [i for share in found for i in share] == list(range(count))
    assert shares(count, size) == tuple(map(len, found))
    assert len(found[0]) == max(map(len, found)) <= min(map(len, found)) + 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (6, 2), (9, 3), (5, 1), (24, 6)])
@pytest.mark.parametrize("size", range(2, 9))
def test_each_query_head_is_one_ranks_and_so_is_what_it_attends_to(heads: int, kv_heads: int, size: int) -> None:
    attention = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=16)
    layer = LayerConfig(
        mixer=replace(attention, rope={"rope_type": "default", "rope_theta": 1e4}), mlp=MlpConfig(size=8)
    )
    config = DecoderConfig(
        vocab_size=50, hidden_size=32, max_position_embeddings=64, tied_embeddings=True, layers=(layer,)
    )
    if heads < size or (kv_heads < size and size % kv_heads):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}"):
            check_shards(config, size)
        return
    check_shards(config, size)
    seen: list[int] = []
    for rank in range(size):
        shard = Shard(config, cast(Communicator, _Rank(rank, size)))
        q, kv = shard.q_heads(heads, kv_heads, rank), shard.kv_heads(kv_heads, rank)
        each, own = heads // kv_heads, shard.config.attention[0]
        assert isinstance(own, AttentionConfig)
        assert (own.num_heads, own.num_kv_heads) == (len(q), len(kv))
        assert [head // each for head in q] == [kv[i * len(kv) // len(q)] for i in range(len(q))]
        seen += q
    assert seen == list(range(heads))
