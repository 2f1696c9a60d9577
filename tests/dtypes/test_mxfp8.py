"""Products of MXFP8 against float32 and against the format's own numbers, gradients, training and prices."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.nn.small_models import TINY

from meshwright.audit.plan_audit import audit_plan
from meshwright.cli.main import main
from meshwright.hardware.catalog import chip
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.runnable import emulated
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.nn.products.narrow import narrow_multiply, narrow_product
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import Plan
from meshwright.platforms import GPU
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

LAYOUT = Layout.of(weights_dtype="f32", compute_dtype="f32")
PLAN = contraction_of(LAYOUT, "wq", "BTD,DNH->BTNH")
BLOCK = 32


def rounded(x: np.ndarray) -> np.ndarray:
    """x[rows, sum] in blocks of 32 numbers along the sum, with powers of two under which none exceeds 448."""
    result = np.empty_like(x)
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], BLOCK):
            block = x[i, j : j + BLOCK]
            largest = np.abs(block).max()
            exponent = np.ceil(np.log2(largest / 448)) if largest else 0
            scale = np.float32(2.0**exponent).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
            result[i, j : j + BLOCK] = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype("f4") * scale
    return result


def error_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The largest error of x[r, k] w[s, k] summed over k, by the format alone.

    e4m3 has 3 bits of mantissa: half a step is 2^-4 of a normal number, and 2^-10 of a scale below 2^-6 of
    it. A scale is under 2 / 448 of its block's largest number a. So |x' - x| <= |x| / 16 + a 2^-9 / 448, and
    of a product |x' w' - x w| <= |x| dw + |w| dx + dx dw.
    """

    def errors(x: np.ndarray) -> np.ndarray:
        filled = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % BLOCK)))
        largest = filled.reshape(len(x), -1, BLOCK).max(axis=2)
        return np.abs(x) / 16 + np.repeat(largest, BLOCK, axis=1)[:, : x.shape[1]] * 2**-9 / 448

    of_x, of_w = errors(x), errors(w)
    return np.abs(x) @ of_w.T + of_x @ np.abs(w).T + of_x @ of_w.T


def test_products_and_gradients_are_of_numbers_in_blocks() -> None:
    """Along whatever each sums over, the last block not full; blocks that differ by 2^20 keep their bits."""
    random = np.random.default_rng(1)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in [(2, 75, 80), (80, 3, 24)])
    d_y = random.normal(size=(2, 75, 3, 24)).astype(np.float32)
    x[..., 32:64] *= 2.0**-20
    w[:32] *= 2.0**10
    w[64:] = 0

    def both(x: jax.Array, w: jax.Array) -> tuple:
        y, pull_back = jax.vjp(lambda x, w: narrow_product(PLAN, jnp.float32, "mxfp8", x, w), x, w)
        return y, *pull_back(jnp.asarray(d_y))

    with jax.set_mesh(device_mesh(LAYOUT)):
        y, d_x, d_w = (np.asarray(each) for each in jax.jit(both)(x, w))
    flat_x, flat_w, flat_d = x.reshape(150, 80), w.reshape(80, 72), d_y.reshape(150, 72)
    for result, lhs, rhs in [
        (y.reshape(150, 72), flat_x, flat_w.T),
        (d_x.reshape(150, 80), flat_d, flat_w),
        (d_w.reshape(80, 72), flat_x.T, flat_d.T),
    ]:
        expected = rounded(lhs) @ rounded(rhs).T
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        error = np.abs(result - lhs @ rhs.T)
        assert (error <= error_bound(lhs, rhs) * (1 + 1e-4) + 1e-5 * np.abs(expected).max()).all()
        assert 0.005 < np.linalg.norm(error) / np.linalg.norm(lhs @ rhs.T) < 0.06


def test_bfloat16_holds_the_numbers_and_their_scales() -> None:
    """So emulated products in it are those in float32, except for the order of sums."""
    random = np.random.default_rng(2)
    x, w = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in [(32, 64), (64, 48)])
    wide, narrow = (
        narrow_multiply(dtype, "mxfp8")("CI,IO->CO", x, w, True) for dtype in (jnp.float32, jnp.bfloat16)
    )
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=1e-5 * np.abs(wide).max())


