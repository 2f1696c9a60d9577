"""Examples of layouts, one a feature, with the phases that each runs: the table of `mw support`."""

from collections.abc import Mapping, Sequence

from meshwright.dtypes import number_type, types_for
from meshwright.layout.layout import Layout
from meshwright.layout.runnable import layout_lacks, why_not
from meshwright.models.config import ModelConfig

_QUANTISED = [name for name in types_for("weights", "serve") if number_type(name).scales]
_MULTIPLIED = types_for("operands", "serve")


def _any(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


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
    f"{_any(types_for('operands', 'train'))} matmuls": f"data=2,matmul_dtype={_MULTIPLIED[0]}",
    f"{_any(_QUANTISED)} weights": f"tensor=2,weights_dtype={_QUANTISED[-1]}",
    f"{_any(_MULTIPLIED)} weights and matmuls": (
        f"tensor=2,weights_dtype={_MULTIPLIED[0]},matmul_dtype={_MULTIPLIED[0]}"
    ),
}
PHASES: Mapping[str, str] = {"train": "training", "prefill": "prefill", "generate": "generation"}


def layout_example(feature: str, config: ModelConfig | None = None) -> str:
    """The layout of LAYOUTS; for this model it has the degrees that the feature needs.

    >>> layout_example("fsdp")
    'fsdp=2'
    """
    if config is not None and feature == "kv_replicas":  # of heads that are one a device
        return f"tensor={config.num_kv_heads},kv_replicas=2"
    return LAYOUTS[feature]


def phases_of(feature: str, config: ModelConfig | None = None) -> dict[str, str | None]:
    """Why the example of a feature does not run in each phase, for this model or for any; None if it does."""
    layout = Layout.parse(layout_example(feature, config))
    if config is None:
        return {phase: layout_lacks(layout, phase) for phase in PHASES}
    return {phase: why_not(config, layout, phase) for phase in PHASES}
