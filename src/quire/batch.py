"""Batch: a step's plan as tensors. The only thing that models and runners see of it.

Letters as in `quire.ops.spec`; P is the number of prompt positions whose logprobs are asked for, E of prompts that
are embedded, K of entries in a sparse list, W of bytes with a bit for each token. All tensors lie on the host; those of
T and S entries are views of buffers that the next step overwrites. What a model reads as tensors of its device, token
ids and positions, the runner sends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Pairs(NamedTuple):
    """Block ids: the contents of src[i] go to dst[i]. No block stands in both."""

    src: list[int]
    dst: list[int]


@dataclass(frozen=True)
class GroupMoves:
    """Which of one cache group's blocks move before the step, in the order of the fields."""

    swap_out: Pairs  # from the device to the host
    swap_in: Pairs  # from the host to the device
    copies: list[Pairs]  # on the device, one list after the other


@dataclass(frozen=True)
class GroupTables:
    """Where the K and V of one cache group of attention lie."""

    slots: torch.Tensor  # int64 [T], where each row's K and V are written; -1: they stand there already
    block_tables: torch.Tensor  # int32 [S, M]


@dataclass(frozen=True)
class RecurrentTables:
    """Where the states of layers that keep one lie. Entry j of a sequence is for the jth piece that the step touches.

    -1: there is none.
    """

    state_tables: torch.Tensor  # int32 [S, P], the state before the piece
    row_tables: torch.Tensor  # int32 [S, P], the piece's rows


@dataclass(frozen=True)
class Masks:
    """Rows that may not draw every token. Row numbers ascend."""

    rows: torch.Tensor  # int64 [K]
    allowed: torch.Tensor  # uint8 [K, W], bit t % 8 of byte t // 8: token t may be drawn; those beyond may not

    def part(self, start: int, stop: int) -> Masks | None:
        """Those among rows start:stop."""
        inside = slice(*torch.searchsorted(self.rows, torch.tensor([start, stop])).tolist())
        return Masks(self.rows[inside] - start, self.allowed[inside]) if inside.start < inside.stop else None


@dataclass(frozen=True)
class SamplingRows:
    """How each of the R rows draws its token. Row numbers in the sparse lists ascend."""

    temperature: torch.Tensor  # fp32 [R], 0 is greedy
    top_k: torch.Tensor  # int64 [R], V or more keeps all
    top_p: torch.Tensor  # fp32 [R]
    min_p: torch.Tensor  # fp32 [R]
    uniforms: torch.Tensor  # fp64 [R], in [0, 1): the rows' random numbers
    num_logprobs: torch.Tensor  # int64 [R], -1: none asked for
    penalty_rows: torch.Tensor  # int64 [K], row of each token that a penalty concerns
    penalty_tokens: torch.Tensor  # int64 [K]
    penalty_counts: torch.Tensor  # fp32 [K], how often the token was generated; 0: it stands in the prompt only
    repetition: torch.Tensor  # fp32 [R], repetition penalty
    presence: torch.Tensor  # fp32 [R], presence penalty
    frequency: torch.Tensor  # fp32 [R], frequency penalty
    bias_rows: torch.Tensor  # int64 [K], row of each token with a bias
    bias_tokens: torch.Tensor  # int64 [K]
    bias: torch.Tensor  # fp32 [K], added to its logit
    banned_rows: torch.Tensor  # int64 [K], row of each token that must not be drawn
    banned_tokens: torch.Tensor  # int64 [K]
    masks: Masks | None = None  # of rows with a guide or allowed tokens; None where no row has any

    def part(self, start: int, stop: int) -> SamplingRows:
        """Rows start:stop."""
        if start == 0 and stop >= len(self.temperature):
            return self
        dense = {
            name: getattr(self, name)[start:stop]
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "uniforms",
                "num_logprobs",
                "repetition",
                "presence",
                "frequency",
            )
        }
        penalised = slice(*torch.searchsorted(self.penalty_rows, torch.tensor([start, stop])).tolist())
        biased = slice(*torch.searchsorted(self.bias_rows, torch.tensor([start, stop])).tolist())
        banned = slice(*torch.searchsorted(self.banned_rows, torch.tensor([start, stop])).tolist())
        return SamplingRows(
            **dense,
            penalty_rows=self.penalty_rows[penalised] - start,
            penalty_tokens=self.penalty_tokens[penalised],
            penalty_counts=self.penalty_counts[penalised],
            bias_rows=self.bias_rows[biased] - start,
            bias_tokens=self.bias_tokens[biased],
            bias=self.bias[biased],
            banned_rows=self.banned_rows[banned] - start,
            banned_tokens=self.banned_tokens[banned],
            masks=None if self.masks is None else self.masks.part(start, stop),
        )


@dataclass(frozen=True)
class PromptRows:
    """Prompt positions whose logprobs are asked for: the logits of a row are about the token after it."""

    rows: torch.Tensor  # int64 [P], query rows
    tokens: torch.Tensor  # int64 [P], the token after each
    num_logprobs: torch.Tensor  # int64 [P]
    request_ids: list[str]  # [P]


class EmbedRows(NamedTuple):
    """Rows whose hidden states are asked for: those of the last tokens of prompts that are embedded."""

    rows: torch.Tensor  # int64 [E], query rows, ascending
    request_ids: list[str]  # [E]


class DrawnRows(NamedTuple):
    """Rows whose tokens the step before draws: they are on the device and not yet known to the host."""

    rows: torch.Tensor  # int64 [K], query rows, ascending
    request_ids: list[str]  # [K]


@dataclass(frozen=True)
class Batch:
    """One step's work, flattened: all sequences' new tokens in one row of T."""

    token_ids: torch.Tensor  # int64 [T]; 0 in the rows of `drawn`
    drawn: DrawnRows
    positions: torch.Tensor  # int64 [T]
    query_starts: torch.Tensor  # int32 [S+1]
    context_lens: torch.Tensor  # int32 [S]
    moves: tuple[GroupMoves, ...]  # one a cache group
    groups: tuple[GroupTables, ...]  # one a cache group of attention
    recurrent: tuple[RecurrentTables, ...]  # one for layers that keep a state; none where there are no such layers
    logit_rows: torch.Tensor  # int64 [R], query rows whose next token is drawn
    logit_ids: list[str]  # [R], their requests
    sampling: SamplingRows
    prompt: PromptRows
    embed: EmbedRows
    lora_slots: torch.Tensor | None = None  # int32 [T], each row's adapter, -1: none; None: no row has one
