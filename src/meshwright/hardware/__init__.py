"""Chips, their links, and machines made of them.

The package can be called: `meshwright.hardware("v5p:16x16x16")`; see `api.hardware`.
"""
