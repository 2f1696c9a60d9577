"""Meshes on devices, and shardings as JAX writes them: PartitionSpec, NamedSharding, explicit types."""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.notation.devices import Devices, meshes, shardings, whole

from meshwright.errors import DeviceError, NotationError
from meshwright.nn.start.device_mesh import (
    array_type,
    device_grid,
    explicit_mesh,
    from_array_type,
    from_named_sharding,
    from_partition_spec,
    named_sharding,
    notation_mesh,
    partition_spec,
    reduced_axes,
)
from meshwright.notation.array import ShardedArray
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, ShardedArray]:
    """A mesh of up to eight devices and any sharding of three dimensions, partial sums in its order."""
    mesh = draw(meshes(max_devices=8))
    array = draw(shardings(mesh, "IJK", unreduced=True))
    return mesh, array.replace(unreduced=tuple(axis for axis in mesh if axis in array.unreduced))


def _sizes(mesh: Mesh) -> dict[str, int]:
    return dict.fromkeys("IJK", mesh.num_devices)


@given(placed())
def test_there_and_back(given: tuple[Mesh, ShardedArray]) -> None:
    mesh, array = given
    devices = explicit_mesh(mesh)
    assert notation_mesh(devices) == mesh
    assert from_partition_spec("A", "IJK", partition_spec(array)).same_layout(array)
    assert from_named_sharding("A", "IJK", named_sharding(array, devices)) == array
    assert from_array_type("A", "IJK", array_type(array, devices, _sizes(mesh), jnp.bfloat16)) == array


@given(placed())
@settings(max_examples=40, deadline=None)
def test_the_type_that_a_traced_function_sees(given: tuple[Mesh, ShardedArray]) -> None:
    mesh, array = given
    seen: list[ShardedArray] = []
    jax.eval_shape(
        lambda x: seen.append(from_array_type("A", "IJK", x)),
        array_type(array, explicit_mesh(mesh), _sizes(mesh), jnp.float32),
    )
    assert seen == [array]


@given(placed())
@settings(max_examples=40, deadline=None)
def test_blocks_on_devices_are_those_of_the_notation(given: tuple[Mesh, ShardedArray]) -> None:
    """What device_put leaves on device (x, y, z) is the block that the notation gives it."""
    mesh, array = given
    array, sizes = array.replace(unreduced=()), _sizes(mesh)
    values = whole(array, sizes).astype(np.int32)
    devices = explicit_mesh(mesh)
    x = jax.device_put(values, named_sharding(array, devices))
    assert from_array_type("A", "IJK", x) == array
    expected = Devices(mesh).place(values, array)
    for shard in x.addressable_shards:
        (where,) = np.argwhere(devices.devices == shard.device).tolist()
        np.testing.assert_array_equal(shard.data, expected[tuple(where)])
    assert x.addressable_shards[0].data.size == prod(array.local_shape(mesh, sizes))


def test_a_partial_sum_is_typed_unreduced() -> None:
    mesh = explicit_mesh(Mesh({"X": 2, "Y": 4}))
    lhs = array_type(parse_array("A[I, J_X]"), mesh, {"I": 8, "J": 8}, jnp.float32)
    rhs = array_type(parse_array("B[J_X, K_Y]"), mesh, {"J": 8, "K": 8}, jnp.float32)
    spec = PartitionSpec(None, "Y", unreduced=frozenset("X"))
    with jax.set_mesh(mesh):
        out = jax.eval_shape(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=spec), lhs, rhs)
    assert str(from_array_type("C", "IK", out)) == "C[I, K_Y]{U_X}"


def test_reduced_axes_go_there_and_back() -> None:
    mesh = explicit_mesh(Mesh({"X": 2, "Y": 4}))
    struct = array_type(parse_array("w[D, F_Y]"), mesh, {"D": 8, "F": 8}, jnp.float32, reduced=("X",))
    assert isinstance(struct.sharding, NamedSharding)
    assert reduced_axes(struct.sharding.spec) == ("X",)
    assert str(from_array_type("w", "DF", struct)) == "w[D, F_Y]"


@pytest.mark.parametrize(
    ("spec", "array"),
    [
        (PartitionSpec(), "A[I, J]"),
        (PartitionSpec("X"), "A[I_X, J]"),
        (PartitionSpec(None, ("X",)), "A[I, J_X]"),
        (PartitionSpec(("Y", "X"), ()), "A[I_YX, J]"),
        (PartitionSpec(unreduced=frozenset("YX")), "A[I, J]{U_XY}"),
    ],
)
def test_forms_of_a_spec(spec: PartitionSpec, array: str) -> None:
    assert str(from_partition_spec("A", "IJ", spec)) == array


def test_specs_that_are_no_sharding() -> None:
    with pytest.raises(NotationError) as caught:
        from_partition_spec("A", "I", PartitionSpec("X", "Y"))
    assert str(caught.value) == "P('X', 'Y') has 2 entries, more than A[I] has dimensions"
    with pytest.raises(NotationError, match=r"J of A is left to the compiler, which has no notation$"):
        from_partition_spec("A", "IJ", PartitionSpec("X", PartitionSpec.UNCONSTRAINED))
    with pytest.raises(NotationError, match=r"^A\[I_X, J\]: I = 6 does not divide over X = 4"):
        array_type(parse_array("A[I_X, J]"), explicit_mesh(Mesh({"X": 4})), {"I": 6, "J": 2}, jnp.float32)


def test_a_type_under_auto_axes_does_not_tell() -> None:
    mesh = jax.make_mesh((2,), ("X",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.zeros((4, 4)), NamedSharding(mesh, PartitionSpec("X")))
    with pytest.raises(NotationError) as caught:
        from_array_type("A", "IJ", x)
    assert str(caught.value) == (
        "A[I, J]: mesh axis X is Auto, so the type does not say which dimension it splits; "
        "fits: a mesh of AxisType.Explicit"
    )
    assert isinstance(x.sharding, NamedSharding)
    assert str(from_named_sharding("A", "IJ", x.sharding)) == "A[I_X, J]"


def test_too_few_devices() -> None:
    with pytest.raises(DeviceError, match=r"^Mesh\(\{'X': 64\}\) needs 64 devices and JAX sees 8 \(cpu\)"):
        explicit_mesh(Mesh({"X": 64}))


@dataclass(frozen=True)
class Chip:
    """What JAX says of a TPU's chip."""

    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5p"
    core_on_chip: int = 0


def test_axes_lie_along_the_dimensions_of_a_tpus_torus() -> None:
    """A ring of four along the long dimension, another round the face; JAX lists chips in any order."""
    chips = [Chip((x, y, z)) for x in range(4) for y in range(2) for z in range(2)]
    chips = [chips[5 * n % 16] for n in range(16)]
    found = device_grid(chips, (4, 4))
    assert [[chip.coords[0] for chip in row] for row in found] == [[x] * 4 for x in range(4)]
    assert {chip.coords for chip in found.flat} == {chip.coords for chip in chips}
