"""What `mw shard --run` runs: a contraction or a reshard on devices, beside what the algebra derives."""
