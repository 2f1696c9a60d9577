"""The number type in which published files hold a model's matrices, and plans that take it by default."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.inputs import ServedDtypes
from meshwright.errors import CheckpointError
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.precision import stored_bytes
from meshwright.layout.workload import Workload
from meshwright.models.hf import from_hf
from meshwright.models.parameters import parameters
from meshwright.models.presets import load_model
from meshwright.models.stored import stored_dtype
from meshwright.nn.files.quantised_files import dequantised
from meshwright.plan.serve.requests import Requests
from meshwright.plan.serve.search import Infeasible, search_serving
from meshwright.plan.serve.steps import StepBytes
from meshwright.plan.what_fits import verdicts
from meshwright.plan_file import Plan, load_plan, save_plan


def _compressed(kind: str, bits: int) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"type": kind, "num_bits": bits}}},
    }


@pytest.mark.parametrize(
    ("declared", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 3}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_algo": "FP8", "ignore": ["lm_head"]}, "fp8"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}, "fp8"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": [8]}, "b": 8}}, None),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": 8}, None),
        (_compressed("float", 8), "fp8"),
        (_compressed("int", 4), "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, None),
        ({"quant_method": ["fp8"]}, None),
        ({"quant_method": "gptq", "bits": [4]}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": {}}}}}, None),
    ],
)  # fmt: skip
def test_a_file_states_the_type_of_its_matrices(declared: Any, dtype: str | None) -> None:
    assert stored_dtype({"quantization_config": declared}) == dtype


def test_a_folder_states_the_type_in_a_file_of_modelopt(tmp_path: Path) -> None:
    """Of two types the narrower is stored, and modules of the other count as not quantised."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = {f"model.layers.{n}.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16} for n in range(2)}
    layers |= {"model.layers.1.mlp.down_proj": {"quant_algo": "FP8"}}
    table = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: does not parse"):
        dequantised(tmp_path, {})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": table}))
    model = load_model(str(tmp_path))
    assert model.stored_dtype == "fp4"
    assert {each.path: each.num_layers for each in model.unquantised} == {
        "embed": 1, "unembed": 1, "layers/w_out": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "by_engine", "words"),
    [
        ("deepseek-v3", False, {"weights_dtype": "fp8", "experts_dtype": None}),
        ("gpt-oss-120b", False, {"weights_dtype": "bf16", "experts_dtype": None}),  # mw serve has no mxfp4
        ("gpt-oss-120b", True, {"weights_dtype": "bf16", "experts_dtype": "mxfp4"}),
        ("llama-3-70b", True, {"weights_dtype": "bf16", "experts_dtype": None}),
    ],
)
def test_plans_to_serve_take_the_type_of_published_files(
    model: str, by_engine: bool, words: dict[str, str | None]
) -> None:
    gpu, cpu, config = catalog.load("h200:8"), catalog.load("cpu:1"), load_model(model)
    [found] = ServedDtypes().precisions([gpu], config, by_engine=by_engine)
    assert {name: found.get(name) for name in words} == words
    [asked] = ServedDtypes(weights_dtype="bf16").precisions([gpu], config, by_engine=by_engine)
    assert asked["weights_dtype"] == "bf16" and "experts_dtype" not in asked
    [on_cpu] = ServedDtypes().precisions([cpu], config, by_engine=by_engine)
    assert on_cpu["weights_dtype"] == cpu.chip.platform.dtype


@pytest.mark.parametrize(
    ("model", "machine", "words"),
    [
        ("llama-3-70b", "h100:1", "take more chips, or --weights-dtype fp8: 70.6 GB of weights"),
        ("gpt-oss-120b", "h100:1", "--engine vllm: with experts in mxfp4 weights are 65.2 GB"),
    ],
)
def test_a_model_too_large_in_16_bits_is_answered_with_a_type_that_fits(
    model: str, machine: str, words: str
) -> None:
    hardware = [catalog.load(machine)]
    precisions = ServedDtypes().precisions(hardware, load_model(model))
    with pytest.raises(Infeasible, match=words):
        search_serving(load_model(model), hardware, Requests(1024, 512), precisions=precisions)


@pytest.mark.parametrize(("weights", "words"), [("int8", "or --weights-dtype int4"), ("int4", "more chips$")])
def test_a_request_too_long_is_answered_with_narrower_weights_if_there_are_any(
    weights: str, words: str
) -> None:
    config, hardware = load_model("llama-3-8b"), [catalog.load("rtx-4090:1")]
    precisions = ServedDtypes(weights_dtype=weights).precisions(hardware, config)
    with pytest.raises(Infeasible, match=words):
        search_serving(config, hardware, Requests(230_000, 100), precisions=precisions)


def test_fit_has_a_line_for_the_type_of_published_files() -> None:
    ways = {each.way: each for each in verdicts(load_model("gpt-oss-120b"), catalog.load("h100:1"), 4096)}
    published = ways["serve as published, mxfp4"]
    assert published.fits and published.not_run and not ways["serve in bf16"].fits
    plain = verdicts(load_model("llama-3-8b"), catalog.load("h100:1"), 4096)
    assert not any("published" in each.way for each in plain)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
_ATTENTION = {f"layers/{name}": 3 for name in ("wq", "wk", "wv", "wo")}


