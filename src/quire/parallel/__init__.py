"""Several processes that compute one model together, each a part of it: tensor parallelism."""
