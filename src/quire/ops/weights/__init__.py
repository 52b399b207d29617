"""Formats of weights and their products: linears, integers with scales, narrow floats, GGUF blocks, adapters."""