@pytest.mark.parametrize(
    ("key", "listed", "wide"),
    [
        ("modules_to_not_convert", ["lm_head"], {"unembed": 1}),
        ("modules_to_not_convert", ["model.layers.0.mlp.up_proj", "model.layers.2.mlp"],
         {"layers/w_in": 2, "layers/w_gate": 1, "layers/w_out": 1}),
        ("ignored_layers", ["self_attn"], _ATTENTION),
        ("ignore", ["re:.*self_attn.*"], _ATTENTION),
        ("ignore", ["re:.*layers\\.1\\..*q_proj$"], {"layers/wq": 1}),
        ("exclude_modules", ["model.layers.*.self_attn*", "lm_head"], _ATTENTION | {"unembed": 1}),
        ("modules_to_not_convert", ["language_model.model.layers.1.self_attn.k_proj"], {"layers/wk": 1}),
        ("modules_to_not_convert", ["up", "visual", 3, "model.layers.10"], {}),
        ("ignore", [], {}),
    ],
)  # fmt: skip
def test_listed_modules_stay_wide(key: str, listed: list[Any], wide: dict[str, int]) -> None:
    model = from_hf(_LLAMA | {"quantization_config": {"quant_method": "fp8", key: listed}}, "tiny")
    found = {each.path: each.num_layers for each in model.unquantised}
    assert found == {"embed": 1} | wide  # no file quantises the embedding
    assert {each.dtype for each in model.unquantised} == {"fp8"}


@pytest.mark.parametrize(
    "declared", [{"quant_method": "fp8"}, {"quant_method": "odd", "ignore": ["lm_head"]}]
)
def test_without_a_list_or_a_known_type_no_weight_is_marked(declared: dict[str, Any]) -> None:
    assert from_hf(_LLAMA | {"quantization_config": declared}, "tiny").unquantised == ()


def test_weights_are_counted_each_in_its_own_type() -> None:
    """LLaMA 3.1 405B in fp8: 126 layers, D = 16,384, F = 53,248, N = 128, K = 8, H = 128, V = 128,256."""
    d, f, heads, kv = 16_384, 53_248, 128 * 128, 8 * 128
    attention = 126 * 2 * (2 * d * heads + 2 * d * kv)  # bf16 in all layers
    outer = 2 * 2 * 3 * d * f  # bf16 in the first and in the last layer
    inner = 124 * (3 * d * f + 4 * (2 * f + d))  # fp8, with a float32 scale of each output
    norms, tables = 2 * (2 * 126 + 1) * d, 2 * 2 * 128_256 * d
    config = load_model("llama-3.1-405b-fp8")
    layout = Layout.of(tensor=8, weights_dtype="fp8", compute_dtype="bf16")
    assert (
        stored_bytes(config, layout.precision)
        == attention + outer + inner + norms + tables
        == 487_229_259_776
    )
    on_a_chip = StepBytes(config, layout.at("generate")).weights
    # Norms, and the scales of rows that chips sum over, are whole on every chip.
    whole = norms + 124 * 4 * d
    assert on_a_chip == pytest.approx((487_229_259_776 - whole) / 8 + whole, rel=1e-6)
    plain = stored_bytes(load_model("llama-3.1-405b"), layout.precision)
    assert plain < 0.85 * 487_229_259_776  # all matrices in fp8


def test_the_first_file_of_405b_had_each_kv_head_twice() -> None:
    """62.0 GB a chip were measured on 8 H100 with the file of July 2024, whose config.json had K = 16.

    sgl-project/sglang pull request 723 sets K = 8 for it, as today's file has.
    """
    config = replace(load_model("llama-3.1-405b-fp8"), num_kv_heads=16)
    layout = Layout.of(tensor=8, weights_dtype="fp8", compute_dtype="bf16").at("generate")
    assert StepBytes(config, layout).weights == pytest.approx(62.0e9, rel=1e-3)


def test_wide_weights_stay_so_in_a_plan_and_in_the_server(tmp_path: Path) -> None:
    listed = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "lm_head"]}
    model = from_hf(_LLAMA | {"quantization_config": listed}, "tiny")
    layout = Layout.of(weights_dtype="fp8", compute_dtype="bf16")
    save_plan(Plan(model, "h100:1", Workload(1, 64, "generate"), layout), tmp_path / "plan.toml")
    read = load_plan(tmp_path / "plan.toml").model
    assert read.unquantised == model.unquantised
    stored = {path: layout.precision.stored_dtype(path, param) for path, param in parameters(read).items()}
    assert {path for path, dtype in stored.items() if dtype == "fp8"} == {
        "layers/w_gate", "layers/w_in", "layers/w_out",
    }  # fmt: skip
    other = Layout.of(weights_dtype="int8", compute_dtype="bf16").precision
    assert other.stored_dtype("layers/wq", parameters(read)["layers/wq"]) == "int8"  # another quantisation


@pytest.mark.parametrize(
    ("name", "preset", "dtype"),
    [
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b-fp8", "fp8"),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3-30b-a3b", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b", "int4"),
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-r1", "fp4"),
        ("Qwen/Qwen3-32B", "qwen3-32b", None),
    ],
)
def test_names_of_repositories_state_the_type(name: str, preset: str, dtype: str | None) -> None:
    assert (load_model(name).name, load_model(name).stored_dtype) == (preset, dtype)
