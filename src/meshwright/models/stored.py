"""The number type in which a checkpoint's files hold its matrices, as its config.json states."""

from collections.abc import Mapping
from typing import Any

from meshwright.dtypes import NUMBER_TYPES

# Kind and bits of weights in compressed-tensors, bits of GPTQ and AWQ, and algorithms of NVIDIA's ModelOpt.
_COMPRESSED = {"float 8": "fp8", "int 8": "int8", "int 4": "int4", "float 4": "fp4"}
_INTEGERS = {"4": "int4", "8": "int8"}
_MODELOPT = {"FP8": "fp8", "NVFP4": "fp4"}


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """The number type of quantised matrices; None without quantisation, or with an unknown one.

    >>> stored_dtype({"quantization_config": {"quant_method": "gptq", "bits": 4}})
    'int4'
    """
    for key in ("quantization_config", "compression_config"):
        if isinstance(declared := config.get(key), Mapping):
            return _of(declared)
    return None


def _of(declared: Mapping[str, Any]) -> str | None:
    method = declared.get("quant_method")
    if method in ("gptq", "awq"):
        return _INTEGERS.get(str(declared.get("bits")))
    if method == "bitsandbytes":
        return "nf4" if declared.get("load_in_4bit") else "int8" if declared.get("load_in_8bit") else None
    if method == "modelopt":
        return _MODELOPT.get(str(declared.get("quant_algo")))
    if method == "compressed-tensors":
        groups = declared.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                return _COMPRESSED.get(f"{weights.get('type')} {weights.get('num_bits')}")
        return None
    return next((record.name for record in NUMBER_TYPES.values() if record.quant_method == method), None)
