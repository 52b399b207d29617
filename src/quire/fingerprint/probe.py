"""Digests of the results of each operator for small fixed inputs, which show the bits that a machine computes.

Replicas with the same files and versions may round differently: another instruction set, another library of
mathematical functions, a kernel that was compiled differently. Results show it whatever the reason is.

Inputs are made of integers by exact steps, so that they cannot differ. Their magnitudes vary by factors of up to 128,
so that summing in another order changes the sum. Sums are long enough to be split where kernels split them: linears
after 192 inputs (bf16 on AVX-512) and groups of 128, attention after 256 and 1,024 keys, recurrences after pieces of 32
rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.cache.groups import CacheGroup, Heads, StateSizes
from quire.cache.storage import KVCache, cache_dtype, group_spec
from quire.config import EngineConfig
from quire.engine.flatten import sampling_rows
from quire.engine.sampler import sample, token_logprobs
from quire.fingerprint.fingerprint import DIGEST_SIZE
from quire.models.decoder_config import DecoderConfig
from quire.models.model import Model
from quire.models.state_config import (
    ConvolutionConfig,
    GatedDeltaConfig,
    KeyDecayConfig,
    LightningConfig,
    LinearUnitConfig,
    SelectiveConfig,
    StateConfig,
    StateSpaceConfig,
)
from quire.ops import AttentionPlan, AttentionSpec, Backend
from quire.ops.activation import Activation
from quire.ops.choice import Choice
from quire.ops.experts import ExpertLayer
from quire.ops.recurrent.calls import Scan, ScanRule
from quire.ops.recurrent.plan import RecurrentPlan
from quire.ops.recurrent.records import PIECE, RecurrentCache, RecurrentSpec
from quire.ops.weights.linear import Linear, Linears
from quire.ops.weights.quantised import QuantisedWeight
from quire.request import Request, SamplingParams

ROWS = (1, 7, 40)  # of a linear: one, fewer than in a tile, and more
INPUTS = 448  # two stretches of 192 and a part of one; three groups of 128 and a part of one
OUTPUTS = 96
SEQUENCES = ((40, 40), (7, 300), (1, 1100))  # query rows and keys: a prompt, a chunk of one, and a decoded token
WINDOW = 100
# Tokens of each sequence with a state, after each of two steps: a prompt, a chunk of one, and a decoded token.
STATE_STEPS = ((40, 93, 69), (40, 100, 70))
STATE_PIECES = 4  # most pieces that a sequence has begun after them
VOCABULARY = 2053  # not a multiple of the sampler's tiles
NUMBERS = 4096  # inputs of each function; fewer than torch splits among threads
EPS = 1e-6
SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.0, logprobs=5, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, logprobs=5),
    SamplingParams(temperature=0.7, logprobs=5, top_p=0.9),
    SamplingParams(temperature=1.3, logprobs=5, top_k=40),
    SamplingParams(temperature=1.0, logprobs=5, min_p=0.05),
    SamplingParams(temperature=0.9, logprobs=5, frequency_penalty=0.3, presence_penalty=0.7),
    SamplingParams(temperature=3.0, logprobs=5, top_p=0.99, top_k=500, min_p=0.01, repetition_penalty=0.9),
)
CLAMPED = Activation("silu", slope=1.702, limit=7.0, offset=1.0)  # gpt-oss's


def probe(model: Model, backend: Backend, config: EngineConfig) -> dict[str, str]:
    """Return a digest, 16 hexadecimal digits, of the results of each kind of operator, by the kind's name.

    Operators work in the model's dtype, with its heads and its cache dtype, whether or not its layers use all of them.
    Integer products, experts and operators of states are included if the model has them. No weight of the model is
    read, and its engine is not used.
    """
    case = _Case.of(model, backend, config)
    kinds: dict[str, Callable[[_Case], Iterator[Tensor]]] = {
        "linear": _linears,
        "attention": _attention,
        "norm": _norms,
        "rope": _rope,
        "activation": _activations,
        "sampler": _sampler,
        "function": _functions,
    }
    if model.quantisation is not None and config.quantization_activations == "int8":
        kinds["integer linear"] = _integer_linears
    if case.group.heads.index_dim:
        kinds["index"] = _index
    if isinstance(model.whole, DecoderConfig) and model.whole.experts:
        kinds["experts"] = _experts
    mixers = [layer.mixer for layer in model.whole.layers] if isinstance(model.whole, DecoderConfig) else []
    # One of each kind: a family's layers that keep a state have the same sizes.
    for mixer in {type(mixer): mixer for mixer in mixers if isinstance(mixer, StateConfig)}.values():
        kinds |= _state_kinds(mixer)
    with torch.inference_mode():
        return {kind: _digest(compute(case)) for kind, compute in kinds.items()}


@dataclass(frozen=True)
class _Case:
    """The operators to probe, and their parameters."""

    backend: Backend
    linears: Linears
    group: CacheGroup
    spec: AttentionSpec  # of the group's layers, without a window

    @classmethod
    def of(cls, model: Model, backend: Backend, config: EngineConfig) -> _Case:
        block_size, groups = config.cache.block_size, model.whole.groups
        attention = [group for group in groups if isinstance(group, CacheGroup)]
        heads = attention[0].heads if attention else Heads(4, 4, 64)
        kv_heads = min(2, heads.num_kv_heads)
        few = replace(heads, num_heads=kv_heads * (heads.num_heads // heads.num_kv_heads), num_kv_heads=kv_heads)
        num_blocks = sum(-(-keys // block_size) for _, keys in SEQUENCES)
        dtypes = model.dtype, cache_dtype(config.cache, model.dtype)
        group = CacheGroup((0,), heads=few)
        spec = group_spec(group, block_size, num_blocks, *dtypes, config.device, config.reproducible)
        return cls(backend, backend.linears(config.device, config.reproducible), group, spec)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtypes of small operators: fp32 shows differences that rounding to a half hides in nearly all numbers."""
        return list(dict.fromkeys((self.spec.dtype, torch.float32)))

    def numbers(self, seed: int, *shape: int, scale: float = 1.0) -> Tensor:
        """Return fixed numbers of the model's dtype, see `_numbers`."""
        return self.wide_numbers(seed, *shape, scale=scale).to(self.spec.dtype)

    def wide_numbers(self, seed: int, *shape: int, scale: float = 1.0) -> Tensor:
        """Return the same numbers in fp32."""
        return _numbers(seed, shape, scale).to(self.spec.device)


