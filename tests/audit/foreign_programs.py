"""Programs that users of other libraries have, made at random: small JAX functions, and edits of their text.

Each family is written as users of one library write it, with weights sharded at random over a mesh of eight
devices where the compiler chooses what nobody constrains.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.audit.compile.compile import program_text
from meshwright.platforms import CPU

UNOPTIMIZED: Any = dict(CPU.compiler.options)

P = PartitionSpec
MESHES = ({"data": 8}, {"data": 2, "tensor": 4}, {"data": 4, "tensor": 2}, {"replica": 2, "fsdp": 4})


@dataclass(frozen=True)
class Foreign:
    """A compiled program's text; flops: at least of its products over all devices, counted in the jaxpr.

    0 where the jaxpr has products twice that a compiler may compute once.
    """

    text: str
    flops: int


@dataclass(frozen=True)
class _Case:
    """A function and the shapes of its arguments; a spec for each."""

    run: Callable[..., Any]
    args: Any
    specs: Any


def _array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class _Maker:
    """Draws sizes and shardings for one mesh."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.sizes = self.draw.choice(MESHES)
        # At least two rows a device: XLA writes a product over one element without a dot.
        self.batch, self.width = self.draw.choice((16, 32)), self.draw.choice((32, 64))
        self.hidden, self.depth = 4 * self.width, self.draw.choice((1, 2, 3))
        self.dtype = self.draw.choice(("float32", "bfloat16"))

    def spec(self, rank: int) -> PartitionSpec:
        """One or two axes on some dimensions of an array."""
        axes: list[Any] = [None] * rank
        for axis in self.sizes:
            if self.draw.random() < 0.7:
                place = self.draw.randrange(rank)
                axes[place] = axis if axes[place] is None else (axes[place], axis)
        return P(*axes)

    @property
    def rows(self) -> PartitionSpec:
        return P(next(iter(self.sizes)))


def _nnx(m: _Maker) -> _Case:
    """A state of nested names, as Flax NNX splits a module, updated by SGD with momentum."""
    kernels = {
        f"layers_{i}": {
            "linear1": {"kernel": _array(m.width, m.hidden, dtype=m.dtype), "bias": _array(m.hidden)},
            "linear2": {"kernel": _array(m.hidden, m.width, dtype=m.dtype)},
        }
        for i in range(m.depth)
    }

    def forward(state: Any, x: Array) -> Array:
        for i in range(m.depth):
            one = state[f"layers_{i}"]
            h = jax.nn.gelu(x @ one["linear1"]["kernel"] + one["linear1"]["bias"].astype(x.dtype))
            x = x + h @ one["linear2"]["kernel"]
        return (x.astype(jnp.float32) ** 2).mean()

    def step(state: Any, trace: Any, x: Array) -> Any:
        loss, grads = jax.value_and_grad(forward)(state, x)
        trace = jax.tree.map(lambda t, g: (0.9 * t + g).astype(t.dtype), trace, grads)
        return jax.tree.map(lambda w, t: w - 0.01 * t.astype(w.dtype), state, trace), trace, loss

    specs = jax.tree.map(lambda leaf: m.spec(len(leaf.shape)), kernels)
    x = _array(m.batch, m.width, dtype=m.dtype)
    return _Case(step, (kernels, kernels, x), (specs, specs, m.rows))


def _equinox(m: _Maker) -> _Case:
    """A module of one example under vmap, as Equinox writes it."""
    weights = [_array(m.width, m.width, dtype=m.dtype) for _ in range(m.depth)]

    def one(weights: list[Array], x: Array) -> Array:
        for w in weights:
            x = jnp.tanh(w @ x)
        return x.sum()

    def loss(weights: list[Array], x: Array) -> Array:
        return jax.vmap(one, in_axes=(None, 0))(weights, x).mean()

    specs = [m.spec(2) for _ in weights]
    x = _array(m.batch, m.width, dtype=m.dtype)
    return _Case(jax.grad(loss), (weights, x), (specs, m.rows))


def _maxtext(m: _Maker) -> _Case:
    """Stacked layers in a scan with remat, activations constrained, as MaxText does."""
    wi, wo = (m.depth + 1, m.width, m.hidden), (m.depth + 1, m.hidden, m.width)

    remat = m.draw.choice((None, partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)))

    def loss(wi: Array, wo: Array, x: Array) -> Array:
        def layer(x: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
            x = lax.with_sharding_constraint(x, m.rows)
            return x + jax.nn.silu(x @ w[0]) @ w[1], None

        end, _ = lax.scan(remat(layer) if remat else layer, x, (wi, wo))
        return (end.astype(jnp.float32) ** 2).mean()

    args = (*(_array(*shape, dtype=m.dtype) for shape in (wi, wo)), _array(m.batch, m.width, dtype=m.dtype))
    specs = (P(None, *m.spec(2)), P(None, *m.spec(2)), m.rows)
    return _Case(jax.value_and_grad(loss, argnums=(0, 1)), args, specs)


def _attention(m: _Maker) -> _Case:
    """Attention with a causal mask, as a GPT of one file."""
    heads, size = 4, m.width // 4

    def block(wqkv: Array, wo: Array, x: Array) -> Array:
        q, k, v = jnp.split(x @ wqkv, 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], heads, size) for y in (q, k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / size**0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        probabilities = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32))
        out = jnp.einsum("bhts,bshd->bthd", probabilities.astype(v.dtype), v).reshape(x.shape)
        return ((x + out @ wo).astype(jnp.float32) ** 2).mean()

    shapes = (m.width, 3 * m.width), (m.width, m.width), (m.batch, 16, m.width)
    args = tuple(_array(*shape, dtype=m.dtype) for shape in shapes)
    return _Case(jax.grad(block, argnums=(0, 1)), args, (m.spec(2), m.spec(2), m.rows))


