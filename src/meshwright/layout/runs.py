"""What runs: of models and layouts. The others can be planned, since `cost/` knows every operation."""

from meshwright.errors import MeshwrightError
from meshwright.layout.layout import Layout
from meshwright.models.config import ModelConfig


def why_not(config: ModelConfig, layout: Layout, phase: str = "train") -> str | None:
    """What of a model or a layout does not run, or does not divide; None where both run."""
    features = _of_model(config) | (_of_layout(layout) if phase == "train" else {})
    for feature, used in features.items():
        if used:
            return feature
    try:
        layout.check(config)
    except MeshwrightError as error:
        return str(error).partition(";")[0]
    return None


def _of_model(config: ModelConfig) -> dict[str, bool]:
    scaling = config.rope_scaling
    return {
        "experts": config.moe is not None,
        "latent attention": config.mla is not None,
        "attention sinks": config.attention_sinks,
        "ALiBi positions": config.positions == "alibi",
        f"rope_scaling of kind {scaling.kind!r}" if scaling else "": scaling is not None
        and scaling.kind not in ("llama3", "linear"),
        "layers that share a cache": config.layers_per_cache > 1,
        f"activation {config.activation!r}": config.activation == "clamped_silu",
    }


def _of_layout(layout: Layout) -> dict[str, bool]:
    plain = Layout()
    return {
        f"pipe={layout.pipe}": layout.pipe > 1,
        f"expert={layout.expert}": layout.expert > 1,
        f"tensor2={layout.tensor2}": layout.tensor2 > 1,
        "zero_context=true": layout.zero_context,
        f"context_method={layout.context_method}": layout.context_method != plain.context_method,
        f"remat={layout.remat}": layout.remat in ("attention", "alternate"),
        "offload=true": layout.offload,
        f"matmul_dtype={layout.matmul_dtype}": layout.matmul_dtype not in (None, layout.compute_dtype),
        f"gradients_dtype={layout.gradients_dtype}": layout.gradients_dtype
        not in (None, layout.weights_dtype),
        f"optimizer_dtype={layout.optimizer_dtype}": layout.optimizer_dtype != plain.optimizer_dtype,
        "master_weights=true": layout.master_weights,
    }
