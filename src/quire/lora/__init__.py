"""Adapters as vLLM's callers name them. `quire.models.lora` computes them."""