def _by_hand(m: _Maker) -> _Case:
    """Collectives written out in a shard_map."""
    axis, size = next(iter(m.sizes.items()))
    ring = [(i, (i + 1) % size) for i in range(size)]
    op = m.draw.choice(("psum", "all_gather", "psum_scatter", "ppermute", "all_to_all"))

    def local(w: Array, x: Array) -> Array:
        y = x @ w
        if op == "psum":
            return lax.psum(y, axis)[: y.shape[0]]
        if op == "all_gather":
            return lax.all_gather(y, axis, tiled=True)[: y.shape[0]]
        if op == "psum_scatter":
            return jnp.tile(lax.psum_scatter(y, axis, tiled=True), (size, 1))
        if op == "ppermute":
            return lax.ppermute(y, axis, ring)
        return lax.all_to_all(y, axis, 0, 0, tiled=True)

    def run(w: Array, x: Array) -> Array:
        return jax.shard_map(local, in_specs=(P(), P(axis)), out_specs=P(axis), check_vma=False)(w, x)

    rows = size * m.batch
    args = _array(m.width, m.hidden, dtype=m.dtype), _array(rows, m.width, dtype=m.dtype)
    return _Case(run, args, (P(), P(axis)))


def _branches(m: _Maker) -> _Case:
    """One of two products, as a flag says."""

    def run(flag: Array, w: Array, x: Array) -> Array:
        return lax.cond(flag > 0, lambda x: jnp.tanh(x @ w) @ w.T, lambda x: x, x)

    args = (
        _array(dtype="int32"),
        _array(m.width, m.hidden, dtype=m.dtype),
        _array(m.batch, m.width, dtype=m.dtype),
    )
    return _Case(run, args, (P(), m.spec(2), m.rows))


def _experts(m: _Maker) -> _Case:
    """Rows sorted by expert, and a product of which each expert has some rows."""

    def run(w: Array, x: Array, scores: Array) -> Array:
        chosen = jnp.argmax(scores, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
        return lax.ragged_dot(x[order], w, sizes).astype(jnp.float32).sum()

    args = _array(4, m.width, m.hidden), _array(m.batch, m.width), _array(m.batch, 4)
    return _Case(run, args, (P(), m.rows, m.rows))


def _decoding(m: _Maker) -> _Case:
    """A loop of which data say when it ends: how often its product runs is not known."""

    def run(w: Array, x: Array, limit: Array) -> Array:
        def more(carry: tuple[Array, Array]) -> Array:
            return (carry[0] < limit) & (jnp.abs(carry[1]).sum() < 1e6)

        return lax.while_loop(more, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (jnp.int32(0), x))[1]

    args = _array(m.width, m.width), _array(m.batch, m.width), _array(dtype="int32")
    return _Case(run, args, (m.spec(2), m.rows, P()))


def _convolution(m: _Maker) -> _Case:
    """Two convolutions, channels last."""

    def run(k: Array, x: Array) -> Array:
        y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y).mean()

    return _Case(run, (_array(3, 3, 4, m.width), _array(m.batch, 8, 8, 4)), (P(), m.rows))


def _lookup(m: _Maker) -> _Case:
    """An embedding, a head, and the log-probabilities of targets."""

    def loss(table: Array, tokens: Array) -> Array:
        logits = (table[tokens] @ table.T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    args = _array(64, m.width, dtype=m.dtype), _array(m.batch, 8, dtype="int32")
    return _Case(jax.grad(loss), args, (m.spec(2), m.rows))


FAMILIES: tuple[Callable[[_Maker], _Case], ...] = (
    _nnx, _equinox, _maxtext, _attention, _by_hand, _branches, _experts, _decoding, _convolution, _lookup,
)  # fmt: skip


def foreign(seed: int) -> Foreign:
    """Program number `seed`: its family in turn, all else at random."""
    maker = _Maker(seed)
    case = FAMILIES[seed % len(FAMILIES)](maker)
    names, sizes = tuple(maker.sizes), tuple(maker.sizes.values())
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    # Others leave promotion on.
    promotion = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with jax.set_mesh(mesh), promotion[0], promotion[1]:
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        given = jax.tree.map(
            lambda spec, leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, _divided(spec, leaf.shape, maker.sizes))
            ),
            case.specs,
            case.args,
            is_leaf=is_spec,
        )
        traced = jax.jit(case.run).trace(*given)
        compiled = traced.lower().compile(compiler_options=UNOPTIMIZED)
    recomputes = "checkpoint" in str(traced.jaxpr)
    return Foreign(program_text(compiled), 0 if recomputes else product_flops(traced.jaxpr))


