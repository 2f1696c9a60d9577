"""Models as Hugging Face's `config.json` describes them."""

import warnings
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig, RopeScaling

# HF's key of each field that a LLaMA config.json must have.
_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
# Mistral's block is LLaMA's when its window is off.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
# Keys that must say what the forward pass does; absent means the same.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "quantization_config": (None,),
}
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
)
# Known, and without effect on the shape or the mathematics of a forward pass.
_NO_EFFECT = (
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "attention_dropout", "initializer_range", "pretraining_tp", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "_name_or_path", "name_or_path", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "is_decoder", "id2label", "label2id", "problem_type", "auto_map", "tokenizer_class",
)  # fmt: skip


def from_hf(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The ModelConfig of an HF `config.json`.

    Raises ModelError naming every missing key at once, or the architecture or option that is not
    supported. Warns of keys it does not know: they may change what the model computes.
    """
    _check_architecture(config, name)
    missing = [key for key in _REQUIRED.values() if config.get(key) is None]
    if missing:
        raise ModelError(f"{name}: config.json lacks {', '.join(missing)}")
    for key, supported in _FIXED.items():
        if key in config and config[key] not in supported:
            raise ModelError(f"{name}: {key} = {config[key]!r} is not supported; fits: {supported[0]!r}")
    known = {*_REQUIRED.values(), *_FIXED, *_OPTIONAL, *_NO_EFFECT}
    if unknown := sorted(set(config) - known):
        warnings.warn(f"{name}: config.json keys not known and ignored: {', '.join(unknown)}", stacklevel=2)
    sizes = {field: config[key] for field, key in _REQUIRED.items()}
    rope = _rope(config)
    return ModelConfig(
        name=name,
        **sizes,
        num_kv_heads=_or_default(config.get("num_key_value_heads"), sizes["num_heads"]),
        d_head=_or_default(config.get("head_dim"), 0) or _default_d_head(name, sizes),
        norm_eps=_or_default(config.get("rms_norm_eps"), 1e-6),
        rope_theta=_or_default(rope.get("rope_theta"), 10_000.0),
        rope_scaling=_rope_scaling(rope, name),
        tied_embeddings=_or_default(config.get("tie_word_embeddings"), False),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of an HF LlamaForCausalLM; `from_hf` reads it back."""
    written: dict[str, Any] = {"architectures": [_ARCHITECTURES["llama"]], "model_type": "llama"}
    written |= {key: getattr(config, field) for field, key in _REQUIRED.items()}
    written |= {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if scaling := config.rope_scaling:
        written["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return written


def _check_architecture(config: Mapping[str, Any], name: str) -> None:
    supported = f"supported: {', '.join(_ARCHITECTURES.values())}"
    listed = config.get("architectures") or []
    for architecture in listed:
        if architecture not in _ARCHITECTURES.values():
            raise ModelError(f"{name}: architecture {architecture} is not supported; {supported}")
    if not listed and config.get("model_type", "llama") not in _ARCHITECTURES:
        raise ModelError(f"{name}: model_type {config['model_type']!r} is not supported; {supported}")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings from either form: transformers 5 folds both old keys into `rope_parameters`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta")} | dict(scaling)


def _rope_scaling(rope: Mapping[str, Any], name: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{name}: rope_type {kind!r} is not supported; fits: 'default', 'llama3'")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in rope]:
        raise ModelError(f"{name}: rope scaling lacks {', '.join(missing)}")
    return RopeScaling(*(rope[key] for key in keys))


def _default_d_head(name: str, sizes: Mapping[str, Any]) -> int:
    d_model, num_heads = sizes["d_model"], sizes["num_heads"]
    if not isinstance(d_model, int) or not isinstance(num_heads, int) or num_heads < 1 or d_model % num_heads:
        raise ModelError(
            f"{name}: hidden_size = {d_model} does not divide over num_attention_heads = {num_heads}; "
            "add head_dim"
        )
    return d_model // num_heads


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value
