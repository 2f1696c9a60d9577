"""A checkpoint with quantised weights, in the form that vLLM and transformers read (compressed-tensors).

    int8, fp8    <layer>.weight and weight_scale [out, 1]
    int4         <layer>.weight_packed, eight inputs of an int32, weight_scale [out, in / group], weight_shape

Only linear layers are quantised; both readers expect the embedding, the head and routers unquantised.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from meshwright.dtypes import number_type
from meshwright.errors import CheckpointError, ModelError, PlanError
from meshwright.files import read_text
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.hf import written_family
from meshwright.models.parameters import Param, dimensions, parameters
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.paged import Rows
from meshwright.nn.files.hf_tensors import hf_tensors
from meshwright.nn.files.weights import load_hf, save_hf
from meshwright.nn.layer_weights import layered
from meshwright.nn.params import flatten
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.cache_programs import CacheSizes
from meshwright.serve.device.forward_steps import StepShape
from meshwright.serve.device.loading import ModelFolder, load_model_folder
from meshwright.serve.device.programs import InferencePrograms
from meshwright.serve.device.readout import Read, Readout

_WINDOW = 512  # tokens that are scored together
_KEPT = ("embed", "lm_head", "wte", "wpe", "gate.weight", "router")


def quantize_folder(
    checkpoint: Path, folder: Path, dtype: str, text: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Write the checkpoint with weights in `dtype` to `folder`, completely or not at all.

    text: a file whose perplexity is measured with the weights before and after. Returns `path`, `dtype`,
    `bytes_before`, `bytes_after` and with a text `perplexity_before`, `perplexity_after`, `tokens`. Raises
    CheckpointError if `folder` has files, ModelError if this form has no place for the model's weights,
    PlanError for a text that is too short.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"checkpoint {folder}: holds files already; name another folder")
    folder_model = load_model_folder(checkpoint)
    tokens = None if text is None else _tokens(folder_model, text)
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
    mesh = device_mesh(layout)
    report("reading the checkpoint")
    params = folder_model.load_params(layout, mesh)
    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        report(f"writing weights in {dtype}")
        before = _write(params, folder_model, unfinished, dtype)
        document: dict[str, Any] = {"path": str(folder), "dtype": dtype}
        document |= {"bytes_before": before, "bytes_after": _bytes(unfinished)}
        if tokens is not None:
            report("scoring the text before and after")
            whole = perplexity(params, folder_model.config, layout, mesh, tokens)
            quantised = load_hf(unfinished, folder_model.config, layout, mesh)
            after = perplexity(quantised, folder_model.config, layout, mesh, tokens)
            document |= {"tokens": len(tokens), "perplexity_before": whole, "perplexity_after": after}
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return document


def perplexity(
    params: Mapping[str, Any], config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, tokens: list[int]
) -> float:
    """The perplexity of the text, by windows; the first token of each window is not scored."""
    length = min(_WINDOW, config.max_seq_len, len(tokens))
    programs = InferencePrograms(config, layout.at("generate"), mesh, CacheSizes(1, 1, length))
    weights, (pools, last) = layered(dict(params), config, layout, mesh), programs.empty()
    step = programs.step(StepShape((Rows(1, length),), 1, 1, 1, num_hidden=length)).compile()
    readout = Readout(programs, length)
    positions, slots = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
    table, head = np.zeros((1, 1, 1), np.int32), np.zeros(1, np.int32)
    logprobs: list[float] = []
    for start in range(0, len(tokens) - length + 1, length):
        window = np.asarray(tokens[start : start + length], np.int32)
        _, pools, hidden = step(weights, pools, last, window, positions, slots, table, head)
        reads = [Read(0, 0, row, token) for row, token in enumerate(window[1:].tolist())]
        scores, _ = readout.dispatch(weights, hidden, reads, []).read()
        logprobs += [score.logprob for score in scores[0]]
    return math.exp(-float(np.mean(logprobs)))


def _tokens(folder: ModelFolder, text: Path) -> list[int]:
    tokens = list(folder.tokenizer().encode(read_text(text, PlanError)))
    if len(tokens) < 2:
        raise PlanError(f"{text}: has {len(tokens)} tokens; fits: a text of 2 tokens or more")
    return tokens


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _write(params: Mapping[str, Any], folder_model: ModelFolder, folder: Path, dtype: str) -> int:
    """Write the quantised weights to `folder`; returns the bytes of all weights in bf16."""
    config = folder_model.config
    if _stores_inputs_first(config):
        raise ModelError(
            f"{config.name}: its weights are stored [in, out], which compressed-tensors cannot represent; "
            "quantise while loading: mw serve --weights-dtype"
        )
    group = number_type(dtype).group
    if group:
        group = math.gcd(group, *(prod(_sizes(config, param)) for param in parameters(config).values()))

    def store(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        is_linear = name.endswith(".weight") and weight.ndim == 2 and not any(word in name for word in _KEPT)
        return (
            compressed(name, weight, dtype, group) if is_linear else {name: weight.astype(ml_dtypes.bfloat16)}
        )

    save_hf(params, config, folder, store=store, more={"quantization_config": _description(dtype, group)})
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder_model.path / file).is_file():
            shutil.copyfile(folder_model.path / file, folder / file)
    return sum(2 * weight.size for weight in flatten(params).values())


def _stores_inputs_first(config: ModelConfig) -> bool:
    """Whether files of the model hold the weight of any product as [in, out]."""
    tensors = hf_tensors(config, written_family(config))
    products = {path: param for path, param in parameters(config).items() if param.init == "normal"}
    return any(set(tensors[path].dims[-2]) <= set(param.fan_in) for path, param in products.items())


def _sizes(config: ModelConfig, param: Param) -> Sequence[int]:
    """The sizes that a product with the parameter sums over; 0, which groups divide, if no product does."""
    sizes = dimensions(config)
    return [sizes[letter] for letter in param.fan_in] if param.init == "normal" else [0]


def compressed(name: str, weight: np.ndarray, dtype: str, group: int | None) -> dict[str, np.ndarray]:
    """The tensors of weight[out, in] in compressed-tensors' form. group: inputs of a scale; None: all."""
    record = number_type(dtype)
    wide = weight.astype(np.float32).reshape(weight.shape[0], -1, group or weight.shape[1])
    scales = np.maximum(np.abs(wide).max(-1) / record.largest, 1e-30)
    scaled = (wide / scales[..., None]).reshape(weight.shape)
    scaled = np.round(scaled) if record.is_integer else scaled
    scale = {f"{name}_scale": scales.astype(np.float32)}
    if group is None:
        return {name: scaled.astype(jax_dtype(dtype))} | scale
    shape = np.asarray(weight.shape, np.int64)
    return {f"{name}_packed": _packed(scaled.astype(np.int32) + 8), f"{name}_shape": shape} | scale


def _packed(values: np.ndarray) -> np.ndarray:
    """Eight unsigned 4-bit numbers of a row in each int32; the first is in the lowest bits."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8))).astype(np.uint32)
    parts = padded.reshape(padded.shape[0], -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(parts, axis=-1).view(np.int32)


def _description(dtype: str, group: int | None) -> dict[str, Any]:
    """quantization_config as compressed-tensors writes it."""
    record = number_type(dtype)
    weights: dict[str, Any] = {
        "num_bits": record.bits,
        "type": "int" if record.is_integer else "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if group else "channel",
    }
    if group:
        weights["group_size"] = group
    return {
        "quant_method": "compressed-tensors",
        "format": record.compressed_tensors,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }
