"""What is computed outside of products, counted by hand in small programs."""

from dataclasses import replace

import pytest

from meshwright.audit.compare.arithmetic import rounding_findings, type_findings
from meshwright.audit.compare.findings import (
    activation_findings,
    missing_findings,
    norm_findings,
    result_findings,
    state_findings,
    unplanned_findings,
    update_findings,
)
from meshwright.audit.compile.planned_program import PlannedStep, PlannedUpdate, planned_step
from meshwright.audit.facts.narrow_arithmetic import NarrowResult, narrowest_elements, rounded_statistics
from meshwright.audit.facts.outside_products import (
    ScopedArithmetic,
    UpdateArithmetic,
    scoped_arithmetic,
    state_passes,
    transcendentals,
    update_arithmetic,
)
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import parse_hlo
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.notation.mesh import Mesh
from meshwright.plan_file import Plan
from meshwright.platforms import CPU

UNPRICED = Prices(Mesh({}), None, None)

# Of w[4, 8] and its gradient g: w - 0.1 g, which is 2 operations an element, and a norm of g, which squares
# and sums. The forward pass adds to the residual stream what dropout leaves.
TRAINED = """
HloModule jit_step, is_scheduled=true

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

update {
  w = f32[4,8] parameter(0)
  g = f32[4,8] parameter(1)
  rate = f32[4,8] constant({...})
  scaled = f32[4,8] multiply(g, rate), metadata={op_name="jit(step)/update/mul"}
  ROOT new = f32[4,8] subtract(w, scaled), metadata={op_name="jit(step)/update/sub"}
}

ENTRY main {
  w = f32[4,8] parameter(0), metadata={op_name="state.params['w']"}
  x = f32[2,8] parameter(1), metadata={op_name="rows"}
  y = f32[2,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp()/w/dot_general"}
  kept = f32[2,4] multiply(y, y), metadata={op_name="jit(step)/jvp(dropout)/mul"}
  z = f32[2,4] add(y, kept), metadata={op_name="jit(step)/jvp(residual)/add"}
  g = f32[4,8] dot(z, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp())/w/dot_general"}
  zero = f32[] constant(0)
  squared = f32[4,8] multiply(g, g), metadata={op_name="jit(step)/update/square"}
  norm = f32[] reduce(squared, zero), dimensions={0,1}, to_apply=sum, metadata={op_name="jit(step)/update/reduce_sum"}
  new = f32[4,8] fusion(w, g), kind=kLoop, calls=update
  ROOT out = (f32[4,8], f32[]) tuple(new, norm)
}
"""  # noqa: E501


def test_the_update_is_counted_where_it_is_fused() -> None:
    assert update_arithmetic(parse_hlo(TRAINED)) == UpdateArithmetic(computed=3 * 32, reduced=32)


def test_operations_without_a_planned_name_are_told() -> None:
    found = list(scoped_arithmetic(parse_hlo(TRAINED), differentiated=True))
    assert [one.elements for one in found] == [8, 8]
    (remark,) = unplanned_findings(found, {"w", "residual"}, UNPRICED)
    assert (remark.kind, remark.tensor) == ("elementwise", "dropout")
    assert remark.what.startswith("8 elements, 50.0%")
    assert unplanned_findings(found, {"w", "residual", "dropout"}, UNPRICED) == []


def test_counters_of_loops_are_not_told() -> None:
    found = [
        ScopedArithmetic("jit(step)/residual/add", 100_000),
        ScopedArithmetic("jit(step)/while/add", 10),
    ]
    assert unplanned_findings(found, {"residual"}, UNPRICED) == []
    counted = [*found[:1], replace(found[1], elements=10, is_float=False)]
    assert unplanned_findings(counted, {"residual"}, UNPRICED, CPU.compiler.unplanned_share) == []
    assert unplanned_findings([found[0], found[1]], {"residual"}, UNPRICED, CPU.compiler.unplanned_share)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (UpdateArithmetic(1900, 100), []),
        (UpdateArithmetic(2000, 100), []),
        (UpdateArithmetic(2300, 100), ["computes"]),
        (UpdateArithmetic(1500, 100), ["computes"]),
        (UpdateArithmetic(3800, 100), ["computes"]),
        (UpdateArithmetic(1900, 200), ["reduces"]),
        (UpdateArithmetic(1900, 0), ["reduces"]),
    ],
)
def test_updates_are_compared_by_what_they_compute_and_reduce(
    found: UpdateArithmetic, words: list[str]
) -> None:
    told = update_findings(PlannedUpdate(1900, 100, 2200), found, UNPRICED)
    assert [one.what.split()[2] for one in told] == words


