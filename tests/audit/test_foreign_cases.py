"""Other people's programs: the finding of each, and that its remedy ends it."""

import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from tests.audit.foreign_by_hand import BY_HAND
from tests.audit.foreign_cases import CASES, SEVERAL, array, constrained
from tests.audit.foreign_cases import mesh as mesh_of
from tests.audit.foreign_given import GIVEN
from tests.audit.foreign_needs import NEEDS, SEVERAL_NEEDS
from tests.audit.foreign_operations import OPERATIONS
from tests.audit.foreign_origins import ORIGINS
from tests.audit.foreign_rows import ROWS, SEVERAL_ROWS
from tests.audit.foreign_work import WORK

import meshwright
from meshwright.audit import foreign
from meshwright.audit.compile.target import Target
from meshwright.audit.foreign import audit_file
from meshwright.audit.hlo.read import parse_hlo
from meshwright.errors import AuditError
from meshwright.hardware.catalog import load


def _kinds(program: Any) -> list[str]:
    run, args = program
    with jax.numpy_rank_promotion("allow"):
        return [one["kind"] for one in meshwright.audit(run, *args, hardware="v5p")["warnings"]]


_ALL_CASES = CASES | BY_HAND | NEEDS | ORIGINS | OPERATIONS | WORK | GIVEN | ROWS


# Programs that compile for four seconds; the others take a third of one.
_SLOW = {"updates orthogonalised on all devices", "an associative scan over split positions"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in _ALL_CASES]
)
def test_each_program_has_its_finding_and_its_remedy_ends_it(name: str) -> None:
    case = _ALL_CASES[name]
    kinds = _kinds(case.run())
    assert set(kinds) == (set() if case.kind is None else {case.kind})
    if case.fixed is not None:
        assert _kinds(case.fixed()) == []


@pytest.mark.parametrize("name", ["FSDP", "FSDP by columns", "FSDP in a loop"])
def test_constrained_activations_save_what_the_finding_says(name: str) -> None:
    case = CASES[name]
    assert case.fixed is not None
    (run, args), (fixed, fixed_args) = case.run(), case.fixed()
    before, after = meshwright.audit(run, *args), meshwright.audit(fixed, *fixed_args)
    (found,) = before["warnings"]
    assert 0 < found["bytes"] <= before["bytes"]["compiled"] - after["bytes"]["compiled"]


def test_activations_that_send_less_than_gathered_weights_are_no_finding() -> None:
    """Layers of tensor parallelism with few rows, which are split over the axis of the weights too."""
    m = mesh_of("x")

    def audit(constrain: bool) -> dict:
        def loss(weights: Any, x: Any) -> Any:
            def layer(x: Any, pair: Any) -> Any:
                between = jax.nn.relu(x @ pair[0])
                return x + (constrained(m, between, "x") if constrain else between) @ pair[1], None

            return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

        def step(weights: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

        weights = array(m, (4, 512, 2048), None, None, "x"), array(m, (4, 2048, 512), None, "x")
        return meshwright.audit(jax.jit(step, donate_argnums=0), weights, array(m, (1024, 512), "x"))

    found, held = audit(constrain=False), audit(constrain=True)
    assert found["bytes"]["compiled"] < held["bytes"]["compiled"]
    assert found["warnings"] == []


@pytest.mark.parametrize("name", [*SEVERAL, *SEVERAL_NEEDS, *SEVERAL_ROWS])
def test_the_root_comes_first_of_several_findings(name: str) -> None:
    case = (SEVERAL | SEVERAL_NEEDS | SEVERAL_ROWS)[name]
    assert _kinds(case.run())[0] == case.kind
    assert case.fixed and _kinds(case.fixed()) == []


def test_a_gathered_contraction_does_not_hide_what_another_axis_repeats() -> None:
    """Rows are whole over `data`, and a contraction is gathered over `tensor`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))

    def of(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(weights: dict[str, Any], x: Any) -> Any:
        between = jax.lax.with_sharding_constraint(
            jax.nn.relu(x @ weights["in"]), NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
        )
        result = x + between @ weights["out"]
        whole = NamedSharding(mesh, PartitionSpec())
        return (jax.lax.with_sharding_constraint(result, whole) ** 2).sum()

    weights = {"in": of((512, 2048), None, "tensor"), "out": of((2048, 512), None, "tensor")}
    found = meshwright.audit(jax.jit(jax.grad(loss)), weights, of((16, 128, 512)))
    kinds = {one["kind"]: one["what"] for one in found["warnings"]}
    assert "contraction_gathered" in kinds
    assert "over `data` compute the same" in kinds["computed_repeatedly"]


def test_the_result_prints_as_ten_lines() -> None:
    run, args = CASES["FSDP"].run()
    found = meshwright.audit(run, *args, hardware="v5p")
    lines = repr(found).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) < 170
    assert lines[0].startswith("differs: 1 findings; ") and "activations_not_constrained" in lines[1]
    assert "compiled for CPUs, priced on v5p" in lines[-2] and "donate the state" in lines[-1]
    assert found["versions"] == {name: version(name) for name in ("jax", "jaxlib")}


class _Wrapped:
    """A function as equinox.filter_jit returns it: its compiled program is an attribute of a wrapper."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def lower(self, *args: Any) -> Any:
        types = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.ShapeDtypeStruct)]
        assert not types, "Equinox would take them as static values"
        lowered = jax.jit(self.run).lower(*args)
        return SimpleNamespace(compile=lambda: SimpleNamespace(compiled=lowered.compile()))


