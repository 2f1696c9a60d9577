"""Quantised weights: made, multiplied on every layout, and read from checkpoints of other tools."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import save_file
from tests.nn.small_models import LATENT, MIXTURE, OSS, TINY

from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.cached_ops import InferenceOps
from meshwright.nn.files.quantised_files import dequantised
from meshwright.nn.files.weights import _opened
from meshwright.nn.layer_weights import layered
from meshwright.nn.params import init_params
from meshwright.nn.products.quantised import Quantised, as_read, quantise, widened
from meshwright.nn.products.stored_products import in_order, weight_letters
from meshwright.nn.start.device_mesh import device_mesh, partition_spec
from meshwright.serve.device.programs import workload_step

pytestmark = pytest.mark.sampled(4)

RANDOM = np.random.default_rng(0)
# In one program, which compiles faster than its operations one by one.
WIDENED = jax.jit(partial(widened, dtype=jnp.float32))
B, S = 4, 8
TOKENS = RANDOM.integers(0, TINY.vocab_size, (B, S)).astype(np.int32)
# Half a step of each type: of int8 127 to the largest, of int4 7, of fp8 (e4m3) 3 bits of mantissa.
SINKS = replace(OSS, sliding_window=None, global_every=0)
HALF_A_STEP = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 2**-4}


@pytest.mark.parametrize("dtype", HALF_A_STEP)
def test_a_weight_is_off_by_half_a_step_at_most(dtype: str) -> None:
    w = RANDOM.normal(size=(6, 4, 48)).astype(np.float32)
    layout = Layout.of()
    with jax.set_mesh(device_mesh(layout)):
        found = jax.jit(quantise, static_argnums=(1, 2, 3))(jnp.asarray(w), dtype, 1, 16)
        wide = np.asarray(WIDENED(found))
    assert found.scales.shape == ((6, 4, 3) if dtype == "int4" else (6, 4))
    largest = np.abs(w.reshape(6, 4, -1, 16 if dtype == "int4" else 48)).max(-1, keepdims=True)
    bound = HALF_A_STEP[dtype] * np.broadcast_to(largest, (6, 4, largest.shape[2], 48 // largest.shape[2]))
    assert (np.abs(wide - w) <= bound.reshape(w.shape) + 1e-7).all()


def _logits(
    text: str,
    weights_dtype: str,
    matmul_dtype: str | None = None,
    wide: bool = False,
    config: ModelConfig = TINY,
) -> Any:
    """Logits after prompts under a layout; wide: with the weights that the quantised ones stand for."""
    layout = Layout.parse(text).replace(
        weights_dtype=weights_dtype, compute_dtype="f32", matmul_dtype=matmul_dtype
    )
    plain = layout.replace(weights_dtype="f32", matmul_dtype=None)
    run = plain if wide else layout
    step, (_, pools, last, *others), mesh = workload_step(config, run, Workload(B, S), "prefill")
    weights = layered(init_params(config, as_read(layout), mesh, seed=0), config, layout, mesh)
    with jax.set_mesh(mesh):
        if wide:
            is_leaf = lambda leaf: isinstance(leaf, Quantised)  # noqa: E731
            weights = jax.tree.map(WIDENED, weights, is_leaf=is_leaf)
        per_replica = B // layout.num_batch_shards
        heads = np.tile(np.arange(1, per_replica + 1) * S - 1, layout.num_batch_shards)
        columns = (TOKENS, np.tile(np.arange(S), B), np.zeros(B * S), np.arange(B) % per_replica, heads)
        inputs = [
            jax.device_put(np.asarray(x, np.int32).reshape(told.shape), told.sharding)
            for x, told in zip((np.zeros(last.shape), *columns), (last, *others), strict=True)
        ]
        empty = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), pools)
        return np.asarray(step(weights, empty, *inputs)[0])


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("data=2,tensor=2", "int8"),
        pytest.param("tensor=2", "int4", marks=pytest.mark.slow),
        pytest.param("data=1", "fp8", marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=2,tensor=2", "int4", marks=pytest.mark.slow),
        pytest.param("fsdp=2,tensor=2", "fp8", marks=pytest.mark.slow),
    ],
)
def test_products_are_those_of_the_numbers_that_weights_stand_for(text: str, dtype: str) -> None:
    # The groups of int4 are of what one device has, so that other layouts have other numbers.
    found, expected = _logits(text, dtype), _logits(text if dtype == "int4" else "data=1", dtype, wide=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("data=2,expert=2,tensor=2", "int8"),
        ("data=2,expert=2", "int4"),
        ("data=4,expert=4,grouped=true", "fp8"),
        ("fsdp=2,expert=2,tensor=2,grouped=true", "f32"),
    ],
)
def test_so_are_products_of_experts(text: str, dtype: str) -> None:
    how = {"wide": dtype != "f32", "config": MIXTURE}
    found, expected = _logits(text, dtype, config=MIXTURE), _logits("data=1", dtype, **how)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def _by_hand(x: np.ndarray, weight: Quantised, dtype: str) -> np.ndarray:
    """Rows by a weight[O, I]: each row in the type, with a scale of its own, and what both stand for."""
    scales = np.abs(x).max(1, keepdims=True) / {"int8": 127, "fp8": 448}[dtype]
    values = np.round(x / scales) if dtype == "int8" else (x / scales).astype(ml_dtypes.float8_e4m3fn)
    wide = np.asarray(weight.values, np.float64) * np.asarray(weight.scales, np.float64)[:, None]
    return scales * values.astype(np.float64) @ wide.T


@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [
        ("int8", "bf16"),
        ("fp8", "f32"),
        pytest.param("int8", "f32", marks=pytest.mark.slow),
        pytest.param("fp8", "bf16", marks=pytest.mark.slow),
    ],
)
def test_activations_are_cast_to_the_type_of_the_weights(dtype: str, compute_dtype: str) -> None:
    """Each device's share of a row has a scale of its own where a sum is split."""
    x = RANDOM.normal(size=(3, 1, 64)).astype(jax_dtype(compute_dtype))
    x[1] *= 1e-6  # nothing is left of it, had it the scale of others
    x[..., 32:] *= 100
    layout = Layout.of(tensor=2, weights_dtype=dtype, compute_dtype=compute_dtype, matmul_dtype=dtype)
    layout, mesh = layout.at("generate"), device_mesh(layout)
    ops, row = InferenceOps(TINY, layout), np.asarray(x, np.float32)[:, 0]
    for name, spec, parts in (("w_in", "BTD,DF->BTF", 1), ("w_out", "BTF,DF->BTD", 2)):
        with jax.set_mesh(mesh):
            plan = contraction_of(layout, name, spec)
            w = quantise(jnp.asarray(RANDOM.normal(size=(48, 64)), jnp.float32), dtype, 1, 1)
            here = partition_spec(plan.lhs)
            stored = in_order(plan.rhs_reshard, weight_letters(plan)).given
            values = jax.device_put(w.values, NamedSharding(mesh, partition_spec(stored)))
            read = Quantised(values, w.scales)
            found = ops._einsum(name, plan, jax.device_put(x, NamedSharding(mesh, here)), read)
        shares = zip(
            np.split(row, parts, 1), np.split(np.asarray(w.values, np.float32), parts, 1), strict=True
        )
        partial_sums = [_by_hand(some, Quantised(values, w.scales), dtype) for some, values in shares]
        expected = sum(partial_sums)
        # In bfloat16 the partial sums of two devices are rounded, and so is their sum.
        off = 1e-5 if compute_dtype == "f32" else 2**-7
        largest = sum(np.abs(each).max(1, keepdims=True) for each in partial_sums)
        assert (np.abs(np.asarray(found, np.float32)[:, 0] - expected) < off * largest).all()
        wide = row.astype(np.float64) @ np.asarray(widened(w, jnp.float32), np.float64).T
        assert (np.abs(expected - wide).max(1, keepdims=True) > 1e-3 * largest).all()


