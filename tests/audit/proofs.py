"""Random contractions and reshards, and what it takes to prove one: its result, gradients and collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from tests.notation.devices import meshes, shardings
from tests.notation.test_einsum import specs

from meshwright.audit.compare.unnamed import Pair, derived, match
from meshwright.audit.shard.execution import emitted_by
from meshwright.nn.products.execute import contract, run_steps
from meshwright.nn.sharded_arrays import max_abs_error, put
from meshwright.nn.start.device_mesh import explicit_mesh
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction, Einsum, contraction, cotangent
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array


@dataclass(frozen=True)
class Case:
    """A contraction on a mesh, with the size of every letter."""

    mesh: Mesh
    plan: Contraction
    sizes: dict[str, int]


def arrays_of(plan: Contraction) -> list[ShardedArray]:
    """Every sharding that an array has on its way, forward and backward."""
    reshards = (plan.lhs_reshard, plan.rhs_reshard, plan.out_reshard)
    ends = [array for reshard in reshards for array in (reshard.given, reshard.used, reshard.yielded)]
    steps = [step.result for reshard in reshards for step in (*reshard.forward, *reshard.backward)]
    return ends + steps


def least_sizes(arrays: Sequence[ShardedArray], mesh: Mesh) -> dict[str, int]:
    """The smallest size of every dimension that divides in each of `arrays`."""
    sizes: dict[str, int] = {}
    for array in arrays:
        for dim, axes in zip(array.dims, array.axes, strict=True):
            sizes[dim] = lcm(sizes.get(dim, 1), mesh.size(axes))
    return sizes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec, mesh = draw(specs()), draw(meshes(max_devices=8))
    einsum = Einsum.parse(spec)
    lhs = draw(shardings(mesh, einsum.lhs, "A", unreduced=True))
    rhs = draw(shardings(mesh, einsum.rhs, "B", unreduced=True))
    roles = {
        axis: draw(st.sampled_from([*einsum.letters, None])) for axis in draw(st.permutations(mesh.axes))
    }
    out = draw(shardings(mesh, einsum.out, "C"))
    deferred = [axis for axis, letter in roles.items() if letter and letter in einsum.contracted]
    partial = tuple(axis for axis in deferred if axis not in out.sharded_axes and draw(st.booleans()))
    plan = contraction(spec, lhs, rhs, out.replace(unreduced=partial), roles)
    least = least_sizes(arrays_of(plan), mesh)
    return Case(mesh, plan, {dim: size * draw(st.integers(1, 3)) for dim, size in least.items()})


@st.composite
def reshards(draw: st.DrawFn) -> tuple[Mesh, ShardedArray, ShardedArray]:
    """Two shardings of one array of up to three dimensions; the second is as finished or more."""
    mesh, dims = draw(meshes(max_devices=8)), draw(st.sampled_from(["I", "IJ", "IJK"]))
    array, target = draw(shardings(mesh, dims, unreduced=True)), draw(shardings(mesh, dims))
    kept = tuple(a for a in array.unreduced if a not in target.sharded_axes and draw(st.booleans()))
    return mesh, array, target.replace(unreduced=kept)


MESH = Mesh({"X": 4, "Y": 2})
SIZES = dict.fromkeys("IJKL", 16)


def random(array: ShardedArray, sizes: dict[str, int], seed: int) -> np.ndarray:
    shape = [sizes[dim] for dim in array.dims]
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def differing(pairs: list[Pair]) -> list[str]:
    """What has no counterpart, in words."""
    found = [pair for pair in pairs if pair.status == "differs"]
    return [f"{pair.note}: {one.collective}" for pair in found for one in (*pair.derived, *pair.emitted)]


def prove_forward(case: Case) -> None:
    """The product is the dense one, with exactly the collectives of the steps."""
    plan, mesh = case.plan, explicit_mesh(case.mesh)
    lhs, rhs = random(plan.lhs, case.sizes, 1), random(plan.rhs, case.sizes, 2)
    placed = put(lhs, plan.lhs, mesh, seed=3), put(rhs, plan.rhs, mesh, seed=4)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda a, b: contract(plan, jnp.float32, a, b)).lower(*placed).compile()
        result = compiled(*placed)
    assert max_abs_error(result, plan.out, np.einsum(str(plan.einsum), lhs, rhs)) == 0
    wanted = derived(plan.steps, case.mesh, case.sizes, "f32")
    assert differing(match(wanted, emitted_by(compiled, case.mesh))) == []


def prove_gradients(case: Case) -> None:
    """jax.grad of a scalar gives the dense gradients, with the collectives of the transposed contractions."""
    plan, mesh, einsum = case.plan, explicit_mesh(case.mesh), case.plan.einsum
    lhs, rhs, weights = (
        random(array, case.sizes, seed) for seed, array in enumerate((plan.lhs, plan.rhs, plan.out))
    )
    operands = put(lhs, plan.lhs, mesh, seed=3), put(rhs, plan.rhs, mesh, seed=4)
    d_out = put(weights, cotangent(plan.out), mesh, reduced=plan.out.unreduced)

    def scalar(a: jax.Array, b: jax.Array, weights: jax.Array) -> jax.Array:
        """Its derivative by the product is `weights`."""
        return jnp.sum(contract(plan, jnp.float32, a, b) * weights)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(scalar, argnums=(0, 1))).lower(*operands, d_out).compile()
        d_lhs, d_rhs = compiled(*operands, d_out)
    dense_lhs = np.einsum(f"{einsum.out},{einsum.rhs}->{einsum.lhs}", weights, rhs)
    dense_rhs = np.einsum(f"{einsum.lhs},{einsum.out}->{einsum.rhs}", lhs, weights)
    assert max_abs_error(d_lhs, cotangent(plan.lhs), dense_lhs) == 0
    assert max_abs_error(d_rhs, cotangent(plan.rhs), dense_rhs) == 0
    wanted = derived(backward_steps(plan), case.mesh, case.sizes, "f32")
    assert differing(match(wanted, emitted_by(compiled, case.mesh))) == []


def backward_steps(plan: Contraction) -> list[Collective]:
    """Both operands moved as forward, d out moved once, and both gradients brought home."""
    of_lhs, of_rhs = plan.lhs_gradient, plan.rhs_gradient
    assert of_lhs.rhs_steps == of_rhs.lhs_steps == [], "operands are kept as computed on"
    assert of_lhs.lhs_steps == of_rhs.rhs_steps, "both gradients read the same d out"
    return [*plan.lhs_steps, *plan.rhs_steps, *of_lhs.lhs_steps, *of_lhs.out_steps, *of_rhs.out_steps]


def prove_reshard(mesh: Mesh, steps: list[Collective]) -> list[Pair]:
    """The array is the same after `steps`; what was derived beside what was emitted."""
    if not steps:
        return []
    devices = explicit_mesh(mesh)
    sizes = least_sizes([steps[0].operand, *(step.result for step in steps)], mesh)
    whole = random(steps[0].operand, sizes, 1)
    placed = put(whole, steps[0].operand, devices, seed=2)
    with jax.set_mesh(devices):
        compiled = jax.jit(lambda x: run_steps(x, steps)).lower(placed).compile()
        assert max_abs_error(compiled(placed), steps[-1].result, whole) == 0
    return match(derived(steps, mesh, sizes, "f32"), emitted_by(compiled, mesh))


def planned(lhs: str, rhs: str, out: str, roles: dict[str, str | None]) -> Contraction:
    a, b, c = parse_array(lhs), parse_array(rhs), parse_array(out)
    return contraction(f"{''.join(a.dims)},{''.join(b.dims)}->{''.join(c.dims)}", a, b, c, roles)
