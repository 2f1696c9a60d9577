"""Programs as XLA for TPU writes them (libtpu 0.0.42), cut down by hand: sums that scatter, or do not."""

from typing import Literal

import pytest
from tests.audit.hlo_text import HEAD

from meshwright.audit.compare.findings import findings
from meshwright.audit.compare.line_up import line_up
from meshwright.audit.compare.rewrites import Side
from meshwright.audit.facts.communication import EmittedCollective, collectives
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.facts.seconds import step_prices
from meshwright.audit.hlo.read import parse_hlo
from meshwright.cost.priced import PricedCollective
from meshwright.hardware.catalog import load
from meshwright.notation.mesh import Mesh

MESH = Mesh({"fsdp": 4})
NAME = "jit(step)/transpose(jvp(layers))/w_in/reshape"
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%sum"
OFFSETS = """  %table = u32[4] constant({...})
  %id = u32[] partition-id()
  %at = u32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %start = u32[] bitcast(%at)
  %zero = u32[] constant(0)
"""

# dw[40, 128] padded to 48 rows, of which each device gets 12 and needs 10: two end on its neighbour.
PADDED = (
    HEAD
    + f"""%all-reduce-scatter (input: bf16[40,128]) -> bf16[12,128] {{
  %input = bf16[40,128] parameter(0)
  %none = bf16[] constant(0)
  %pad = bf16[48,128] pad(%input, %none), padding=0_8x0_0
  %whole = bf16[48,128] all-reduce(%pad), {GROUPS}
{OFFSETS}  ROOT %mine = bf16[12,128] dynamic-slice(%whole, %start, %zero), dynamic_slice_sizes={{12,128}}
}}

ENTRY %main (dw: bf16[40,128]) -> bf16[10,128] {{
  %dw = bf16[40,128] parameter(0)
  %fusion = bf16[12,128] fusion(%dw), kind=kCustom, calls=%all-reduce-scatter, metadata={{op_name="{NAME}"}}
  %slice = bf16[2,128] slice(%fusion), slice={{[10:12], [0:128]}}
  %moved = bf16[2,128] collective-permute(%slice), source_target_pairs={{{{0,1}},{{1,2}},{{2,3}}}}
  %rows = bf16[14,128] concatenate(%moved, %fusion), dimensions={{0}}
  ROOT %kept = bf16[10,128] slice(%rows), slice={{[0:10], [0:128]}}
}}
"""
)

# Two gradients scattered by one fusion; their names stand where they are taken out of it.
COMBINED = (
    HEAD
    + f"""%all-reduce-scatter (x: bf16[40,128], y: bf16[8,128]) -> (bf16[10,128], bf16[2,128]) {{
  %x = bf16[40,128] parameter(0)
  %y = bf16[8,128] parameter(1)
  %both = (bf16[40,128], bf16[8,128]) all-reduce(%x, %y), {GROUPS}
{OFFSETS}  %first = bf16[40,128] get-tuple-element(%both), index=0
  %second = bf16[8,128] get-tuple-element(%both), index=1
  %mine = bf16[10,128] dynamic-slice(%first, %start, %zero), dynamic_slice_sizes={{10,128}}
  %own = bf16[2,128] dynamic-slice(%second, %start, %zero), dynamic_slice_sizes={{2,128}}
  ROOT %slices = (bf16[10,128], bf16[2,128]) tuple(%mine, %own)
}}

ENTRY %main (dx: bf16[40,128], dy: bf16[8,128]) -> bf16[10,128] {{
  %dx = bf16[40,128] parameter(0)
  %dy = bf16[8,128] parameter(1)
  %fusion = (bf16[10,128], bf16[2,128]) fusion(%dx, %dy), kind=kCustom, calls=%all-reduce-scatter
  %e = bf16[2,128] get-tuple-element(%fusion), index=1, metadata={{op_name="{NAME.replace("w_in", "wk")}"}}
  ROOT %d = bf16[10,128] get-tuple-element(%fusion), index=0, metadata={{op_name="{NAME}"}}
}}
"""
)

