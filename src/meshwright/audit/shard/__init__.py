"""`mw shard --run`: a contraction or a reshard on devices, compared with the derived collectives."""
