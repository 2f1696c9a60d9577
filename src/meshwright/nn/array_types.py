"""JAX's types for our number types."""

import jax.numpy as jnp
import numpy as np

from meshwright.dtypes import number_type


def jax_dtype(name: str) -> np.dtype:
    """The JAX type of the elements of a number type."""
    return jnp.dtype(number_type(name).jax)
