"""GGUF files: a model's weights, configuration and vocabulary in one file."""
