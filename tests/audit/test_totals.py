"""Products and memory, planned beside compiled: what is flagged, and what a compiler may do."""

from dataclasses import dataclass, replace

import pytest

from meshwright.audit.compare.findings import compare_memory
from meshwright.audit.compare.flops import compare_products
from meshwright.audit.compile.planned_program import PlannedStep, planned_step
from meshwright.audit.facts.buffers import Held, Peak
from meshwright.audit.facts.matmuls import Product, summed_products
from meshwright.audit.hlo.read import ArrayShape, Computation, Instruction, parse_hlo
from meshwright.audit.hlo.trace import CallPath, TracedValue
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import PRESETS
from meshwright.plan_file import Plan
from meshwright.platforms import CPU, TPU

PLANNED = {
    ("wq", "forward"): 40.0,
    ("wk", "forward"): 10.0,
    ("wv", "forward"): 10.0,
    ("attention", "forward"): 4.0,
    ("wq", "backward"): 80.0,
    ("w_out", "forward"): 100.0,
    ("w_out", "recompute"): 100.0,
    ("w_out", "backward"): 200.0,
}


_OF_ATTENTION = frozenset({"wq", "wk", "wv"})


def _product(name: str, flops: float) -> Product:
    scope, phase = name.split()
    prefix = {"forward": "jit(f)/jvp(layers)", "backward": "jit(f)/transpose(jvp(layers))"}[phase]
    one = Instruction(
        "dot", ArrayShape("f32", (1,)), "dot", (), {}, op_name=f"{prefix}/{scope}/BTD,DF->BTF/dot_general"
    )
    return Product(TracedValue(one, CallPath(Computation("main", {}, "dot"))), flops, one.op_name)


def _found(**changed: float) -> list[tuple[str, str, float]]:
    """What differs of the planned products, some of which have other FLOPs."""
    flops = {"wq forward": 40.0, "wk forward": 10.0, "wv forward": 10.0, "attention forward": 4.0,
             "wq backward": 80.0, "w_out forward": 100.0, "w_out backward": 300.0} | changed  # fmt: skip
    made = [_product(name, number) for name, number in flops.items()]
    return [
        (one.tensor, one.direction, one.extra_flops)
        for one in compare_products(PLANNED, made, differentiated=True, same_input=[_OF_ATTENTION])
    ]


def test_recomputed_products_count_with_the_backward_pass() -> None:
    assert _found() == []


def test_too_many_and_too_few_products_differ() -> None:
    assert _found(**{"w_out backward": 400.0}) == [("w_out", "backward", 100.0)]
    assert _found(**{"wq forward": 20.0}) == [("wq", "forward", -20.0)]
    assert _found(**{"odd forward": 50.0}) == [("odd", "forward", 50.0)]


@pytest.mark.parametrize(("edge", "allowed"), [(512 / 8192, 1.34), (512 / 1024, 1.49), (1.0, 1.99)])
def test_a_kernel_may_compute_the_blocks_that_its_mask_cuts(edge: float, allowed: float) -> None:
    def differing(target: str, times: float) -> list[str]:
        one = Instruction("a", ArrayShape("bf16", (1,)), "custom-call", (), {"custom_call_target": target},
                          op_name="jit(f)/layers/attention/splash_mha_fwd_residuals/pallas_call")  # fmt: skip
        value = TracedValue(one, CallPath(Computation("main", {}, "a")))
        product = Product(value, times * 100, one.op_name)
        planned = {("attention", "forward"): 100.0}
        return [d.tensor for d in compare_products(planned, [product], differentiated=False, edge=edge)]

    assert differing('"tpu_custom_call"', allowed) == []
    assert differing('"tpu_custom_call"', allowed + 0.02) == ["attention"]
    assert differing('"another"', allowed) == ["attention"]


def test_sums_may_replace_the_products_of_a_step() -> None:
    """XLA for GPUs sums q times the state over the elements of a key, in place of a product."""
    planned = {("state_space", "forward"): 100.0, ("wq", "forward"): 100.0}
    made = [_product("wq forward", 100.0)]

    def differing(*summed: str, products: list[Product] = made) -> list[str]:
        differences = compare_products(planned, products, differentiated=False, summed=summed)
        return [one.tensor for one in differences]

    assert differing() == ["state_space"]
    assert differing("state_space") == []
    assert differing("state_space", products=[*made, _product("state_space forward", 200.0)]) != []
    assert differing("state_space", products=[]) == ["wq"]