# What became of the naive form: summed whole, then sliced by a program that has no table of offsets.
WHOLE = (
    HEAD
    + f"""ENTRY %main (dw: bf16[40,128]) -> bf16[10,128] {{
  %dw = bf16[40,128] parameter(0)
  %gradient = bf16[40,128] add(%dw, %dw), metadata={{op_name="{NAME}"}}
  %whole = bf16[40,128] all-reduce(%gradient), {GROUPS}
{OFFSETS}  ROOT %mine = bf16[10,128] dynamic-slice(%whole, %start, %zero), dynamic_slice_sizes={{10,128}}
}}
"""
)


def _read(text: str) -> list[EmittedCollective]:
    return collectives(parse_hlo(text))


def _planned(op: Literal["reduce_scatter", "all_gather"] = "reduce_scatter") -> PricedCollective:
    what = "gradients" if op == "reduce_scatter" else "weights"
    num_bytes = 40 * 128 * 2
    return PricedCollective(what, "backward", op, ("fsdp",), "w_in", num_bytes, "bf16", 1, 1e-6, 1e-6, "ici")


def test_a_sum_fused_with_its_slice_is_a_reduce_scatter_named_by_the_fusion() -> None:
    scatter, permute = sorted(_read(PADDED), key=lambda one: one.op, reverse=True)
    assert (scatter.op, scatter.phase, scatter.scope) == ("reduce_scatter", "backward", ("layers", "w_in"))
    assert (scatter.gathered_bytes, scatter.padding_bytes) == (40 * 128 * 2, 8 * 128 * 2)
    assert (permute.op, permute.follows_sum, permute.scope) == ("permute", True, ("layers", "w_in"))


def test_a_scattered_tensor_of_joined_pieces_is_one_tensor() -> None:
    """The gradient of gathered keys, whose positions the devices deal out in pieces."""
    joined = """  %early = bf16[20,128] slice(%dw), slice={[20:40], [0:128]}
  %late = bf16[20,128] slice(%dw), slice={[0:20], [0:128]}
  %pieces = bf16[40,128] concatenate(%early, %late), dimensions={0}
  %fusion = bf16[12,128] fusion(%pieces)"""
    text = PADDED.replace("  %fusion = bf16[12,128] fusion(%dw)", joined)
    assert [(one.op, one.scope, one.gathered_bytes) for one in _read(text)] == [
        (one.op, one.scope, one.gathered_bytes) for one in _read(PADDED)
    ]


def test_tensors_scattered_together_keep_their_names() -> None:
    assert [(one.op, one.scope[-1], one.gathered_bytes) for one in _read(COMBINED)] == [
        ("reduce_scatter", "w_in", 40 * 128 * 2),
        ("reduce_scatter", "wk", 8 * 128 * 2),
    ]


def test_what_a_sum_of_several_made_has_the_name_of_its_own() -> None:
    """XLA for GPU lays the slices of a combined reduce-scatter end to end, all under the name of the last."""
    other = NAME.replace("w_in", "wk")
    text = (
        HEAD
        + f"""ENTRY %main (x: bf16[40,128], y: bf16[8,128]) -> bf16[1536] {{
  %x = bf16[40,128] parameter(0)
  %y = bf16[8,128] parameter(1)
  %dx = bf16[40,128] add(%x, %x), metadata={{op_name="{NAME}"}}
  %dy = bf16[8,128] add(%y, %y), metadata={{op_name="{other}"}}
  %both = (bf16[10,128], bf16[2,128]) reduce-scatter(%dx, %dy), dimensions={{0}}, {GROUPS}, \
metadata={{op_name="{other}"}}
  %a = bf16[10,128] get-tuple-element(%both), index=0
  %b = bf16[2,128] get-tuple-element(%both), index=1, metadata={{op_name="{other}"}}
  %first = bf16[1280] bitcast(%a)
  %second = bf16[256] bitcast(%b)
  %flat = bf16[1536] concatenate(%first, %second), dimensions={{0}}
  ROOT %whole = bf16[1536] all-reduce(%flat), {GROUPS}
}}
"""
    )
    assert [(one.op, one.scope[-1], one.gathered_bytes) for one in _read(text)] == [
        ("reduce_scatter", "w_in", 40 * 128 * 2),
        ("reduce_scatter", "wk", 8 * 128 * 2),
        ("all_reduce", "w_in", 10 * 128 * 2),
        ("all_reduce", "wk", 2 * 128 * 2),
    ]


