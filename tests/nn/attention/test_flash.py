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
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from tests.nn.small_models import TINY

from meshwright.layout import Layout
from meshwright.layout.moves.attention import gathered_keys, token_sharding
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Window
from meshwright.nn.attention.blockwise import blockwise, zigzag
from meshwright.nn.attention.by_formula import ScoreForm, attend, visible
from meshwright.nn.attention.flash import cudnn, flash_kernels, kernels_of, splash
from meshwright.nn.norms import along
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import abstract_params
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.start.device_mesh import array_type, device_mesh, named_sharding

LAYOUT = Layout.of(data=2, tensor=2)
SIZES = {"B": 2, "T": 256, "N": 4, "K": 2, "H": 64}


def mesh_of(platform: str, layout: Layout = LAYOUT) -> Any:
    """The layout's mesh of devices that are not there."""
    sizes = layout.mesh.sizes
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    explicit = (AxisType.Explicit,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), explicit, abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "dtype", "sizes", "window", "traits", "layout", "kernel"),
    [
        ("tpu", "bfloat16", {}, None, {}, LAYOUT, splash),
        (
            "tpu",
            "float32",
            {},
            Window(9),
            {"attention_softcap": 3.0, "attention_sinks": True},
            LAYOUT,
            splash,
        ),
        ("tpu", "bfloat16", {"T": 200}, None, {}, LAYOUT, None),
        ("tpu", "bfloat16", {"T": 512}, None, {}, Layout.of(data=2, context=2), splash),
        ("tpu", "bfloat16", {"T": 512}, None, {}, Layout.of(data=2, context=4), None),
        ("tpu", "bfloat16", {}, None, {}, Layout.of(data=2, context=2, context_method="ring"), None),
        ("tpu", "bfloat16", {}, None, {"positions": "alibi"}, LAYOUT, None),
        ("gpu", "bfloat16", {"T": 200}, Window(9), {}, LAYOUT, cudnn),
        ("tpu", "bfloat16", {}, Window(9, chunked=True), {"attention_chunk": 9}, LAYOUT, splash),
        ("gpu", "bfloat16", {"T": 200}, Window(9, chunked=True), {"attention_chunk": 9}, LAYOUT, None),
        ("gpu", "bfloat16", {"T": 200}, Window(200, chunked=True), {"attention_chunk": 200}, LAYOUT, cudnn),
        ("gpu", "float32", {}, None, {}, LAYOUT, None),
        ("gpu", "bfloat16", {}, None, {"attention_softcap": 3.0}, LAYOUT, None),
        ("gpu", "bfloat16", {}, None, {"attention_sinks": True}, LAYOUT, None),
        ("gpu", "bfloat16", {}, None, {}, Layout.of(data=2, context=2), None),
        ("gpu", "bfloat16", {"H": 256}, None, {}, LAYOUT, cudnn),
        ("gpu of 2020", "bfloat16", {"H": 128}, None, {}, LAYOUT, cudnn),
        ("gpu of 2020", "bfloat16", {"H": 256}, None, {}, LAYOUT, None),
        ("gpu of others", "bfloat16", {}, None, {}, LAYOUT, None),
        ("gpu", "bfloat16", {"H": 100}, None, {}, LAYOUT, None),
        ("cpu", "bfloat16", {}, None, {}, LAYOUT, None),
    ],
)
def test_a_kernel_is_taken_where_it_can_run(
    platform: str,
    dtype: str,
    sizes: dict,
    window: Window | None,
    traits: dict,
    layout: Layout,
    kernel: Callable | None,
) -> None:
    kind, _, of = platform.partition(" ")
    capability = {"of 2020": 8.0, "of others": 0.0}.get(of, 9.0)
    mesh = mesh_of(kind, layout)
    sizes = SIZES | sizes
    config = replace(TINY, d_head=sizes["H"], **traits)
    computed = layout.replace(compute_dtype={"bfloat16": "bf16", "float32": "f32"}[dtype])
    taken: list[Callable | None] = []

    def look(q: Array) -> Array:
        found: Any = flash_kernels(q, config, computed, [window], ScoreForm(1.0, config.attention_softcap))
        taken.append(found and found[0].func)
        return q

    with jax.sharding.use_abstract_mesh(mesh), kernels_of(capability):
        jax.eval_shape(look, array_type(layout.activation("q", "BTNH"), mesh, sizes, dtype))
    assert taken == [kernel]


def test_packed_documents_have_a_kernel_on_tpus_alone() -> None:
    layout, found = LAYOUT.replace(compute_dtype="bf16"), {}
    for kind in ("tpu", "gpu"):
        mesh = mesh_of(kind)
        q: Any = array_type(LAYOUT.activation("q", "BTNH"), mesh, SIZES, "bfloat16")
        with jax.sharding.use_abstract_mesh(mesh), kernels_of(9.0):
            found[kind] = [
                bool(flash_kernels(q, TINY, layout, [None], ScoreForm(1.0), has_documents=packed))
                for packed in (False, True)
            ]
    assert found == {"tpu": [True, True], "gpu": [True, False]}


OF_CONTEXT = Layout.of(context=2, tensor=2)
PLAIN = ScoreForm(SIZES["H"] ** -0.5)


