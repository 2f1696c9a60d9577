"""What a compiler is asked beyond its defaults, so that it hides the collectives that a plan hides."""

import jax

# XLA for GPU joins the gradients of a layer into one reduce-scatter, which is left to the layer's end, when
# no product is; and it gathers a layer's first weights in the layer itself, not in the one before.
_GPU_OPTIONS: dict[str, bool | int] = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    "xla_gpu_enable_pipelined_all_gather": True,
}


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, bool | int] | None:
    """Of `jax.jit`, for a training step on these devices; None where the defaults do."""
    return _GPU_OPTIONS if mesh.devices.flat[0].platform == "gpu" else None