def _words(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first outputs of splitmix64 (Steele et al. 2014) from a state that is specific to the seed."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return words


def _numbers(seed: int, shape: Sequence[int], scale: float) -> Tensor:
    """Return fp32 of that shape, in -scale..scale, a power of two: 24 bits, times 1, 1/2, ... or 1/128."""
    words = _words(seed, int(np.prod(shape)))
    whole = (words >> np.uint64(40)).astype(np.int32) - 2**23
    fractions = np.ldexp(whole.astype(np.float32), -23 - (words & np.uint64(7)).astype(np.int32))
    return torch.from_numpy(fractions * np.float32(scale)).view(*shape)


def _digest(results: Iterator[Tensor]) -> str:
    found = blake2b(digest_size=DIGEST_SIZE)
    for x in results:
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(x.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --------------------------------------------------------------------------------------------------- products


def _linears(case: _Case) -> Iterator[Tensor]:
    weight, bias = case.numbers(1, OUTPUTS, INPUTS), case.numbers(2, OUTPUTS)
    embedding, tied = case.linears.tied(weight)
    yield embedding(torch.arange(OUTPUTS, device=case.spec.device))
    products = (case.linears.linear(weight, bias), case.linears.linear(weight), case.linears.head(weight), tied)
    yield from _products(case, products)


def _products(case: _Case, linears: Sequence[Linear]) -> Iterator[Tensor]:
    for rows in ROWS:
        x = case.numbers(3, rows, INPUTS, scale=4.0)
        for linear in linears:
            yield linear(x)


def _integer_linears(case: _Case) -> Iterator[Tensor]:
    """Yield products with integers in every form that checkpoints and quantization at load time produce."""
    weights = [
        _integers(case, bits, group_size, has_zeros)
        for bits in (4, 8)
        for group_size in (32, 128, INPUTS)
        for has_zeros in (False, True)
    ]
    weights.append(replace(_integers(case, 8, INPUTS, False), activation_group=INPUTS))
    order = torch.arange(INPUTS - 1, -1, -1, device=case.spec.device)
    weights.append(replace(_integers(case, 4, 128, False), order=order))
    bias = case.numbers(2, OUTPUTS)
    yield from _products(case, [case.linears.linear(weight, bias) for weight in weights])
    embedding, tied = case.linears.tied(_integers(case, 8, INPUTS, False))
    yield embedding(torch.arange(OUTPUTS, device=case.spec.device))
    yield from _products(case, [tied])


def _integers(
    case: _Case, bits: int, group_size: int, has_zeros: bool, outputs: int = OUTPUTS, inputs: int = INPUTS
) -> QuantisedWeight:
    groups = -(-inputs // group_size)

    def below(limit: int, seed: int, columns: int) -> Tensor:
        words = _words(seed, outputs * columns) % np.uint64(limit)
        return torch.from_numpy(words.astype(np.int64)).view(outputs, columns)

    weight = QuantisedWeight(
        below(2**bits, 4, inputs).to(torch.uint8),
        _numbers(5, (outputs, groups), 1 / 16).abs(),
        below(2**bits, 6, groups).float() if has_zeros else None,
        bits,
        group_size,
        case.spec.dtype,
    )
    return weight.to(case.spec.device)


def _experts(case: _Case) -> Iterator[Tensor]:
    count, inner = 4, OUTPUTS
    linears = case.linears
    router = linears.head(case.numbers(7, count, INPUTS))
    mlp_in = [linears.linear(case.numbers(10 + i, 2 * inner, INPUTS)) for i in range(count)]
    mlp_out = [linears.linear(case.numbers(20 + i, INPUTS, inner)) for i in range(count)]
    plain = [Choice(num_chosen=2, renormalised=renormalised) for renormalised in (False, True)]
    layers = [ExpertLayer(router, mlp_in, mlp_out, choice) for choice in plain]
    layers.append(replace(layers[0], weighed="inputs"))
    for layer in layers:
        for rows in ROWS:
            yield case.backend.experts(case.numbers(3, rows, INPUTS, scale=4.0), layer)


# -------------------------------------------------------------------------------------------------- attention


def _attention(case: _Case) -> Iterator[Tensor]:
    """Yield the results of a prompt, a chunk and a decoded token in one step, over a cache that was written before."""
    spec, backend = case.spec, case.backend
    D, block_size = spec.head_dim, spec.block_size
    kv = KVCache([case.group], spec.num_blocks, block_size, spec.cache_dtype, spec.device, backend=backend).kv(0)
    keys = [keys for _, keys in SEQUENCES]
    width = -(-max(keys) // block_size)
    first = list(accumulate((-(-n // block_size) for n in keys[:-1]), initial=0))  # the first block of each sequence
    tables = torch.tensor(first, dtype=torch.int32)[:, None] + torch.arange(width, dtype=torch.int32)
    slots = torch.cat([block * block_size + torch.arange(n) for block, n in zip(first, keys, strict=True)])

    def plan(window: int | None, rows: Sequence[int], slots: Tensor | None) -> AttentionPlan:
        ends = torch.tensor(list(accumulate(rows, initial=0)), dtype=torch.int32)
        return backend.plan(replace(spec, window=window), ends, torch.tensor(keys, dtype=torch.int32), tables, slots)

    k, v = (case.numbers(seed, sum(keys), spec.num_kv_heads, D, scale=2.0) for seed in (30, 31))
    if case.group.heads.latent is not None:
        v = k[..., : spec.dim_v]
    backend.write_kv(k, v, kv, plan(None, keys, slots))
    rows = [rows for rows, _ in SEQUENCES]
    q = case.numbers(32, sum(rows), spec.num_heads, D, scale=8.0)
    by_head = case.wide_numbers(33, spec.num_heads).abs()
    everything = plan(None, rows, None)
    yield from backend.attention(q, kv, everything, return_lse=True)
    yield backend.attention(q, kv, everything, scale=0.25, softcap=30.0)
    yield backend.attention(q, kv, everything, alibi_slopes=by_head)
    yield backend.attention(q, kv, everything, sinks=by_head)
    windowed = plan(WINDOW, rows, None)
    yield backend.attention(q, kv, windowed)
    yield backend.attention(q, kv, windowed, softcap=30.0, sinks=by_head)
    yield backend.attention(q, kv, windowed, chunk=WINDOW)


def _index(case: _Case) -> Iterator[Tensor]:
    """Yield the scores of keys of an indexer."""
    count, heads, dim = ROWS[-1], 12, case.group.heads.index_dim
    keys, size = max(keys for _, keys in SEQUENCES), case.spec.block_size
    blocks = -(-keys // size)
    index = case.numbers(121, blocks, 1, size, dim, scale=2.0)
    q, weights = case.numbers(122, count, heads, dim, scale=2.0), case.wide_numbers(123, count, heads)
    tables = torch.arange(blocks, dtype=torch.int32).flip(0)[None]
    sequences, counts = torch.zeros(count, dtype=torch.int64), torch.full((count,), keys)
    yield case.backend.index_scores(q, weights, index, tables, sequences, counts)


def _rope(case: _Case) -> Iterator[Tensor]:
    spec, count = case.spec, ROWS[-1]
    cos, sin = (case.wide_numbers(seed, count, spec.head_dim // 2) for seed in (42, 43))
    for dtype in case.dtypes:
        q = case.wide_numbers(40, count, spec.num_heads, spec.head_dim).to(dtype)
        k = case.wide_numbers(41, count, spec.num_kv_heads, spec.head_dim).to(dtype)
        case.backend.rope(q, k, torch.arange(count, device=spec.device).flip(0), cos, sin)
        yield q
        yield k


# ----------------------------------------------------------------------------------------------------- states


def _state_kinds(mixer: StateConfig) -> dict[str, Callable[[_Case], Iterator[Tensor]]]:
    """Return the operators of layers with that mixer, except linears: with few heads, each of the model's size."""
    match mixer:
        case GatedDeltaConfig():
            heads = 2 * min(3, mixer.num_heads // mixer.num_k_heads)
            delta = replace(mixer, num_heads=heads, num_k_heads=2)
            return {
                "convolution": partial(_convolutions, delta.sizes),
                "gated delta": partial(_gated_delta, delta.sizes),
                "gated norm": partial(_gated_norms, delta.out_size, heads),
            }
        case StateSpaceConfig():
            heads = 2 * min(3, mixer.num_heads // mixer.num_groups)
            space = replace(mixer, num_heads=heads, num_groups=2, norm_groups=1)
            return {
                "convolution": partial(_convolutions, space.sizes),
                "state space": partial(_state_space, space.sizes, mixer.dt_limits),
                "gated norm": partial(_gated_norms, space.out_size, heads),
            }
        case LightningConfig():
            lightning = replace(mixer, num_heads=2, slopes=mixer.slopes[:2])
            return {"state space": partial(_state_space, lightning.sizes, (1.0, 1.0))}
        case KeyDecayConfig():
            return _scan_kinds(replace(mixer, num_heads=2).sizes, "delta", mixer.floor)
        case SelectiveConfig() | LinearUnitConfig():
            few = replace(mixer.sizes, num_heads=2, num_k_heads=1, width=2 * mixer.head_dim)
            return _scan_kinds(few, "selective" if isinstance(mixer, SelectiveConfig) else "lru", 0.0)
        case ConvolutionConfig():
            return {"convolution": partial(_convolutions, replace(mixer, width=INPUTS).sizes)}


def _state_steps(case: _Case, sizes: StateSizes) -> Iterator[tuple[RecurrentCache, RecurrentPlan]]:
    """Yield the plans of consecutive steps over the same records."""
    S, P, dtype, device = len(STATE_STEPS[0]), STATE_PIECES, case.spec.dtype, case.spec.device
    spec = RecurrentSpec(**asdict(sizes), num_states=S * P, num_rows=S * P, dtype=dtype, device=device)
    cache, before = RecurrentCache.allocate(spec), torch.zeros(S, dtype=torch.int32)
    for lens in torch.tensor(STATE_STEPS, dtype=torch.int32):
        starts = torch.cat([lens.new_zeros(1), (lens - before).cumsum(0, dtype=torch.int32)])
        piece = (before // PIECE)[:, None] + torch.arange(P, dtype=torch.int32)
        tables = torch.where(piece < P, torch.arange(0, S * P, P, dtype=torch.int32)[:, None] + piece, -1)
        yield cache, case.backend.recurrent_plan(spec, starts, lens, tables, tables)
        before = lens


def _convolutions(sizes: StateSizes, case: _Case) -> Iterator[Tensor]:
    weight, bias = case.wide_numbers(101, sizes.width, sizes.taps), case.wide_numbers(102, sizes.width)
    for cache, plan in _state_steps(case, sizes):
        x = case.numbers(100, plan.num_tokens, sizes.width, scale=4.0)
        yield case.backend.convolve(x, weight, bias, "silu", cache, plan)
    for cache, plan in _state_steps(case, sizes):
        x = case.numbers(100, plan.num_tokens, sizes.width, scale=4.0)
        yield case.backend.convolve(x, weight, None, None, cache, plan)


def _gated_delta(sizes: StateSizes, case: _Case) -> Iterator[Tensor]:
    heads, width = sizes.num_heads, 2 * sizes.num_k_heads * sizes.dim_k + sizes.num_heads * sizes.dim_v
    rate, dt_bias = -case.wide_numbers(112, heads).abs(), case.wide_numbers(113, heads)
    for cache, plan in _state_steps(case, sizes):
        qkv, gates = (case.numbers(seed, plan.num_tokens, n, scale=4.0) for seed, n in ((110, width), (111, 2 * heads)))
        yield case.backend.gated_delta(qkv, gates, rate, dt_bias, cache, plan)


def _scan_kinds(sizes: StateSizes, rule: ScanRule, floor: float) -> dict[str, Callable[[_Case], Iterator[Tensor]]]:
    scans = partial(_scans, sizes, rule, floor)
    return {"convolution": partial(_convolutions, sizes), f"scan, {rule}": scans}


def _scans(sizes: StateSizes, rule: ScanRule, floor: float, case: _Case) -> Iterator[Tensor]:
    heads, dim_k, values = sizes.num_heads, sizes.dim_k, sizes.num_heads * sizes.dim_v
    shape = (heads,) if rule == "delta" else (heads, dim_k, sizes.dim_v)
    bias_shape = {"delta": (heads * dim_k,), "selective": (values,), "lru": (2, values)}[rule]
    rate, bias, skip = -case.wide_numbers(132, *shape).abs(), case.wide_numbers(133, *bias_shape), None
    if rule == "selective":
        skip = case.wide_numbers(134, values)
    scan = Scan(rule, rate, bias, skip, floor=floor)
    for cache, plan in _state_steps(case, sizes):
        widths = Scan.widths(rule, plan.spec)
        x, gates, side = (case.numbers(135 + i, plan.num_tokens, width, scale=4.0) for i, width in enumerate(widths))
        yield case.backend.scan(x, gates, side, scan, cache, plan)


def _state_space(sizes: StateSizes, dt_limits: tuple[float, float], case: _Case) -> Iterator[Tensor]:
    heads, width = sizes.num_heads, 2 * sizes.num_k_heads * sizes.dim_k + sizes.num_heads * sizes.dim_v
    rate, skip, dt_bias = (-case.wide_numbers(seed, heads).abs() for seed in (122, 123, 124))
    for cache, plan in _state_steps(case, sizes):
        xbc, dt = (case.numbers(seed, plan.num_tokens, n, scale=4.0) for seed, n in ((120, width), (121, heads)))
        yield case.backend.state_space(xbc, dt, rate, skip, dt_bias, dt_limits, cache, plan)


def _gated_norms(width: int, heads: int, case: _Case) -> Iterator[Tensor]:
    weight = case.wide_numbers(132, width)
    for dtype in case.dtypes:
        x, gate = (case.wide_numbers(seed, ROWS[-1], width, scale=8.0).to(dtype) for seed in (130, 131))
        yield case.backend.gated_norm(x, gate, weight, EPS, heads, "norm")
        yield case.backend.gated_norm(x, gate, weight, EPS, 1, "gate")


# ---------------------------------------------------------------------------------------------- small operators


def _norms(case: _Case) -> Iterator[Tensor]:
    backend = case.backend
    weight, bias = (case.wide_numbers(seed, INPUTS) for seed in (52, 53))
    for dtype in case.dtypes:
        x, residual = (case.wide_numbers(seed, ROWS[-1], INPUTS, scale=4.0).to(dtype) for seed in (50, 51))
        yield backend.rms_norm(x, weight, EPS)
        yield backend.add_rms_norm(x, residual, weight, EPS)
        yield residual
        yield backend.layer_norm(x, weight, bias, EPS)
        yield backend.layer_norm(x, weight, None, EPS)


def _activations(case: _Case) -> Iterator[Tensor]:
    for dtype in case.dtypes:
        x = case.wide_numbers(60, ROWS[-1], 2 * INPUTS, scale=8.0).to(dtype)
        yield case.backend.swiglu(x)
        yield case.backend.gelu(x, "none")
        yield case.backend.gelu(x, "tanh")
        for activation in (Activation(), Activation("gelu_tanh"), Activation("relu_squared", gated=False), CLAMPED):
            yield case.backend.activate(x, activation)


def _functions(case: _Case) -> Iterator[Tensor]:
    """Yield the functions that torch computes in models and in the sampler: they differ from CPU to CPU."""
    x = case.wide_numbers(70, NUMBERS, scale=16.0)
    for function in (torch.exp, torch.tanh, torch.erf, torch.sin, torch.cos, torch.sigmoid):
        yield function(x)
    yield torch.log(x.abs() + 1.0)
    yield torch.rsqrt(x.abs() + 1.0)
    weights = torch.exp(x.double())
    yield weights
    yield weights.cumsum(-1)
    rows = x.view(-1, 256)
    yield torch.softmax(rows, -1)
    yield rows.pow(2).mean(-1)
    D = case.spec.head_dim
    for theta in (1e4, 5e5):  # RoPE tables are computed on the host
        frequencies = 1.0 / theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
        angles = torch.arange(0, 2**17, 2**17 // 32 + 1, dtype=torch.float32)[:, None] * frequencies
        yield angles.cos()
        yield angles.sin()


def _sampler(case: _Case) -> Iterator[Tensor]:
    """Yield tokens and logprobs. Few draws would detect a change in a weight's last bit; `_functions` does."""
    requests = []
    for seed, sampling in enumerate(SAMPLINGS):
        given = array("i", (_words(80 + seed, 50) % np.uint64(VOCABULARY)).astype(np.int32).tolist())
        requests.append(Request(str(seed), given, 20, sampling, seed % 3, seed=seed))
    rows = sampling_rows(requests)
    logits = case.wide_numbers(90, len(requests), VOCABULARY, scale=16.0)
    changed = logits.clone()
    tokens = sample(changed, rows, case.backend)
    yield tokens
    yield changed
    reported = token_logprobs(logits, tokens, rows.num_logprobs, case.backend)()
    numbers = [[one.logprob, one.rank, *(x for pair in one.top for x in pair)] for one in reported]
    yield torch.tensor(numbers, dtype=torch.float64)
    yield case.backend.logsumexp(logits)
    yield from case.backend.top_k_softmax(logits, 8)
