"""One module for each engine that is compared: it runs in that engine's own environment."""
