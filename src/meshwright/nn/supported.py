"""Which models and layouts `nn/` runs. The others can be planned: `cost/` knows every operation."""

from meshwright.errors import LayoutError, ModelError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig


def check_runs(config: ModelConfig) -> None:
    """Raises ModelError naming the first feature that cannot be run yet."""
    scaling = config.rope_scaling
    features = {
        "experts": config.moe is not None,
        "latent attention": config.mla is not None,
        "attention sinks": config.attention_sinks,
        "ALiBi positions": config.positions == "alibi",
        f"rope_scaling of kind {scaling.kind!r}" if scaling else "": _beyond_llama3(config),
        "layers that share a cache": config.layers_per_cache > 1,
        f"activation {config.activation!r}": config.activation == "clamped_silu",
    }
    for feature, used in features.items():
        if used:
            raise ModelError(f"{config.name}: {feature} can be planned, not yet run")


def check_layout_runs(layout: Layout) -> None:
    """Raises LayoutError naming the first thing in a layout that cannot be run yet."""
    plain = Layout.of()
    features = {
        f"pipe={layout.pipe}": layout.pipe > 1,
        f"expert={layout.degree('expert')}": layout.degree("expert") > 1,
        f"tensor2={layout.degree('tensor2')}": layout.degree("tensor2") > 1,
        "zero_context=true": layout.option("zero_context"),
        f"context_method={layout.context_method}": layout.context_method != plain.context_method,
        f"remat={layout.remat}": layout.remat in ("attention", "alternate"),
        "offload=true": layout.offload,
        f"matmul_dtype={layout.matmul_dtype}": layout.matmul_dtype not in (None, layout.compute_dtype),
        f"gradients_dtype={layout.gradients_dtype}": layout.gradients_dtype
        not in (None, layout.weights_dtype),
        f"optimizer_dtype={layout.optimizer_dtype}": layout.optimizer_dtype != plain.optimizer_dtype,
        "master_weights=true": layout.master_weights,
    }
    for feature, used in features.items():
        if used:
            raise LayoutError(
                f"layout {layout}: {feature} can be planned, not yet run; "
                "mw plan train --runnable ranks what runs"
            )


def check_layout_infers(layout: Layout) -> None:
    """Raises LayoutError where a layout splits the positions of a sequence: one token has none to split."""
    splits = [f"context={layout.context}"] if layout.context > 1 else []
    splits += ["sequence_parallel=true"] if layout.option("sequence_parallel") else []
    if splits:
        raise LayoutError(
            f"layout {layout}: inference splits over data, fsdp and tensor; leave out {', '.join(splits)}"
        )


def _beyond_llama3(config: ModelConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling.kind not in ("llama3", "linear")
