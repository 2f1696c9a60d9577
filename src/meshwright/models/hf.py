"""Models as Hugging Face's `config.json` describes them, read and written by `models/architectures.py`."""

import warnings
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.architectures import ARCHITECTURES, CHANGES, NO_EFFECT, Architecture, Key
from meshwright.models.config import MLA, ModelConfig, MoE
from meshwright.models.rope_settings import ROPE_KEYS, read_rope, write_rope

# HF's names of our activations, the first as we write it.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "gelu_erf": ("gelu",),
    "relu": ("relu",),
    "relu2": ("relu2",),
}
_GLOBAL = "full_attention"
_WINDOW_KEYS = ("sliding_window", "layer_types")
# What a key must be where it is there and not null, of those that are read before a ModelConfig checks them.
_KINDS: dict[str, tuple[type, ...]] = {
    "hidden_size": (int,),
    "n_embd": (int,),
    "architectures": (list,),
    "model_type": (str,),
    "layer_types": (list,),
    "no_rope_layers": (list,),
    "attn_config": (dict,),
    "no_rope_layer_interval": (int,),
    "moe_layers": (list,),
    "num_hidden_layers": (int,),
    "rope_scaling": (dict,),
    "rope_parameters": (dict,),
    "partial_rotary_factor": (int, float),
    "original_max_position_embeddings": (int,),
    "query_pre_attn_scalar": (int, float),
}


def from_hf(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The ModelConfig of an HF `config.json`.

    Raises ModelError naming every missing key at once, or the architecture, the option or the key that is
    not supported and changes what the model computes. Warns of keys that it does not know.
    """
    config = _text_config(config, name)
    _check_kinds(config, name)
    architecture = _architecture(config, name)
    tables = (architecture.keys, architecture.moe, architecture.mla)
    keys = [key for table in tables for key in table.values() if isinstance(key, Key)]
    needed = dict.fromkeys(key.name for key in keys if key.needed and _value(config, key) is None)
    if needed:
        raise ModelError(f"{name}: config.json lacks {', '.join(needed)}")
    tables = [(config, architecture.fixed)]
    tables += [(config.get(table) or {}, fixed) for table, fixed in architecture.fixed_in.items()]
    for given, fixed in tables:
        for key, supported in fixed.items():
            if given.get(key, supported[0]) not in supported:
                raise ModelError(f"{name}: {key} = {given[key]!r} is not supported; fits: {supported[0]!r}")
    _check_unknown(config, architecture, keys, name)
    return _read(config, architecture, name)


def _read(config: Mapping[str, Any], architecture: Architecture, name: str) -> ModelConfig:
    fields = dict(architecture.traits) | {
        field: _value(config, key) for field, key in architecture.keys.items()
    }
    if "activation" in architecture.keys:
        fields["activation"] = _activation(fields["activation"], architecture.keys["activation"].name, name)
    if scalar := fields.get("query_scale"):
        fields["query_scale"] = scalar**-0.5 if scalar > 0 else scalar
    if architecture.moe:
        fields["moe"] = MoE(**_nested(config, architecture.moe))
    if architecture.mla:
        fields["mla"] = mla = MLA(**_nested(config, architecture.mla))
        fields["d_head"] = mla.nope_dim + mla.rope_dim
    fields["num_kv_heads"] = _or_default(fields.get("num_kv_heads"), fields["num_heads"])
    fields["d_ff"] = _or_default(fields.get("d_ff"), 4 * fields["d_model"])
    fields["d_head"] = fields.get("d_head") or _default_d_head(name, fields)
    if architecture.chunked:
        fields |= _without_rope(config, fields, name)
    fields |= _windows(config, architecture, fields, name)
    fields |= read_rope(config, architecture, fields, name)
    return ModelConfig(name=name, **fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of the HF model that computes the same; `from_hf` reads it back.

    Raises ModelError where no HF architecture does.
    """
    for architecture in ARCHITECTURES:
        written = _write(config, architecture)
        if written is not None and _reads_back(written, architecture, config):
            return written
    raise ModelError(f"{config.name}: no Hugging Face architecture has this combination of features")


def _write(config: ModelConfig, architecture: Architecture) -> dict[str, Any] | None:
    """`config` in the keys of one architecture, which may say less than all of it."""
    if bool(architecture.moe) != bool(config.moe) or bool(architecture.mla) != bool(config.mla):
        return None
    written: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
    }
    written |= _first_values(architecture.fixed)
    written |= {table: _first_values(fixed) for table, fixed in architecture.fixed_in.items()}
    written |= {key.name: getattr(config, field) for field, key in architecture.keys.items()}
    if key := architecture.keys.get("activation"):
        written[key.name] = _ACTIVATIONS.get(config.activation, (config.activation,))[0]
    if key := architecture.keys.get("query_scale"):
        scale = config.query_scale
        written[key.name] = round(scale**-2) if scale else config.d_head
    for nested, table in ((config.moe, architecture.moe), (config.mla, architecture.mla)):
        written |= {key.name: getattr(nested, field) for field, key in table.items() if isinstance(key, Key)}
    if architecture.local_layers:
        key, field, local = _local_layers(architecture)
        written[key] = getattr(config, field)
        kinds = [_GLOBAL if window is None else local for window in config.windows]
        written |= {"layer_types": kinds} if config.global_every else {}
    if architecture.chunked:
        written["attention_chunk_size"] = config.attention_chunk or config.max_seq_len
        written["no_rope_layers"] = [int(layer.kind.turned) for layer in config.layers]
        written["attn_temperature_tuning"] = config.temperature_floor is not None
        written["floor_scale"] = config.temperature_floor or architecture.keys["temperature_floor"].default
    return written | write_rope(config)


