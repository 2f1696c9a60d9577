"""The C++ extension for CPUs: against numpy and XLA, built anew, and where it cannot be had."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.needed import needs_native
from tests.nn.small_models import TINY

from meshwright.layout import Layout
from meshwright.native import kernels
from meshwright.nn import layer_weights
from meshwright.nn.attention.paged import PADDING, Rows
from meshwright.nn.layer_weights import layered
from meshwright.nn.params import init_params
from meshwright.nn.products.quantised import as_read, quantise, quantised_product, widened
from meshwright.nn.products.stored_products import rows_product
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.platforms import CPU
from meshwright.serve.device.cache_programs import CacheSizes
from meshwright.serve.device.forward_steps import StepShape
from meshwright.serve.device.programs import InferencePrograms

# Numbers of a row of whole steps, in one block of a panel and in several, and rows of a weight.
SIZES, WIDTHS = (
    st.one_of(st.integers(1, 50), st.integers(2050, 2060)).map(lambda n: 4 * n),
    st.integers(1, 75),
)


def _operands(rows: int, size: int, width: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(rows * size * width)
    x = jnp.asarray(random.normal(size=(rows, size)), jnp.bfloat16 if dtype == jnp.int8 else dtype)
    if dtype == jnp.int8:
        return x, jnp.asarray(random.integers(-128, 128, (width, size)), jnp.int8)
    return x, jnp.asarray(random.normal(size=(width, size)), dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[R, I] by w[O, I], which is put in panels."""
    with jax.set_mesh(device_mesh(Layout.parse(""))):
        return kernels.product(x, kernels.panel_order(w))


# Every example has shapes of its own, for which some programs are compiled.
@settings(max_examples=30)
@given(st.integers(1, 40), SIZES, WIDTHS, st.sampled_from(["bfloat16", "float32"]), st.booleans())
def test_a_product_is_that_of_float32(
    rows: int, size: int, width: int, dtype: str, has_wide_rows: bool
) -> None:
    needs_native()
    x, w = _operands(rows, size, width, dtype)
    x = x.astype(jnp.float32) if has_wide_rows else x
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
    np.testing.assert_allclose(_product(x, w), expected, atol=2e-6 * size, rtol=1e-5)


@settings(max_examples=30)
@given(st.integers(1, 40), SIZES, WIDTHS, st.sampled_from(["bfloat16", "float32"]))
def test_a_product_with_int8_may_leave_rows_as_they_are(rows: int, size: int, width: int, kind: str) -> None:
    needs_native()
    x, w = _operands(rows, size, width, jnp.int8)
    x = x.astype(kind)
    with jax.set_mesh(device_mesh(Layout.parse(""))):
        y = kernels.widened_product(x, kernels.panel_order(w))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(y, expected, atol=2e-4 * np.sqrt(size), rtol=1e-5)


# One program quantises and multiplies: each example has new shapes, and compiling takes most of its time.
@partial(jax.jit, static_argnums=2)
def _int4_products(x: jax.Array, w: jax.Array, group: int) -> tuple[jax.Array, ...]:
    """Products of x[R, I], as it is and in int8, with w[O, I] in int4; and w as quantised."""
    made = quantise(w.astype(jnp.float32), "int4", 1, group)
    parts = kernels.panel_order(made.values), kernels.panel_order(made.scales)
    products = (kernels.grouped_int4_product(x, *parts, rounds=rounds) for rounds in (False, True))
    return *products, widened(made, jnp.float32)


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.one_of(st.integers(1, 9), st.just(130)),
    st.sampled_from([8, 16, 32]),
    WIDTHS,
    st.sampled_from(["bfloat16", "float32"]),
)
def test_a_product_with_int4_adds_the_sums_of_groups(
    rows: int, groups: int, group: int, width: int, kind: str
) -> None:
    needs_native()
    x, w = _operands(rows, groups * group, width, kind)
    x = x.at[rows // 2].set(0)
    with jax.set_mesh(device_mesh(Layout.parse(""))):
        y, of_rounded, wide = _int4_products(x, w, group)
    numbers = np.asarray(wide, np.float64).T
    close = {"atol": 1e-5 * np.sqrt(groups * group), "rtol": 1e-5}
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ numbers, **close)
    values, scales = _rounded(x)
    np.testing.assert_allclose(of_rounded, values @ numbers * scales, **close)


