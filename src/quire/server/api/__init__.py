"""The routes: what a request may hold, what the engine does for it, and what is answered."""
