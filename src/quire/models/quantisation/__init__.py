"""Quantised checkpoints: the formats in their config.json, and the readers of their tensors.

Each format has a module. Its scheme, built from `quantization_config`, returns the storage form of each linear. The
file's integers and scales are used unchanged in products; they are only reordered.
"""
