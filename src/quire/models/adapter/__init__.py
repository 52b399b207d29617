"""Models that have no family here: transformers' own modeling code, with Quire's attention in it."""
