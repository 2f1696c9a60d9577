"""Runs a ShardJob on this process's devices; as a program from stdin, with a report to stdout."""

import json
import pickle
import sys
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from meshwright.audit.compare.unnamed import Derived, Pair, derived, match
from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.emitted import Emitted, on_mesh
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.shard.shard_job import ShardJob
from meshwright.audit.shard.windowed import windowed_contract, windowed_step
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.products.execute import contract, run_steps
from meshwright.nn.sharded_arrays import max_abs_error, put
from meshwright.nn.start.device_mesh import explicit_mesh
from meshwright.notation.einsum import cotangent
from meshwright.notation.mesh import Mesh


def execute(job: ShardJob) -> dict[str, Any]:
    """The report of `job`; see `on_devices.run`."""
    dtype, mesh = jax_dtype(job.dtype), explicit_mesh(job.mesh)
    random = np.random.default_rng(0)
    whole = [
        random.integers(-1, 2, [job.sizes[dim] for dim in array.dims]).astype(dtype) for array in job.operands
    ]
    placed = [put(x, array, mesh) for x, array in zip(whole, job.operands, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda *operands: run_job(job, dtype, *operands)).lower(*placed).compile()
        result = compiled(*placed)
    wanted, emitted = derived_of(job), emitted_by(compiled, job.mesh)
    gradients = _gradients(job, dtype, mesh, whole, placed) if job.gradients else {}
    return {
        "max_abs_error": max_abs_error(result, job.result, _dense(job, whole)),
        "emitted": [_emitted_dict(e) for e in emitted],
        "derived": [d.to_dict() for d in wanted],
        "pairs": [_pair_dict(pair, wanted, emitted) for pair in match(wanted, emitted)],
        **gradients,
    }


def _gradients(
    job: ShardJob, dtype: np.dtype, mesh: jax.sharding.Mesh, whole: list[np.ndarray], placed: list[Array]
) -> dict[str, Any]:
    """Both operands' gradients of a random cotangent, compared with the dense gradients."""
    plan = job.plan
    assert plan and not job.then, "only a contraction has gradients"
    random = np.random.default_rng(1)
    d_whole = random.integers(-1, 2, [job.sizes[dim] for dim in plan.out.dims]).astype(dtype)
    d_out = put(d_whole, cotangent(plan.out), mesh, reduced=plan.out.unreduced)

    def gradients(lhs: Array, rhs: Array, d_out: Array) -> tuple[Array, ...]:
        return jax.vjp(lambda *operands: run_job(job, dtype, *operands), lhs, rhs)[1](d_out)

    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).lower(*placed, d_out).compile()
        results = compiled(*placed, d_out)
    lhs, rhs, d_exact = (x.astype(np.float64) for x in (*whole, d_whole))
    dense = (
        np.einsum(str(plan.lhs_gradient.einsum), d_exact, rhs, optimize=True),
        np.einsum(str(plan.rhs_gradient.einsum), lhs, d_exact, optimize=True),
    )
    errors = [
        max_abs_error(gradient, cotangent(operand), exact)
        for gradient, operand, exact in zip(results, (plan.lhs, plan.rhs), dense, strict=True)
    ]
    return {
        "gradient_max_abs_errors": errors,
        "gradient_emitted": [_emitted_dict(e) for e in emitted_by(compiled, job.mesh)],
    }


def run_job(job: ShardJob, dtype: DTypeLike, *operands: Array) -> Array:
    """The result of `job` on placed operands, as JAX traces it."""
    if job.plan is None:
        return run_steps(operands[0], job.then)
    lhs, rhs = operands
    if job.window is None:
        return run_steps(contract(job.plan, dtype, lhs, rhs), job.then)
    return run_steps(windowed_contract(job.plan, job.window, dtype, lhs, rhs), job.then)


def derived_of(job: ShardJob) -> list[Derived]:
    """The collectives that the algebra derives for `job`."""
    windowed = windowed_step(job.plan, job.window) if job.plan and job.window else None
    return derived(job.steps, job.mesh, job.sizes, job.dtype, windowed)


def emitted_by(compiled: jax.stages.Compiled, mesh: Mesh) -> list[Emitted]:
    """A compiled program's collectives, on the axes of `mesh`."""
    text = compiled.as_text()
    assert text, "XLA keeps the text of a compiled program"
    return [on_mesh(each, mesh) for each in collectives(parse_hlo(text))]


def _dense(job: ShardJob, whole: list[np.ndarray]) -> np.ndarray:
    """The exact result: sums of small integers in float64."""
    exact = [x.astype(np.float64) for x in whole]
    return np.einsum(str(job.plan.einsum), *exact, optimize=True) if job.plan else exact[0]


def _emitted_dict(e: Emitted) -> dict[str, Any]:
    return {
        "op": e.op,
        "axes": list(e.axes),
        "bytes": e.gathered_bytes,
        "count": e.collective.count,
        "instruction": e.collective.name,
    }


def _pair_dict(pair: Pair, wanted: list[Derived], emitted: list[Emitted]) -> dict[str, Any]:
    """Indices into derived[] and emitted[]."""
    return {
        "derived": [i for i, d in enumerate(wanted) if any(d is one for one in pair.derived)],
        "emitted": [i for i, e in enumerate(emitted) if any(e is one for one in pair.emitted)],
        "status": pair.status,
        "note": pair.note,
    }


if __name__ == "__main__":
    print(json.dumps(execute(pickle.load(sys.stdin.buffer))))