@pytest.mark.parametrize("of_types", [True, False])
def test_functions_that_wrap_jit_are_audited(of_types: bool) -> None:
    """With arrays, or with ShapeDtypeStructs next to a function, which Equinox takes as static values."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",))
    split = NamedSharding(mesh, PartitionSpec())
    rows = jax.ShapeDtypeStruct((256, 256), "float32", sharding=split)
    given = rows if of_types else jax.device_put(jnp.zeros(rows.shape), split)
    model = {"weight": given, "activation": jnp.tanh} if of_types else {"weight": given}

    def run(model: Any, x: Any) -> Any:
        return {"y": model.get("activation", jnp.tanh)(x @ model["weight"]), **model}

    found = meshwright.audit(_Wrapped(run), model, given, hardware="v5p")
    assert [one["kind"] for one in found["warnings"]] == ["computed_repeatedly"]


@pytest.mark.parametrize("donated", [(), (0,)])
def test_new_state_next_to_the_old_is_noted(donated: tuple[int, ...]) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    weight, rows = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        for shape in ((1024, 1024), (64, 1024))
    )

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    jitted = jax.jit(step, donate_argnums=donated, out_shardings=weight.sharding)
    notes = [note for note in meshwright.audit(jitted, weight, rows)["notes"] if "donate the state" in note]
    expected = "`w` is updated in new memory, 524 kB on each device next to the old state; donate the state"
    assert [note.partition(":")[0] for note in notes] == ([] if donated else [expected])
    gradient = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))
    assert not any("donate" in note for note in meshwright.audit(gradient, weight, rows)["notes"])


def _decode(*, donated: bool) -> dict:
    """The audit of a step that scans layers, each of which writes a position into its cache."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    caches = jax.ShapeDtypeStruct((4, 16, 256, 64), "float32", sharding=split)
    rows = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))

    def step(caches: jax.Array, x: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            cache = jax.lax.dynamic_update_slice(cache, x[:, None], (0, at, 0))
            return x + jnp.einsum("bsh,bh->bh", cache, x), cache

        return jax.lax.scan(layer, x, caches)

    jitted = jax.jit(step, donate_argnums=(0,) if donated else ())
    return meshwright.audit(jitted, caches, rows, jax.ShapeDtypeStruct((), "int32"))


@pytest.mark.parametrize("donated", [True, False])
def test_caches_that_a_scan_returns_in_new_memory_are_found(donated: bool) -> None:
    found = [one for one in _decode(donated=donated)["warnings"] if one["kind"] == "cache_copied"]
    assert len(found) == (0 if donated else 1)
    assert donated or found[0]["what"].startswith("`caches` is written in part and returned, and the step")


def test_state_that_is_not_donated_is_noted_next_to_donated_state() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    weight = jax.ShapeDtypeStruct(
        (1024, 1024), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )

    def step(w: jax.Array, square: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        square = 0.9 * square + 0.1 * g**2
        return w - 0.1 * g / jnp.sqrt(square), square

    jitted = jax.jit(step, donate_argnums=0, out_shardings=weight.sharding)
    notes = meshwright.audit(jitted, weight, weight, weight)["notes"]
    assert [note.partition(",")[0] for note in notes if "donate" in note] == [
        "`square` is updated in new memory"
    ]


def test_the_constant_that_promotes_is_named() -> None:
    run, args = OPERATIONS["scores divided by a NumPy scalar"].run()
    (found,) = meshwright.audit(run, *args)["warnings"]
    assert "since div has promoted an operand: its constant has 32 bits" in found["what"]
    assert found["where"].startswith("jit(forward)/div") and "a Python number" in found["change"]


def test_operations_along_one_dimension_are_one_finding() -> None:
    run, args = OPERATIONS["a sort, a sum and a look-up along one split dimension"].run()
    (found,) = meshwright.audit(run, *args)["warnings"]
    assert "so are `reduce_window_sum`, `sort`" in found["what"]
    assert found["change"].startswith(
        "constrain the array once, before the first of these operations: as its product"
    )


def test_numbers_of_64_bits_are_named() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",))
    weight, rows = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in (((256, 256), ()), ((512, 256), ("data",)))
    )
    scales = np.linspace(0.5, 1.5, 256)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(scales * (x @ w) @ w.T) ** 2))(w)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = meshwright.audit(jax.jit(step, donate_argnums=0), weight, rows, hardware="v5p")
    (wide,) = (one for one in found["warnings"] if one["kind"] == "promoted")
    assert "compute in f64" in wide["what"] and "jax_enable_x64" in wide["change"]


