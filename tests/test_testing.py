"""The helper that pins a program's collectives: what passes, and what it says of what does not."""

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.audit.checks import check_bounds, parse_bound
from meshwright.audit.foreign import read_program
from meshwright.audit.hlo.read import parse_hlo
from meshwright.errors import AuditError
from meshwright.hardware.catalog import load
from meshwright.notation.mesh import Mesh
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
    with pytest.raises(ValueError, match="is not a collective; write AllGather_fsdp"):
        assert_collectives(mlp, *args, expected=[name])


def test_an_axis_that_the_mesh_lacks_is_refused(mesh: jax.sharding.Mesh, args: list) -> None:
    message = "AllGather_fsdp: the mesh has no axis 'fsdp'; it has data, tensor"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        assert_collectives(mlp, *args, expected=["AllGather_fsdp"])


def test_what_is_not_understood_does_not_pass(mesh: jax.sharding.Mesh) -> None:
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P("data", None)))
    with (
        jax.set_mesh(mesh),
        pytest.raises(AssertionError, match=r"[?] not understood: .*trip count is unknown"),
    ):
        assert_collectives(until, x, expected={"AllGather_data": 1})


def test_keyword_arguments_are_passed_on(mesh: jax.sharding.Mesh, args: list) -> None:
    def scaled(w_in: jax.Array, w_out: jax.Array, *, x: jax.Array) -> jax.Array:
        return mlp(w_in, w_out, x)

    with jax.set_mesh(mesh):
        assert_collectives(
            scaled, *args[:2], x=args[2], expected={"AllGather_data": 2, "AllReduce_tensor": 1}
        )


# The weights are 64 KiB each, a quarter on a device of `tensor`; the sums 512 x 64 / 2 numbers of 4 bytes.
@pytest.mark.parametrize(
    "bounds",
    [
        ["at most 20 kB over data", "at most 0.2 MB over tensor", "no all-to-all"],
        ["no permute of w_*", "no gather of dot_general", "no gather over tensor"],
        "at most 1 MB",
    ],
)
def test_bounds_that_hold_pass(mesh: jax.sharding.Mesh, args: list, bounds) -> None:
    with jax.set_mesh(mesh):
        assert_collectives(mlp, *args, bounds=bounds)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("at most 10 kB over data", "16.4 kB a device and step (all_gather w_in, all_gather w_out)"),
        ("no gather of w_*", "(all_gather w_in, all_gather w_out)"),
        ("no AllGather of w_in", "(all_gather w_in)"),
        ("nothing over tensor", "(all_reduce dot_general)"),
    ],
)
def test_a_bound_that_is_broken_is_named(mesh: jax.sharding.Mesh, args: list, bound: str, said: str) -> None:
    with jax.set_mesh(mesh), pytest.raises(AssertionError) as caught:
        assert_collectives(mlp, *args, bounds=[bound])
    assert f"  ! {bound}: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ("less than 3 MB", "is not a bound; write 'at most 100 MB over data'"),
        ("no gathering of w", "no collective is called 'gathering'; did you mean gather"),
        ("nothing over fsdp", "the mesh has no axis 'fsdp'; it has data, tensor"),
        ("nothing over dcn", "name hardware of several slices or nodes"),
    ],
)
def test_a_bound_in_other_words_is_refused(
    mesh: jax.sharding.Mesh, args: list, bound: str, message: str
) -> None:
    with jax.set_mesh(mesh), pytest.raises(AuditError, match=message):
        assert_collectives(mlp, *args, bounds=[bound])


def test_something_must_be_expected(args: list) -> None:
    with pytest.raises(ValueError, match="give expected=, bounds= or both"):
        assert_collectives(mlp, *args)


def test_chips_whose_compiler_is_not_known_are_refused(mesh: jax.sharding.Mesh, args: list) -> None:
    with jax.set_mesh(mesh), pytest.raises(AuditError, match="no compiler is known for cpu:8"):
        assert_collectives(mlp, *args, bounds=["at most 1 MB"], hardware="cpu:8")


def test_what_crosses_slices_is_told_from_the_groups() -> None:
    """Sixteen devices in two slices: data crosses, its inner half does not."""
    text = """HloModule two_slices, num_partitions=16

add { x = f32[] parameter(0)  y = f32[] parameter(1)  ROOT s = f32[] add(x, y) }

ENTRY main {
  w = f32[1024,1024] parameter(0), metadata={op_name="w"}
  inside = f32[1024,1024] all-reduce(w), channel_id=1, replica_groups=[4,4]<=[2,4,2]T(0,2,1), to_apply=add
  ROOT out = f32[1024,1024] all-reduce(inside), channel_id=2, replica_groups=[8,2]<=[2,8]T(1,0), to_apply=add
}
"""
    reading = read_program(parse_hlo(text), load("2*v5e:2x4"), Mesh({"data": 8, "tensor": 2}))
    inside, across = reading.sent
    bound = parse_bound("nothing over dcn")
    assert check_bounds([bound], [inside], reading.prices) == []
    assert check_bounds([bound], [across], reading.prices) == [
        "nothing over dcn: 4.19 MB a device and step (all_reduce out)"
    ]
