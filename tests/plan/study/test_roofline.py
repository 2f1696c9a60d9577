"""Operations of a step: together they are its compute, its bytes and its collectives."""

import pytest
from tests.plan.study.test_split import LAYOUTS, candidate

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.study.roofline import link_roofs, operations
from meshwright.plan.train import price

CONFIG, WORKLOAD = load_model("llama-3-8b"), Workload(64, 2048)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operations_and_the_optimizer_are_the_work_of_the_step(layout):
    found = candidate(layout)
    work = sum(term.seconds for term in found.cost.terms if term.bound in ("compute", "hbm"))
    optimizer = sum(term.seconds for term in found.cost.terms if term.name == "optimizer")
    total = sum(operation.seconds for operation in operations(found))
    assert total == pytest.approx(work - optimizer, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_their_flops_are_those_executed(layout):
    found = candidate(layout)
    total = sum(operation.flops for operation in operations(found))
    assert total == pytest.approx(found.cost.executed_flops, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_belongs_to_an_operation_but_the_update_s_and_hops(layout):
    found = candidate(layout)
    moved = [
        planned
        for planned in found.cost.collectives
        if planned.direction != "update" and planned.what != "activations between stages"
    ]
    ops = operations(found)
    assert sum(o.link_seconds for o in ops) == pytest.approx(sum(p.seconds * p.count for p in moved))
    exposed = sum(p.seconds * p.count * p.exposed for p in moved)
    assert sum(o.exposed_seconds for o in ops) == pytest.approx(exposed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_above_a_roof(layout):
    found = candidate(layout)
    chip = found.hardware.chip
    for operation in operations(found):
        if operation.flops:
            assert operation.flops_per_second <= chip.flops("bf16") * (1 + 1e-9)
            roof = operation.intensity * chip.hbm_bytes_per_second
            assert operation.flops_per_second <= roof * (1 + 1e-9)
            assert operation.linked_flops_per_second <= operation.flops_per_second


def test_the_input_of_three_products_counts_to_each_by_its_flops():
    found = candidate("data=2,tensor=8,sequence_parallel=true")
    ops = {(o.name, o.direction): o for o in operations(found)}
    queries, keys = ops["wq", "forward"], ops["wk", "forward"]
    assert queries.link_bytes / keys.link_bytes == pytest.approx(queries.flops / keys.flops)


def test_a_roof_is_what_the_largest_collective_reaches():
    found = candidate("fsdp=16")
    (roof,) = [roof for roof in link_roofs(found) if roof.axes == ("fsdp",) and roof.seconds > 1e-3]
    gathers = [p for p in found.cost.collectives if p.op == "all_gather"]
    rates = [p.gathered_bytes / p.seconds for p in gathers]
    assert roof.bytes_per_second == pytest.approx(max(rates))


def test_what_has_no_flops_is_bound_by_memory():
    ops = operations(candidate("fsdp=16"))
    assert {o.bound for o in ops if not o.flops} == {"hbm"}
    assert {"attention", "w_gate", "unembed", "attention_norm"} <= {o.name for o in ops}


def test_gathered_keys_and_values_are_attention_s():
    ops = {(o.name, o.direction): o for o in operations(candidate("context=2,tensor=8"))}
    assert ops["attention", "forward"].link_bytes > 0


def test_the_tokens_of_experts_belong_to_operations():
    """Every collective of a mixture of experts has an operation, dispatch and combine too."""
    config = load_model("mixtral-8x7b")
    workload, layout = Workload(64, 4096), Layout.parse("data=4,tensor=2,expert=4")
    found = price(config, catalog.load("h100:8"), workload, layout)
    moved = [planned for planned in found.cost.collectives if planned.direction != "update"]
    ops = operations(found)
    assert sum(o.link_seconds for o in ops) == pytest.approx(sum(p.seconds * p.count for p in moved))
