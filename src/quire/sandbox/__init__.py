"""Programs that no one has read, grammars and chat templates, in child processes with limits."""
