"""Resume: the rules by which an answer goes on at another replica."""

from __future__ import annotations

NUM_CHECKED = 4  # delivered tokens that another replica draws again: in one step with guesses, where these are allowed
MOST_LOST = 8  # replicas, as a request that kills each of them must not go through the whole fleet
