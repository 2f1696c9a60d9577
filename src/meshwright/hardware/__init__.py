"""Chips, their links, and machines made of them."""
