"""Quire's operators inside other libraries: `transformers`, and `gate`, what is known of its models."""
