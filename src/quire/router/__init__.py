"""Several models at one address: each is a `quire serve` of its own that starts at its first request.

`pool` decides which models are in memory; `app` forwards requests to them.
"""
