"""Quire's attention inside transformers' models: the logits of eager attention, or a refusal with its reason."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from transformers import masking_utils

import quire.integrations.transformers as q
from quire.errors import QuireError, Unsupported
from tests.marks import of_long_runs, spread

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "pad_token_id": 0}
GROUPED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
WINDOW = 4
FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**GROUPED),
    "qwen3": lambda: tf.Qwen3Config(**GROUPED, head_dim=16),
    "gemma2": lambda: tf.Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
    ),
    "mistral": lambda: tf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gpt_oss": lambda: tf.GptOssConfig(
        **GROUPED, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": lambda: tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64, pad_token_id=0),
    "olmo2": lambda: tf.Olmo2Config(**GROUPED),
    "phi3": lambda: tf.Phi3Config(**GROUPED, sliding_window=WINDOW),
}
TOLERANCE = 1e-4
RELEASE = tuple(int(part) for part in tf.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def build(config: tf.PreTrainedConfig, implementation: str = "eager") -> tf.PreTrainedModel:
    """A model of random weights that are large enough for a mistake to show, the same ones each time."""
    config._attn_implementation = implementation
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    for name, weights in sorted(model.named_parameters()):
        weights.data.copy_(torch.randn(weights.shape, generator=generator) * (1.0 if "sinks" in name else 0.2))
    model.generation_config.eos_token_id = None  # or a sequence may end at once
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[tf.PreTrainedModel, tf.PreTrainedModel]:
    """The same model with eager attention and with Quire's."""
    with torch.no_grad():
        eager, ours = (build(FAMILIES[request.param](), name) for name in ("eager", "quire"))
    assert ours.config._attn_implementation == "quire"
    return eager, ours


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1))


def left_padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return random_ids(len(lengths), longest) * mask, mask


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    assert a.numel() > 0
    return (a - b).abs().max().item()  # NaN where either has one, which no bound admits


class TestFamilies:
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_plain_forward(self, models, use_cache: bool) -> None:
        ids = random_ids(3, 11)
        want, got = (model(ids, use_cache=use_cache).logits for model in models)
        assert want.std() > 0.1
        assert largest_difference(got, want) < TOLERANCE

    def test_every_layer_runs_on_quire(self, models, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        original = q.ops.PagedKV
        monkeypatch.setattr(q.ops, "PagedKV", lambda k, v: calls.append(k) or original(k, v))
        _, ours = models
        ours(random_ids(1, 6))
        assert len(calls) == ours.config.num_hidden_layers

    def test_left_padded_decoding_step_by_step(self, models) -> None:
        ids, mask = left_padded([9, 3, 6])
        caches = [tf.DynamicCache(config=model.config) for model in models]
        tokens, keep = ids, mask.bool()
        for step in range(7):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            want, got = (
                model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
                for model, cache in zip(models, caches, strict=True)
            )
            assert largest_difference(got[keep], want[keep]) < TOLERANCE, f"step {step}"
            tokens, keep = random_ids(3, step + 1)[:, -1:], torch.ones(3, 1, dtype=torch.bool)
            mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)

    @pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
    def test_generate_left_padded(self, models, options: dict) -> None:
        ids, mask = left_padded([4, 9, 7])
        want, got = (
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=8,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                **options,
            )
            for model in models
        )
        assert torch.equal(got.sequences, want.sequences)
        assert largest_difference(torch.stack(got.logits), torch.stack(want.logits)) < TOLERANCE

    def test_chunked_prefill(self, models) -> None:
        ids = random_ids(2, 12)
        ended = []
        for model in models:
            cache = tf.DynamicCache(config=model.config)
            parts = [model(part, past_key_values=cache).logits for part in ids.split((5, 6, 1), 1)]
            ended.append(torch.cat(parts, 1))
        assert largest_difference(ended[1], ended[0]) < TOLERANCE

    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("told_by", ["cu_seq_lens", "position_ids"])
    def test_flattened_ragged_batch_is_each_sequence_alone(self, models, told_by: str, use_cache: bool) -> None:
        eager, ours = models
        if eager.config.model_type == "gpt2" and use_cache and RELEASE < (5, 17):
            pytest.skip("GPT-2 did not hand these to its attention yet")
        lengths = [7, 1, 9, 2]
        flat = random_ids(1, sum(lengths))
        options = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
        if told_by == "cu_seq_lens":
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            options |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            options |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        elif use_cache or eager.config.model_type == "gpt_oss":  # eager attention does not cut these either
            with pytest.raises(Unsupported, match="position_ids restart at 0 within a row, but the mask"):
                ours(flat, use_cache=use_cache, **options)
            return
        got = ours(flat, use_cache=use_cache, **options).logits
        want = torch.cat([eager(part).logits for part in flat.split(lengths, 1)], 1)
        assert largest_difference(got, want) < TOLERANCE

    def test_right_padded_forward(self, models) -> None:
        lengths, ids = [5, 9], random_ids(2, 9)
        mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
        want, got = (model(ids, attention_mask=mask).logits[mask.bool()] for model in models)
        assert largest_difference(got, want) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("gemma2", {"sliding_window": 64}),
        ("gpt_oss", {"sliding_window": 64}),
        ("gemma2", {"attn_logit_softcapping": None}),
    ],
    ids=str,
)
def test_windows_and_softcaps_of_these_models_change_their_logits(family: str, change: dict) -> None:
    """Or the families above would not test them."""
    ids, config = random_ids(1, 11), FAMILIES[family]()
    with_it = build(FAMILIES[family]())(ids).logits
    for name, value in change.items():
        setattr(config, name, value)
    assert largest_difference(build(config)(ids).logits, with_it) > 1e-2