def test_weights_that_no_norm_has_a_part_in_are_told() -> None:
    """The norm of g is only a metric at first; then the rate of the update is over it, or over its sum."""
    assert [one.tensor for one in norm_findings(parse_hlo(TRAINED))] == ["grad_norm"]
    over = 'rate = f32[4,8] broadcast(size), dimensions={}, metadata={op_name="jit(step)/update/div"}'
    clipped = TRAINED.replace("rate = f32[4,8] constant({...})", f"size = f32[] parameter(2)\n  {over}")
    clipped = clipped.replace("fusion(w, g)", "fusion(w, g, norm)")
    assert norm_findings(parse_hlo(clipped)) == []
    # XLA combines the norm's sum over devices with the loss's.
    name = "jit(step)/(update/reduce_sum:jvp(loss)/reduce_sum)"
    sent = "all = f32[] all-reduce(norm), replica_groups={{0,1}}, to_apply=sum"
    combined = f'{sent}, metadata={{op_name="{name}"}}\n'
    summed = clipped.replace("fusion(w, g, norm)", "fusion(w, g, all)")
    summed = summed.replace("  new =", f"  {combined}  new =")
    assert norm_findings(parse_hlo(summed)) == []


@pytest.mark.parametrize(
    ("kind", "function", "told"),
    [
        ("silu", "exp", 0), ("silu", "logistic", 0), ("silu", "tanh", 1), ("silu", "max", 1),
        ("gelu", "tanh", 0), ("gelu", "exp", 1), ("gelu_erf", "erf", 0),
        ("relu", "max", 0), ("relu", "exp", 1),
    ],
)  # fmt: skip
def test_an_activation_takes_the_function_of_its_kind(kind: str, function: str, told: int) -> None:
    scope = "jit(step)/jvp(layers)/w_activation/jit(f)"
    text = TRAINED.replace("jit(step)/jvp(dropout)/mul", f"{scope}/{function}")
    found = transcendentals(parse_hlo(text), differentiated=True)
    assert len(activation_findings(found, {"w", "w_activation", "residual"}, kind)) == told


def test_a_planned_operation_that_the_program_lacks_is_told() -> None:
    program = parse_hlo(TRAINED)
    assert missing_findings(program, {"residual", "dropout", "residual_sum"}) == []
    assert [one.tensor for one in missing_findings(program, {"residual", "rope_q"})] == ["rope_q"]


def test_a_sort_is_told_of_however_small_it_is() -> None:
    found = [
        ScopedArithmetic("jit(step)/residual/add", 1000),
        ScopedArithmetic("jit(step)/sort", 1, sorts=True),
    ]
    assert [one.tensor for one in unplanned_findings(found, {"residual"}, UNPRICED)] == ["sort"]
    rows = [found[0], ScopedArithmetic("jit(step)/dispatch/sort", 1, sorts=True)]
    assert unplanned_findings(rows, {"residual", "dispatch_sort"}, UNPRICED) == []


