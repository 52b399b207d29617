"""Load on a server: `quire bench serve` and `quire bench soak`."""
