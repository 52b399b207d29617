"""Layers that keep a state, run step by step over records that are NaN wherever no sequence owns them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire import ops
from quire.ops.recurrent.calls import Scan
from quire.ops.recurrent.plan import RecurrentPlan, num_pieces
from quire.ops.recurrent.records import PIECE, RecurrentCache, RecurrentSpec


@dataclass(frozen=True)
class Sizes:
    """A layer's, and its dtype."""

    heads: int = 2  # Hv
    k_heads: int = 2  # Hk
    dim_k: int = 16
    dim_v: int = 16
    taps: int = 4
    dtype: torch.dtype = torch.float32
    rule: str = "delta"  # of these, whose name a scan's records depend on: "kda", "selective", "lru"

    @property
    def width(self) -> int:
        values = self.heads * self.dim_v
        return values if self.rule in ("selective", "lru") else 2 * self.k_heads * self.dim_k + values

    def spec(self, device: str = "cpu", records: int = 64) -> RecurrentSpec:
        return RecurrentSpec(
            num_heads=self.heads,
            num_k_heads=self.k_heads,
            dim_k=self.dim_k,
            dim_v=self.dim_v,
            width=self.width,
            taps=self.taps,
            dim_decay={"kda": self.dim_k, "selective": self.dim_v, "lru": self.dim_v}.get(self.rule, 0),
            num_states=records,
            num_rows=records,
            dtype=self.dtype,
            device=device,
        )


