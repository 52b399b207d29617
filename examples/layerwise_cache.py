"""A cache that is filled layer by layer, as a hand-written model does: register a prefill, append tokens, gather.

A thin face over the two rooms that do the work in Quire: `BlockManager` knows who owns which block, `KVCache` holds the
memory. All layers share one block table, so that blocks are taken once for a token and not once for a token and layer.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from quire.cache.groups import CacheGroup, Heads
from quire.cache.manager import BlockManager, Move
from quire.cache.storage import KVCache
from quire.errors import BadShape, BadValue, OutOfBlocks
from quire.request import Request, SamplingParams


class LayerwiseCache:
    """Sequences of one model, by name. A layer may be ahead of the others by a prefill or by one token."""

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """One pool of num_blocks blocks for all layers."""
        groups = (CacheGroup(tuple(range(num_layers)), heads=Heads(num_kv_heads, num_kv_heads, head_dim)),)
        self.manager = BlockManager(groups, num_blocks, block_size, max_growth=2**30, enable_prefix_caching=False)
        self.memory = KVCache(groups, num_blocks, block_size, dtype)
        self.num_layers, self.num_kv_heads, self.block_size, self.head_dim = (
            num_layers, num_kv_heads, block_size, head_dim,
        )  # fmt: skip
        self.sequences: dict[str, Request] = {}
        self.lengths: dict[str, list[int]] = {}  # tokens of each sequence in each layer

    def register_prefill_layer(
        self,
        layer: int,
        name: str,
        key: Tensor,  # [1, Hkv, T, D]
        value: Tensor,  # [1, Hkv, T, D]
    ) -> list[int]:
        """Store a whole prompt's K and V of one layer; the first layer takes the blocks. Returns the block table."""
        num_tokens = key.shape[2]
        self._check("key", key, (1, self.num_kv_heads, num_tokens, self.head_dim))
        self._check("value", value, (1, self.num_kv_heads, num_tokens, self.head_dim))
        if name not in self.sequences:
            request = Request(name, array("i", [0]) * num_tokens, num_tokens, SamplingParams())
            self.manager.admit(request, self.manager.lookup.match(request))
            self._grow(request, num_tokens)
            self.sequences[name], self.lengths[name] = request, [0] * self.num_layers
        if self.lengths[name][layer]:
            raise BadValue(f"layer {layer} of {name!r} has {self.lengths[name][layer]} tokens; a prefill comes first")
        if num_tokens != len(self.sequences[name].tokens):
            have = len(self.sequences[name].tokens)
            raise BadValue(f"key has {num_tokens} tokens; the other layers of {name!r} have {have}")
        for at in range(0, num_tokens, self.block_size):
            end = min(at + self.block_size, num_tokens)
            self._store(layer, name, at, key[0, :, at:end], value[0, :, at:end])
        self.lengths[name][layer] = num_tokens
        return self.block_table(name)

    def append_token(
        self,
        layer: int,
        name: str,
        key: Tensor,  # [Hkv, D]
        value: Tensor,  # [Hkv, D]
    ) -> None:
        """Store the next token's K and V of one layer.

        The first layer that brings the token makes room for it. Where the last block is shared with another sequence,
        that copies the block first (in all layers), so that the other one keeps its own.
        """
        request, position = self._sequence(name), self.lengths[name][layer]
        self._check("key", key, (self.num_kv_heads, self.head_dim))
        self._check("value", value, (self.num_kv_heads, self.head_dim))
        if position == 0:
            raise BadValue(f"layer {layer} of {name!r} has no tokens yet; register its prefill first")
        if position == len(request.tokens):
            if min(self.lengths[name]) < position:
                raise BadValue(f"layer {layer} of {name!r} would be two tokens ahead of another layer")
            request.tokens.append(0)
            self._grow(request, position + 1)
        self._store(layer, name, position, key[:, None], value[:, None])
        self.lengths[name][layer] = position + 1

    def gather_sequence(
        self,
        layer: int,
        name: str,
    ) -> tuple[Tensor, Tensor]:
        """K and V of one layer, in order and contiguous: [1, Hkv, T, D] each. What paged attention does without."""
        kv, table = self.memory.kv(layer), self.block_table(name)
        k, v = (x[table].transpose(0, 1).flatten(1, 2)[None, :, : self.lengths[name][layer]] for x in (kv.k, kv.v))
        return k.contiguous(), v.contiguous()

    def fork(self, name: str, child: str) -> None:
        """A second sequence with the same tokens. It shares all blocks until one of the two appends to the last.

        All layers must stand at the same place: a block that one layer has still to write cannot be shared.
        """
        parent = self._sequence(name)
        if child in self.sequences:
            raise BadValue(f"there is a sequence {child!r} already")
        if len(set(self.lengths[name])) > 1:
            raise BadValue(f"the layers of {name!r} have {self.lengths[name]} tokens; a fork needs all at one place")
        twin = Request(child, array("i", parent.tokens), parent.num_prompt, SamplingParams())
        self.manager.fork(parent, twin)
        twin.cache.num_computed = (
            parent.cache.num_computed
        )  # K and V are brought from outside: its last token has them too
        self.sequences[child], self.lengths[child] = twin, list(self.lengths[name])

    def free(self, name: str) -> None:
        """Give the sequence's blocks back."""
        self.manager.release(self._sequence(name))
        del self.sequences[name]
        del self.lengths[name]

    def block_table(self, name: str) -> list[int]:
        """The sequence's blocks, the same for all layers."""
        return self._sequence(name).cache.block_ids[0].tolist()

    def _sequence(self, name: str) -> Request:
        if name not in self.sequences:
            raise BadValue(f"there is no sequence {name!r}; there are: {', '.join(self.sequences) or 'none'}")
        return self.sequences[name]

    def _check(self, argument: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(x.shape) != shape:
            raise BadShape(f"{argument} has shape {tuple(x.shape)}; expected {shape}")

    def _grow(self, request: Request, num_tokens: int) -> None:
        copies: list[Move] = []
        if not self.manager.grow(request, num_tokens, copies):
            raise OutOfBlocks(f"{request.id!r} needs room for {num_tokens} tokens; the pool has no free block")
        for move in copies:
            for layer in range(self.num_layers):
                kv = self.memory.kv(layer)
                kv.k[move.dst], kv.v[move.dst] = kv.k[move.src], kv.v[move.src]
        self.manager.advance(request, num_tokens - request.cache.num_computed)

    def _store(self, layer: int, name: str, position: int, key: Tensor, value: Tensor) -> None:
        block, offset = self.block_table(name)[position // self.block_size], position % self.block_size
        kv, end = self.memory.kv(layer), offset + key.shape[1]
        kv.k[block, :, offset:end], kv.v[block, :, offset:end] = key, value


def main() -> None:
    """A prompt, a fork of it, and a token for each of the two."""
    cache = LayerwiseCache(num_layers=2, num_blocks=8, num_kv_heads=2, block_size=4, head_dim=8)
    prompt = torch.randn(2, 2, 1, 2, 6, 8)  # K and V of two layers, six tokens
    for layer, (key, value) in enumerate(prompt):
        table = cache.register_prefill_layer(layer, "a", key, value)
    print(f"six tokens of two layers in blocks {table}")
    cache.fork("a", "b")
    print(f"forked: a {cache.block_table('a')}, b {cache.block_table('b')}, free {cache.manager.pools[0].num_free}")
    for name in "ab":
        for layer in range(2):
            cache.append_token(layer, name, *torch.randn(2, 2, 8))
    print(f"grown:  a {cache.block_table('a')}, b {cache.block_table('b')}, free {cache.manager.pools[0].num_free}")
    first, second = (cache.gather_sequence(1, name)[0] for name in "ab")
    print(f"they agree up to the fork: {bool((first == second).all(dim=(0, 1, 3))[:6].all())}, and then differ")


if __name__ == "__main__":
    main()
