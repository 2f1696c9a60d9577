"""The number type in which published files hold a model's matrices, and plans that take it by default."""

from typing import Any

import pytest

from meshwright.api.inputs import ServedDtypes
from meshwright.hardware import catalog
from meshwright.models.presets import load_model
from meshwright.models.stored import stored_dtype
from meshwright.plan.serve.requests import Requests
from meshwright.plan.serve.search import Infeasible, search_serving
from meshwright.plan.what_fits import verdicts


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
        (_compressed("float", 8), "fp8"),
        (_compressed("int", 4), "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, None),
        ({"quant_method": ["fp8"]}, None),
        ({"quant_method": "gptq", "bits": [4]}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": {}}}}}, None),
        ("fp8", None),
    ],
)  # fmt: skip
def test_a_file_states_the_type_of_its_matrices(declared: Any, dtype: str | None) -> None:
    assert stored_dtype({"quantization_config": declared}) == dtype


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
        ("llama-3-70b", "h100:1", "take more chips, or --weights-dtype fp8, in which they are 70.6 GB"),
        ("gpt-oss-120b", "h100:1", "--engine vllm: with experts in mxfp4 weights are 61.7 GB"),
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