def test_the_reader_of_a_whole_sum_is_named() -> None:
    run, args = OPERATIONS["a logged quantile of the gradients"].run()
    (found,) = meshwright.audit(run, *args)["warnings"]
    assert found["what"].endswith("; sort reads the whole") and "quantile" in found["change"]


def test_a_shard_map_that_names_an_abstract_mesh_compiles_for_this_process() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    rows = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    program, found = foreign.compiled_program(jax.jit(mapped), rows)
    assert found is not None and dict(found.sizes) == {"data": 8} and program.num_devices == 8


_GATHER = """HloModule {name}

ENTRY %main {{
  %a = f32[8,64]{{1,0}} parameter(0)
  ROOT %g = f32[64,64]{{1,0}} all-gather(f32[8,64]{{1,0}} %a), replica_groups={groups}, dimensions={{0}}
}}
"""


@pytest.mark.parametrize("groups", ["{{0,1,2,3,4,5,6,7}}", "[1,8]<=[8]"])
def test_a_header_without_devices_takes_them_from_the_groups(groups: str) -> None:
    assert parse_hlo(_GATHER.format(name="xla", groups=groups)).num_devices == 8


def test_two_modules_and_mlir_are_refused(tmp_path: Path) -> None:
    module = _GATHER.format(name="one", groups="[1,8]<=[8]")
    texts = {
        "2 modules (one, one)": module + "\n" + module,
        "this is MLIR": "module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n}",
        "not partitioned yet": module.replace(
            "parameter(0)\n", "parameter(0)\n  %b = f32[8,64]{1,0} add(%a, %a), sharding={replicated}\n"
        ),
    }
    for why, text in texts.items():
        file = tmp_path / "step.txt"
        file.write_text(text)
        with pytest.raises(AuditError, match=re.escape(why)):
            audit_file(file)


def test_arguments_with_an_abstract_mesh_need_hardware() -> None:
    mesh = AbstractMesh((8,), ("data",))
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(AuditError, match="ahead of time needs hardware="):
        meshwright.audit(lambda x: x @ x, x)


