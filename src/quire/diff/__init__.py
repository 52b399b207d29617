"""The first operator at which two runs of a model differ: traces of runs, their comparison, and replays."""