def test_a_sum_without_a_name_has_that_of_what_it_sums() -> None:
    (one,) = _read(WHOLE)
    assert (one.op, one.op_name, one.phase) == ("all_reduce", NAME, "backward")


def test_a_padded_scatter_is_equivalent_and_no_finding() -> None:
    rows = line_up([_planned()], [on_mesh(one, MESH) for one in _read(PADDED)], Side(has_reduce_scatter=True))
    assert [(row.tensor, row.direction, row.status) for row in rows] == [("w_in", "backward", "equivalent")]
    assert findings(rows, step_prices(load("v5e:2x2"), MESH)) == []


def test_a_gradient_summed_whole_is_found_priced_and_mended() -> None:
    rows = line_up([_planned()], [on_mesh(one, MESH) for one in _read(WHOLE)], Side(has_reduce_scatter=True))
    (found,) = findings(rows, step_prices(load("v5e:2x2"), MESH))
    assert found.what.startswith("w_in: the plan has a reduce-scatter over fsdp, the compiler emits")
    assert found.change.startswith("reshape the scattered dimension to [fsdp, rest]")
    assert (found.tensor, found.direction, found.where) == ("w_in", "backward", NAME)
    # An all-reduce passes on 2 V (n-1)/n bytes, a reduce-scatter half of that.
    assert found.bytes == 40 * 128 * 2 * 3 // 4
    assert found.seconds is not None and found.seconds > 0


def test_a_sum_round_more_rings_than_a_reduce_scatter_has_no_cure() -> None:
    """The compiler says how many directed rings carry it; a reduce-scatter of it takes both ways of one."""
    rings = """backend_config={"strategy":"UniDirectionNDRingStrategy","debug":"UniDirectionNDRingStrategy\
{colors:6 phases:3 cores:{4 4 4}}"}"""
    text = WHOLE.replace(f"all-reduce(%gradient), {GROUPS}", f"all-reduce(%gradient), {GROUPS}, {rings}")
    rows = line_up([_planned()], [on_mesh(one, MESH) for one in _read(text)], Side(has_reduce_scatter=True))
    (found,) = findings(rows, step_prices(load("v5e:2x2"), MESH))
    assert found.what.endswith("over 6 rings at once, in 67% of the time of a reduce-scatter over one ring")
    assert found.change == ""
    both_ways = text.replace("UniDirectionNDRingStrategy", "StrategyND").replace("colors:6", "colors:2")
    assert [one.num_rings for one in _read(text) + _read(both_ways)] == [6, 4]


def test_a_gather_written_as_a_sum_costs_what_the_sum_sends() -> None:
    text = WHOLE.replace(
        "%gradient = bf16[40,128] add(%dw, %dw)",
        """%none = bf16[] constant(0)
  %empty = bf16[40,128] broadcast(%none), dimensions={}
  %shard = bf16[10,128] slice(%dw), slice={[0:10], [0:128]}
  %id.1 = u32[] partition-id()
  %ten = u32[] constant(10)
  %zero.1 = u32[] constant(0)
  %from = u32[] multiply(%id.1, %ten)
  %gradient = bf16[40,128] dynamic-update-slice(%empty, %shard, %from, %zero.1)""",
    )
    planned = _planned("all_gather")
    rows = line_up([planned], [on_mesh(one, MESH) for one in _read(text)], Side(has_reduce_scatter=True))
    (found,) = findings(rows, step_prices(load("v5e:2x2"), MESH))
    assert found.what.startswith("w_in: the all-gather over fsdp is compiled to an all-reduce")
    assert found.bytes == 40 * 128 * 2 * 3 // 4


def test_a_difference_over_no_mesh_axes_has_no_time() -> None:
    text = WHOLE.replace("{{0,1,2,3}}", "{{0,1},{2},{3}}")
    rows = line_up([], [on_mesh(one, MESH) for one in _read(text)], Side(has_reduce_scatter=True))
    (found,) = findings(rows, step_prices(load("v5e:2x2"), MESH))
    assert found.seconds is None


@pytest.mark.parametrize("text", [PADDED, COMBINED, WHOLE])
def test_each_sum_is_counted_once(text: str) -> None:
    found = [(one.name, one.index) for one in _read(text)]
    assert len(found) == len(set(found))
