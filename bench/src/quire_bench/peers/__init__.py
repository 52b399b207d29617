"""Other engines on the same prompts, beside Quire."""
