"""Blocks on a disk: what a process has computed, another one finds again."""
