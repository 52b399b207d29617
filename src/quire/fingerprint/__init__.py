"""Fingerprints of everything that determines the bits of a model's numbers, for fleets and for blocks on a disk."""
