"""The planned move of a model's weights between two layouts of the same devices, as a program."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding

from meshwright.cost.weights_move import WeightsMove, weights_move
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.params import abstract_params, flatten, merged_params
from meshwright.nn.products.execute import run_steps
from meshwright.nn.start.device_mesh import named_sharding
from meshwright.notation.mesh import Mesh


def mesh_over(sizes: Mesh, devices: np.ndarray) -> jax.sharding.Mesh:
    """`sizes` with explicit axes over `devices`, numbered from the innermost axis."""
    shape = tuple(sizes.sizes.values())
    return jax.sharding.Mesh(devices.reshape(shape), sizes.axes, axis_types=(AxisType.Explicit,) * len(shape))


class WeightsMover:
    """Moves parameters from `before` to `after` by the collectives of `weights_move`, on the devices.

    mesh: of `before`; both layouts number its devices. Both copies exist until the caller drops one. Raises
    LayoutError if the layouts have no mesh in common.
    """

    def __init__(
        self, config: ModelConfig, before: Layout, after: Layout, mesh: jax.sharding.Mesh, hardware: Hardware
    ) -> None:
        self.config, self.before, self.after = config, before, after
        self.plan: WeightsMove = weights_move(config, before, after, hardware)
        devices = mesh.devices.reshape(-1)
        self.mesh, self.shared = mesh, mesh_over(self.plan.shared.mesh, devices)
        self.target = mesh_over(after.mesh, devices)

    def __call__(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters under `after`."""
        flat = flatten(params)
        given = {
            move.path: _viewed(flat[move.path], named_sharding(move.array, self.shared))
            for move in self.plan.moves
        }
        with jax.set_mesh(self.shared):
            moved = self.jitted(given)
        wanted = flatten(abstract_params(self.config, self.after, self.target))
        views = {path: _viewed(array, wanted[path].sharding) for path, array in moved.items()}
        return merged_params(self.config, views)

    @cached_property
    def jitted(self) -> Any:
        """The program: parameters by path, sharded on the mesh of both, to the same as `after` stores them.

        Call it under `shared`.
        """
        # Both programs cast: in the narrower type the weights travel, and `after` may be wider.
        dtypes = [jax_dtype(name) for name in (self.plan.dtype, self.after.precision.weights_dtype)]

        def moved(flat: dict[str, Array]) -> dict[str, Array]:
            made = {}
            for move in self.plan.moves:
                with jax.named_scope(move.path.rpartition("/")[2]):
                    array = run_steps(flat[move.path].astype(dtypes[0]), move.reshard.steps)
                    # A copy: JAX returns an unchanged input itself, and its owner may donate it.
                    made[move.path] = jnp.copy(array.astype(dtypes[1]))
            return made

        return jax.jit(moved)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The types of the program's input."""
        types = flatten(abstract_params(self.config, self.before, self.mesh))
        return {
            move.path: jax.ShapeDtypeStruct(
                types[move.path].shape,
                types[move.path].dtype,
                sharding=named_sharding(move.array, self.shared),
            )
            for move in self.plan.moves
        }


def _viewed(x: Array, sharding: NamedSharding) -> Array:
    """`x` under a sharding that puts the same block on each device, without a copy."""
    blocks = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, blocks)