def _divided(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> PartitionSpec:
    """The spec without the axes that a dimension does not divide over."""
    kept = []
    for size, axes in zip(shape, (*spec, *(None,) * len(shape)), strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        kept.append(axes if names and size % _product(sizes[name] for name in names) == 0 else None)
    return P(*kept)


def _product(numbers: Iterator[int]) -> int:
    found = 1
    for number in numbers:
        found *= number
    return found


def product_flops(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """FLOPs of all products of a jaxpr: of a loop all turns, of branches the largest, of a while one turn."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    total = 0
    for one in inner.eqns:
        name, params = one.primitive.name, one.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = one.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
            total += 2 * one.outvars[0].aval.size * _product(left[d] for d in contracted)  # pyright: ignore[reportAttributeAccessIssue]
        elif name == "cond":
            total += max(product_flops(branch) for branch in params["branches"])
        else:
            turns = params.get("length", 1) if name == "scan" else 1
            parts = (
                params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr") if key in params
            )
            shards = 8 if name == "shard_map" else 1  # what is written for one device runs on all
            total += turns * shards * sum(map(product_flops, parts))
    return total


# Edits of a text. Each gives None where the text has no place for it.

Edit = Callable[[random.Random, str], str | None]


def _one_line(wanted: str, change: Callable[[random.Random, str], str]) -> Edit:
    """`change` of one of the lines that have `wanted`."""

    def edit(draw: random.Random, text: str) -> str | None:
        lines = text.splitlines()
        places = [i for i, line in enumerate(lines) if re.search(wanted, line)]
        if not places:
            return None
        at = draw.choice(places)
        lines[at] = change(draw, lines[at])
        return "\n".join(lines)

    return edit


def _replaced(wanted: str, old: str, new: str) -> Edit:
    return _one_line(wanted, lambda draw, line: re.sub(old, new, line, count=1))


def _cut(draw: random.Random, text: str) -> str | None:
    return text[: draw.randrange(len(text) // 4, len(text) - 20)]


def _without_a_computation(draw: random.Random, text: str) -> str | None:
    blocks = re.split(r"\n\n(?=%|ENTRY)", text)
    inner = [i for i, block in enumerate(blocks) if block.startswith("%")]
    if not inner:
        return None
    gone = draw.choice(inner)
    return "\n\n".join(block for i, block in enumerate(blocks) if i != gone)


_GROUPS = r"replica_groups=.+?(?=, use_global|, channel|, dimensions|, to_apply)"
EDITS: dict[str, Edit] = {
    "cut short": _cut,
    "a line lost": _one_line(r" = ", lambda draw, line: ""),
    "an unknown opcode": _replaced(r" dot\(", r" dot\(", " hyper-dot("),
    "a product of a library": _replaced(
        r" dot\(", r" dot\((.*?)\)", r' custom-call(\1), custom_call_target="mm"'
    ),
    "a product without dimensions": _replaced(r" dot\(", r", lhs_contracting_dims=\{[\d,]*\}", ""),
    "other groups": _replaced(_GROUPS, _GROUPS, "replica_groups={{0,1,2},{3,4},{5,6,7}}"),
    "groups of another form": _replaced(_GROUPS, _GROUPS, "replica_groups={spiral}"),
    "groups that are cut": _replaced(_GROUPS, _GROUPS, "replica_groups=[2,2]<=[8]"),
    "a loop without its count": _replaced("known_trip_count", r'"known_trip_count":\{"n":"\d+"\}', '"x":1'),
    "a sum in another opcode": _replaced(r" all-reduce\(", r" all-reduce\(", " collective-broadcast("),
    "an unknown type": _one_line(r" dot\(", lambda draw, line: line.replace("f32[", "q7[", 1)),
    "a computation lost": _without_a_computation,
    "replicas": _one_line("^HloModule", lambda draw, line: line.replace("num_partitions=", "replica_count=")),
    "replicas of partitions": _one_line(
        "^HloModule", lambda draw, line: line.replace("num_partitions=8", "num_partitions=4, replica_count=2")
    ),
    "names of torch/XLA": lambda draw, text: re.sub(r'op_name="[^"]*"', 'op_name="aten__mm.1/mm"', text),
    "no names": lambda draw, text: re.sub(r", metadata=\{[^}]*\}", "", text),
}  # fmt: skip
