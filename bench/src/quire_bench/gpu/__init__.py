"""Everything on a GPU in one command: `quire bench gpu`."""
