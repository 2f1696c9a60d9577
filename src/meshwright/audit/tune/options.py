"""XLA's options for training steps that `mw tune` tries, beyond those that every step is compiled with.

Sources: openxla.org/xla/flags_guidance and MaxText's list of flags (TPU); docs.jax.dev, "GPU performance
tips" (GPU). Only options that the compiled schedule shows are tried: those of kernels, such as which library
multiplies, leave a program's text as it is.
"""

from collections.abc import Mapping

# By compiler. Options that the guides give together are one change.
OPTIONS: Mapping[str, tuple[Mapping[str, bool | int | str], ...]] = {
    "tpu": (
        # Gathers of the next turn of a loop start in this one.
        {
            "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
            "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
            "xla_tpu_enable_ici_ag_pipelining": True,
        },
        # Sums run beside products, too.
        {"xla_enable_async_all_reduce": True, "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True},
        # A collective runs beside several products in a row.
        {
            "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
            "xla_tpu_overlap_compute_collective_tc": True,
        },
        # The scheduler tries again with less memory in use.
        {"xla_latency_hiding_scheduler_rerun": 5},
        # Larger tiles for each fusion, less room to fetch the operands of the next.
        {"xla_tpu_scoped_vmem_limit_kib": 65_536},
        # Sums of gradients across slices run beside the backward pass.
        {
            "xla_tpu_enable_data_parallel_all_reduce_opt": True,
            "xla_tpu_data_parallel_opt_different_sized_ops": True,
        },
    ),
    "gpu": (
        {"xla_gpu_enable_pipelined_reduce_scatter": True},
        {"xla_gpu_enable_pipelined_all_reduce": True},
        {"xla_gpu_enable_while_loop_double_buffering": True},
        {"xla_gpu_all_gather_combine_threshold_bytes": 134_217_728},
        {"xla_gpu_all_reduce_combine_threshold_bytes": 134_217_728},
    ),
}
