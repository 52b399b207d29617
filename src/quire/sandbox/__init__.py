"""Programs that nobody has read, grammars and chat templates, in child processes with limits."""