def test_sinks_change_the_logits_of_gpt_oss() -> None:
    model, ids = build(FAMILIES["gpt_oss"](), "quire"), random_ids(1, 11)
    before = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert largest_difference(model(ids).logits, before) > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_eager(family: str, dtype: torch.dtype) -> None:
    ids, mask = left_padded([9, 4])
    want, got = (build(FAMILIES[family](), n).to(dtype)(ids, attention_mask=mask).logits for n in ("eager", "quire"))
    assert got.dtype == dtype
    want, got = want[mask.bool()].float(), got[mask.bool()].float()
    assert (got - want).abs().mean() < 0.05 * want.std()


def test_beam_search() -> None:
    ids, mask = left_padded([3, 8])
    want, got = (
        build(FAMILIES["qwen3"](), name).generate(
            ids, attention_mask=mask, max_new_tokens=6, num_beams=3, do_sample=False
        )
        for name in ("eager", "quire")
    )
    assert torch.equal(got, want)


def test_from_pretrained(tmp_path) -> None:
    eager = build(FAMILIES["llama"]())
    eager.save_pretrained(tmp_path)
    ours = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="quire", dtype=torch.float32)
    ids = random_ids(2, 7)
    assert ours.config._attn_implementation == "quire"
    assert largest_difference(ours(ids).logits, eager(ids).logits) < TOLERANCE


def test_set_attn_implementation() -> None:
    model, ids = build(FAMILIES["olmo2"]()), random_ids(2, 7)
    want = model(ids).logits
    model.set_attn_implementation("quire")
    assert model.config._attn_implementation == "quire"
    assert largest_difference(model(ids).logits, want) < TOLERANCE


def test_padding_between_tokens() -> None:
    ids = random_ids(2, 9)
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1, 1, 0]])
    want, got = (build(FAMILIES["llama"](), n)(ids, attention_mask=mask).logits for n in ("eager", "quire"))
    assert largest_difference(got[mask.bool()], want[mask.bool()]) < TOLERANCE


