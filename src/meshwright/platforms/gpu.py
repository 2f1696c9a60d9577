"""NVIDIA GPUs: cuDNN's flash attention, our kernel over pages, and XLA's compiler for CUDA (jax 0.10.2)."""

import re
from collections.abc import Mapping

from meshwright.platforms.platform import Attention, Compiler, ExpertBlocks, Kernel, Platform

_CUDNN_DTYPES = ("bf16", "f16")
# The widest heads of cuDNN's kernels: since Hopper, and before.
_HOPPER, _HOPPER_HEAD, _CUDNN_HEAD = 9.0, 256, 128


def _cudnn(attention: Attention) -> Mapping[str, bool]:
    """cuDNN's flash attention; it checks the widths of heads as jax.nn.dot_product_attention does."""
    dtype, width, capability = attention.compute_dtype, attention.head_dim, attention.capability
    widest = _HOPPER_HEAD if capability and capability >= _HOPPER else _CUDNN_HEAD
    return {
        "an indexer chooses keys": attention.indexed,
        "the model has ALiBi": attention.alibi,
        "no compute_capability of an NVIDIA GPU is given, which cuDNN needs": capability is None,
        f"positions are split over {', '.join(attention.split)}": bool(attention.split),
        "the model has attention sinks": attention.sinks,
        f"cuDNN has none for {dtype}": dtype not in _CUDNN_DTYPES,
        f"cuDNN has none for heads of {width}": width % 8 != 0 or width > widest,
        "cuDNN has none with a softcap": attention.softcap,
        f"cuDNN has none for chunks of {attention.chunk} tokens": attention.chunk is not None,
    }


def _paged(attention: Attention) -> Mapping[str, bool]:
    """`decoded` (nn/attention/paged_kernel.py): one query a row, which sees all positions before it."""
    return {
        "the model has latents": attention.latents,
        "the model has ALiBi": attention.alibi,
        "the model has attention sinks": attention.sinks,
        f"positions are split over {', '.join(attention.split)}": bool(attention.split),
        f"it takes rows of one query, not of {attention.queries}": attention.queries > 1,
        "an indexer chooses keys": attention.indexed,
        "layers have windows": attention.windows,
        f"heads of {attention.head_dim} are no power of two": attention.head_dim.bit_count() != 1,
    }


GPU = Platform(
    name="gpu",
    plural="GPUs",
    network="switch",
    links=("nvlink", "network"),
    resources={"ici": "NVLink", "dcn": "the network"},
    engine="vllm",
    device_per_process=True,
    driver_reports=True,
    slurm=True,
    node_labels=("cloud.google.com/gke-accelerator",),
    node_resource="nvidia.com/gpu",
    ray_resources=lambda num_devices: {"num_cpus": 0, "num_gpus": num_devices},
    scaled_matmul=True,
    flash=Kernel("cudnn", _cudnn, wide_values=True),
    paged=Kernel("paged", _paged),
    fused_softmax=True,
    # XLA leaves pages that a step does not read to its end, and keeps the keys and values of all layers until
    # then: of LLaMA-3-8B on eight H100s, 4 prompts of 4,096 tokens, temporaries took 1.06 GB, and take 0.61.
    ordered_caches=True,
    ordered_states=True,
    # A product of few rows takes XLA's kernels some microseconds beyond the time to read its weights: of
    # LLaMA-3-8B and a row on an H200 gate and up took 37 us each, and together 58 (jax 0.11.2).
    joins_weights=True,
    # The runtime takes 0.1 to 0.2 ms to send an array, and a step of the server has thirteen: on an H200 an
    # int8 step of LLaMA-3-8B took 4.9 ms, of which its kernels took 3.4 (jax 0.11.2).
    joins_inputs=True,
    # XLA computes the gradient of a cap, and keeps it for both products that read it. A product of narrow
    # operands stays in float32, the type that scales multiply.
    wide_logits=True,
    unnamed_exchange=True,
    # LLaMA-3.2-1B on 8 H100s, fsdp=8: a step takes 15.6 GB, 1.5 more than with all layers in the loop.
    gathers_ahead=True,
    # A loop over blocks copies its expert's weights out of the stack before each product: in a step of two
    # layers of Mixtral on eight H100s with 64 sequences, the loops take 1.36 of 1.79 ms (in the schedule of
    # jax 0.10.2). One product of all experts reads each weight once; with more rows it is bound by compute.
    expert_blocks=ExpertBlocks(whole_tokens=128, copied=True),
    compiler=Compiler(
        title="the GPU's compiler",
        packages=("jax-cuda12-plugin", "jax-cuda13-plugin"),
        extra="cuda12",
        lowering="cuda",
        # LLaMA-3.2-1B on four H100s, jax 0.10.2: the 60 kernels of a step have 0.30 MB together, and all 16
        # layers share them; a step of two layers of experts has 69, 0.31 MB. A sampler has a third of that.
        step_code_bytes=0.3e6,
        sampler_code_bytes=0.1e6,
        # Otherwise JAX gives up a plugin whose driver it does not find.
        environment={"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        # Without a GPU no kernel can be timed, so none is chosen by its time.
        options={"xla_gpu_autotune_level": 0},
        rooflines=True,
        config_mark=re.compile(
            r"operation_queue_id|block_level_fusion_config|gemm_backend_config|collective_backend_config"
        ),
        train_options={
            # XLA joins the gradients of a layer into one reduce-scatter, which is left to the layer's end,
            # when no product is; and it gathers a layer's first weights in the layer, not in the one before.
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
            "xla_gpu_enable_pipelined_all_gather": True,
        },
        # The option changes the loop over microbatches, too: XLA carries activations of all layers from
        # turn to turn, and computed all products of Gemma 2 twice (jax 0.10.2).
        microbatch_options={"xla_gpu_enable_pipelined_all_gather": False},
        tuned_options=(
            {"xla_gpu_enable_pipelined_reduce_scatter": True},
            {"xla_gpu_enable_pipelined_all_reduce": True},
            {"xla_gpu_enable_while_loop_double_buffering": True},
            {"xla_gpu_all_gather_combine_threshold_bytes": 134_217_728},
            {"xla_gpu_all_reduce_combine_threshold_bytes": 134_217_728},
        ),
    ),
)
