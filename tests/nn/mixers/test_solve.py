"""The triangular system of the delta rule."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.mixers.recurrence import by_products


@pytest.mark.parametrize("size", [1, 7, 64])
def test_halves_solve_as_the_solver_does(size: int) -> None:
    keys = jax.random.split(jax.random.key(size), 2)
    system = jnp.tril(jax.random.normal(keys[0], (3, size, size)), -1) / size**0.5
    wanted = jax.random.normal(keys[1], (3, size, 5))

    def solved_by(solve, system, wanted):
        return jnp.sin(solve(jnp.tril(system, -1), wanted)).sum()

    def with_solver(system, wanted):
        return jax.scipy.linalg.solve_triangular(system, wanted, lower=True, unit_diagonal=True)

    results = [
        jax.value_and_grad(solved_by, argnums=(1, 2))(solve, system, wanted)
        for solve in (by_products, with_solver)
    ]
    for mine, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_two_devices_of_two_cores_end() -> None:
    """As many devices as cores: a solver that waits in a thread of XLA's pool would wait for ever."""
    program = """
        import os
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec
        from meshwright.nn.each_device import each_device
        from meshwright.nn.mixers.recurrence import Inputs, chunked

        jax.config.update("jax_num_cpu_devices", 2)
        split, mesh = PartitionSpec("data"), jax.make_mesh((2,), ("data",))

        def local(k):
            v, decay = k[..., None, :], -jnp.ones((*k.shape[:3], 1))
            return chunked(Inputs(k, k, v, decay, 0 * decay + 0.1))[0]

        with jax.set_mesh(mesh):
            k = jnp.ones((16, 256, 8, 16), out_sharding=split) / 4
            run = jax.jit(each_device(local, [split], split))
            for _ in range(5):
                jax.block_until_ready(run(k))
        os._exit(0)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=dict(os.environ), check=True, timeout=60
    )