def _rounded(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Rows in int8, and their scales."""
    wide = np.asarray(x, np.float32)
    scales = np.maximum(np.abs(wide).max(1, keepdims=True) / np.float32(127), np.float32(1e-30))
    return np.round(wide / scales).astype(np.int32), scales


@settings(max_examples=30)
@given(st.integers(1, 40), SIZES, WIDTHS, st.sampled_from(["bfloat16", "float32"]))
def test_a_product_with_int8_is_exact_but_for_the_scale(rows: int, size: int, width: int, kind: str) -> None:
    needs_native()
    x, w = _operands(rows, size, width, jnp.int8)
    values, scales = _rounded(x)
    whole = values @ np.asarray(w, np.int32).T
    np.testing.assert_array_equal(_product(x.astype(kind), w), whole.astype(np.float32) * scales)


def test_it_quantises_rows_as_xla_does() -> None:
    needs_native()
    x, w = _operands(8, 256, 64, jnp.int8)

    def by_xla(x: jax.Array) -> jax.Array:
        return quantised_product(rows_product, x, w)

    # XLA multiplies by the reciprocal of 127: a number on the border of two steps may fall to the other.
    step = 128 * np.abs(np.asarray(x, np.float32)).max() / 127
    np.testing.assert_allclose(_product(x, w), jax.jit(by_xla)(x), atol=2 * step)


def test_a_row_of_zeros_or_of_nan_is_one_of_the_product() -> None:
    needs_native()
    x, w = _operands(5, 72, 9, jnp.int8)
    x = x.at[1].set(0).at[3, 5].set(jnp.nan)
    found = np.asarray(_product(x, w))
    assert (found[1] == 0).all()
    assert np.isnan(found[3]).all()
    assert np.isfinite(found[[0, 2, 4]]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("size", [92, 2060])
def test_rows_of_zeros_are_passed_over(dtype: Any, size: int) -> None:
    """Their products with weights that are no numbers would be none; others are as alone, to the bit."""
    needs_native()
    x, w = _operands(40, size, 75, dtype)
    there = np.sort(np.random.default_rng(size).permutation(40)[:13])
    sparse = jnp.zeros_like(x).at[there].set(x[there]).at[there[0] + 1 :: 7].multiply(-1)
    found = np.asarray(_product(sparse, w))
    alone = np.asarray(_product(sparse[there], w))
    np.testing.assert_array_equal(found[there], alone)
    assert (np.delete(found, there, axis=0) == 0).all()
    if dtype != jnp.int8:
        broken = np.asarray(_product(sparse, w.at[3].set(jnp.nan)))
        assert (np.delete(broken, there, axis=0) == 0).all() and np.isnan(broken[there, 3]).all()
    assert (np.asarray(_product(jnp.zeros_like(x), w)) == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_rows_are_found_in_panels(dtype: Any) -> None:
    needs_native()
    _, w = _operands(1, 92, 75, dtype)
    ids = jnp.asarray([[0, 15, 16], [63, 64, 74]], jnp.int32)
    with jax.set_mesh(device_mesh(Layout.parse(""))):
        found = kernels.rows_of_panels(kernels.panel_order(w), ids)
    np.testing.assert_array_equal(found, w[ids])


@pytest.mark.parametrize(
    ("of_rows", "dtype"),
    [
        (jnp.float32, jnp.float32),
        *((rows, of) for rows in (jnp.float32, jnp.bfloat16) for of in (jnp.bfloat16, jnp.int8)),
    ],
)
def test_a_row_does_not_depend_on_the_others(dtype: Any, of_rows: Any) -> None:
    """To the bit, with every number of rows beside it, and wherever it stands among them."""
    needs_native()
    x, w = _operands(32, 92, 75, dtype)
    rows_of = np.asarray(x.astype(of_rows))
    with jax.set_mesh(device_mesh(Layout.parse(""))):
        panels = kernels.panel_order(w)
        multiply = partial(jax.jit(kernels.product), w=panels)
        alone = np.concatenate([multiply(rows_of[row : row + 1]) for row in range(32)])
        for rows in range(2, 33):
            np.testing.assert_array_equal(multiply(rows_of[:rows]), alone[:rows])
            np.testing.assert_array_equal(multiply(rows_of[32 - rows :]), alone[32 - rows :])


def test_attention_of_a_row_does_not_depend_on_the_others() -> None:
    """To the bit; over keys of five pages of six positions in f32, bf16 and int8."""
    needs_native()
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(4, 3, 6, 20)), jnp.float32)
    wide = [jnp.asarray(random.normal(size=(20, 2, 6, 20)), jnp.float32) for _ in range(2)]
    tables = jnp.asarray(random.permutation(20).reshape(4, 5), jnp.int32)
    positions = jnp.asarray([[0, 1, 2], [27, 28, 29], [9, 10, PADDING], [5, 6, 7]], jnp.int32)
    for pools in _in_each_type(wide):
        every = np.asarray(kernels.attention(q, positions, tables, pools, **SCORES, window=8, chunked=False))
        for row in range(4):
            one = slice(row, row + 1)
            alone = kernels.attention(
                q[one], positions[one], tables[one], pools, **SCORES, window=8, chunked=False
            )
            np.testing.assert_array_equal(alone[0], every[row])


@pytest.mark.parametrize("size", [6, 16, 20])
def test_attention_of_a_query_does_not_depend_on_those_beside_it(size: int) -> None:
    """To the bit; of 23 that the extension takes several at a time, with keys that only some of them see."""
    needs_native()
    random = np.random.default_rng(2)
    q = jnp.asarray(random.normal(size=(1, 23, 6, 72)), jnp.float32)
    wide = [jnp.asarray(random.normal(size=(9, 2, size, 72)), jnp.float32) for _ in range(2)]
    tables, positions = (
        jnp.asarray([[7, 3, 0, 5, 1, 8, 4]], jnp.int32),
        jnp.arange(19, 42, dtype=jnp.int32)[None],
    )
    for pools in _in_each_type(wide):
        for window, chunked in ((0, False), (9, False), (9, True)):
            ask = partial(kernels.attention, pools=pools, **SCORES, window=window, chunked=chunked)
            every = ask(q, positions, tables)
            for at in range(23):
                one = slice(at, at + 1)
                np.testing.assert_array_equal(ask(q[:, one], positions[:, one], tables)[0, 0], every[0, at])


@pytest.mark.parametrize("num_queries", [1, 33])
def test_attention_reads_narrow_caches_as_their_numbers(num_queries: int) -> None:
    needs_native()
    random = np.random.default_rng(1)
    q = jnp.asarray(random.normal(size=(2, num_queries, 4, 72)), jnp.float32)
    wide = [jnp.asarray(random.normal(size=(18, 2, 6, 72)), jnp.float32) for _ in range(2)]
    tables = jnp.asarray(random.permutation(18).reshape(2, 9), jnp.int32)
    positions = jnp.asarray([[53], [40]], jnp.int32) + jnp.arange(1 - num_queries, 1, dtype=jnp.int32)[None]
    _, bits, int8 = _in_each_type(wide)

    def attended(pools: Any) -> np.ndarray:
        out = kernels.attention(q, positions, tables, pools, scale=0.1, softcap=3.0, window=0, chunked=False)
        return np.asarray(out)

    rounded = [pool.astype(jnp.bfloat16).astype(jnp.float32) for pool in wide]
    np.testing.assert_array_equal(attended(bits), attended(rounded))
    expected = attended([widened(pool, jnp.float32) for pool in int8])
    np.testing.assert_allclose(attended(int8), expected, atol=5e-6)


def _in_each_type(wide: list[jax.Array]) -> list[list[Any]]:
    """Pools in each type that `attention` reads: f32, the bits of bf16, and int8."""
    bits = [jax.lax.bitcast_convert_type(pool.astype(jnp.bfloat16), jnp.uint16) for pool in wide]
    return [wide, bits, [quantise(pool, "int8", 1, 1) for pool in wide]]


def test_threads_call_it_at_once() -> None:
    needs_native()
    x, w = _operands(16, 512, 1024)
    multiply = jax.jit(kernels.product)
    with jax.set_mesh(device_mesh(Layout.parse(""))):
        w = kernels.panel_order(w)
    expected, found = np.asarray(multiply(x, w)), []

    def call() -> None:
        found.extend(np.asarray(multiply(x, w)) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for one in found:
        np.testing.assert_array_equal(one, expected)


SCORES = {"scale": 0.3, "softcap": 0.0}
LAYOUTS = {
    "one device": ("bf16", "bf16", ""),
    "int8": ("int8", "bf16", "matmul_dtype=int8"),
    "tensor": ("bf16", "bf16", "tensor=2"),
    "int8, tensor": ("int8", "bf16", "tensor=2,matmul_dtype=int8"),
    "data": ("bf16", "bf16", "data=2"),
    "f32": ("f32", "f32", ""),
    "bf16 widened": ("bf16", "f32", ""),
    "int4": ("int4", "f32", ""),
    "int4, tensor": ("int4", "f32", "tensor=2"),
    "int4 by int8": ("int4", "bf16", "matmul_dtype=int8"),
    "int4 by int8, tensor": ("int4", "f32", "tensor=2,matmul_dtype=int8"),
}


def _logits(dtype: str, computed: str, text: str, *, with_native: bool) -> tuple[np.ndarray, str]:
    """Logits after one token of four sequences each, and the program."""
    layout = Layout.parse(text).replace(weights_dtype=dtype, compute_dtype=computed).at("generate")
    mesh = device_mesh(layout)
    programs = InferencePrograms(TINY, layout, mesh, CacheSizes(4, 8, 4), with_native=with_native)
    count = programs.num_replicas
    step = StepShape((Rows(4, 1),), 4, 4, 2)
    random = np.random.default_rng(0)
    given = init_params(TINY, as_read(layout), mesh, seed=0)
    params = layered(given, TINY, layout, mesh, with_panels=programs.with_panels)
    tokens = random.integers(0, TINY.vocab_size, count * 4).astype(np.int32)
    tables = np.tile(np.arange(8, dtype=np.int32).reshape(4, 1, 2), (count, 1, 1))
    pools, last = programs.empty()
    columns = np.zeros(count * 4, np.int32), np.zeros(count * 4, np.int32), tables
    compiled = programs.step(step).compile()
    heads = np.tile(np.arange(4, dtype=np.int32), count)
    logits, _ = compiled(params, pools, last, tokens, *columns, heads)
    return np.asarray(logits), compiled.as_text()


@pytest.mark.parametrize("kind", ["one device", "int8", "int4"])
def test_joined_weights_give_the_same_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: an entry of a product depends only on its row and its column."""
    needs_native()
    joined, program = _logits(*LAYOUTS[kind], with_native=True)
    monkeypatch.setattr(layer_weights, "platform_of", lambda _: replace(CPU, joins_weights=False))
    apart, longer = _logits(*LAYOUTS[kind], with_native=True)
    np.testing.assert_array_equal(joined, apart)
    # Two products a layer (queries, keys and values; gate and up) in place of five.
    num_joined, num_apart = (text.count("custom-call(") for text in (program, longer))
    assert num_apart - num_joined == 3 * TINY.num_layers


def test_a_row_that_nobody_holds_has_zeros_and_changes_no_other() -> None:
    needs_native()
    layout = Layout.parse("data=2").replace(weights_dtype="bf16", compute_dtype="f32").at("generate")
    mesh = device_mesh(layout)
    programs = InferencePrograms(TINY, layout, mesh, CacheSizes(4, 8, 4), with_native=True)
    assert not programs.multiplies_padding
    params = layered(init_params(TINY, layout, mesh, seed=0), TINY, layout, mesh, with_panels=True)
    step = programs.step(StepShape((Rows(4, 1),), 4, 4, 2)).compile()
    tables = np.tile(np.arange(8, dtype=np.int32).reshape(4, 1, 2), (2, 1, 1))
    tokens = np.arange(1, 9, dtype=np.int32)

    def logits(held: list[int]) -> np.ndarray:
        positions, heads = np.full(8, PADDING, np.int32), np.full(8, PADDING, np.int32)
        positions[held] = 0
        heads[held] = np.asarray(held) % 4
        pools, last = programs.empty()
        found, _ = step(params, pools, last, tokens, positions, np.zeros(8, np.int32), tables, heads)
        return np.asarray(found)

    every, some = logits([*range(8)]), logits([1, 4, 6])
    np.testing.assert_array_equal(some[[1, 4, 6]], every[[1, 4, 6]])
    assert (np.delete(some, [1, 4, 6], axis=0) == 0).all() and (every != 0).any(axis=1).all()


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        (TINY, {}, False),
        (replace(TINY, qkv_bias=True), {}, False),
        (replace(TINY, attention_out_bias=True), {}, True),
        (TINY, {"weights_dtype": "fp8"}, True),
        (TINY, {"weights_dtype": "int8", "matmul_dtype": "int8"}, False),
    ],
)
def test_padding_is_multiplied_where_it_does_not_stay_zeros(
    kind: Any, words: dict[str, str], expected: bool
) -> None:
    layout = Layout.of(**{"weights_dtype": "bf16", "compute_dtype": "f32"} | words).at("generate")
    mesh = device_mesh(layout)
    for with_native in (True, False):
        programs = InferencePrograms(kind, layout, mesh, CacheSizes(4, 8, 4), with_native=with_native)
        assert programs.multiplies_padding == (expected or not with_native)


