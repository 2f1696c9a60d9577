"""What a compiler is asked beyond its defaults, so that it hides the collectives that a plan hides.

What a compiled step runs beside each collective is in its audit (`overlaps`).
"""

import warnings
from collections.abc import Mapping
from functools import lru_cache

import jax
from jax.sharding import NamedSharding, PartitionSpec

Options = Mapping[str, bool | int | str]
_NONE: Options = {}
_OPTIONS: dict[str, Options] = {
    # XLA for GPU joins the gradients of a layer into one reduce-scatter, which is left to the layer's end,
    # when no product is; and it gathers a layer's first weights in the layer itself, not in the one before.
    "gpu": {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        "xla_gpu_enable_pipelined_all_gather": True,
    },
    # XLA for TPU does this by itself on chips of one core; on v4 and v5p gathers would run alone.
    "tpu": {
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    },
}


def compiler_options(mesh: jax.sharding.Mesh, own: Options = _NONE) -> dict[str, bool | int | str] | None:
    """The options of `jax.jit` for a training step on these devices; None where the defaults do.

    own: a plan's, which come before those here. An option that this version of XLA does not know is left out,
    with a warning.
    """
    options = {**_OPTIONS.get(_platform(mesh), {}), **own}
    return {name: value for name, value in options.items() if _is_known(name, value, mesh)} or None


def _platform(mesh: jax.sharding.Mesh) -> str:
    return mesh.devices.flat[0].platform


@lru_cache
def _is_known(name: str, value: bool | int | str, mesh: jax.sharding.Mesh) -> bool:
    """Whether the compiler takes the option: it refuses a program over one that it does not know."""
    # Of the whole mesh: under jax.set_mesh JAX refuses programs of other devices.
    one = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(one).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(f"XLA for {_platform(mesh)} does not know {name}: it is left out", stacklevel=3)
        return False
    return True
