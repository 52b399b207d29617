"""Quire's operators inside other libraries: `transformers`, and `gate`, which checks whether it can serve a model."""
