"""The simulator: the real scheduler, router and autoscaler on a virtual clock, and steps that are not computed."""
