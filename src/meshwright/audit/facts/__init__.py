"""What a compiled program does: its collectives, FLOPs, buffers, and what runs beside what."""
