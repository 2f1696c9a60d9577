"""A compiled program's text as data: instructions, where values come from, JAX's names of them."""
