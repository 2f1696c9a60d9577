"""The delta rule by chunks: its triangular system, and decays of each element of a key."""

import os
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.mixers.gated_delta import inverse_flops
from meshwright.nn.mixers.recurrence import Inputs, by_products, chunked


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
        jax.jit(jax.value_and_grad(partial(solved_by, solve), argnums=(0, 1)))(system, wanted)
        for solve in (by_products, with_solver)
    ]
    for mine, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [3, 48, 64])
def test_products_of_a_solution_are_counted(size: int) -> None:
    """Those of the traced program: of the inverse by halves, and of the inverse by the values."""
    system, wanted = jnp.zeros((size, size)), jnp.zeros((size, 5))
    traced = jax.make_jaxpr(by_products.__wrapped__)(system, wanted)  # pyright: ignore[reportAttributeAccessIssue]
    flops = 0
    for each in traced.eqns:
        if each.primitive.name == "dot_general":
            ((summed, _), _) = each.params["dimension_numbers"]
            flops += 2 * each.outvars[0].aval.size * each.invars[0].aval.shape[summed[0]]
    assert flops == inverse_flops(size) + 2 * size**2 * 5


@pytest.mark.parametrize("state_dim", [1, 6])
def test_arrays_of_all_chunks_have_the_types_of_the_inputs(state_dim: int) -> None:
    """Float32 is made chunk by chunk: copies of all positions would take twice the memory."""
    k, v = jnp.zeros((2, 256, 1, state_dim), jnp.bfloat16), jnp.zeros((2, 256, 1, 3, 4), jnp.bfloat16)
    decay = jnp.zeros(v.shape[:4], jnp.float32)
    traced = jax.make_jaxpr(lambda k, v, decay: chunked(Inputs(k, k, v, decay, None)))(k, v, decay)
    [loop] = [each for each in traced.eqns if each.primitive.name == "scan"]
    skipped = loop.params["num_consts"] + loop.params["num_carry"]
    assert [x.aval.dtype for x in loop.invars[skipped:]] == [jnp.bfloat16] * 3 + [jnp.float32, jnp.int32]
    assert [x.aval.dtype for x in loop.outvars[loop.params["num_carry"] :]] == [jnp.bfloat16]


def test_decays_by_element_are_those_of_a_plain_recurrence() -> None:
    """In float64, position by position, with documents that end within chunks and decays of up to 30 nats.

    Float32 products of some hundred terms differ by up to 1e-5 of the largest result.
    """
    rng = np.random.default_rng(0)
    shape, s, p = (2, 150, 2, 1), 6, 5
    q, k = (rng.normal(size=(*shape[:3], s)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(*shape, p)), rng.uniform(size=shape)
    decay = -np.exp(rng.normal(size=(*shape, s)) * 2 - 1)
    segments = np.zeros(shape[:2], np.int32)
    segments[0, 70:], segments[1, 20:], segments[1, 100:] = 1, 1, 2
    expected, state = np.zeros_like(v), np.zeros((2, 2, 1, s, p))
    for t in range(shape[1]):
        state *= (segments[:, t] == segments[:, max(t - 1, 0)])[:, None, None, None, None]
        state = np.exp(decay[:, t])[..., None] * state
        known = np.einsum("bgs,bgusp->bgup", k[:, t], state)
        state = state + np.einsum("bgs,bgup->bgusp", k[:, t], beta[:, t][..., None] * (v[:, t] - known))
        expected[:, t] = np.einsum("bgs,bgusp->bgup", q[:, t], state)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta))
    out, after = chunked(Inputs(*arrays), jnp.asarray(segments))
    for mine, plain in ((out, expected), (after, state)):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=2e-5 * np.abs(plain).max())


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
