"""The routes: from a request's body to the engine's jobs, and from these to the answer."""