# Splits by tensor are tested with int8, and int4 with and without rows in int8; "data" runs what one device
# does.
_SLOW = "one device", "int8", "tensor", "data", "bf16 widened", "int4 by int8", "int4, tensor"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in _SLOW)) for case in LAYOUTS]
)
def test_a_step_gives_the_logits_of_xlas(case: str) -> None:
    needs_native()
    dtype, computed, text = LAYOUTS[case]
    (own, program), (expected, plain) = (
        _logits(dtype, computed, text, with_native=here) for here in (True, False)
    )
    assert program.count("meshwright_attention") >= TINY.num_layers
    assert ("meshwright_grouped_product" if dtype == "int4" else "meshwright_product") in program
    assert "meshwright" not in plain.replace("meshwright/", "")
    size = np.abs(expected).max()
    np.testing.assert_allclose(own, expected, atol=(1e-5 if computed == "f32" else 0.03) * size)


def _in_a_process(code: str, **env: str) -> str:
    run = [sys.executable, "-c", f"from meshwright.native import kernels\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, **env})
    return done.stdout.strip()


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    needs_native()
    found = _in_a_process(
        "print(kernels.why_not_built())", PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path)
    )
    assert found == "there is no C++ compiler: install g++ or clang++, or name one in CXX"


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    needs_native()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    found = _in_a_process("print(kernels.why_not_built())", CXX=str(broken), XDG_CACHE_HOME=str(tmp_path))
    assert found == f"{broken} cannot compile it: no such header"
    assert not list(tmp_path.glob("meshwright/native/*"))


