"""The helper that pins a program's collectives: what passes, and what it says of what does not."""

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.testing import assert_collectives

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def mlp(w_in: jax.Array, w_out: jax.Array, x: jax.Array) -> jax.Array:
    """Weights gathered over data, and partial products summed over tensor."""
    h = jnp.tanh(x @ with_sharding_constraint(w_in, P(None, "tensor")))
    y = h @ with_sharding_constraint(w_out, P("tensor", None))
    return with_sharding_constraint(y, P("data", None))


@pytest.fixture(scope="module")
def args(mesh: jax.sharding.Mesh) -> list[jax.ShapeDtypeStruct]:
    shapes = {(64, 256): P("data", "tensor"), (256, 64): P("tensor", "data"), (512, 64): P("data", None)}
    return [
        jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(mesh, spec)) for s, spec in shapes.items()
    ]


@pytest.mark.parametrize(
    "expected",
    [
        {"AllGather_data": 2, "AllReduce_tensor": 1},
        ["AllGather_data", "AllGather_data", "AllReduce_tensor"],
        ["AllGather_data w_in", "AllGather_data w_out", "AllReduce_{tensor}"],
        {"AllGather_data w_in": 1, "AllGather_data": 1, "AllReduce_tensor": 1, "AllToAll_data": 0},
    ],
)
def test_what_the_program_does_passes(mesh: jax.sharding.Mesh, args: list, expected) -> None:
    with jax.set_mesh(mesh):
        assert_collectives(mlp, *args, expected=expected)


def test_the_message_shows_the_lines_that_differ(mesh: jax.sharding.Mesh, args: list) -> None:
    with jax.set_mesh(mesh), pytest.raises(AssertionError) as caught:
        assert_collectives(mlp, *args, expected={"AllGather_data": 3, "ReduceScatter_tensor": 1})
    assert str(caught.value).splitlines()[1:] == [
        "  - AllGather_data: 3",
        "  + AllGather_data: 2 (w_in, w_out)",
        "  + AllReduce_tensor: 1 (dot_general)",
        "  - ReduceScatter_tensor: 1",
    ]


def test_loops_count_and_a_slice_of_a_sum_is_a_reduce_scatter(mesh: jax.sharding.Mesh) -> None:
    def run(x: jax.Array) -> jax.Array:
        def turn(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return with_sharding_constraint(total + x.sum(0), P("tensor", None)), None

        return jax.lax.scan(turn, jnp.zeros((64, 32)), x)[0]

    x = jax.ShapeDtypeStruct((5, 8, 64, 32), "float32", sharding=NamedSharding(mesh, P(None, "tensor")))
    with jax.set_mesh(mesh):
        assert_collectives(run, x, expected={"ReduceScatter_tensor": 5})


def test_sums_of_a_few_numbers_are_left_out_unless_asked_for(mesh: jax.sharding.Mesh) -> None:
    x = jax.ShapeDtypeStruct((64,), "float32", sharding=NamedSharding(mesh, P("data")))
    assert_collectives(jnp.sum, x, expected={})
    assert_collectives(jnp.sum, x, expected={"AllReduce_data": 1}, negligible_bytes=0)


@pytest.mark.parametrize("name", ["Gather_data", "AllGather", "AllGather w_in"])
def test_a_name_that_is_no_collective_is_refused(name: str, args: list) -> None:
    with pytest.raises(ValueError, match="is no collective; write AllGather_fsdp"):
        assert_collectives(mlp, *args, expected=[name])


def test_an_axis_that_the_mesh_lacks_is_refused(mesh: jax.sharding.Mesh, args: list) -> None:
    message = "AllGather_fsdp: the mesh has no axis 'fsdp'; it has data, tensor"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        assert_collectives(mlp, *args, expected=["AllGather_fsdp"])


def test_what_is_not_understood_does_not_pass(mesh: jax.sharding.Mesh) -> None:
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P("data", None)))
    with jax.set_mesh(mesh), pytest.raises(AssertionError, match=r"[?] not understood: .*trip count unknown"):
        assert_collectives(until, x, expected={"AllGather_data": 1})
