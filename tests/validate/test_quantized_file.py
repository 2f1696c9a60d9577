"""Records of published files of quantised weights."""

import pytest

from meshwright.layout import Layout
from meshwright.models.parameters import parameters, stacked_layers
from meshwright.models.presets import PRESETS
from meshwright.plan.serve.with_engine import engine_tables_dtype
from meshwright.validate.quantized_file import QUANTIZED_FILES, wide_weights

_NARROW = {"expert_gate", "expert_in", "expert_out"}
_SHARED = {"shared_gate", "shared_in", "shared_out"}
_DENSE = {"w_gate", "w_in", "w_out"}


@pytest.mark.parametrize(
    ("model", "narrow"),
    [
        ("deepseek-v3", _NARROW | _SHARED | _DENSE | {"wo"}),
        ("deepseek-v3.2", _NARROW | _SHARED | _DENSE | {"wo"}),
        ("kimi-k2.5", _NARROW | _SHARED | _DENSE),
        ("glm-5", _NARROW | _SHARED | _DENSE),
        ("glm-5.2", _NARROW),
        ("minimax-m2.5", _NARROW),
        ("qwen3-235b-a22b", _NARROW | {"wq", "wk", "wv", "wo"}),
        ("qwen3.5-397b-a17b", _NARROW),
    ],
)
def test_the_narrow_matrices_of_a_file(model: str, narrow: set[str]) -> None:
    config = PRESETS[model]
    wide = wide_weights(config, "fp4")
    assert wide is not None
    layers = {matrix.path: matrix.num_layers for matrix in wide}
    precision = Layout.of(weights_dtype="fp4", matmul_dtype="fp4", tables_dtype="bf16").precision
    unlisted = {path: param for path, param in parameters(config).items() if path not in layers}
    stored = {
        path.rpartition("/")[2]
        for path, param in unlisted.items()
        if param.init == "normal" and precision.stored_dtype(path, param) == "fp4"
    }
    assert stored == narrow
    for path, num_layers in layers.items():  # a file lists a matrix in all of its layers
        assert num_layers == (len(stacked_layers(config, path.rpartition("/")[0])) or 1), path


def test_a_model_or_a_type_without_a_record() -> None:
    assert wide_weights(PRESETS["deepseek-v3"], "fp8") is None
    assert wide_weights(PRESETS["gpt-oss-120b"], "fp4") is None


@pytest.mark.parametrize("name", QUANTIZED_FILES.names)
def test_a_record_has_its_models_and_two_sources(name: str) -> None:
    file = QUANTIZED_FILES[name]
    assert file.name == name
    assert file.models
    assert all(PRESETS[model].moe is not None for model in file.models)
    assert len(file.sources["wide"].split("; ")) >= 2


def test_engines_keep_tables_wide() -> None:
    assert engine_tables_dtype("fp8", "bf16") == "bf16"
    assert engine_tables_dtype("bf16", "bf16") is None
