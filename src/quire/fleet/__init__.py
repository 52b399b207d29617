"""A fleet: replicas of one model, and the gateway in front of them."""
