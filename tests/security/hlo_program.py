"""The optimised HLO of a small step on eight devices, to be changed."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def program_text() -> str:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, cols = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), (None, "data")))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0].sum()

        return w - 0.1 * jax.grad(loss)(w)

    w, x = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding) for sharding in (cols, rows))
    text = jax.jit(step, out_shardings=cols).lower(w, x).compile().as_text()
    assert text is not None
    return text
