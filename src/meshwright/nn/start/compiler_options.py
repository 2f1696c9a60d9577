"""Options of XLA for a training step, to hide the collectives that a plan assumes hidden.

An audit shows the compute that runs during each collective of a compiled step (`overlaps`).
"""

import warnings
from functools import lru_cache

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.platforms import platform_of
from meshwright.platforms.platform import Options

_NONE: Options = {}


def compiler_options(
    mesh: jax.sharding.Mesh, given: Options = _NONE, num_microbatches: int = 1
) -> dict[str, bool | int | str] | None:
    """Options of `jax.jit` for a training step on this mesh; None for the defaults.

    given: options of the plan, which override the platform's (`Compiler.train_options`, with microbatches
    `Compiler.microbatch_options` too). An option that this version of XLA does not know is left out,
    with a warning.
    """
    compiler = platform_of(mesh).compiler
    of_loop = compiler.microbatch_options if num_microbatches > 1 else _NONE
    options = {**compiler.train_options, **of_loop, **given}
    if options and _are_known(tuple(options.items()), mesh):
        return options
    known = {name: value for name, value in options.items() if _are_known(((name, value),), mesh)}
    for name in options.keys() - known.keys():
        warnings.warn(f"XLA for {platform_of(mesh).name} does not know {name}: it is left out", stacklevel=2)
    return known or None


@lru_cache
def _are_known(options: tuple[tuple[str, bool | int | str], ...], mesh: jax.sharding.Mesh) -> bool:
    """Whether the compiler knows all options. It refuses a program with an unknown one."""
    # On the whole mesh: under jax.set_mesh JAX refuses programs for other devices.
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
