"""Resume: the limits for answers that another replica continues."""

from __future__ import annotations

NUM_CHECKED = 4  # delivered tokens that another replica draws again; in one step if draft tokens are allowed
MOST_LOST = 8  # replicas: a request that kills its replicas must not kill the whole fleet
