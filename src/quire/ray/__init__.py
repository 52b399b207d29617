"""A fleet on Ray Serve, which places, supervises and scales the replicas. Requests and tokens bypass Ray."""