def test_another_processor_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "features", lambda: frozenset({"avx", "avx2", "avx512_vnni"}))
    assert kernels._loaded.__wrapped__() == "the processor has no fma"


def test_programs_for_others_call_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(platform: str) -> Any:
        return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))

    monkeypatch.setattr(kernels, "why_not_built", lambda: None)
    assert kernels.serves_mesh(of("cpu"))
    assert not kernels.serves_mesh(of("gpu"))


@pytest.mark.parametrize("harm", ["half of it", "another byte"])
def test_a_broken_library_is_built_anew(harm: str, tmp_path: Path) -> None:
    """The loader would end the process over one that is cut short. The compiler here copies a sound one."""
    needs_native()
    whole = _path().read_bytes()
    (tmp_path / "sound").write_bytes(whole[: -kernels._DIGEST_BYTES])
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {tmp_path}/sound "$last"\n', encoding="utf-8")
    compiler.chmod(0o755)
    path = tmp_path / _path().relative_to(os.environ["XDG_CACHE_HOME"])
    path.parent.mkdir(parents=True)
    path.write_bytes(whole[: len(whole) // 2] if harm == "half of it" else b"\0" + whole[1:])
    assert not kernels._is_whole(path)
    found = _in_a_process("print(kernels.why_not_built())", CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert found == "None"
    assert path.read_bytes() == whole


def _path() -> Path:
    return kernels.cache_folder() / "native" / f"{kernels._key()}.so"


def test_a_program_kept_on_disk_calls_it_in_another_process() -> None:
    needs_native()
    code = """
import jax, jax.numpy as jnp
from meshwright.nn.start.compiled_cache import keep_compiled
keep_compiled()
assert kernels.why_not_built() is None
x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
read = []  # of this program only: another test may have kept that of ones
jax.monitoring.register_event_listener(lambda event, **_: read.append(event.endswith("/cache_hits")))
found = jax.jit(lambda x, w: 2 * kernels.product(x, w))(x, w)
print(any(read))
assert (found == 128).all()
"""
    assert _in_a_process(code) == "False"
    assert _in_a_process(code) == "True"
