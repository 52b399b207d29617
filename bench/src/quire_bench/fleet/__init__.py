"""Costs and gains of a fleet: its gateway, kills, routing, and the time until a lost replica is avoided."""