def test_a_shard_map_may_name_an_abstract_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled ahead of time, where the devices here stand for the chips."""
    monkeypatch.setattr(foreign, "own_target", lambda machine: Target("cpu"))
    monkeypatch.setattr(foreign, "target_devices", lambda target: jax.devices()[:8])
    mesh, spec = AbstractMesh((8,), ("data",)), PartitionSpec("data")

    def double(x: jax.Array) -> jax.Array:
        return x * jax.lax.psum(x, "data")

    run = jax.jit(jax.shard_map(double, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spec))
    found = meshwright.audit(run, x, hardware="v5p:2x2x2")
    assert [one["op"] for one in found["emitted"]] == ["all_reduce"]


def test_a_shard_map_of_other_devices_is_told_to_leave_out_its_mesh() -> None:
    def refused(jitted: Any) -> Any:
        raise ValueError("The context mesh A should match the mesh passed to shard_map B")

    with pytest.raises(AuditError, match=r"names the devices of another mesh; leave out its mesh="):
        foreign._compiled(jax.jit(jnp.sin), refused)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("random bits of the older threefry", "jax_threefry_partitionable"),
        ("twelve heads over eight devices", "a multiple of 8"),
        ("a loop over split examples", "in jax.shard_map"),
        ("prompts that are tiled", "jnp.repeat"),
        ("convolutions of an ensemble", "in jax.shard_map"),
        ("heads cut out of gathered positions", "all_to_all"),
        ("stages that work in turn", "microbatches"),
    ],
)
def test_the_remedy_is_of_the_operation(name: str, words: str) -> None:
    run, args = ORIGINS[name].run()
    assert all(words in one["change"] for one in meshwright.audit(run, *args)["warnings"])


@pytest.mark.parametrize(
    ("discount", "words"), [(0.99, "split another dimension than the one"), (None, "in jax.shard_map")]
)
def test_turns_that_need_the_one_before_are_not_to_be_divided(discount: float | None, words: str) -> None:
    """Sums of rewards over split time: discounted ones need the sum of the turn before, others add to it."""
    m = mesh_of("x")

    def step(rewards: Any, ends: Any) -> Any:
        def turn(total: Any, now: Any) -> Any:
            reward, end = now
            total = total + reward * (1 - end) if discount is None else reward + discount * total * (1 - end)
            return total, total

        return jax.lax.scan(turn, jax.numpy.zeros(256), (rewards, ends))[1].sum(0)

    args = array(m, (512, 256), "x"), array(m, (512, 256), "x", dtype=jax.numpy.int32)
    warnings = meshwright.audit(jax.jit(step), *args)["warnings"]
    assert {one["kind"] for one in warnings} == {"batch_gathered"}
    assert all(words in one["change"] for one in warnings)


@pytest.mark.parametrize("differentiated", [True, False])
def test_large_buffers_outside_of_loops_are_to_be_computed_in_parts(differentiated: bool) -> None:
    """Logits of all rows, over 100 GB; a backward pass has to compute each part again."""
    m = mesh_of("data")

    def loss(w: Any, x: Any) -> Any:
        return jax.numpy.mean(jax.nn.logsumexp(jax.numpy.tanh(x @ w), -1) ** 2)

    step = jax.jit(jax.grad(loss) if differentiated else loss)
    args = array(m, (64, 131072)), array(m, (2**21, 64), "data")
    (finding,) = meshwright.audit(step, *args, hardware="v5p")["warnings"]
    assert finding["kind"] == "beyond_memory" and "a part of the rows at a time" in finding["change"]
    assert ("jax.checkpoint" in finding["change"]) == differentiated


def _step_of_rows(batch: tuple[Any, ...], weight: tuple[str | None, ...]) -> Any:
    """A step with its batch over some axes of a mesh of two, and a weight that is gathered in it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))

    def of(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(w: Any, x: Any) -> Any:
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
        return jax.numpy.mean(jax.numpy.tanh(x @ w) ** 2)

    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0)
    return step, (of((64, 128), *weight), of((512, 64), *batch))


def test_a_batch_over_too_few_axes_is_to_be_split_over_all() -> None:
    step, args = _step_of_rows(("data",), ("fsdp",))
    (finding,) = meshwright.audit(step, *args)["warnings"]
    assert finding["kind"] == "computed_repeatedly"
    assert "shard the batch over `fsdp` too" in finding["change"]
    assert _kinds(_step_of_rows((("data", "fsdp"),), ("fsdp",))) == []


def test_a_whole_batch_is_to_be_given_in_parts() -> None:
    step, args = _step_of_rows((), ())
    (finding,) = meshwright.audit(step, *args)["warnings"]
    assert "PartitionSpec('data', 'fsdp')" in finding["change"]
    assert _kinds(_step_of_rows((("data", "fsdp"),), ())) == []


