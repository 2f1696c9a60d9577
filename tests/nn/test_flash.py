"""Attention kernels: where they are taken, that they are attention, and how often each pass runs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from tests.nn.test_layouts import TINY

from meshwright.layout import Layout
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.nn.attention import Scores, attend, visible
from meshwright.nn.flash import cudnn, flash_kernels, splash
from meshwright.nn.mesh import array_type, device_mesh, named_sharding
from meshwright.nn.ops import JaxOps
from meshwright.nn.params import abstract_params

LAYOUT = Layout.of(data=2, tensor=2)
SIZES = {"B": 2, "T": 256, "N": 4, "K": 2, "H": 64}


def mesh_of(platform: str, layout: Layout = LAYOUT) -> Any:
    """The layout's mesh of devices that are not there."""
    sizes = layout.mesh.sizes
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    explicit = (AxisType.Explicit,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), explicit, abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "dtype", "sizes", "window", "softcap", "layout", "kernel"),
    [
        ("tpu", "bfloat16", {}, None, None, LAYOUT, splash),
        ("tpu", "float32", {}, 9, 3.0, LAYOUT, splash),
        ("tpu", "bfloat16", {"T": 200}, None, None, LAYOUT, None),
        ("tpu", "bfloat16", {}, None, None, Layout.of(data=2, context=2), None),
        ("gpu", "bfloat16", {"T": 200}, 9, None, LAYOUT, cudnn),
        ("gpu", "float32", {}, None, None, LAYOUT, None),
        ("gpu", "bfloat16", {}, None, 3.0, LAYOUT, None),
        ("gpu", "bfloat16", {"H": 256}, None, None, LAYOUT, None),
        ("gpu", "bfloat16", {"H": 100}, None, None, LAYOUT, None),
        ("cpu", "bfloat16", {}, None, None, LAYOUT, None),
    ],
)
def test_a_kernel_is_taken_where_it_can_run(
    platform: str,
    dtype: str,
    sizes: dict,
    window: int | None,
    softcap: float | None,
    layout: Layout,
    kernel: Callable | None,
) -> None:
    mesh = mesh_of(platform, layout)
    sizes = SIZES | sizes
    config = replace(TINY, d_head=sizes["H"], attention_softcap=softcap)
    computed = layout.replace(compute_dtype={"bfloat16": "bf16", "float32": "f32"}[dtype])
    taken: list[Callable | None] = []

    def look(q: Array) -> Array:
        found: Any = flash_kernels(q, config, computed, [window], Scores(softcap))
        taken.append(found and found[0].func)
        return q

    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(look, array_type(layout.activation("q", "BTNH"), mesh, sizes, dtype))
    assert taken == [kernel]


@pytest.mark.parametrize(
    ("window", "how"),
    [pytest.param(None, Scores(softcap=5.0, scale=0.3), marks=pytest.mark.slow), (100, Scores())],
)
def test_splash_is_attention_with_its_gradients(window: int | None, how: Scores) -> None:
    mesh = device_mesh(LAYOUT)
    arrays = [
        LAYOUT.activation(name, letters) for name, letters in {"q": "BTNH", "k": "BTKH", "v": "BTKH"}.items()
    ]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.device_put(
            jax.random.normal(key, [SIZES[dim] for dim in array.dims]), named_sharding(array, mesh)
        )
        for key, array in zip(keys, (*arrays, arrays[0]), strict=True)
    )
    whole = jnp.broadcast_to(jnp.arange(SIZES["T"]), (SIZES["B"], SIZES["T"]))
    places = transformer.Places(jax.device_put(whole, named_sharding(LAYOUT.tokens("positions"), mesh)))
    run = partial(splash, layout=LAYOUT, window=window, how=how, interpret=True)

    def with_gradients(attention: Callable) -> list[Array]:
        def run(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, ...]:
            out, pull_back = jax.vjp(attention, q, k, v)
            return out, *pull_back(d_out)

        return list(jax.jit(run)(q, k, v, d_out))

    with jax.set_mesh(mesh):
        seen = visible(places, places, None if window is None else jnp.int32(window))
        kernel = with_gradients(run)
        dense = with_gradients(lambda q, k, v: attend(q, k, v, None, seen, LAYOUT, how))
    for ours, theirs in zip(kernel, dense, strict=True):
        assert ours.sharding == theirs.sharding
        assert jnp.max(jnp.abs(ours - theirs)) < 5e-6 * jnp.max(jnp.abs(theirs))


@pytest.mark.parametrize(("remat", "num_forward"), [("full", 2), ("matmuls", 1), ("none", 1)])
@pytest.mark.parametrize(("seq_len", "num_backward"), [(1024, 1), (8192, 2)])
def test_what_a_kernel_keeps_is_not_computed_again(
    remat: str, num_forward: int, seq_len: int, num_backward: int
) -> None:
    """A layer's scan is one body forward, and one backward; dQ has a kernel of its own at length."""
    config = ModelConfig("tiny", 2, 256, 256, 4, 2, 64, vocab_size=64, max_seq_len=8192)
    layout = Layout.of(data=2, tensor=2, remat=remat, compute_dtype="bf16")
    mesh = mesh_of("tpu", layout)
    ops, params = JaxOps(config, layout), abstract_params(config, layout, mesh)
    tokens = array_type(layout.tokens("tokens"), mesh, {"B": 2, "T": seq_len}, "int32")

    def loss(params: dict, tokens: Array) -> Array:
        return transformer.loss(config, ops, params, tokens, tokens, transformer.Places(tokens))

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr
    used, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
    kernels = list(_kernels(used))
    assert sum(name.startswith("splash_mha_fwd") for name in kernels) == num_forward
    assert sum(name.startswith("splash_mha_d") for name in kernels) == num_backward


def test_no_pass_keeps_what_a_kernel_skips() -> None:
    """In a pipeline it would wait with the activations, and the backward pass not know what it computes."""
    mesh = mesh_of("tpu")
    q, k = (
        array_type(LAYOUT.activation("x", letters), mesh, SIZES, "bfloat16") for letters in ("BTNH", "BTKH")
    )
    run = partial(splash, layout=LAYOUT, window=None, how=Scores())
    with jax.sharding.use_abstract_mesh(mesh):
        saved = jax.tree.leaves(jax.eval_shape(lambda q, k, v: jax.vjp(run, q, k, v)[1], q, k, k))
    assert saved and all(jnp.issubdtype(one.dtype, jnp.floating) for one in saved)
    # The queries, keys, values, the result and the log of the scores' sums.
    assert len([one for one in saved if one.size > SIZES["B"] * SIZES["N"]]) == 5


def _kernels(jaxpr: Any) -> Iterator[str]:
    """The name of every kernel that a program calls, once for each place where it does."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"]
        for param in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _kernels(inner)
