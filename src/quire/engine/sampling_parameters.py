"""The sampling parameters of a step's rows, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.decode_rows import KEEP_ALL, sampling_numbers
from quire.request import Request


@dataclass(frozen=True)
class Parameters:
    """Sampling parameters of R rows. Steps whose rows belong to the same requests share them."""

    requests: Sequence[Request]  # [R]
    real: tuple[Tensor, ...]  # fp32 [R]: temperature, top_p, min_p, and the penalties
    whole: tuple[Tensor, ...]  # int64 [R]: top_k and num_logprobs
    draws: bool  # any row is not greedy
    cuts: bool  # any row has top_k, top_p or min_p
    reports: bool  # any row reports logprobs
    special: tuple[int, ...]  # rows that have penalties, constraints, a guide or min_tokens

    @classmethod
    def of_arrays(
        cls,
        requests: Sequence[Request],
        real: NDArray[np.float32],  # [R, 6], see `sampling_numbers`
        whole: NDArray[np.int64],  # [R, 3]
    ) -> Parameters:
        """Return the parameters of these rows, given their numbers."""
        return cls(
            requests,
            torch.from_numpy(real.T.copy()).unbind(),
            torch.from_numpy(whole[:, :2].T.copy()).unbind(),
            bool(real[:, 0].any()),
            bool(((real[:, 1] < 1) | (real[:, 2] > 0) | (whole[:, 0] < KEEP_ALL)).any()),
            bool((whole[:, 1] >= 0).any()),
            tuple(np.flatnonzero(whole[:, 2]).tolist()),
        )

    def followed_by(self, more: Parameters) -> Parameters:
        """Return the parameters of these rows and, after them, of others."""
        if not more.requests or not self.requests:
            return self if self.requests else more
        return Parameters(
            [*self.requests, *more.requests],
            tuple(torch.cat(pair) for pair in zip(self.real, more.real, strict=True)),
            tuple(torch.cat(pair) for pair in zip(self.whole, more.whole, strict=True)),
            self.draws or more.draws,
            self.cuts or more.cuts,
            self.reports or more.reports,
            (*self.special, *(len(self.requests) + row for row in more.special)),
        )


def parameters_of(requests: Sequence[Request], known: Parameters | None = None) -> Parameters:
    """Return the parameters of these requests' rows: `known` itself if it is theirs."""
    if known is not None and len(requests) == len(known.requests) and all(map(is_, requests, known.requests)):
        return known
    numbers = [sampling_numbers(request) for request in requests]
    real = np.array([reals for reals, _ in numbers], np.float32).reshape(-1, 6)
    whole = np.array([wholes for _, wholes in numbers], np.int64).reshape(-1, 3)
    return Parameters.of_arrays(requests, real, whole)
