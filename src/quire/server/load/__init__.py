"""Clients that load a server: what quire bench serve and quire bench soak send, and what they make of the answers."""
