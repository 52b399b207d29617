"""Disk cache: KV blocks that one process computed and another can reuse."""
