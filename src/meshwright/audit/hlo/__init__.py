"""A compiled program's text as data: instructions, the flow of values, JAX's names."""
