"""Tensors of e5m2 in checkpoints, and their name in audits."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from meshwright.audit.facts.communication import bits_of
from meshwright.dtypes import KNOWN, of_hlo
from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.nn.files.quantised_files import dequantised
from meshwright.nn.files.weights import _opened


def test_weights_of_a_checkpoint_are_read_with_their_scales(tmp_path: Path) -> None:
    values = np.array([[1.75, -57344, 2.0**-16], [0.0, 96, -3]], ml_dtypes.float8_e5m2)
    scales = np.array([[0.5], [2]], np.float32)
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": values, "a.weight_scale": scales}, tmp_path / "model.safetensors")
    with _opened(tmp_path) as stored:
        assert stored["a.weight"].get_dtype() == "F8_E5M2"
        weight = dequantised(tmp_path, stored)["a.weight"][:, :]
    np.testing.assert_array_equal(weight, [[0.875, -28672, 2.0**-17], [0, 192, -6]])


def test_audits_name_it_and_layouts_refuse_it() -> None:
    assert (of_hlo("f8e5m2"), of_hlo("f8e5m2fnuz"), bits_of("e5m2")) == ("e5m2", "e5m2", 8)
    assert "e5m2" not in KNOWN
    with pytest.raises(LayoutError, match="matmul_dtype = 'e5m2'; fits: "):
        Layout.of(matmul_dtype="e5m2")
