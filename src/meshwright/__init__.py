"""meshwright: draw the mesh, know the cost, run it, prove it.

The planning half (`notation`, `hardware`, `models`, `layout`, `cost`, `plan`) imports no JAX.
"""

__version__ = "0.1.0"
