"""HTTP: connections and their limits, keys and hosts, bodies, queues for slow work, and errors as clients see them."""
