"""Facts about a compiled program: collectives, FLOPs, buffers, schedule."""
