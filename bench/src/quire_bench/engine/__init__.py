"""The engine: speed, latency, memory, start-up, and what each part of a step takes."""
