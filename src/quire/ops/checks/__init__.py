"""Checks of arguments: single tensors, overlapping memory, the metadata of a step, and each operator."""
