"""Exchanges of axes between dimensions, against the array and against the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.audit.hlo.read import parse_hlo
from meshwright.nn.products.execute import run_steps
from meshwright.nn.start.device_mesh import partition_spec
from meshwright.notation.collective import Collective
from meshwright.notation.parse import parse_array


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("A[I_{X,Y}, J]", "A[I, J_{X,Y}]"),
        ("A[I_{X,Y}, J]", "A[I, J_{Y,X}]"),  # a reshard to XLA adds a permute
        ("A[I_{Y,X}, J]", "A[I, J_{X,Y}]"),
    ],
)
def test_an_exchange_is_one_collective_in_any_order_of_axes(before: str, after: str) -> None:
    step = Collective("all_to_all", ("X", "Y"), parse_array(before), parse_array(after))
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("X", "Y"), axis_types=explicit)
    whole = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    with jax.set_mesh(mesh):
        placed = jax.device_put(whole, jax.sharding.NamedSharding(mesh, partition_spec(step.operand)))
        move = jax.jit(lambda x: run_steps(jnp.sin(x), [step]))
        text = move.lower(placed).compile().as_text() or ""
        moved = move(placed)
    assert moved.sharding.spec == partition_spec(step.result)
    np.testing.assert_allclose(moved, np.sin(whole), rtol=1e-6)
    computations = parse_hlo(text).computations.values()
    ops = [line.opcode for body in computations for line in body.instructions.values()]
    assert sum(op.startswith("all-to-all") for op in ops) == 1
    assert not any(op.startswith(("collective-permute", "all-gather")) for op in ops)
