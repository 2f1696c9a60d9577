"""The number type of the matrices in a checkpoint's files, as its config.json states."""

from collections.abc import Mapping
from typing import Any

from meshwright.dtypes import NUMBER_TYPES, named
from meshwright.errors import ModelError

# Our number type by the declaration of config.json: the method, and its words for the type of the weights if
# the method has several, such as "gptq 4".
_TYPES = {record.quant_method: record.name for record in NUMBER_TYPES.values() if record.quant_method} | {
    words: record.name for record in NUMBER_TYPES.values() for words in record.declared
}
# Bits of weights if a repository's name has only the method (GPTQ, AWQ).
_USUAL_BITS = 4


def declared_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The table of a config.json that says how its weights are quantised; None without one.

    ModelOpt may name a type for each module. The table then has the narrowest, and the modules of other types
    are listed as not quantised. Raises ModelError if the key's value is no table.
    """
    for key in ("quantization_config", "compression_config"):
        declared = config.get(key)
        if declared is not None and not isinstance(declared, Mapping):
            raise ModelError(f"{key} = {declared!r} must be an object, with quant_method")
        if declared:
            return _of_modelopt(declared) if "quant_algo" in declared else declared
    return None


def _of_modelopt(declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """ModelOpt's table with its method, which hf_quant_config.json leaves out, and with a single type."""
    table = {**declared, "quant_method": "modelopt"}
    layers = declared.get("quantized_layers")
    if not isinstance(layers, Mapping):
        return table
    algos = {
        module: str(each.get("quant_algo")) for module, each in layers.items() if isinstance(each, Mapping)
    }
    bits = {
        algo: NUMBER_TYPES[dtype].bits
        for algo in algos.values()
        if (dtype := _TYPES.get(f"modelopt {algo}")) is not None
    }
    if not bits:
        return table
    narrowest = min(bits, key=bits.__getitem__)
    others = [module for module, algo in algos.items() if algo != narrowest]
    listed = declared.get("exclude_modules") or declared.get("ignore") or []
    kept = listed if isinstance(listed, list) else []
    # One list: readers take the first of the two keys that has one.
    return table | {"quant_algo": narrowest, "exclude_modules": [*kept, *others], "ignore": None}


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """The number type of quantised matrices; None without quantisation, or with an unknown one.

    >>> stored_dtype({"quantization_config": {"quant_method": "gptq", "bits": 4}})
    'int4'
    """
    declared = declared_quantisation(config)
    if declared is None:
        return None
    method = str(declared.get("quant_method"))
    return _TYPES.get(" ".join([method, *_type_words(method, declared)]))


def dtype_in_name(name: str) -> str | None:
    """The number type of weights in the name of a repository; None without one.

    >>> dtype_in_name("Qwen/Qwen3-30B-A3B-FP8"), dtype_in_name("Qwen2.5-72B-AWQ"), dtype_in_name("gpt2")
    ('fp8', 'int4', None)
    """
    for word in reversed(name.lower().split("-")):
        if dtype := _TYPES.get(f"{word} {_USUAL_BITS}"):
            return dtype
        if named(word) in NUMBER_TYPES and NUMBER_TYPES[named(word)].scales is not None:
            return named(word)
    return None


def _type_words(method: str, declared: Mapping[str, Any]) -> list[str]:
    """The declaration's words for the type of the weights; none for a method with a single type."""
    if method in ("gptq", "awq"):
        return [str(declared.get("bits"))]
    if method == "bitsandbytes":
        return [name for name in ("load_in_4bit", "load_in_8bit") if declared.get(name)]
    if method == "modelopt":
        return [str(declared.get("quant_algo"))]
    if method == "compressed-tensors":
        groups = declared.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                return [str(weights.get("type")), str(weights.get("num_bits"))]
    return []