def _sorted_rows(*, by_hand: bool) -> Any:
    """Rows of a split batch in the order of their experts, all devices' or each device's own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))

    def route(weights: Any, x: Any) -> Any:
        order = jax.numpy.argsort(x[:, 0])
        y = jax.numpy.tanh(x[order] @ weights)
        return jax.numpy.zeros_like(y).at[order].set(y)

    weights = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    x = jax.ShapeDtypeStruct((512, 64), "float32", sharding=split)
    if by_hand:
        specs = PartitionSpec(), PartitionSpec("data")
        mapped = jax.shard_map(route, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
        return jax.jit(mapped), (weights, x)
    return jax.jit(route, out_shardings=split), (weights, x)


def test_rows_in_an_order_of_all_devices_are_to_be_sorted_on_each() -> None:
    run, args = _sorted_rows(by_hand=False)
    changes = {one["kind"]: one["change"] for one in meshwright.audit(run, *args)["warnings"]}
    assert "sort and multiply each device's rows" in changes["computed_repeatedly"]
    assert _kinds(_sorted_rows(by_hand=True)) == []


def test_rows_gathered_by_hand_for_means_are_to_be_reduced() -> None:
    run, args = ROWS["means of gathered rows"].run()
    (finding,) = meshwright.audit(run, *args)["warnings"]
    assert finding["change"].startswith("reduce each device's shard")


def test_a_batch_that_leaves_out_an_axis_without_inputs_is_to_be_split_over_both() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("node", "gpu"))
    step = jax.jit(jax.grad(lambda w, x, y: ((jnp.tanh(x @ w) - y) ** 2).mean()))
    rows = array(mesh, (1024, 256), "node")
    args = array(mesh, (256, 256)), rows, rows
    (finding,) = meshwright.audit(step, *args)["warnings"]
    assert "PartitionSpec(('node', 'gpu'))" in finding["change"]


def test_a_quantile_is_not_told_to_sort_along_another_dimension() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec("x")))
    (finding,) = meshwright.audit(jax.jit(lambda x: jax.numpy.quantile(x, 0.9)), x)["warnings"]
    assert finding["kind"] == "gathered_for_one_operation"
    assert "count each device's numbers" in finding["change"]


def _notes(program: Any) -> list[str]:
    run, args = program
    document = meshwright.audit(run, *args)
    assert document["verdict"] == "match"
    return document["notes"]


def test_a_cache_that_is_not_donated_is_copied() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))

    def program(**donated: Any) -> Any:
        def of(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec)))

        def write(cache: Any, row: Any, at: Any) -> Any:
            cache = jax.lax.dynamic_update_slice(cache, row, (at, 0))
            return cache, cache.sum(0)

        at = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, PartitionSpec()))
        return jax.jit(write, **donated), (of((128, 64), None, "x"), of((1, 64), None, "x"), at)

    run, args = program()
    (found,) = meshwright.audit(run, *args, hardware="v5p")["warnings"]
    assert found["kind"] == "cache_copied" and found["tensor"] == "cache"
    assert found["seconds"] == pytest.approx(2 * found["bytes"] / load("v5p:2x2x2").chip.hbm_bytes_per_second)
    assert _kinds(program(donate_argnums=0)) == []


def _with_teacher(*spec: str | None) -> Any:
    step, (student, teacher, x) = ORIGINS["a frozen teacher in shards"].run()
    sharding = NamedSharding(student.sharding.mesh, PartitionSpec(*spec))
    return step, (student, jax.ShapeDtypeStruct(teacher.shape, teacher.dtype, sharding=sharding), x)


def test_a_weight_that_is_whole_next_to_sharded_ones_is_noted() -> None:
    (note,) = _notes(_with_teacher())
    assert "whole on each device" in note
    assert _notes(_with_teacher(None, "fsdp")) == []


def test_the_note_of_a_whole_weight_names_a_sharded_one_of_its_shape() -> None:
    step, (student, _, x) = ORIGINS["a frozen teacher in shards"].run()
    whole = NamedSharding(student.sharding.mesh, PartitionSpec())
    (note,) = _notes((step, (student, jax.ShapeDtypeStruct(student.shape, student.dtype, sharding=whole), x)))
    assert note.startswith("`t` is whole") and "as `s` of the same shape is" in note


def test_sums_that_the_backward_pass_repeats_are_noted() -> None:
    _, (weights, x) = ORIGINS["residuals of layers in a loop"].run()

    def program(**policy: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                y = jax.numpy.tanh(x @ w[0]) @ w[1]
                y = jax.lax.with_sharding_constraint(
                    y, NamedSharding(weights[0].sharding.mesh, PartitionSpec())
                )
                x = x + checkpoint_name(y, "sum")
                return jax.numpy.sin(x), None

            return jax.numpy.mean(jax.lax.scan(jax.checkpoint(layer, **policy), x, w)[0] ** 2)

        return jax.jit(jax.grad(loss)), (weights, x)

    (note,) = _notes(program())
    assert "jax.checkpoint repeats sums" in note
    assert _notes(program(policy=jax.checkpoint_policies.save_only_these_names("sum"))) == []