def test_bidirectional_encoder() -> None:
    config = tf.BertConfig(**SIZES, intermediate_size=64)
    torch.manual_seed(0)
    eager = tf.BertModel(config).eval()
    config = tf.BertConfig(**SIZES, intermediate_size=64)
    ours = tf.BertModel._from_config(config, attn_implementation="quire").eval()
    ours.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    ids, mask = left_padded([9, 4])
    want, got = (model(ids, attention_mask=mask).last_hidden_state for model in (eager, ours))
    assert largest_difference(got, want) < TOLERANCE  # the rows of padding too: they are rows like others here


def test_registering_twice_changes_nothing() -> None:
    before = tf.PreTrainedModel.get_correct_attn_implementation
    q.register()
    assert tf.PreTrainedModel.get_correct_attn_implementation is before
    assert before.__wrapped__.__qualname__ == "PreTrainedModel.get_correct_attn_implementation"


# ------------------------------------------------------------------------------------ the attention by itself


def masked(batch: int, rows: int, keys: int, padding: torch.Tensor | None = None, offset: int = 0, **options) -> q.Mask:
    options = {"q_length": rows, "q_offset": keys - rows + offset, "kv_offset": offset} | options
    return q.mask(batch_size=batch, kv_length=keys, attention_mask=padding, **options)


