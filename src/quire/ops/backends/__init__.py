"""Backends in PyTorch: the reference, the gathering baseline, and their executor."""
