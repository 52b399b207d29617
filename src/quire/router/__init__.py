"""Several models at one address: each is a separate `quire serve` that starts at its first request.

`pool` decides which models are in memory; `app` forwards requests to them.
"""
