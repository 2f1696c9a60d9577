"""Serving engines: a TOML for each, with the shares of a chip's ratings that it reaches."""
