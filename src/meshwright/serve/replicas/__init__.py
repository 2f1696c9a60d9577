"""Several servers behind one address, on Ray Serve, each with an engine of its own."""
