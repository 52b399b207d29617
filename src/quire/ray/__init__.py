"""A fleet on Ray Serve, which places, supervises and scales its replicas. Tokens and requests never pass through it."""
