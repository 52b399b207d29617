"""LoRA adapters: read in PEFT's format, fitted to a model's linears, and stored in slots."""
