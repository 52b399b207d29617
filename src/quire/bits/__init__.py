"""What decides the bits of a model's numbers: for a fleet, and for blocks on a disk."""
