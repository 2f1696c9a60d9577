"""The planner of inference: which chips, which layout, which batch, and what latency and price follow."""
