"""Which models `nn/` runs. The others can be planned: `cost/` knows every operation."""

from meshwright.errors import ModelError
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


def _beyond_llama3(config: ModelConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling.kind not in ("llama3", "linear")
