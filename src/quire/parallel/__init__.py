"""Tensor parallelism: several processes that compute one model together, each a shard of it."""