# A cache [2, 16], given back, of which a row is written; a weight [16, 4]; and a product of both. LINES: what
# is done before.
SERVED = """
HloModule jit_step, is_scheduled=true

ENTRY main {
  w = bf16[16,4] parameter(0), metadata={op_name="params['w']"}
  cache = bf16[2,16] parameter(1), metadata={op_name="pools['k']"}
  row = bf16[1,16] parameter(2)
  at = s32[] parameter(3)
  zero = s32[] constant(0)
  LINES
  new = bf16[2,16] dynamic-update-slice(c, row, at, zero), metadata={op_name="jit(step)/attention/scatter"}
  y = bf16[2,4] dot(new, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/wq/dot_general"}
  ROOT out = (bf16[2,4], bf16[2,16]) tuple(y, new)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("lines", "state", "num_bytes"),
    [
        ("c = bf16[2,16] bitcast(cache)\n  v = bf16[16,4] copy(w)", "", 0),
        ("c = bf16[2,16] copy(cache)\n  v = bf16[16,4] bitcast(w)", "pools['k']", 2 * 64),
        ("c = bf16[2,16]{1,0:S(1)} copy(cache)\n  v = bf16[16,4] bitcast(w)", "", 0),
        ("c = bf16[2,16] bitcast(cache)\n  v = bf16[16,4] tanh(w)", "params['w']", 128),
        ("c = bf16[2,16] reverse(cache), dimensions={0}\n  v = bf16[16,4] bitcast(w)", "pools['k']", 2 * 64),
    ],
    ids=["as it is", "copied", "to fast memory", "weights computed", "cache reversed"],
)
def test_passes_over_weights_and_caches(lines: str, state: str, num_bytes: int) -> None:
    passes = list(state_passes(parse_hlo(SERVED.replace("LINES", lines)), differentiated=False))
    assert sum(one.num_bytes for one in passes) == num_bytes
    planned = PlannedStep((), 1.0, 1.0, {}, "bf16", {"weights": 128, "cache": 64}, 200)
    told = state_findings(passes, planned, UNPRICED)
    assert [one.tensor for one in told] == ([state] if state else [])


@pytest.mark.parametrize(("line", "told"), [("copy", []), ("tanh", ["tanh"])])
def test_logits_are_what_a_planned_operation_makes(line: str, told: list[str]) -> None:
    text = SERVED.replace("LINES", "c = bf16[2,16] bitcast(cache)\n  v = bf16[16,4] bitcast(w)")
    after = f'out = bf16[2,4] {line}(y), metadata={{op_name="jit(run)/{line}"}}'
    text = text.replace("  ROOT out =", f"  {after}\n  ROOT results =").replace("tuple(y,", "tuple(out,")
    assert [one.tensor for one in result_findings(parse_hlo(text), {"wq", "attention"})] == told


@pytest.mark.parametrize(("adds_wide", "names"), [(True, ["gradients"]), (False, [])])
def test_gradients_of_microbatches_are_added_as_planned(adds_wide: bool, names: list[str]) -> None:
    """In bfloat16 only if the plan adds them so."""
    plan = Plan(load_model("tiny"), "cpu:8", Workload(32, 64), Layout.of(data=8, microbatches=2))
    name = "jit(_step)/while/body/gradients/w_in/add"
    narrow = [NarrowResult(name, "add", "backward", 4096)]
    found = type_findings(narrow, {}, planned_step(plan, load("cpu:8")), 0, adds_wide=adds_wide)
    assert [one.tensor for one in found] == names


# A callback, which has no result, numbers that are rounded to eight bits, and an angle in bfloat16.
ROUNDED = """
HloModule jit_step, is_scheduled=true

ENTRY main {
  x = f32[4,8] parameter(0)
  none = () custom-call(), custom_call_target="xla_ffi_python_cpu_callback"
  narrow = f8e5m2[4,8] convert(x), metadata={op_name="jit(step)/layers/w_out/convert"}
  wide = f32[4,8] convert(narrow), metadata={op_name="jit(step)/layers/w_out/convert"}
  angle = bf16[4,8] convert(x), metadata={op_name="jit(step)/layers/q_rope/convert"}
  again = f32[4,8] convert(angle), metadata={op_name="jit(step)/layers/q_rope/convert"}
  turned = f32[4,8] cosine(again), metadata={op_name="jit(step)/layers/q_rope/cos"}
  ROOT y = f32[4,8] add(wide, turned)
}
"""


def test_numbers_of_eight_bits_are_found_without_a_plan_for_them() -> None:
    found = narrowest_elements(parse_hlo(ROUNDED))
    assert found == (32, "jit(step)/layers/w_out/convert")
    (finding,) = rounding_findings(found, Layout.of())
    assert (finding.kind, finding.tensor) == ("dtype", "w_out")
    assert rounding_findings(found, Layout.of(matmul_dtype="fp8")) == []
    wide = ROUNDED.replace("f8e5m2", "f16")
    assert rounding_findings(narrowest_elements(parse_hlo(wide)), Layout.of()) == []


def test_angles_in_bfloat16_are_found() -> None:
    assert rounded_statistics(parse_hlo(ROUNDED), differentiated=False) == {"q_rope": 32}
    assert rounded_statistics(parse_hlo(ROUNDED.replace("bf16", "f32")), differentiated=False) == {}