class Layer:
    """A convolution, then a recurrence of its results: a rule of "delta" or "ssd"."""

    def __init__(self, sizes: Sizes, rule: str, seed: int, device: str = "cpu") -> None:
        if rule == "lru":
            sizes = replace(sizes, k_heads=1, dim_k=1)
        sizes = replace(sizes, rule=rule)
        self.sizes, self.rule, self.device = sizes, rule, device
        gen = torch.Generator().manual_seed(seed)
        wide = torch.promote_types(sizes.dtype, torch.float32)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(wide).to(device)

        self.weight, self.bias = draw(sizes.width, sizes.taps), draw(sizes.width)
        self.decay_rate, self.dt_bias, self.skip = -draw(sizes.heads).exp(), draw(sizes.heads), draw(sizes.heads)
        self.dt_limits = (0.01, 2.0)
        self.beta_scale, keys, values = 1.7, sizes.heads * sizes.dim_k, sizes.heads * sizes.dim_v
        by_rule = {"kda": (self.decay_rate, draw(keys)), "lru": (None, draw(2, values))}
        rate, bias = by_rule.get(rule, (None, draw(values)))
        rate = -draw(sizes.heads, sizes.dim_k, sizes.dim_v).exp() if rate is None else rate
        floor = -2.0 if rule == "kda" and sizes.heads % 3 else 0.0
        skip = draw(values) if rule == "selective" else None
        self.scan = Scan({"kda": "delta"}.get(rule, rule), rate, bias, skip, self.beta_scale, floor)

    @property
    def gates_widths(self) -> tuple[int, ...]:
        """Of the gates, and of the side of a scan."""
        heads, keys, values = self.sizes.heads, self.sizes.heads * self.sizes.dim_k, self.sizes.heads * self.sizes.dim_v
        scans = {"kda": (keys, heads), "selective": (values, 2 * self.sizes.k_heads * self.sizes.dim_k)}
        return (scans | {"lru": (values, values), "delta": (2 * heads,), "ssd": (heads,)})[self.rule]

    def inputs(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """x [count, W] and gates [count, 2 * Hv] (delta) or dt [count, Hv], both with rows that lie apart."""
        gen = torch.Generator().manual_seed(seed)

        def draw(width: int) -> Tensor:
            home = torch.full((count, width + 3), torch.nan, dtype=self.sizes.dtype, device=self.device)[:, 2:-1]
            return home.copy_(torch.randn(count, width, generator=gen))

        return draw(self.sizes.width), draw(sum(self.gates_widths))

    def convolve(self, backend: ops.Backend, x: Tensor, cache: RecurrentCache, plan: RecurrentPlan) -> Tensor:
        return backend.convolve(x, self.weight, self.bias, "silu", cache, plan)

    def recur(
        self, backend: ops.Backend, x: Tensor, gates: Tensor, cache: RecurrentCache, plan: RecurrentPlan
    ) -> Tensor:
        if self.rule == "delta":
            return backend.gated_delta(x, gates, self.decay_rate, self.dt_bias, cache, plan, self.beta_scale)
        if self.rule != "ssd":
            return backend.scan(x, *gates.split(self.gates_widths, 1), self.scan, cache, plan)
        weights = self.decay_rate, self.skip, self.dt_bias, self.dt_limits
        return backend.state_space(x, gates, *weights, cache, plan)


@dataclass
class Held:
    """What a sequence keeps."""

    tokens: int = 0
    state: int = -1
    rows: int = -1


@dataclass
class Run:
    """Sequences of one layer over a pool of records."""

    layer: Layer
    backend: ops.Backend
    keep_all: bool = False  # a record for each boundary and piece that a step reaches, not for the last ones alone
    records: int = 64
    held: dict[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.layer.sizes.spec(self.layer.device, self.records)
        self.cache = RecurrentCache.allocate(self.spec)
        for x in self.cache.tensors().values():
            x.fill_(torch.nan)
        # Taken from the end, so that records are not in the order of pieces.
        self.free_states, self.free_rows = list(range(self.records)), list(range(self.records))
        self.nonfinite: list[int] = []

    def step(self, parts: list[tuple[int, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Sequences by name, each with its next inputs. What the convolution and the recurrence give for them."""
        plan, after = self._plan([(name, len(x)) for name, x, _ in parts])
        x, gates = (torch.cat([part[i] for part in parts]) for i in (1, 2))
        convolved = self.layer.convolve(self.backend, x, self.cache, plan)
        out = self.layer.recur(self.backend, convolved, gates, self.cache, plan)
        self.nonfinite = plan.nonfinite.tolist()
        for name, held in after.items():
            self._release(name, held)
        sizes = [len(part[1]) for part in parts]
        return list(zip(convolved.split(sizes), out.split(sizes), strict=True))

    def _plan(self, parts: list[tuple[int, int]]) -> tuple[RecurrentPlan, dict[int, Held]]:
        width = max(num_pieces(self._at(name), self._at(name) + count) for name, count in parts) + 1
        starts, lens, states, rows, after = [0], [], [], [], {}
        for name, count in parts:
            held, end = self.held.get(name, Held()), self._at(name) + count
            last = end // PIECE - held.tokens // PIECE
            state, row = [-1] * width, [-1] * width
            state[0], row[0] = held.state, held.rows
            for j in range(last + 1):
                if j > 0 and (j == last or self.keep_all):
                    state[j] = self.free_states.pop()
                if row[j] < 0 and ((j == last and end % PIECE > 0) or self.keep_all):
                    row[j] = self.free_rows.pop()
            state[last + 1 :] = [self.records + 7] * (width - last - 1)  # never read
            starts.append(starts[-1] + count)
            lens.append(end)
            states.append(state)
            rows.append(row)
            after[name] = Held(end, state[last], row[last] if end % PIECE else -1)
            if count == 0:
                after[name] = replace(held)
            used = (state[: last + 1], row[: last + 1]) if count else ([], [])
            self._spare(after[name], *used)
        tensors = (torch.tensor(x, dtype=torch.int32) for x in (starts, lens, states, rows))
        return self.backend.recurrent_plan(self.spec, *tensors), after

    def _spare(self, kept: Held, states: list[int], rows: list[int]) -> None:
        self.passed = getattr(self, "passed", [])
        self.passed.append(
            ([i for i in states if i not in (-1, kept.state)], [i for i in rows if i not in (-1, kept.rows)])
        )

    def _release(self, name: int, held: Held) -> None:
        """Go on with these records; NaN for those that the sequence passed on from."""
        self.held[name] = held
        states, rows = self.passed.pop(0)
        self.free_states, self.free_rows = states + self.free_states, rows + self.free_rows
        for x in (self.cache.state, self.cache.tail):
            x[states] = torch.nan
        for x in (self.cache.keys, self.cache.updates, self.cache.decays, self.cache.inputs):
            x[rows] = torch.nan

    def _at(self, name: int) -> int:
        return self.held.get(name, Held()).tokens


# --------------------------------------------------------------------------- the same without pieces, in float64


def exact_convolution(layer: Layer, x: Tensor) -> Tensor:
    """Of a whole sequence: [n, W]."""
    taps = layer.sizes.taps
    known = torch.cat([torch.zeros(taps - 1, x.shape[1], dtype=torch.float64), _exact(x)])
    windows = known.unfold(0, taps, 1)  # [n, W, K]
    total = (windows * _exact(layer.weight)).sum(-1) + _exact(layer.bias)
    return total * torch.sigmoid(total)


def exact_recurrence(layer: Layer, x: Tensor, gates: Tensor) -> Tensor:
    """Of a whole sequence, from token to token: [n, Hv * Dv]."""
    sizes, x, gates = layer.sizes, _exact(x), _exact(gates)
    if layer.rule not in ("delta", "ssd"):
        return exact_scan(layer, x, *gates.split(layer.gates_widths, 1))
    count, key_width, value_width = len(x), sizes.k_heads * sizes.dim_k, sizes.heads * sizes.dim_v
    decay_rate, dt_bias = _exact(layer.decay_rate), _exact(layer.dt_bias)
    if layer.rule == "delta":
        q, k, v = x.split([key_width, key_width, value_width], 1)
    else:
        v, k, q = x.split([value_width, key_width, key_width], 1)
    groups = sizes.heads // sizes.k_heads
    q, k = (y.reshape(count, sizes.k_heads, sizes.dim_k).repeat_interleave(groups, 1) for y in (q, k))
    v = v.reshape(count, sizes.heads, sizes.dim_v)
    if layer.rule == "delta":
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        q = q / sizes.dim_k**0.5
        b, a = gates.chunk(2, 1)
        beta, g = layer.beta_scale * b.sigmoid(), decay_rate * torch.nn.functional.softplus(a + dt_bias)
    else:
        beta = torch.nn.functional.softplus(gates + dt_bias).clamp(*layer.dt_limits)
        g = decay_rate * beta
    state = torch.zeros(sizes.heads, sizes.dim_k, sizes.dim_v, dtype=torch.float64)
    out = []
    for t in range(count):
        state = g[t].exp()[:, None, None] * state
        new = v[t] if layer.rule == "ssd" else v[t] - (state * k[t][..., None]).sum(1)
        state = state + k[t][..., None] * (beta[t, :, None] * new)[:, None]
        out.append((state * q[t][..., None]).sum(1))
    o = torch.stack(out) if out else v
    return (o + _exact(layer.skip)[:, None] * v if layer.rule == "ssd" else o).flatten(1)


def exact_scan(layer: Layer, x: Tensor, gates: Tensor, side: Tensor) -> Tensor:
    """Of a whole sequence, from token to token: [n, Hv * Dv]."""
    sizes, weights, count = layer.sizes, layer.scan, len(x)
    heads, dim_k, dim_v, groups = sizes.heads, sizes.dim_k, sizes.dim_v, sizes.heads // sizes.k_heads
    rate, bias = _exact(weights.rate), _exact(weights.bias)
    softplus = torch.nn.functional.softplus
    values = x[:, -heads * dim_v :].reshape(count, heads, dim_v)
    keys = {"kda": x[:, : -heads * dim_v], "selective": side, "lru": x.new_ones(count, 2)}[layer.rule]
    q, k = keys.reshape(count, 2, sizes.k_heads, dim_k).repeat_interleave(groups, 2).unbind(1)
    if layer.rule == "kda":
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        q, raw = q / dim_k**0.5, (gates + bias).view(count, heads, dim_k, 1)
        rates = rate[:, None, None]
        g = weights.floor * (-rates * raw).sigmoid() if weights.floor else rates * softplus(raw)
    else:
        dt = softplus(gates + bias) if layer.rule == "selective" else (gates + bias[0]).sigmoid()
        dt = dt.view(count, heads, 1, dim_v)
        g = rate * dt
    state, out = torch.zeros(heads, dim_k, dim_v, dtype=torch.float64), []
    for t in range(count):
        state = g[t].exp() * state
        if layer.rule == "kda":
            u = layer.beta_scale * side[t].sigmoid()[:, None] * (values[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        elif layer.rule == "selective":
            u = dt[t, :, 0] * values[t]
        else:
            u = (side[t] + bias[1]).sigmoid().view(heads, dim_v) * values[t]
            u = u * (1 - (2 * g[t, :, 0]).exp()).sqrt() if t else u
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    o = torch.stack(out) if out else values
    return (o if weights.skip is None else o + _exact(weights.skip).view(heads, dim_v) * values).flatten(1)


def _exact(x: Tensor) -> Tensor:
    return x.to("cpu", torch.float64)


def make_plan(
    backend: ops.Backend, spec: RecurrentSpec, starts: list[int], lens: list[int], states: object, rows: object
) -> RecurrentPlan:
    return backend.recurrent_plan(spec, *(torch.tensor(x, dtype=torch.int32) for x in (starts, lens, states, rows)))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).cpu()
