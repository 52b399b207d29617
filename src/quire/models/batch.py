"""Batch: a step's plan as tensors. Models and runners see nothing else of the plan.

Letters are those of `quire.ops.spec`. In addition, P is the number of prompt positions whose logprobs are requested, E
the number of prompts that are embedded, K the number of entries in a sparse list, and W the number of bytes that have
one bit for each token. All tensors are on the host. Those of T and S entries, and the random numbers, are views of
buffers that the next step overwrites. The runner copies token ids and positions to the device, where models read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Pairs(NamedTuple):
    """Block ids: the contents of src[i] are copied to dst[i]. No block is in both lists."""

    src: list[int]
    dst: list[int]


@dataclass(frozen=True)
class GroupMoves:
    """The moves of one cache group's blocks before the step, in the order of the fields."""

    swap_out: Pairs  # from the device to the host
    swap_in: Pairs  # from the host to the device
    copies: list[Pairs]  # on the device, one list after the other


@dataclass(frozen=True)
class GroupTables:
    """The places of the K and V of one attention cache group."""

    slots: torch.Tensor  # int64 [T], slot to which each row's K and V are written; -1: they are cached
    block_tables: torch.Tensor  # int32 [S, M]
    key_ends: torch.Tensor | None = None  # int32 [T], see `AttentionPlan.update`


@dataclass(frozen=True)
class RecurrentTables:
    """The places of the states of recurrent layers. Entry j of a sequence is for the jth piece that the step touches.

    An entry of -1 means no place.
    """

    state_tables: torch.Tensor  # int32 [S, P], the state before the piece
    row_tables: torch.Tensor  # int32 [S, P], the piece's rows


@dataclass(frozen=True)
class Masks:
    """Rows that may draw only some of the tokens. Row numbers ascend."""

    rows: torch.Tensor  # int64 [K]
    allowed: torch.Tensor  # uint8 [K, W], bit t % 8 of byte t // 8: token t may be drawn; tokens beyond W bytes may not

    def part(self, start: int, stop: int) -> Masks | None:
        """Return the masks of rows start:stop, None if these have none."""
        inside = slice(*torch.searchsorted(self.rows, torch.tensor([start, stop])).tolist())
        return Masks(self.rows[inside] - start, self.allowed[inside]) if inside.start < inside.stop else None


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of each of the R rows. Row numbers in the sparse lists ascend."""

    temperature: torch.Tensor  # fp32 [R], 0 is greedy
    top_k: torch.Tensor  # int64 [R], V or more keeps all
    top_p: torch.Tensor  # fp32 [R]
    min_p: torch.Tensor  # fp32 [R]
    uniforms: torch.Tensor  # fp64 [R], in [0, 1): the rows' random numbers
    num_logprobs: torch.Tensor  # int64 [R], -1: not requested
    penalty_rows: torch.Tensor  # int64 [K], row of each token that has a penalty
    penalty_tokens: torch.Tensor  # int64 [K]
    penalty_counts: torch.Tensor  # fp32 [K], times the token was generated; 0: it is in the prompt only
    repetition: torch.Tensor  # fp32 [R], repetition penalty
    presence: torch.Tensor  # fp32 [R], presence penalty
    frequency: torch.Tensor  # fp32 [R], frequency penalty
    draws: bool  # any row has a temperature
    cuts: bool  # any row has top_k, top_p or min_p
    reports: bool  # logprobs are requested for any row
    bias_rows: torch.Tensor  # int64 [K], row of each token with a bias
    bias_tokens: torch.Tensor  # int64 [K]
    bias: torch.Tensor  # fp32 [K], added to its logit
    banned_rows: torch.Tensor  # int64 [K], row of each token that must not be drawn
    banned_tokens: torch.Tensor  # int64 [K]
    masks: Masks | None = None  # of rows with a guide or allowed tokens; None if no row has any

    def part(self, start: int, stop: int) -> SamplingRows:
        """Return rows start:stop."""
        if start == 0 and stop >= self.temperature.shape[0]:
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
            draws=self.draws,
            cuts=self.cuts,
            reports=self.reports,
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
    """Prompt positions whose logprobs are requested. The logits of a row predict the token after it."""

    rows: torch.Tensor  # int64 [P], query rows
    tokens: torch.Tensor  # int64 [P], the token after each
    num_logprobs: torch.Tensor  # int64 [P]
    request_ids: list[str]  # [P]


class EmbedRows(NamedTuple):
    """Rows whose hidden states are pooled: those of whole prompts, or only their last ones."""

    rows: torch.Tensor  # int64 [K], query rows, ascending
    request_ids: list[str]  # [E]
    counts: list[int]  # [E], rows of each


class GivenRows(NamedTuple):
    """Rows whose input is given instead of looked up by their tokens: those of images."""

    rows: torch.Tensor  # int64 [K], query rows, ascending
    values: torch.Tensor  # [K, H]; of some models, rows to add after the first layers follow, H each
    axes: torch.Tensor | None  # int64 [K, 3], positions in time, height and width by which they are rotated


class DrawnRows(NamedTuple):
    """Rows whose tokens the previous step draws: they are on the device, and the host does not know them yet."""

    rows: torch.Tensor  # int64 [K], query rows, ascending
    request_ids: list[str]  # [K]


@dataclass(frozen=True)
class Batch:
    """The flattened work of one step: the new tokens of all sequences in one dimension of T."""

    token_ids: torch.Tensor  # int64 [T]; 0 in the rows of `drawn`
    drawn: DrawnRows
    positions: torch.Tensor  # int64 [T]
    query_starts: torch.Tensor  # int32 [S+1]
    context_lens: torch.Tensor  # int32 [S]
    moves: tuple[GroupMoves, ...]  # one per cache group
    groups: tuple[GroupTables, ...]  # one per attention cache group
    recurrent: tuple[RecurrentTables, ...]  # one for the recurrent layers; empty without such layers
    logit_rows: torch.Tensor  # int64 [R], query rows whose next token is sampled
    logit_ids: list[str]  # [R], their requests
    sampling: SamplingRows
    prompt: PromptRows
    embed: EmbedRows
    given: GivenRows | None = None  # None: all rows are looked up
    turns: torch.Tensor | None = None  # int64 [T], by which rows are rotated; None: by their positions
    lora_slots: torch.Tensor | None = None  # int32 [T], each row's adapter slot, -1: no adapter; None: no row has one
    num_decoding: int = 0  # sequences, the first ones, of the plan's decode step: one row each, which draws a token
