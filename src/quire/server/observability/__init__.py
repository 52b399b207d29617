"""Observation: the block inspector, the log of events that it shows, and metrics."""
