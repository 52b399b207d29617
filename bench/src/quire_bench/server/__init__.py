"""Load on a server: `quire bench serve`, `quire bench http` and `quire bench soak`."""