# Half a step of int8 is 0.4% of the largest of a row, of fp8 (3 bits of mantissa) 6% of each number at most,
# in every product of two layers and the head.
FAR = {"int8": 0.05, "fp8": 0.15}


@pytest.mark.parametrize(
    ("text", "dtype", "config"),
    [
        pytest.param("data=2,fsdp=2", "fp8", TINY, marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=2", "int8", TINY, marks=pytest.mark.slow),
        pytest.param("data=2,expert=2", "fp8", MIXTURE, marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=2", "fp8", LATENT, marks=pytest.mark.slow),
        pytest.param("data=2,expert=2", "fp8", SINKS, marks=pytest.mark.slow),
    ],
)
def test_narrow_products_are_those_of_one_device(text: str, dtype: str, config: ModelConfig) -> None:
    found, alone = (_logits(one, dtype, dtype, config=config) for one in (text, "data=1"))
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5 * np.abs(alone).max())
    wide = _logits("data=1", dtype, wide=True, config=config)
    assert 0 < np.abs(alone - wide).max() < FAR[dtype] * np.abs(wide).max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize(
    ("text", "config"), [("tensor=2", TINY), ("data=2,tensor=2", LATENT), ("expert=2,tensor=2", MIXTURE)]
)
def test_they_are_near_where_sums_are_split(text: str, dtype: str, config: ModelConfig) -> None:
    found, wide = (
        _logits(text, dtype, dtype, config=config),
        _logits("data=1", dtype, wide=True, config=config),
    )
    assert 0 < np.abs(found - wide).max() < FAR[dtype] * np.abs(wide).max()


# Checkpoints of other tools, each written by hand as its format says


def _nibbles(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32s along the last dimension, whose nibble i holds column order[i] of eight."""
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for place, column in enumerate(order):
        packed |= values[..., column::8].astype(np.uint32) << np.uint32(4 * place)
    return packed.view(np.int32)


OUT, IN, G = 16, 32, 8
Q = RANDOM.integers(0, 16, (IN, OUT))
ZEROS = RANDOM.integers(1, 16, (IN // G, OUT))
SCALES = RANDOM.uniform(0.1, 1, (IN // G, OUT)).astype(np.float16)
GROUPS = RANDOM.permutation(np.arange(IN) // G).astype(np.int32)


def _gptq() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    tensors = {
        "a.qweight": np.ascontiguousarray(_nibbles(Q.T).T),
        "a.qzeros": _nibbles(ZEROS - 1),
        "a.scales": SCALES,
        "a.g_idx": GROUPS,
    }
    expected = [
        [(Q[i, o] - ZEROS[GROUPS[i], o]) * float(SCALES[GROUPS[i], o]) for i in range(IN)] for o in range(OUT)
    ]
    return {"quant_method": "gptq", "bits": 4, "group_size": G}, tensors, np.array(expected)


def _awq() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"a.qweight": _nibbles(Q, order), "a.qzeros": _nibbles(ZEROS, order), "a.scales": SCALES}
    expected = [
        [(Q[i, o] - ZEROS[i // G, o]) * float(SCALES[i // G, o]) for i in range(IN)] for o in range(OUT)
    ]
    return {"quant_method": "awq", "bits": 4, "group_size": G}, tensors, np.array(expected)


def _packed() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    """compressed-tensors with zero points: both moved up by 8, zero points packed along the outputs."""
    scales = SCALES.T.astype(np.float32)
    tensors = {
        "a.weight_packed": _nibbles(Q.T),
        "a.weight_scale": np.ascontiguousarray(scales),
        "a.weight_zero_point": np.ascontiguousarray(_nibbles(ZEROS).T),
        "a.weight_shape": np.array([OUT, IN], np.int64),
    }
    expected = [[(Q[i, o] - ZEROS[i // G, o]) * scales[o, i // G] for i in range(IN)] for o in range(OUT)]
    groups = {"group_0": {"weights": {"num_bits": 4}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}, tensors, np.array(expected)


def _channel() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    values = RANDOM.integers(-127, 128, (OUT, IN)).astype(np.int8)
    scales = RANDOM.uniform(0.1, 1, (OUT, 1)).astype(np.float32)
    tensors = {"a.weight": values, "a.weight_scale": scales, "a.input_scale": np.ones(1, np.float32)}
    return {"quant_method": "compressed-tensors"}, tensors, values * scales


def _blocks() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    """DeepSeek-V3's fp8: a scale for each block, the last of which may be cut off."""
    values = RANDOM.normal(size=(OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    scales = RANDOM.uniform(0.1, 1, (2, 3)).astype(np.float32)
    expected = [[float(values[o, i]) * scales[o // 12, i // 12] for i in range(IN)] for o in range(OUT)]
    config = {"quant_method": "fp8", "weight_block_size": [12, 12]}
    return config, {"a.weight": values, "a.weight_scale_inv": scales}, np.array(expected)


def _pairs() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    """DeepSeek-V4's experts: two inputs in a byte, the first in its lower bits, a scale for 32 inputs."""
    codes, powers = RANDOM.integers(0, 16, (OUT, IN)), RANDOM.integers(-3, 4, (OUT, 1))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = [[numbers[codes[o, i]] * 2.0 ** powers[o, 0] for i in range(IN)] for o in range(OUT)]
    tensors = {
        "a.weight": (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8).view(np.int8),
        "a.scale": (2.0**powers).astype(ml_dtypes.float8_e8m0fnu),
    }
    return {"quant_method": "fp8", "weight_block_size": [128, 128]}, tensors, np.array(expected)


def _folder(tmp_path: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({**tensors, "b.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("form", [_gptq, _awq, _packed, _channel, _blocks, _pairs])
def test_weights_of_other_tools_are_what_their_formats_say(form: Any, tmp_path: Path) -> None:
    config, tensors, expected = form()
    with _opened(_folder(tmp_path, config, tensors)) as stored:
        found = dequantised(tmp_path, stored)
        assert sorted(found) == ["a.weight", "b.weight"]
        assert (found["a.weight"].get_shape(), found["a.weight"].get_dtype()) == ([OUT, IN], "F32")
        np.testing.assert_allclose(found["a.weight"][2:7, 1:], expected[2:7, 1:], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            "quantised by 'hqq'; fits: gptq, awq, compressed-tensors, fp8, mxfp4, or no quantisation",
        ),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits by gptq; fits: 2, 4, 8 bits"),
        ({"quant_method": "gptq", "bits": 4}, "has no a.scales, which its quantisation needs"),
    ],
)
def test_what_cannot_be_read_is_refused(config: dict, message: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, config, {"a.qweight": np.zeros((4, 16), np.int32)})
    with _opened(folder) as stored, pytest.raises(CheckpointError) as error:
        dequantised(folder, stored)
    assert str(error.value) == f"checkpoint {folder}: {message}"


def test_pairs_without_a_scale_for_each_block_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": np.zeros((4, 32), np.int8), "a.scale": np.ones((4, 1), np.float32)}
    folder = _folder(tmp_path, {"quant_method": "fp8"}, tensors)
    with _opened(folder) as stored, pytest.raises(CheckpointError) as error:
        dequantised(folder, stored)
    assert str(error.value) == (
        f"checkpoint {folder}: a.weight is [4, 32] and a.scale [4, 1]; fits: [out, in / 2] and [out, in / 32]"
    )


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    blocks, scales = np.zeros((2, 8, 3, 16), np.uint8), np.zeros((2, 8, 2), np.uint8)
    folder = _folder(tmp_path, {"quant_method": "mxfp4"}, {"a_blocks": blocks, "a_scales": scales})
    with _opened(folder) as stored, pytest.raises(CheckpointError) as error:
        dequantised(folder, stored)
    assert str(error.value) == (
        f"checkpoint {folder}: a_blocks is [2, 8, 3, 16] and a_scales [2, 8, 2]; "
        "fits: [E, out, in / 32, 16] and [E, out, in / 32]"
    )