@pytest.mark.parametrize("extreme", [0.0, 1e-38, 3e38])
def test_extreme_numbers_stay_finite(extreme: float) -> None:
    x = jnp.full((1, BLOCK), extreme, jnp.float32)
    y = narrow_multiply(jnp.float32, "mxfp8")("CI,IO->CO", x, jnp.full((BLOCK, 1), 1 / BLOCK), True)
    np.testing.assert_allclose(np.asarray(y)[0, 0], extreme, rtol=2**-4, atol=1e-30)


@pytest.mark.slow
def test_a_model_trains_as_in_bfloat16() -> None:
    """Losses within 2% at every step: gradients keep 95% of their direction, as in fp8 with a scale a row."""
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (16, 17))
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=20)
    losses = []
    for matmul_dtype in (None, "mxfp8"):
        layout = Layout.of(weights_dtype="f32").replace(matmul_dtype=matmul_dtype)
        step = CompiledStep(TINY, layout, Workload(16, 16), optimizer, chip_flops_per_second=1e11)
        state, found = step.init(0), []
        for _ in range(5):
            state, metrics = step.step(state, tokens)
            found.append(float(metrics["loss"]))
        losses.append(found)
    plain, narrow = losses
    assert narrow == pytest.approx(plain, rel=0.02) and narrow != plain
    assert narrow[-1] < 0.95 * narrow[0]


def test_blackwell_multiplies_it_at_the_rate_of_fp8_and_others_in_16_bits() -> None:
    for one in map(chip, ("b200", "b300", "gb200-nvl72", "gb300-nvl72")):
        assert one.has_units("mxfp8") and one.flops("mxfp8") == one.flops_per_second["fp8"]
        assert one.matmul_flops_per_second("mxfp8") == one.matmul_flops_per_second("fp8")
    for one in map(chip, ("h100", "a100-80gb", "v6e", "tpu7x", "mi300x")):
        assert not one.has_units("mxfp8") and one.flops("mxfp8") == one.flops("bf16")


@pytest.mark.parametrize(
    ("name", "chips"), [("cpu", "CPUs have"), ("h100", "these chips have"), ("v6e", "these chips have")]
)
def test_emulated_products_are_announced(name: str, chips: str) -> None:
    layout, machine = Layout.of(matmul_dtype="mxfp8"), chip(name)
    how = "operands are rounded to it and multiplied in bf16, which saves no time"
    assert emulated(layout, machine.platform, machine) == f"{chips} no products of mxfp8: {how}"
    assert emulated(layout, GPU, chip("b200")) is None


@pytest.mark.slow
def test_the_compiled_step_is_the_planned_one() -> None:
    config = replace(load_model("tiny"), d_model=256, d_ff=512)
    words = {"weights_dtype": "f32", "compute_dtype": "f32", "matmul_dtype": "mxfp8"}
    plan = Plan(config, "cpu:8", Workload(16, 64), Layout.of(fsdp=4, tensor=2).replace(**words))
    audit = audit_plan(plan, "cpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])


@pytest.mark.slow
def test_the_command_line_plans_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.py").write_text("def f(x):\n    return x + 1\n" * 40)
    plan, layout = tmp_path / "plan.toml", "fsdp=4,tensor=2,matmul_dtype=mxfp8"
    options = [
        "--set",
        "vocab_size=512",
        "--hardware",
        "cpu:8",
        "--batch-tokens",
        "512",
        "--seq-len",
        "32",
        "--layout",
        layout,
    ]
    assert main(["plan", "train", "--model", "tiny", *options, "-o", str(plan)]) == 0
    assert 'matmul_dtype = "mxfp8"' in plan.read_text()
    run = ["--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--steps", "2"]
    assert main(["train", str(plan), *run]) == 0
    assert "CPUs have no products of mxfp8: operands are rounded to it" in capsys.readouterr().err
