"""HTTP itself: connections and their limits, keys and hosts, bodies, waiting in line, errors as clients see them."""
