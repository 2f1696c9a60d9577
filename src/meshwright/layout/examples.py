"""Examples of layouts, one a feature, and in which phases each runs: what `mw support` and its page show."""

from collections.abc import Mapping

from meshwright.layout.layout import Layout
from meshwright.layout.runnable import layout_lacks, why_not
from meshwright.models.config import ModelConfig

LAYOUTS: Mapping[str, str] = {
    "data": "data=2",
    "data, ZeRO-1 or 2": "data=2,zero=2",
    "fsdp": "fsdp=2",
    "tensor": "tensor=2",
    "tensor, sequence parallel": "tensor=2,sequence_parallel=true",
    "tensor2": "tensor=2,tensor2=2",
    "kv_replicas": "tensor=2,kv_replicas=2",
    "context, all-gather": "context=2",
    "context, ring": "context=2,context_method=ring",
    "context, Ulysses": "context=2,context_method=ulysses",
    "expert": "fsdp=2,expert=2",
    "expert, dispatch once": "fsdp=4,expert=4,expert_nodes=2,dispatch=once",
    "pipe, schedule lanes": "pipe=2,microbatches=2,schedule=lanes",
    "pipe, other schedules (on one host)": "pipe=2,microbatches=2",
    "offload": "data=2,offload=true",
    "fp8, fp4 or int8 matmuls": "data=2,matmul_dtype=fp8",
    "int8 or int4 weights": "tensor=2,weights_dtype=int8",
    "fp8 or int8 weights and matmuls": "tensor=2,weights_dtype=fp8,matmul_dtype=fp8",
}
PHASES: Mapping[str, str] = {"train": "training", "prefill": "prefill", "generate": "generation"}


def example(feature: str, config: ModelConfig | None = None) -> str:
    """The layout of LAYOUTS; for this model it has the degrees that the feature needs.

    >>> example("fsdp")
    'fsdp=2'
    """
    if config is not None and feature == "kv_replicas":  # of heads that are one a device
        return f"tensor={config.num_kv_heads},kv_replicas=2"
    return LAYOUTS[feature]


def phases_of(feature: str, config: ModelConfig | None = None) -> dict[str, str | None]:
    """Why the example of a feature does not run in each phase, for this model or for any; None if it does."""
    layout = Layout.parse(example(feature, config))
    if config is None:
        return {phase: layout_lacks(layout, phase) for phase in PHASES}
    return {phase: why_not(config, layout, phase) for phase in PHASES}
