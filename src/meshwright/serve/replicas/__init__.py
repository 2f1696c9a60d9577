"""Several servers at one address, on Ray Serve, each with its own engine."""
