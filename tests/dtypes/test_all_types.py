"""The records of number types, and that other packages read them."""

import ast
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import meshwright
from meshwright.dtypes import (
    KNOWN,
    NUMBER_TYPES,
    NumberType,
    Use,
    dtype_bytes,
    named,
    number_type,
    of_hlo,
    types_for,
)
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import chip
from meshwright.layout.precision import FITS

SOURCE = Path(meshwright.__file__).parent
# Types of sums, of norms and of indices, and the default of layouts: not choices of a user.
_COMMON = {"f32", "bf16", "i32"}
# Mentions of other types in code and messages outside dtypes/: fixed examples and defaults. Families and the
# words of other programs, which a new type does not touch, are not counted.
MOST_MENTIONS = 36


def test_dtypes() -> None:
    sizes = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "int8": 1, "fp4": 0.5, "int4": 0.5, "i32": 4}
    assert {dtype: dtype_bytes(dtype) for dtype in sizes} == sizes
    with pytest.raises(MeshwrightError) as caught:
        dtype_bytes("real")
    assert str(caught.value) == f"dtype 'real' is unknown; known: {', '.join(KNOWN)}"
    with pytest.raises(MeshwrightError, match="dtype 'float32' is unknown; write f32"):
        dtype_bytes("float32")


def test_every_file_is_a_type_under_its_own_name() -> None:
    files = {path.stem for path in (SOURCE / "dtypes").glob("*.py")}
    assert files - {"__init__", "number_type", "all_types"} == set(NUMBER_TYPES)


@pytest.mark.parametrize("record", NUMBER_TYPES.values(), ids=NUMBER_TYPES)
def test_a_record_agrees_with_the_format_of_its_elements(record: NumberType) -> None:
    dtype = np.dtype(record.jax)
    if record.levels:
        assert len(record.levels) == 2**record.bits and list(record.levels) == sorted(record.levels)
        assert record.largest == max(map(abs, record.levels)) and ml_dtypes.iinfo(dtype).bits == record.bits
    elif record.is_integer:
        info = ml_dtypes.iinfo(dtype)
        assert (info.bits, record.largest) == (record.bits, info.max)
    else:
        info = ml_dtypes.finfo(dtype)
        assert (info.bits, np.float32(record.largest)) == (record.bits, np.float32(info.max))
    assert all(int(re.findall(r"\d+", name)[0]) == record.bits for name in record.hlo)
    assert all(named(alias) == record.name for alias in (record.name, *record.aliases))


def test_names_belong_to_a_single_type() -> None:
    records = NUMBER_TYPES.values()
    for names in (
        [name for record in records for name in (record.name, *record.aliases)],
        [name for record in records for name in record.hlo[:1]],
    ):
        assert len(names) == len(set(names))
    assert of_hlo("f8e3m4") == "fp8" and of_hlo("u4") == "int4" and of_hlo("c64") == "c64"


def test_scales_are_of_a_known_type() -> None:
    """Blocks are as long as those of products, so that a scale belongs to a single block."""
    for record in NUMBER_TYPES.values():
        if record.scales:
            assert number_type(record.scales.dtype).scales is None or record.scales.has_global
        assert not record.is_blocked or (record.scales is not None and record.scales.block)


def test_products_widen_to_types_that_hold_the_numbers() -> None:
    """Integers into floats, never back; a number of a block, with its scale, into 16 bits."""
    wider = {
        name: {other for other in KNOWN if record.widens_to(number_type(other))}
        for name, record in NUMBER_TYPES.items()
    }
    assert {"fp8", "f16", "bf16", "f32"} <= wider["fp8"] and "int8" not in wider["fp8"]
    assert {"int8", "fp8", "bf16"} <= wider["int4"] and "fp8" not in wider["int8"]
    assert {"f16", "bf16", "f32"} <= wider["fp4"] and not {"fp8", "int8"} & wider["fp4"]


def test_rates_fall_back_to_wider_types() -> None:
    a100, h100, b200 = map(chip, ("a100-80gb", "h100", "b200"))
    assert a100.flops("fp8") == a100.flops("bf16") and not a100.has_units("fp8")
    assert h100.flops("int4") == h100.flops("int8")
    assert h100.flops("fp4") == h100.flops("bf16") and b200.flops("fp4") == b200.flops_per_second["fp4"]


def test_plans_fit_what_programs_run_and_more() -> None:
    of_fields: dict[str, Use] = {
        "weights_dtype": "weights",
        "compute_dtype": "activations",
        "matmul_dtype": "operands",
        "saved_dtype": "saved activations",
        "gradients_dtype": "gradients",
        "optimizer_dtype": "optimizer state",
        "kv_dtype": "cache",
    }
    for field, use in of_fields.items():
        runs = {*types_for(use, "train"), *types_for(use, "serve")}
        assert runs <= set(FITS[field]) == set(types_for(use))


def _mentions(path: Path) -> list[str]:
    """Type names in a file's code and messages; comments and docstrings are not counted."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        f"{path.relative_to(SOURCE)}:{node.lineno} {name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        for name in sorted(set(re.findall(r"\w+", node.value)) & (NUMBER_TYPES.keys() - _COMMON))
    ]


def test_other_packages_read_the_records() -> None:
    # A model family's record says in which type its files are.
    others = {"dtypes", "families", "other_subjects.py", "other_words.py", "other_values.py"}
    files = [path for path in SOURCE.rglob("*.py") if not others & {*path.relative_to(SOURCE).parts}]
    mentions = [mention for path in files for mention in _mentions(path)]
    assert len(mentions) <= MOST_MENTIONS, (
        "too many names of number types outside dtypes/. Ask a record instead: number_type(name).bits, "
        ".scales or .is_integer, or types_for(use, phase); add a field to NumberType if none says it.\n"
        + "\n".join(mentions)
    )
