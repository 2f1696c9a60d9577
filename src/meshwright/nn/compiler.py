"""What a compiler is asked beyond its defaults, so that it hides the collectives that a plan hides.

What a compiled step runs beside each collective is in its audit (`overlaps`).
"""

import jax

_OPTIONS: dict[str, dict[str, bool | int]] = {
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


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, bool | int] | None:
    """Of `jax.jit`, for a training step on these devices; None where the defaults do."""
    return _OPTIONS.get(mesh.devices.flat[0].platform)
