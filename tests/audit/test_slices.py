"""Sums within slices and across them: names, shares, what joins whom, and what it costs. No compiler."""

from dataclasses import replace

import pytest
from tests.audit.hlo_text import HEAD

from meshwright.audit.compare.line_up import line_up
from meshwright.audit.compare.rewrites import Side
from meshwright.audit.facts.communication import EmittedCollective, collectives
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.facts.seconds import step_prices
from meshwright.audit.hlo.read import parse_hlo
from meshwright.cost.priced import PricedCollective
from meshwright.hardware.catalog import load
from meshwright.notation.mesh import Mesh

# data = 8 is two slices of 4: what is in one slice is data's inner part.
MESH = Mesh({"data": 8})
NAME = "jit(step)/transpose(jvp(layers))/w_in/dot_general"
SIZE = 64 * 128 * 2


def _across(rendezvous: str) -> str:
    return (
        "is_host_transfer=true, frontend_attributes={"
        f'_xla_host_transfer_rendezvous="{rendezvous}",_xla_megascale_target="{{1,2}}x{{0:3}}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )


GROUPS = "replica_groups={{0,1,2,3}}, to_apply=%sum"
# Scattered over the 4 of a slice, summed with the other slice, gathered: an all-reduce over all 8.
IN_STEPS = (
    HEAD
    + f"""ENTRY %main (dw: bf16[64,128]) -> bf16[64,128] {{
  %dw = bf16[64,128] parameter(0)
  %gradient = bf16[64,128] add(%dw, %dw), metadata={{op_name="{NAME}"}}
  %mine = bf16[16,128] reduce-scatter(%gradient), dimensions={{0}}, {GROUPS}
  %token = token[] after-all()
  %flat = bf16[2048] bitcast(%mine)
  %send = (bf16[2048], u32[], token[]) send(%flat, %token), channel_id=2, {_across("r")}
  %recv = (bf16[2048], u32[], token[]) recv(%token), channel_id=1, {_across("r")}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %received = (bf16[2048], token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %total = bf16[2048] get-tuple-element(%received), index=0
  %rows = bf16[16,128] bitcast(%total)
  ROOT %whole = bf16[64,128] all-gather(%rows), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}
"""
)


def _read(text: str) -> list[EmittedCollective]:
    return collectives(parse_hlo(text))


def _planned(op: str = "all_reduce", axes: tuple[str, ...] = ("data",)) -> PricedCollective:
    return PricedCollective("gradients", "backward", op, axes, "w_in", SIZE, "bf16", 1, 1e-6, 1e-6, "dcn")  # pyright: ignore[reportArgumentType]


def test_every_step_of_a_sum_has_the_name_of_what_is_summed() -> None:
    found = _read(IN_STEPS)
    assert [(one.op, one.gathered_bytes, one.groups.size) for one in found] == [
        ("reduce_scatter", SIZE, 4),
        ("all_reduce", SIZE // 4, 2),
        ("all_gather", SIZE, 4),
    ]
    assert {(one.phase, one.scope) for one in found} == {("backward", ("layers", "w_in"))}
    cropped = "bf16[2048] bitcast(%mine)", 'bf16[2048] custom-call(%mine), custom_call_target="ZeroCrop"'
    assert _read(IN_STEPS.replace(*cropped))[1].scope == ("layers", "w_in")
    assert [one.follows_sum for one in found] == [False, False, True]


def test_a_sum_in_slices_and_across_them_is_the_planned_one() -> None:
    emitted = [on_mesh(one, MESH) for one in _read(IN_STEPS)]
    (row,) = line_up([_planned()], emitted, Side(has_reduce_scatter=True))
    assert (row.status, row.note) == ("equivalent", "reduced within each slice, then across slices")


def test_both_gradients_of_a_tied_table_may_be_summed_in_steps() -> None:
    planned = [replace(_planned(), tensor="w_in"), replace(_planned(), tensor="w_in")]
    emitted = [on_mesh(one, MESH) for one in _read(IN_STEPS)]
    (both,) = line_up(planned, emitted * 2, Side(has_reduce_scatter=True))
    assert (both.status, both.note) == ("equivalent", "reduced within each slice, then across slices")
    (once,) = line_up(planned, emitted, Side(has_reduce_scatter=True))
    assert once.status == "equivalent" and once.note.startswith("w_in's two gradients are added")


@pytest.mark.parametrize("kept", [("reduce_scatter", "all_gather"), ("all_reduce",)])
def test_a_sum_that_leaves_devices_out_differs(kept: tuple[str, ...]) -> None:
    emitted = [on_mesh(one, MESH) for one in _read(IN_STEPS) if one.op in kept]
    (row,) = line_up([_planned()], emitted, Side(has_reduce_scatter=True))
    assert row.status == "differs"


def test_a_sum_of_all_bytes_over_part_of_an_axis_is_no_match() -> None:
    text = IN_STEPS.partition("  %mine =")[0] + (
        f"  ROOT %whole = bf16[64,128] all-reduce(%gradient), {GROUPS}\n}}\n"
    )
    (row,) = line_up([_planned()], [on_mesh(one, MESH) for one in _read(text)], Side(has_reduce_scatter=True))
    assert row.status == "differs"


def test_steps_are_priced_on_the_links_that_they_take() -> None:
    """The two in a slice cost what they cost on one slice; only a quarter crosses to the other."""
    two, one = step_prices(load("2*v5e:2x2"), MESH), step_prices(load("v5e:2x2"), Mesh({"data": 4}))
    scatter, cross, gather = [on_mesh(found, MESH) for found in _read(IN_STEPS)]
    on_one = [on_mesh(found, Mesh({"data": 4})) for found in _read(IN_STEPS) if found.op != "all_reduce"]
    assert [two.seconds(scatter), two.seconds(gather)] == [one.seconds(found) for found in on_one]
    assert [two.sent(found) for found in (scatter, cross, gather)] == [
        SIZE * 3 // 4,
        SIZE // 4,
        SIZE * 3 // 4,
    ]
    crossing = two.seconds(cross)
    assert crossing is not None and crossing > 0


LOOP = (
    HEAD
    + f"""%body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {{
  %state = (s32[], bf16[64,128]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %last = bf16[64,128] get-tuple-element(%state), index=1
  %token = token[] after-all()
  %send = (bf16[64,128], u32[], token[]) send(%last, %token), channel_id=2, {_across("r")}
  %recv = (bf16[64,128], u32[], token[]) recv(%token), channel_id=1, {_across("r")}
  %gradient = bf16[64,128] add(%last, %last), metadata={{op_name="{NAME}"}}
  ROOT %out = (s32[], bf16[64,128]) tuple(%next, %gradient)
}}

%go (state: (s32[], bf16[64,128])) -> pred[] {{
  %state = (s32[], bf16[64,128]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: bf16[64,128]) -> (s32[], bf16[64,128]) {{
  %x = bf16[64,128] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,128]) tuple(%zero, %x)
  ROOT %end = (s32[], bf16[64,128]) while(%start), condition=%go, body=%body
}}
"""
)


def test_what_a_loop_sends_a_turn_later_has_the_name_of_what_made_it() -> None:
    (one,) = _read(LOOP)
    assert (one.op, one.count, one.scope) == ("all_reduce", 3, ("layers", "w_in"))


def test_a_number_sent_as_a_row_of_128_is_one_number() -> None:
    entry = f"""ENTRY %main (x: f32[8]) -> f32[128] {{
  %x = f32[8] parameter(0)
  %zero = f32[] constant(0)
  %loss = f32[]{{:T(128)}} reduce(%x, %zero), dimensions={{0}}, metadata={{op_name="jit(f)/loss/reduce_sum"}}
  %row = f32[1,1,128]{{2,1,0:T(1,128)}} bitcast(%loss)
  %here = f32[1,1,128]{{2,1,0:T(1,128)}} all-reduce(%row), replica_groups={{{{0,1,2,3}}}}, to_apply=%sum
  %token = token[] after-all()
  %send = (f32[1,1,128], u32[], token[]) send(%here, %token), channel_id=2, {_across("r")}
  ROOT %recv = (f32[1,1,128], u32[], token[]) recv(%token), channel_id=1, {_across("r")}
}}
"""
    assert [(one.scope, one.gathered_bytes) for one in _read(HEAD + entry)] == [(("loss",), 4)] * 2


def test_what_an_unrolled_loop_adds_up_has_the_name_of_its_terms() -> None:
    entry = f"""ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {{
  %x = bf16[64,128] parameter(0)
  %first = bf16[64,128] sine(%x), metadata={{op_name="{NAME}"}}
  %second = bf16[64,128] cosine(%x), metadata={{op_name="{NAME}"}}
  %both = bf16[64,128] add(%first, %second), metadata={{op_name="jit(step)/while/body/closed_call/add"}}
  ROOT %whole = bf16[64,128] all-reduce(%both), {GROUPS}
}}
"""
    (one,) = _read(HEAD + entry)
    assert (one.phase, one.scope) == ("backward", ("layers", "w_in"))


NORMS = (
    HEAD
    + """%join (p: bf16[128], q: bf16[384]) -> bf16[512] {
  %p = bf16[128] parameter(0)
  %q = bf16[384] parameter(1)
  %least = bf16[] constant(-inf)
  %first = bf16[512] pad(%p, %least), padding=0_384
  %second = bf16[512] pad(%q, %least), padding=128_0
  ROOT %both = bf16[512] maximum(%first, %second)
}

ENTRY %main (x: bf16[128], y: bf16[384]) -> bf16[512] {
  %x = bf16[128] parameter(0)
  %y = bf16[384] parameter(1)
  %a = bf16[128] add(%x, %x), metadata={op_name="jit(f)/transpose(jvp(mlp_norm))/reduce_sum"}
  %b = bf16[384] add(%y, %y), metadata={op_name="jit(f)/transpose(jvp(final_norm))/reduce_sum"}
  %all = bf16[512] fusion(%a, %b), kind=kLoop, calls=%join
  %here = bf16[512] all-reduce(%all), replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %again = bf16[512] all-reduce(%here), replica_groups={{0,1},{2,3}}, to_apply=%sum
}
"""
)


def test_tensors_joined_by_a_maximum_of_padded_ones_are_told_apart() -> None:
    """As XLA for TPU lays norms end to end; a second sum of the whole is of each its share."""
    assert [(one.name, one.scope, one.gathered_bytes, one.phase) for one in _read(NORMS)] == [
        (sum_of, (norm,), size, "backward")
        for sum_of in ("here", "again")
        for norm, size in (("mlp_norm", 256), ("final_norm", 768))
    ]
    assert [one.scope for one in _read(NORMS.replace("constant(-inf)", "constant(0)"))] == [(), ()]