def _first_values(fixed: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {key: supported[0] for key, supported in fixed.items()}


def _reads_back(written: Mapping[str, Any], architecture: Architecture, config: ModelConfig) -> bool:
    try:
        return _read(written, architecture, config.name) == config
    except ModelError:
        return False


def _check_kinds(config: Mapping[str, Any], name: str) -> None:
    for key, kinds in _KINDS.items():
        if config.get(key) is not None and not isinstance(config[key], kinds):
            expected = "a number" if float in kinds else f"a {kinds[0].__name__}"
            raise ModelError(f"{name}: {key} = {config[key]!r} must be {expected}")


def _text_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The language model of a config that also describes a vision tower."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    text_type = f"{config.get('model_type')}_text"
    if text_type not in ("gemma3_text", "llama4_text"):
        known = ", ".join(architecture.class_name for architecture in ARCHITECTURES)
        raise ModelError(
            f"{name}: model_type {config.get('model_type')!r} is not supported; supported: {known}"
        )
    return {"model_type": text_type} | {key: value for key, value in text.items() if value is not None}


def _architecture(config: Mapping[str, Any], name: str) -> Architecture:
    by_class = {architecture.class_name: architecture for architecture in ARCHITECTURES}
    others = {architecture.also_named: architecture for architecture in ARCHITECTURES}
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    supported = f"supported: {', '.join(by_class)}"
    for listed in config.get("architectures") or []:
        if not isinstance(listed, str) or listed not in {*by_class, *others}:
            raise ModelError(f"{name}: architecture {listed} is not supported; {supported}")
        return by_class.get(listed) or others[listed]
    model_type = config.get("model_type", "llama")
    if model_type not in by_type:
        raise ModelError(f"{name}: model_type {model_type!r} is not supported; {supported}")
    return by_type[model_type]


def _check_unknown(config: Mapping[str, Any], architecture: Architecture, keys: list[Key], name: str) -> None:
    known = {name for key in keys for name in key.names}
    known |= {*NO_EFFECT, *ROPE_KEYS, *architecture.fixed, *architecture.ignored, *_WINDOW_KEYS}
    known |= {*architecture.read_apart, *architecture.fixed_in}
    known |= {"quantization_config"}
    for key in sorted({*config} & {*CHANGES} - known):
        if config[key] not in CHANGES[key]:
            raise ModelError(
                f"{name}: {key} = {config[key]!r} changes what the model computes, and "
                f"{architecture.class_name} is read without it; fits: {key} = {CHANGES[key][0]!r}"
            )
    known |= set(CHANGES)
    if unknown := sorted(set(config) - known):
        warnings.warn(f"{name}: config.json keys not known and ignored: {', '.join(unknown)}", stacklevel=3)


def _local_layers(architecture: Architecture) -> tuple[str, str, str]:
    """The key of what local layers see, the field of ModelConfig that it is, and what HF calls them."""
    if architecture.chunked:
        return "attention_chunk_size", "attention_chunk", "chunked_attention"
    return "sliding_window", "sliding_window", "sliding_attention"


def _windows(
    config: Mapping[str, Any], architecture: Architecture, fields: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """What local layers see and global_every, of `layer_types` where it is listed; no layer local is none."""
    if not architecture.local_layers:
        return {}
    key, field, local = _local_layers(architecture)
    window = config.get(key, architecture.default_window)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    every = _or_default(pattern, fields.get("nope_every", architecture.global_every))
    if kinds := config.get("layer_types"):
        every = _every(kinds, _GLOBAL, local, "layer_types", name)
    if window is None or every == 1 or _at_least(window, fields["max_seq_len"]):
        return {}
    return {field: window, "global_every": every}


def _without_rope(config: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """nope_every, the temperature of such layers, and whether `moe_layers` says what their interval says."""
    every = _or_default(config.get("no_rope_layer_interval"), 4)
    if flags := config.get("no_rope_layers"):
        every = _every(flags, 0, 1, "no_rope_layers", name)
    num_layers, step, listed = fields["num_layers"], fields["moe"].every, config.get("moe_layers")
    if listed is not None and listed != list(range(step - 1, num_layers, step)[: len(listed) + 1]):
        raise ModelError(
            f"{name}: moe_layers = {listed} is not supported; fits: every n-th layer, as "
            "interleave_moe_layer_step = n says"
        )
    floor = fields["temperature_floor"] if config.get("attn_temperature_tuning", True) else None
    return {"nope_every": every if every <= num_layers else 0, "temperature_floor": floor}


def _every(listed: list[Any], special: Any, others: Any, key: str, name: str) -> int:
    """n where each n-th is `special` and all else `others`; 0 where none is special, 1 where all are."""
    every = listed.index(special) + 1 if special in listed else 0
    if listed != [special if every and (n + 1) % every == 0 else others for n in range(len(listed))]:
        raise ModelError(f"{name}: this {key} is not supported; fits: {others!r}, every n-th {special!r}")
    return every


def _activation(value: str, key: str, name: str) -> str:
    for ours, theirs in _ACTIVATIONS.items():
        if value in theirs:
            return ours
    known = ", ".join(repr(theirs[0]) for theirs in _ACTIVATIONS.values())
    raise ModelError(f"{name}: {key} = {value!r} is not supported; fits: {known}")


def _nested(config: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    return {field: _value(config, key) if isinstance(key, Key) else key for field, key in table.items()}


def _value(config: Mapping[str, Any], key: Key) -> Any:
    for name in key.names:
        if config.get(name) is not None:
            return config[name]
    return None if key.null_is_none and key.name in config else key.default


def _default_d_head(name: str, sizes: Mapping[str, Any]) -> int:
    d_model, num_heads = sizes["d_model"], sizes["num_heads"]
    if not isinstance(d_model, int) or not isinstance(num_heads, int) or num_heads < 1 or d_model % num_heads:
        raise ModelError(
            f"{name}: hidden_size = {d_model} does not divide over num_attention_heads = {num_heads}; "
            "add head_dim"
        )
    return d_model // num_heads


def _at_least(window: Any, max_seq_len: Any) -> bool:
    return isinstance(window, int) and isinstance(max_seq_len, int) and window >= max_seq_len


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value
