"""Real programs, compiled for 8 virtual CPU devices, with every count worked by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from meshwright.audit.compile.compile import program_text
from meshwright.audit.facts.communication import EmittedCollective, collectives
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.groups import axes_that_change, copied_over, group_axes
from meshwright.audit.facts.matmuls import dot_flops
from meshwright.audit.hlo.read import Program, parse_hlo
from meshwright.nn.products.execute import named_once
from meshwright.nn.start.device_mesh import resharded
from meshwright.notation.mesh import Mesh

P = PartitionSpec
MESH = Mesh({"data": 2, "fsdp": 2, "tensor": 2})
NUM_LAYERS, B, T, D, F = 3, 8, 16, 64, 128
BATCH = ("data", "fsdp")
Weights = dict[str, jax.Array]


def layer(x: jax.Array, w: Weights) -> jax.Array:
    """x[B_data,fsdp, T, D] through w_in[D_fsdp, F_tensor], w_out[F_tensor, D_fsdp]."""
    with jax.named_scope("mlp"):
        with jax.named_scope("w_in"):
            w_in = resharded(w["w_in"], P(None, "tensor"))
            h = jnp.einsum("BTD,DF->BTF", x, w_in, out_sharding=P(BATCH, None, "tensor"))
        with jax.named_scope("w_out"):
            w_out = resharded(w["w_out"], P("tensor", None))
            return x + jnp.einsum("BTF,FD->BTD", jnp.tanh(h), w_out, out_sharding=P(BATCH, None, None))


def loss(w: Weights, x: jax.Array) -> jax.Array:
    step = jax.checkpoint(lambda carry, one: (layer(carry, one), None))
    y, _ = jax.lax.scan(step, x, w)
    return (y.astype(jnp.float32) ** 2).mean()


def compiled(function: Callable[..., object], *shapes: tuple[tuple[int, ...], PartitionSpec, str]) -> Program:
    mesh = jax.make_mesh(tuple(MESH.sizes.values()), MESH.axes, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        inputs = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec)) for s, spec, d in shapes]
        text = jax.jit(function).lower(*inputs).compile().as_text()
    assert text
    return parse_hlo(text)


def gradient(dtype: str) -> Program:
    def update(w_in: jax.Array, w_out: jax.Array, x: jax.Array) -> Weights:
        return jax.grad(loss)({"w_in": w_in, "w_out": w_out}, x)

    return compiled(
        update,
        ((NUM_LAYERS, D, F), P(None, "fsdp", "tensor"), dtype),
        ((NUM_LAYERS, F, D), P(None, "tensor", "fsdp"), dtype),
        ((B, T, D), P(BATCH, None, None), dtype),
    )


def shown(one: EmittedCollective) -> tuple[object, ...]:
    cut = axes_that_change(one.slice_offsets, MESH) if one.slice_offsets else ()
    return (
        one.op,
        group_axes(one.groups, MESH).axes,
        one.count,
        one.phase,
        one.scope[:2],
        one.uncast_bytes,
        cut,
    )


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_every_collective_of_a_scanned_fsdp_and_tensor_step(dtype: str, size: int) -> None:
    """Gathers forward and again for remat; sums of activations; gradients summed, each keeping its shard.

    bf16 is widened to f32 on its way on this compiler; uncast_bytes are those of bf16 all the same.
    """
    program = gradient(dtype)
    weight, activation = D * F // 2 * size, B // 4 * T * D * size
    found = sorted(map(shown, (one for one in collectives(program) if one.gathered_bytes > 4)), key=str)
    expected = [
        *(
            ("all_gather", ("fsdp",), NUM_LAYERS, phase, ("mlp", name), weight, ())
            for phase in ("forward", "remat")
            for name in ("w_in", "w_out")
        ),
        ("all_reduce", ("tensor",), NUM_LAYERS, "forward", ("mlp", "w_out"), activation, ()),
        ("all_reduce", ("tensor",), NUM_LAYERS, "backward", ("mlp", "w_in"), activation, ()),
        *(
            ("all_reduce", ("data", "fsdp"), NUM_LAYERS, "backward", ("mlp", name), weight, ("fsdp",))
            for name in ("w_in", "w_out")
        ),
    ]
    assert found == sorted(expected, key=str)
    assert not_understood(program) == []


def test_gathers_name_the_input_that_they_gather() -> None:
    gathers = [one for one in collectives(gradient("bfloat16")) if one.op == "all_gather"]
    assert {(one.scope[-1], one.parameter) for one in gathers} == {("w_in", "w_in"), ("w_out", "w_out")}


def test_flops_are_those_of_the_seven_matmuls_that_run() -> None:
    """Two forward, two backward for each, and w_in again: w_out's result is not needed twice."""
    matmul = 2 * (B // 4 * T) * D * (F // 2)
    assert dot_flops(gradient("float32")) == 7 * matmul * NUM_LAYERS


@pytest.mark.parametrize(
    ("source", "target", "op", "axes", "gathered_bytes"),
    [
        (P("data", ("fsdp", "tensor")), P("data", None), "all_gather", ("fsdp", "tensor"), 16 * 64 * 4),
        (P("tensor", None), P(None, "tensor"), "all_to_all", ("tensor",), 16 * 64 * 4),
        (P("tensor", "fsdp"), P("fsdp", "tensor"), "permute", ("fsdp", "tensor"), 16 * 32 * 4),
    ],
)
def test_resharding_an_array(
    source: PartitionSpec, target: PartitionSpec, op: str, axes: tuple[str, ...], gathered_bytes: int
) -> None:
    program = compiled(lambda x: reshard(x, target), ((32, 64), source, "float32"))
    (one,) = collectives(program)
    assert (one.op, group_axes(one.groups, MESH).axes, one.gathered_bytes) == (op, axes, gathered_bytes)
    assert (one.count, one.parameter) == (1, "x")


def test_what_moves_has_the_name_of_its_scope_and_equal_reshards_of_one_copy_run_once() -> None:
    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("made"):
            made = jnp.tanh(x)
        with jax.named_scope("moved"):
            here = named_once(made)
            first, second = reshard(here, P()), reshard(here, P())
        return first + jnp.flip(second)

    (one,) = collectives(compiled(run, ((32, 64), P("data", None), "float32")))
    assert (one.op, one.scope) == ("all_gather", ("moved",))


def test_inputs_say_how_they_are_sharded() -> None:
    """Also where the compiler leaves it out of the text (JAX 0.12)."""
    mesh = jax.make_mesh((2, 2, 2), MESH.axes, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        specs = P("data", None), P(None, ("tensor", "fsdp")), P()
        given = [jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, p)) for p in specs]
        text = program_text(jax.jit(lambda x, y, z: jnp.sin(x) @ y + z).lower(*given).compile())
    over = [copied_over(one, MESH) for one in parse_hlo(text).main.parameters]
    assert over == [("fsdp", "tensor"), ("data",), ("data", "fsdp", "tensor")]


def test_a_psum_scatter_stays_a_reduce_scatter() -> None:
    def scatter(x: jax.Array) -> jax.Array:
        def local(y: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)

        kept = P("data", "tensor")
        return jax.shard_map(local, in_specs=P("data", None), out_specs=kept, check_vma=False)(x)

    (one,) = collectives(compiled(scatter, ((32, 64), P("data", None), "float32")))
    assert (one.op, group_axes(one.groups, MESH).axes, one.gathered_bytes) == (
        "reduce_scatter",
        ("tensor",),
        16 * 64 * 4,
    )


def test_a_loop_that_ends_by_data_has_no_count_and_says_so() -> None:
    def until(x: jax.Array, n: jax.Array) -> jax.Array:
        def body(carry: tuple[int, jax.Array]) -> tuple[int, jax.Array]:
            return carry[0] + 1, reshard(reshard(carry[1], P(None, None)) * 2, P("data", None))

        return jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, x))[1]

    program = compiled(until, ((32, 64), P("data", None), "float32"), ((), P(), "int32"))
    assert [one.count for one in collectives(program)] == [None]
    assert [line.partition(": ")[2] for line in not_understood(program)] == [
        "its trip count is unknown, so its body is counted once"
    ]
