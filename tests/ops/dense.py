"""Attention over one sequence in float64 with nothing clever in it: what every backend is compared with.

No blocks, no running maximum, no metadata: the whole score matrix, the whole mask, one softmax. It shares neither code
nor algorithm with `quire.ops`. Beside the result it gives the two sizes from which the tolerance follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """The answer in float64, and how far a backend may be from it."""

    out: Tensor  # [T, Hq, Dv]
    lse: Tensor  # [T, Hq], natural log, without the sink
    out_size: Tensor  # [T, Hq, Dv], sum of weight * |v|: what the roundings of an output are relative to
    score_size: Tensor  # [T, Hq], bound of |score|: what the roundings of a score are relative to
    peak: Tensor  # [T, Hq], the largest weight * |v| of a key: what weights are relative to that become whole numbers

    def rows(self, which: slice) -> Dense:
        """The answer for some of the query rows."""
        return Dense(*(getattr(self, field.name)[which] for field in fields(self)))

    def check(
        self,
        out: Tensor,
        lse: Tensor | None,
        dtype: torch.dtype,
        roundings: int = 2,
        largest: float = 1.0,
        query_error: float = 0.0,
        weight_error: float = 0.0,
    ) -> None:
        """Compare a backend's result, computed in `dtype` with sums in fp32 (float64: in float64).

        An error e in a score changes its weight by the factor 1 + e. The weights and the output may each be rounded
        to `dtype`, half an eps each; everything else happens in fp32, for which 16 eps are allowed. A weight may be too
        small for its dtype: largest is the value that it belongs to. query_error: of a query's rounding, relative to
        its length. weight_error: of all keys' weights, relative to the largest of them with its value.
        """
        sums = torch.promote_types(dtype, torch.float32)
        eps, sums_eps = torch.finfo(dtype).eps, torch.finfo(sums).eps
        tiniest = largest * max(torch.finfo(sums).tiny, torch.finfo(dtype).tiny * eps)
        score_error = 16 * sums_eps * (1 + self.score_size) + query_error * self.score_size
        limit = (roundings * eps / 2 + score_error)[..., None] * self.out_size + tiniest * (self.out_size > 0)
        limit = limit + weight_error * self.peak[..., None]

        assert out.dtype == dtype, f"out has dtype {out.dtype}, q {dtype}"
        assert out.shape == self.out.shape, f"out has shape {tuple(out.shape)}, not {tuple(self.out.shape)}"
        check_close("out", out, self.out, limit)
        if lse is not None:
            assert lse.dtype == sums, f"the LSE has dtype {lse.dtype}, not {sums}"
            assert lse.shape == self.lse.shape, f"the LSE has shape {tuple(lse.shape)}, not {tuple(self.lse.shape)}"
            check_close("lse", lse, self.lse, score_error)


def attend(
    q: Tensor,  # [rows, Hq, D]
    k: Tensor,  # [n, Hkv, D]
    v: Tensor,  # [n, Hkv, Dv]
    *,
    causal: bool = True,
    ends: Tensor | None = None,  # int [rows], the keys before which each row attends; None: its position + 1
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,  # [Hq]
    sinks: Tensor | None = None,  # [Hq]
) -> Dense:
    """Rows q, the last of the sequence's n positions, over all of its keys. Inputs are taken as given, in any dtype."""
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    rows, num_heads, head_dim = q.shape
    n, num_kv_heads = k.shape[:2]
    k = k.repeat_interleave(num_heads // num_kv_heads, dim=1)  # query head h reads KV head h // G
    v = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
    position = torch.arange(n - rows, n)[:, None]
    key = torch.arange(n)[None, :]
    scale = head_dim**-0.5 if scale is None else scale

    score = torch.einsum("rhd,nhd->hrn", q, k) * scale
    longest = k.norm(dim=-1).amax(0) if n else torch.zeros(num_heads, dtype=torch.float64)
    score_size = abs(scale) * q.norm(dim=-1) * longest  # Cauchy-Schwarz
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
        score_size = score_size + softcap
    if alibi_slopes is not None:
        slope = alibi_slopes.detach().cpu().double()
        score = score + slope[:, None, None] * (key - position)
        score_size = score_size + slope.abs() * max(n, rows)
    if causal:
        visible = key < (position + 1 if ends is None else ends[:, None])
        if window is not None:
            visible &= key > position - window
        if chunk is not None:
            visible &= key >= position // chunk * chunk
        score = score.masked_fill(~visible, -torch.inf)

    sink = torch.full((num_heads,), -torch.inf, dtype=torch.float64) if sinks is None else sinks.detach().cpu().double()
    logits = torch.cat([score, sink[:, None, None].expand(-1, rows, 1)], dim=-1)
    weight = torch.softmax(logits, dim=-1)[..., :-1]
    weight = torch.where(score == -torch.inf, 0.0, weight)  # a row without any logit
    return Dense(
        out=torch.einsum("hrn,nhd->rhd", weight, v),
        lse=torch.logsumexp(score, dim=-1).T,
        out_size=torch.einsum("hrn,nhd->rhd", weight, v.abs()),
        score_size=score_size,
        peak=_peak(weight, v),
    )


def _peak(weight: Tensor, v: Tensor) -> Tensor:
    """Of weights [Hq, rows, n] and values [n, Hq, Dv]: [rows, Hq]."""
    if v.numel() == 0:
        return weight.new_zeros(weight.shape[1], weight.shape[0])
    return (weight * v.abs().amax(2).T[:, None]).amax(2).T


def concat(parts: Sequence[Dense]) -> Dense:
    """The answers of the sequences of a batch, one after the other."""
    return Dense(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Dense)))


def gather(
    cache: Tensor,  # [N, Hkv, B, D]
    table: list[int],
    context_len: int,
) -> Tensor:
    """The K or V of one sequence, [context_len, Hkv, D], token by token through its block table."""
    block_size = cache.shape[2]
    tokens = [cache[table[t // block_size], :, t % block_size] for t in range(context_len)]
    return torch.stack(tokens) if tokens else cache.new_zeros(0, cache.shape[1], cache.shape[3])


def check_close(name: str, got: Tensor, want: Tensor, limit: Tensor | float) -> None:
    """Every entry within its limit; infinities equal, NaN never."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert not got.isnan().any(), f"{name} has NaN at {_first(got.isnan())}"
    error = torch.where(got == want, 0.0, (got - want).abs())
    wrong = ~(error <= limit)
    if wrong.any():
        at = _first(wrong)
        allowed = limit[at] if isinstance(limit, Tensor) else limit
        raise AssertionError(
            f"{name}{list(at)} is {got[at]:.9g}, should be {want[at]:.9g} within {allowed:.3g}; "
            f"{int(wrong.sum())} of {wrong.numel()} entries are off, by up to {error[wrong].max():.3g}"
        )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