def naive(query, key, value, visible: torch.Tensor, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


MODULE = SimpleNamespace(is_causal=True)
STORED = {  # where the memory's order of [batch, heads, tokens, dim] differs: the order, and the way back
    "BHTD": ((0, 1, 2, 3), (0, 1, 2, 3)),
    "BTHD": ((0, 2, 1, 3), (0, 2, 1, 3)),
    "TBHD": ((2, 0, 1, 3), (1, 2, 0, 3)),
    "BHDT": ((0, 1, 3, 2), (0, 1, 3, 2)),
}


def stored(x: torch.Tensor, order: str) -> torch.Tensor:
    there, back = STORED[order]
    return x.permute(there).contiguous().permute(back)


@pytest.mark.parametrize(
    ("k_order", "v_order", "sizes"), spread(4, STORED, STORED, [(3, 5, 8), (1, 4, 4), (3, 1, 6), (3, 1, 1), (1, 1, 1)])
)
def test_keys_of_any_strides(k_order: str, v_order: str, sizes: tuple[int, int, int]) -> None:
    batch, rows, keys = sizes
    torch.manual_seed(0)
    query, key, value = torch.randn(batch, 4, rows, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 12)
    visible = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
    out, weights = q.attention(
        MODULE,
        stored(query, k_order),
        stored(key, k_order),
        stored(value, v_order),
        masked(batch, rows, keys),
        scaling=0.3,
    )
    assert weights is None
    assert largest_difference(out, naive(query, key, value, visible, 0.3)) < 1e-5


@pytest.mark.parametrize(
    ("batch", "k_order", "v_order", "copied"),
    [(3, "BHTD", "BHTD", False), (3, "BTHD", "BTHD", False), (3, "BTHD", "BHTD", True), (1, "BTHD", "BHTD", False)],
)
def test_keys_are_copied_only_where_strides_force_it(
    batch: int, k_order: str, v_order: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, original = [], q.ops.PagedKV
    monkeypatch.setattr(q.ops, "PagedKV", lambda k, v: seen.append((k, v)) or original(k, v))
    key, value = stored(torch.randn(batch, 2, 6, 8), k_order), stored(torch.randn(batch, 2, 6, 8), v_order)
    q.attention(MODULE, torch.randn(batch, 4, 6, 8), key, value, masked(batch, 6, 6))
    ((k, v),) = seen
    same = k.data_ptr() == key.data_ptr() and v.data_ptr() == value.data_ptr()
    assert same is not copied
    assert k.shape[2] == 1


def test_a_cut_out_of_a_larger_cache_is_read_in_place() -> None:
    """The last row's keys end where the storage ends."""
    torch.manual_seed(0)
    cache = torch.randn(2, 2, 10, 8)
    key = value = cache[:, :, 4:]
    query = torch.randn(2, 2, 6, 8)
    out, _ = q.attention(MODULE, query, key, value, masked(2, 6, 6))
    visible = torch.arange(6) <= torch.arange(6)[:, None]
    assert largest_difference(out, naive(query, key, value, visible, 8**-0.5)) < 1e-5


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["left", "right", "static"])
def test_poison_under_padding_reaches_nothing(poison: float, side: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    padding = padding if side == "left" else padding.flip(1)
    made = masked(2, 6, 6, padding)
    if side == "static":  # the unused end of a static cache
        key, value = (torch.cat([x, torch.randn(2, 2, 3, 8)], 2) for x in (key, value))
        made, padding = masked(2, 6, 9, q_offset=0), torch.tensor([[1] * 6 + [0] * 3] * 2)
    want, _ = q.attention(MODULE, query, key, value, made)
    hidden = (padding == 0)[:, None, :, None]
    poisoned = (x.masked_fill(hidden, poison) for x in (key, value))
    query = query.masked_fill(hidden[:, :, :6], poison)
    got, _ = q.attention(MODULE, query, *poisoned, made)
    assert torch.equal(got, want)
    assert got.isfinite().all()
    assert (got[padding[:, :6] == 0] == 0).all()


def test_a_batch_of_padding_alone_gives_zeros() -> None:
    x = torch.randn(1, 2, 3, 8)
    out, _ = q.attention(MODULE, x, x, x, masked(1, 3, 3, torch.zeros(1, 3)))
    assert torch.equal(out, torch.zeros(1, 3, 2, 8))


@pytest.mark.parametrize("window", [1, 2, 5, 9, 10])
def test_windows_are_those_of_transformers(window: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    function = masking_utils.sliding_window_causal_mask_function(window)
    visible = function(0, 0, torch.arange(3, 9)[:, None], torch.arange(9)[None])
    made = masked(1, 6, 9, mask_function=function)
    for asked in (window, None):
        out, _ = q.attention(MODULE, query, key, value, made, sliding_window=asked)
        assert largest_difference(out, naive(query, key, value, visible, 8**-0.5)) < 1e-5


def test_keys_that_a_sliding_cache_has_dropped() -> None:
    """The cache holds the keys 5..10 only, and the padding is told for all."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    padding = torch.ones(2, 11)
    padding[0, :7] = 0
    function = masking_utils.sliding_window_causal_mask_function(4)
    made = masked(2, 3, 6, padding, offset=5, mask_function=function)
    rows, keys = torch.arange(8, 11)[:, None], torch.arange(5, 11)
    visible = (keys <= rows) & (keys > rows - 4) & padding[:, None, None, 5:].bool()
    out, _ = q.attention(MODULE, query, key, value, made, sliding_window=4)
    assert largest_difference(out, naive(query, key, value, visible, 8**-0.5)) < 1e-5


def test_flattened_rows_after_keys_of_a_cache() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    starts_q, starts_k = torch.tensor([0, 3, 5]), torch.tensor([0, 8, 12])
    out, _ = q.attention(
        MODULE, query, key, value, masked(1, 5, 12), cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k, scaling=0.5
    )
    for rows, keys in ((slice(0, 3), slice(0, 8)), (slice(3, 5), slice(8, 12))):
        parts = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        visible = torch.ones(parts[0].shape[2], parts[1].shape[2]).tril(parts[1].shape[2] - parts[0].shape[2]).bool()
        assert largest_difference(out[:, rows], naive(*parts, visible, 0.5)) < 1e-5


def test_no_mask_and_not_causal_sees_all_keys() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    want = naive(query, key, value, torch.ones(5, 7).bool(), 8**-0.5)
    for module, option in ((SimpleNamespace(is_causal=False), None), (MODULE, False)):
        out, _ = q.attention(module, query, key, value, None, is_causal=option)
        assert largest_difference(out, want) < 1e-5


# ------------------------------------------------------------------------------------------------- refusals

NARROW = {"vocab_size": 50, "hidden_size": 32}
REFUSED_MODELS = {
    "bloom": lambda: tf.BloomConfig(**NARROW, n_layer=1, n_head=2),
    "falcon": lambda: tf.FalconConfig(**NARROW, num_hidden_layers=1, num_attention_heads=2),
    "mpt": lambda: tf.MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=50),
    "gptj": lambda: tf.GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=4, vocab_size=50),
    "llama4": lambda: tf.Llama4TextConfig(
        **NARROW, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32,
        intermediate_size_mlp=32, num_local_experts=2, pad_token_id=0,
    ),
}  # fmt: skip


class TestRefusedModels:
    @pytest.mark.parametrize("name", REFUSED_MODELS)
    def test_from_config_and_from_pretrained(self, name: str, tmp_path) -> None:
        # Of some models the one reason holds with one release of transformers, and the other with another.
        reason = "picks one of several attention classes by the name|computes attention itself and never calls"
        if name == "llama4":
            reason = "chunked attention"
        config = REFUSED_MODELS[name]()
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model.save_pretrained(tmp_path)
        for make in (
            lambda: tf.AutoModelForCausalLM.from_config(REFUSED_MODELS[name](), attn_implementation="quire"),
            lambda: tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="quire"),
        ):
            with pytest.raises(Unsupported, match=reason) as refusal:
                make()
            assert str(refusal.value).startswith(type(model).__name__)

    def test_other_implementations_of_these_models_are_left_alone(self) -> None:
        model = tf.AutoModelForCausalLM.from_config(REFUSED_MODELS["bloom"](), attn_implementation="eager").eval()
        assert model(random_ids(1, 4) % 50).logits.isfinite().all()

    def test_a_model_that_picks_its_attention_class_by_name(self) -> None:
        config = tf.GitConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        with pytest.raises(Unsupported, match="picks one of several attention classes by the name"):
            tf.AutoModelForCausalLM.from_config(config, attn_implementation="quire")

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, of_long_runs({"fullgraph": True})], ids=str)
    def test_a_model_that_is_compiled(self, options: dict) -> None:
        compiled = torch.compile(build(FAMILIES["llama"](), "quire"), backend="eager", **options)
        with pytest.raises(Exception, match=r"torch.compile does|cannot be compiled|Observed exception"):
            compiled(random_ids(1, 4), use_cache=False)
        torch._dynamo.reset()

    def test_switching_to_quire_is_refused_as_well(self) -> None:
        model = tf.AutoModelForCausalLM.from_config(REFUSED_MODELS["llama4"](), attn_implementation="eager")
        with pytest.raises(Unsupported, match="chunked attention"):
            model.set_attn_implementation("quire")

    def test_position_bias(self) -> None:
        config = tf.T5Config(vocab_size=50, d_model=32, num_layers=1, d_ff=32, num_heads=2, d_kv=16)
        ids = random_ids(1, 5) % 50
        with pytest.raises(Unsupported, match=r"position_bias|computes attention itself"):
            tf.T5ForConditionalGeneration._from_config(config, attn_implementation="quire").eval()(
                input_ids=ids, decoder_input_ids=ids
            )

    def test_a_model_whose_source_cannot_be_read(self) -> None:
        model = type("Unseen", (tf.LlamaForCausalLM,), {"__module__": "nowhere"})
        with pytest.raises(Unsupported, match="source of its module nowhere cannot be read"):
            model._from_config(FAMILIES["llama"](), attn_implementation="quire")


class TestRefusedMasks:
    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)), "chunked_overlay"),
            (masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, i, j: i == j), "or_masks"),
            (masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, i, j: i != j), "lambda"),
            (masking_utils.padding_mask_function(torch.ones(1, 6)), "padding_mask_function"),
            (lambda b, h, i, j: j <= i, "lambda"),
            (SimpleNamespace(), "namespace"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_unknown_functions(self, function: object, name: str) -> None:
        with pytest.raises(Unsupported, match=f"attention mask is made by .*{name}"):
            masked(1, 6, 6, mask_function=function)

    def test_a_window_without_causality(self) -> None:
        with pytest.raises(Unsupported, match="without being causal"):
            masked(1, 6, 6, mask_function=masking_utils.sliding_window_overlay(3))

    def test_packed_sequences_that_are_not_contiguous(self) -> None:
        packed = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 1, 0]]))
        with pytest.raises(Unsupported, match="not contiguous"):
            masked(1, 3, 3, mask_function=masking_utils.and_masks(masking_utils.causal_mask_function, packed))

    def test_packed_sequences_with_padding_or_with_a_cache(self) -> None:
        packed = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1]]))
        function = masking_utils.and_masks(masking_utils.causal_mask_function, packed)
        assert masked(1, 3, 3, mask_function=function).pattern.sequences is not None
        for keys, padding in ((3, torch.tensor([[0, 1, 1]])), (5, None)):
            with pytest.raises(Unsupported, match="packed sequences only without padding"):
                masked(1, 3, keys, padding, mask_function=function)

    def test_padding_that_does_not_tell_of_every_token(self) -> None:
        with pytest.raises(Unsupported, match=r"attention_mask has shape \(1, 5\).*must be \[1, 6\] or wider"):
            masked(1, 2, 6, torch.ones(1, 5))

    def test_padding_inside_a_window(self) -> None:
        padding = torch.tensor([[0, 1, 1, 0, 1, 1]])
        function = masking_utils.sliding_window_causal_mask_function
        with pytest.raises(Unsupported, match="padding between tokens in layers with a window of 3"):
            masked(1, 6, 6, padding, mask_function=function(3))
        assert masked(1, 6, 6, padding, mask_function=function(5)).pattern.window == 5  # which reaches over all of them

    def test_rows_without_their_keys(self) -> None:
        with pytest.raises(Unsupported, match=r"query rows are at 5\.\.7 and the keys at 0\.\.5"):
            masked(1, 3, 6, q_offset=5)

    def test_a_model_that_computes_with_the_mask_itself(self) -> None:
        made, scores = masked(2, 3, 3), torch.zeros(2, 1, 3, 3)
        assert made.shape == (2, 1, 3, 3)
        assert made.to(scores.device) is made.contiguous() is made
        assert "window" in repr(made)
        for use in (
            lambda: scores + made,
            lambda: scores.masked_fill(made, 0.0),
            lambda: made[:, :, :, :2],
            lambda: made.to(torch.float32),
            lambda: torch.where(made, scores, scores),
        ):
            with pytest.raises(Unsupported, match="computes with its attention mask itself"):
                use()

    @pytest.mark.parametrize("shape", [(2, 1, 7, 7), (2, 7, 7)])
    def test_custom_masks(self, shape: tuple[int, ...]) -> None:
        with pytest.raises((Unsupported, ValueError), match=r"custom mask|attention_mask has shape"):
            build(FAMILIES["llama"](), "quire")(random_ids(2, 7), attention_mask=torch.zeros(shape))


def attend(query=None, key=None, value=None, made=..., **options) -> torch.Tensor:
    query = torch.randn(1, 2, 6, 8) if query is None else query
    key = torch.randn(1, 2, 6, 8) if key is None else key
    value = torch.randn(1, 2, 6, 8) if value is None else value
    return q.attention(MODULE, query, key, value, masked(1, 6, 6) if made is ... else made, **options)[0]


class TestRefusedArguments:
    def test_what_is_refused_here_is_accepted_without_it(self) -> None:
        assert attend().shape == (1, 6, 2, 8)
        assert attend(use_cache=True, position_bias=None, output_attentions=False).shape == (1, 6, 2, 8)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dropout": 0.1}, "dropout is 0.1"),
            ({"output_attentions": True}, "never computes the attention weights"),
            ({"position_bias": torch.zeros(1, 2, 6, 6)}, "gives position_bias"),
            ({"head_mask": torch.ones(2)}, "gives head_mask"),
            ({"indices": torch.zeros(1)}, "gives indices"),
            ({"cache": object()}, "gives cache"),
            ({"made": None}, "causal and got no mask"),
            ({"made": torch.ones(1, 6)}, r"shape \(1, 6\) is a custom mask"),
            ({"made": torch.zeros(1, 1, 6, 6)}, "custom mask"),
            ({"sliding_window": 3}, "asks for a window of 3, but its mask has none"),
            ({"key": torch.randn(1, 2, 6, 8).bfloat16()}, "key torch.bfloat16"),
            ({"cu_seq_lens_q": torch.tensor([0, 6])}, "must come together"),
            ({"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 5])}, "span 6 rows and 6 keys"),
        ],
        ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
    )
    def test_options(self, options: dict, message: str) -> None:
        with pytest.raises(Unsupported, match=message):
            attend(**options)

    def test_a_mask_of_other_keys(self) -> None:
        with pytest.raises(Unsupported, match="made for the layer"):
            attend(made=masked(1, 6, 7))

    def test_a_window_of_the_mask_that_differs_from_the_layers(self) -> None:
        made = masked(1, 6, 6, mask_function=masking_utils.sliding_window_causal_mask_function(2))
        with pytest.raises(Unsupported, match="window of 3, but its mask has 2"):
            attend(made=made, sliding_window=3)

    def test_sequences_that_are_told_twice_and_differently(self) -> None:
        packed = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1]]))
        made = masked(1, 6, 6, mask_function=masking_utils.and_masks(masking_utils.causal_mask_function, packed))
        with pytest.raises(Unsupported, match="cut the row into other sequences"):
            attend(made=made, cu_seq_lens_q=torch.tensor([0, 2, 6]), cu_seq_lens_k=torch.tensor([0, 2, 6]))

    def test_flattened_sequences_with_padding(self) -> None:
        starts = torch.tensor([0, 3, 6])
        with pytest.raises(Unsupported, match="without attention_mask"):
            attend(made=masked(1, 6, 6, torch.tensor([[0, 1, 1, 1, 1, 1]])), cu_seq_lens_q=starts, cu_seq_lens_k=starts)

    def test_gradients(self) -> None:
        with torch.enable_grad(), pytest.raises(Unsupported, match="no backward pass"):
            attend(value=torch.randn(1, 2, 6, 8, requires_grad=True))
        with torch.enable_grad(), pytest.raises(Unsupported, match="no backward pass"):
            build(FAMILIES["llama"](), "quire")(random_ids(1, 4))

    def test_dropout_in_training(self) -> None:
        config = FAMILIES["llama"]()
        config.attention_dropout = 0.5
        with pytest.raises(Unsupported, match=r"dropout is 0\.5"):
            build(config, "quire").train()(random_ids(1, 4))

    @pytest.mark.parametrize("call", ["forward", "generate"])
    def test_attention_weights(self, call: str) -> None:
        options = {"max_new_tokens": 1, "return_dict_in_generate": True} if call == "generate" else {}
        model = build(FAMILIES["llama"](), "quire")
        with pytest.raises(QuireError, match="never computes the attention weights"):
            getattr(model, call)(random_ids(1, 4), output_attentions=True, **options)

    @pytest.mark.parametrize("batch", [1, 2])
    def test_rows_that_eager_would_not_cut(self, batch: int) -> None:
        """Whatever the batch: restarting positions are cut where the mask says so, or refused."""
        model = build(FAMILIES["llama"](), "quire")
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand(batch, -1)
        with pytest.raises(Unsupported, match="position_ids restart"):
            model(random_ids(batch, 7), position_ids=positions, attention_mask=torch.ones(batch, 7))
        same = torch.zeros(batch, 7, dtype=torch.int64)  # no restart: eager attends over all of it, and so do we
        eager = build(FAMILIES["llama"]())
        eager.load_state_dict(model.state_dict())
        ids = random_ids(batch, 7)
        difference = largest_difference(model(ids, position_ids=same).logits, eager(ids, position_ids=same).logits)
        assert difference < TOLERANCE
