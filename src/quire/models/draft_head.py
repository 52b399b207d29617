"""Draft heads: layers of a checkpoint that predict tokens after the next one (multi-token prediction, DeepSeek-V3).

Row i joins the embedding of token i and the model's hidden state at token i - 1, after the final norm. It passes
through the head's layers and the model's output projection, and predicts token i + 1. For further tokens the head's own
hidden state takes the place of the model's. The K and V of its layers lie in the blocks of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from quire.cache.groups import AnyGroup, CacheGroup
from quire.cache.storage import KVCache
from quire.models.decoder import Decoder
from quire.models.decoder_config import DecoderConfig
from quire.models.layers import position_tables, write_program
from quire.models.quantisation.stacking import Weight, matrix, tensor
from quire.ops import PagedKV
from quire.ops.program import Chain, Plan
from quire.ops.recurrent.records import RecurrentCache
from quire.ops.weights.linear import Embedding

T = TypeVar("T")


class DraftHead:
    """The layers of a checkpoint that predict draft tokens."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Weight], model: Decoder, embedding: Embedding
    ) -> None:
        """Take the weights of `weight_shapes`, among them a copy of the model's output projection.

        They may be rounded more than the model's, which makes drafting faster: no token depends on them.

        model: if it is one rank's part, this rank has the whole head, and the other ranks nothing of it.
        embedding: of all tokens.
        """
        self.config, self.embedding, self._model = config, embedding, model
        tables = position_tables(config, model.max_model_len, model.device)
        linears = model.backend.linears(str(model.device), False)
        self._layers = model.backend.compile(
            write_program(config, weights, linears, tables, None, model.dtype, model.device)
        )
        bias = tensor(weights["lm_head.bias"]) if config.head_bias else None
        self._lm_head = linears.head(matrix(weights["lm_head"]), bias)
        # The cache groups of the model and its head, and the plans of these that each of them uses.
        self.groups, self._plans = joined_groups(model.config, config)
        self.whole_groups, _ = joined_groups(model.whole, config)
        self._only_own = len(self.groups) - len(model.config.groups)  # groups that the model has no layer in
        self._num_attention = sum(isinstance(group, CacheGroup) for group in model.config.groups)
        self._chain: Chain | None = None
        if model.embeds_plainly:
            self.use_chain()

    def use_chain(self, targets: Tensor | None = None) -> None:
        """Choose all draft tokens in one call of the backend, if it has one.

        targets: int64 [V], the token of each logit; None: its number.
        """
        self._chain = self._model.backend.chain(self._layers, self.embedding, self._lm_head, targets)

    @property
    def plans(self) -> Sequence[int]:
        """The cache groups, by index, that the head's layers belong to."""
        return self._plans

    def forward(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        before: Tensor,  # [T, H], the hidden state of the model, or of the head, at the token before each
        cache: KVCache,
        plans: Sequence[Plan],  # one per cache group of model and head, updated for these tokens
        rows: Tensor | None = None,  # int64 [R], ascending
    ) -> Tensor:
        """Return the hidden states after the final norm, [T, H] or [R, H], and write the K and V of all rows."""
        joined, caches = self.joined(token_ids, positions, before), _Later(cache, self._model.config.num_layers)
        return self._layers(joined, positions, caches, [plans[plan] for plan in self._plans], rows)

    def drafts(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]; changed
        before: Tensor,  # [T, W], see `forward`
        cache: KVCache,
        plans: Sequence[Plan],  # updated for these rows, with blocks for those of the draft tokens
        rows: Tensor,  # int64 [R], the last rows of the first R sequences
        counts: Tensor,  # int64 [R], descending, 1 or more: draft tokens of each of these
    ) -> Tensor | None:
        """Compute the rows and return draft tokens, int64 [counts[0], R], undefined after a sequence's count.

        None, and nothing is computed, if the backend has no call for all of them.
        """
        if self._chain is None:
            return None
        joined, caches = self.joined(token_ids, positions, before), _Later(cache, self._model.config.num_layers)
        return self._chain(joined, positions, caches, [plans[plan] for plan in self._plans], rows, counts)

    def embed(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
    ) -> Tensor:
        """Return the embeddings: [T, H]."""
        return self._model.embed_by(self.embedding, token_ids, positions)

    def joined(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        before: Tensor,  # [T, H], see `forward`
    ) -> Tensor:
        """Return the input of the layers: [T, 2 H]."""
        return torch.cat([self.embed(token_ids, positions), before], 1)

    def split(
        self,
        found: Tensor,  # [T, H]
    ) -> tuple[Tensor, Tensor]:
        """Return the model's hidden states after the final norm, and those that `forward` takes as `before`."""
        return found, found

    def choose(
        self,
        hidden: Tensor,  # [R, H], as `forward` returns them
    ) -> Tensor:
        """Return the most likely next token of each row: int64 [R]."""
        return self._lm_head(hidden).argmax(-1)

    def without_own(self, of_groups: Sequence[T]) -> tuple[T, ...]:
        """Return the items of the model's own cache groups, given those of model and head."""
        return *of_groups[: self._num_attention], *of_groups[self._num_attention + self._only_own :]


class _Later:
    """The caches of the layers from `first` on, counted from 0."""

    def __init__(self, cache: KVCache, first: int) -> None:
        self._cache, self._first = cache, first

    def layer(self, index: int) -> PagedKV | RecurrentCache:
        return self._cache.layer(self._first + index)


def joined_groups(model: DecoderConfig, head: DecoderConfig) -> tuple[tuple[AnyGroup, ...], list[int]]:
    """Return the cache groups of a model's layers and then its head's, and the index of each group of the head.

    Layers of the head that have the heads and the window of a group of the model join it.
    """
    attention = [group for group in model.groups if isinstance(group, CacheGroup)]
    others = [group for group in model.groups if not isinstance(group, CacheGroup)]
    indices = []
    for group in head.groups:
        if not isinstance(group, CacheGroup):
            raise TypeError(f"a draft head consists of attention layers, not of a {type(group).__name__}")
        layers = tuple(model.num_layers + layer for layer in group.layers)
        known = [(one.heads, one.window) for one in attention]
        if (group.heads, group.window) in known:
            at = known.index((group.heads, group.window))
            attention[at] = replace(attention[at], layers=attention[at].layers + layers)
        else:
            at = len(attention)
            attention.append(replace(group, layers=layers))
        indices.append(at)
    return (*attention, *others), indices
