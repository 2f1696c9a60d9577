"""TPUs: JAX's splash and ragged paged attention, and XLA's compiler in libtpu (jax 0.10.2, libtpu 0.0.42)."""

import re
from collections.abc import Mapping

from meshwright.dtypes import dtype_bytes
from meshwright.platforms.platform import Attention, Compiler, Kernel, Platform

# The minor dimension of a tile: positions of a block of splash attention, and width of heads in both kernels.
LANES = 128
_PAGED_DTYPES = ("bf16", "f32")


def _splash(attention: Attention) -> Mapping[str, bool]:
    """Splash attention over blocks of whole lanes."""
    return {
        "an indexer chooses keys": attention.indexed,
        "the model has ALiBi": attention.alibi,
        f"keys pass round a ring over {', '.join(attention.split)}": attention.ring,
        f"pieces of {attention.piece:,} tokens are not a multiple of {LANES}": attention.piece % LANES != 0,
    }


def _ragged(attention: Attention) -> Mapping[str, bool]:
    """Ragged paged attention over pages with the key and the value of each head next to each other."""
    dtype, width, heads = attention.kv_dtype, attention.head_dim, attention.num_kv_heads
    tiles = 2 * heads * dtype_bytes(dtype) / 4
    return {
        "the model has latents": attention.latents,
        "an indexer chooses keys": attention.indexed,
        "the model has ALiBi": attention.alibi,
        "the model has attention sinks": attention.sinks,
        f"positions are split over {', '.join(attention.split)}": bool(attention.split),
        "layers see chunks of positions": attention.chunk is not None,
        f"keys are in {dtype}, queries in {attention.compute_dtype}": dtype != attention.compute_dtype,
        f"it takes {' and '.join(_PAGED_DTYPES)}, not {dtype}": dtype not in _PAGED_DTYPES,
        # Its strided loads are of one row of lanes.
        f"its heads are of {LANES}, the model's of {width}": width != LANES,
        f"{heads} KV heads on a device do not fill tiles": tiles not in (1, 2, 4) and tiles % 8 != 0,
    }


TPU = Platform(
    name="tpu",
    plural="TPUs",
    engine="vllm-tpu",
    network="torus",
    links=("ici", "dcn"),
    torus_mesh=True,
    lanes=LANES,
    self_joining=True,  # GKE sets TPU_WORKER_HOSTNAMES
    node_labels=("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"),
    node_resource="google.com/tpu",
    ray_resources=lambda num_devices: {"num_cpus": 0, "resources": {"TPU": num_devices}},
    flash=Kernel("splash", _splash, documents=True, whole_blocks=True, head_tile=LANES),
    paged=Kernel("ragged", _ragged, joined_heads=True),
    fuses_casts=True,  # XLA:TPU fuses elementwise producers into the convolutions that products become
    # XLA computes the gradient of logits without a cap within the products that read it. With a cap, three
    # layers of RecurrentGemma on 8 v5p keep 4.2 GB of it, next to the logits.
    caps_apart=True,
    head_waits=False,  # XLA computes the gradient of the head's weight first
    # Otherwise XLA reads the states of all layers first: of 4 layers of Codestral Mamba on 8 v5p with 64
    # sequences, a step took 139 MB of temporaries.
    ordered_states=True,
    # Otherwise XLA gathers the weights of all layers first: of 6 layers of DeepSeek-V4 on 8 v5e with
    # fsdp=8,expert=4, a generate step took 881 MB of temporaries, and takes 308, in less time.
    ordered_gathers=True,
    whole_sums=True,  # on all links at once (nn/products/scatter.py)
    # By XLA's estimate a fill takes ten times the time of a read: of 189 ms of compute in a step of two
    # layers of Mixtral on 8 v5p with expert=8, fills took 55, and the roundings that name exchanges 16.
    unfilled=True,
    hides_offload=True,  # as in published runs
    # XLA's loops use different layouts for the ring of saved activations, and XLA moves the whole ring to the
    # chip between them: an audited step took 2.3 times its planned memory.
    lanes_offload=False,
    compiler=Compiler(
        title="the TPU's compiler",
        packages=("libtpu",),
        extra="tpu",
        lowering="tpu",
        # LLaMA-3.2-1B, tensor=4 on v5e, libtpu 0.0.42.1: steps of 4.1 to 6.4 MB with four layers, and of 22.5
        # to 23.0 with sixteen; samplers of 0.4 to 1.8. Layers of experts were not measured.
        step_code_bytes=0.6e6,
        layer_code_bytes=1.4e6,
        sampler_code_bytes=1.1e6,
        environment={
            # It looks for no metadata server, and writes warnings to stderr.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_MIN_LOG_LEVEL": "1",
            "TPU_STDERR_LOG_LEVEL": "1",
        },
        exclusive=True,  # libtpu locks a file
        layout_mark=re.compile(r"T\(\d"),  # tiles
        # Its sum is up to twice the temporaries that its buffer assignment has in HBM (5.31 GB for 4.10 GB;
        # programs of 106 GB by it compile for chips of 103 GB). Its peak is the assignment's, to 0.2%.
        peak_only=True,
        # XLA does this by itself on chips of one core; on v4 and v5p gathers would run without compute.
        train_options={
            "xla_enable_async_all_gather": True,
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        },
        # Options that the guides give together are one change.
        tuned_options=(
            # Gathers of the next turn of a loop start in this one.
            {
                "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
                "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
                "xla_tpu_enable_ici_ag_pipelining": True,
            },
            # Sums run during products, too.
            {
                "xla_enable_async_all_reduce": True,
                "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
            },
            # A collective runs during several products in a row.
            {
                "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
                "xla_tpu_overlap_compute_collective_tc": True,
            },
            # The scheduler tries again with less memory in use.
            {"xla_latency_hiding_scheduler_rerun": 5},
            # Larger tiles for each fusion, less room to fetch the operands of the next.
            {"xla_tpu_scoped_vmem_limit_kib": 65_536},
            # Sums of gradients across slices run during the backward pass.
            {
                "xla_tpu_enable_data_parallel_all_reduce_opt": True,
                "xla_tpu_data_parallel_opt_different_sized_ops": True,
            },
        ),
    ),
)
