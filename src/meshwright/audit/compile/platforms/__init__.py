"""Targets of the compilers that need none of their chips, one file each."""