def test_tensors_of_the_same_input_are_known_by_the_plan() -> None:
    """In generation over `tensor` the weights that are not split read the same input as the others."""
    model = replace(PRESETS["kimi-linear-48b-a3b"], num_layers=4)
    plan = Plan(model, "h100:1x8", Workload(64, 4096, "generate"), Layout.of(tensor=8))
    groups = planned_step(plan, load("h100:1x8")).same_input
    of_state = {f"state_{name}" for name in ("q", "k", "v", "beta", "decay_down", "gate_down")}
    assert {"router", "shared_gate", "shared_in"} in groups
    assert of_state in groups
    assert {"w_gate", "w_in"} in groups


SUMMED = """HloModule test

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (q: f32[4,8]) -> f32[4] {
  %q = f32[4,8] parameter(0)
  %zero = f32[] constant(0)
  ROOT %sum = f32[4] reduce(%q, %zero), dimensions={1}, to_apply=%add, \
metadata={op_name="jit(_step)/layers/state_space/shard_map/...s,...usp->...up/NAME"}
}
"""


def test_a_product_is_summed_if_its_name_is_on_a_reduction() -> None:
    assert "state_space" in summed_products(parse_hlo(SUMMED.replace("NAME", "dot_general")))
    assert summed_products(parse_hlo(SUMMED.replace("NAME", "reduce_sum"))) == set()


def test_products_that_xla_merged_are_the_planned_ones() -> None:
    merged = {"wq forward": 60.0, "wk forward": 0.0, "wv forward": 0.0}
    assert _found(**merged) == []
    assert _found(**merged | {"wq forward": 80.0})[0] == ("wq", "forward", 40.0)
    # More padded rows of another product than of wk is no merge, though as large.
    assert [name for name, *_ in _found(**{"attention forward": 14.0, **merged})] == ["attention"]


def test_attention_may_compute_whole_blocks_of_its_mask() -> None:
    assert _found(**{"attention forward": 5.0}) == []
    assert _found(**{"attention forward": 8.0}) == [("attention", "forward", 4.0)]


STEP = PlannedStep((), 1.0, 1.0, {}, "bf16", {"weights": 100, "optimizer": 400, "activations": 500}, 1000)


@dataclass(frozen=True)
class Case:
    arguments: int = 510
    outputs: int = 0
    temporaries: int = 500
    capacity: int | None = None
    tolerance: float = TPU.compiler.total_tolerance


@pytest.mark.parametrize(
    ("case", "tensors"),
    [
        (Case(), []),
        (Case(arguments=560), ["state"]),
        (Case(arguments=460), ["state"]),
        (Case(outputs=500), ["state"]),
        (Case(temporaries=900), ["temporaries"]),
        (Case(temporaries=100), ["temporaries"]),
        (Case(temporaries=900, tolerance=CPU.compiler.total_tolerance), []),
        (Case(capacity=1000), ["memory"]),
        (Case(capacity=1010), []),
        (Case(temporaries=900, capacity=100_000), ["temporaries"]),
        (Case(temporaries=900, capacity=1_000_000), []),
    ],
)
def test_memory_is_compared_by_its_parts(case: Case, tensors: list[str]) -> None:
    compiled = {"arguments": case.arguments, "outputs": case.outputs, "temporaries": case.temporaries}
    compiled["total"] = sum(compiled.values())
    found = compare_memory(STEP, compiled, 10, 0, case.capacity, case.tolerance)
    assert [one.tensor for one in found] == tensors
    assert all(one.kind == "memory" and one.what for one in found)


def test_temporaries_beyond_the_plan_are_named() -> None:
    given = {"arguments": 510, "outputs": 0, "temporaries": 900, "total": 1410}
    peak = Peak(900, (Held(500, "layers/k", "a", "f32[125]"), Held(400, "layers/k", "b", "f32[100]")))
    (found,) = compare_memory(STEP, given, 10, 0, None, TPU.compiler.total_tolerance, peak)
    assert found.what.endswith("in memory.peak: `layers/k` (2 buffers, 900 B)")


def test_a_state_that_is_not_donated_is_told_from_one_that_is_larger() -> None:
    given = {"arguments": 510, "outputs": 500, "temporaries": 500, "total": 1510}
    (copied,) = compare_memory(STEP, given, 10, 0, None, CPU.compiler.total_tolerance)
    assert "donate" in copied.change
    (larger,) = compare_memory(
        replace(STEP), given | {"arguments": 1010, "outputs": 0}, 10, 0, None, CPU.compiler.total_tolerance
    )
    assert larger.change == "" and "weights, the optimizer's state and caches take" in larger.what


def test_results_that_are_no_state_are_no_state_that_is_not_donated() -> None:
    """Logits of an inference step, beside caches of another size than planned."""
    given = {"arguments": 560, "outputs": 100, "temporaries": 400, "total": 1060}
    (found,) = compare_memory(STEP, given, 10, 100, None, CPU.compiler.total_tolerance)
    assert "weights, the optimizer's state and caches take" in found.what