@pytest.mark.parametrize(
    ("layout", "window", "how", "value_dim", "with_sinks", "with_documents"),
    [
        pytest.param(
            LAYOUT, None, ScoreForm(0.3, softcap=5.0), 64, False, False, marks=pytest.mark.slow, id="capped"
        ),
        pytest.param(LAYOUT, Window(100), PLAIN, 64, True, False, id="window, sinks"),
        pytest.param(LAYOUT, Window(100, chunked=True), PLAIN, 64, False, False, id="chunks"),
        pytest.param(OF_CONTEXT, None, PLAIN, 32, False, True, id="positions, narrow values, documents"),
        pytest.param(
            OF_CONTEXT,
            Window(100),
            PLAIN,
            64,
            True,
            False,
            marks=pytest.mark.slow,
            id="positions, window, sinks",
        ),
        pytest.param(
            OF_CONTEXT,
            Window(100, chunked=True),
            PLAIN,
            64,
            False,
            False,
            marks=pytest.mark.slow,
            id="positions, chunks",
        ),
        pytest.param(LAYOUT, None, PLAIN, 64, False, True, marks=pytest.mark.slow, id="documents"),
    ],
)
def test_splash_is_attention_with_its_gradients(
    layout: Layout,
    window: Window | None,
    how: ScoreForm,
    value_dim: int,
    with_sinks: bool,
    with_documents: bool,
) -> None:
    given = _Given(layout, value_dim, with_sinks, with_documents)

    def kernel(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        documents = (given.queries.segments, given.keys.segments) if with_documents else None
        return splash(q, k, v, sinks, documents, layout=layout, window=window, how=how, interpret=True)

    given.check(kernel, window, how)


@pytest.mark.parametrize("layout", [LAYOUT, OF_CONTEXT], ids=str)
def test_attention_by_blocks_takes_gathered_keys(layout: Layout) -> None:
    """Their gradients stay partial sums over the devices that have other queries."""
    given = _Given(layout, SIZES["H"], with_sinks=True, with_documents=True)

    def blocks(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        each = None if sinks is None else along(q[..., 0], sinks)
        return blockwise(q, k, v, each, given.queries, given.keys, None, layout, PLAIN)

    given.check(blocks, None, PLAIN)


class _Given:
    """Inputs of attention, whose positions are dealt as in training, and plain attention beside it."""

    def __init__(self, layout: Layout, value_dim: int, with_sinks: bool, with_documents: bool) -> None:
        self.layout, self.mesh = layout, device_mesh(layout)
        shards = layout.mesh.size(layout.activation("q", "BTNH").axes_of("T"))
        sizes = SIZES | {"O": value_dim, "T": SIZES["T"] * shards}
        self.letters = {"q": "BTNH", "k": "BTKH", "v": "BTKO", "out": "BTNO"}
        of_queries = layout.activation("q", "BTNH")
        keys = iter(jax.random.split(jax.random.key(0), 5))

        def random(name: str, letters: str) -> Array:
            shape = [sizes[dim] for dim in letters]
            split = named_sharding(layout.activation(name, letters), self.mesh)
            return jax.device_put(jax.random.normal(next(keys), shape), split)

        of_q, of_k, of_v, self.d_out = (random(name, of_one) for name, of_one in self.letters.items())
        heads = NamedSharding(self.mesh, PartitionSpec(of_queries.axes_of("N")))
        sinks = jax.device_put(jax.random.normal(next(keys), (sizes["N"],)), heads) if with_sinks else None
        self.inputs = of_q, of_k, of_v, sinks
        row = zigzag(jnp.arange(sizes["T"])[None], shards)
        positions = jnp.broadcast_to(row, (sizes["B"], sizes["T"]))
        places = transformer.Places(positions, positions // 150 if with_documents else None)
        own = token_sharding(layout, "positions")
        self.queries, self.keys = (
            jax.device_put(places, named_sharding(split, self.mesh))
            for split in (own, own.replace(axes={"T": ()}))
        )

    def check(self, attention: Callable, window: Window | None, how: ScoreForm) -> None:
        def dense(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            first = None if window is None else window.first(self.queries.positions)
            seen = visible(self.queries, self.keys, first)
            each = None if sinks is None else along(q[..., 0], sinks)
            return attend(q, k, v, each, seen, self.layout, how)

        with jax.set_mesh(self.mesh):
            ours, theirs = self._with_gradients(attention), self._with_gradients(dense)
        assert len(ours) == 1 + sum(x is not None for x in self.inputs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.sharding == other.sharding
            assert jnp.max(jnp.abs(one - other)) < 5e-6 * jnp.max(jnp.abs(other))

    def _with_gradients(self, attention: Callable) -> list[Array]:
        def of_gathered(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            to_all = {name: gathered_keys(self.layout, name, self.letters[name]) for name in "kv"}
            return attention(q, apply_reshard(to_all["k"], k), apply_reshard(to_all["v"], v), sinks)

        def run(inputs: tuple[Array | None, ...], d_out: Array) -> list[Array]:
            out, pull_back = jax.vjp(of_gathered, *inputs)
            return [out, *(d for d in pull_back(d_out) if d is not None)]

        return list(jax.jit(run)(self.inputs, self.d_out))


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
    tokens = array_type(token_sharding(layout, "tokens"), mesh, {"B": 2, "T": seq_len}, "int32")

    def loss(params: dict, tokens: Array) -> Array:
        return transformer.losses(config, ops, params, tokens, tokens, transformer.Places(tokens))[0]

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
    run = partial(splash, layout=LAYOUT, window=None, how=PLAIN)
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
