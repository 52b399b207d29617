"""Low-rank adapters of a model: read as PEFT saves them, fitted to its linears, held in slots."""
