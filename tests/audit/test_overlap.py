"""What runs beside a collective, in hand-made programs printed in the order of their schedule."""

import pytest

from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.compiled_schedule import ProgramSchedule, overlaps
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.hlo.read import parse_hlo
from meshwright.notation.mesh import Mesh

HEAD = """HloModule test, is_scheduled=true, num_partitions=4

"""
DOT = (
    "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
    'metadata={op_name="jit(f)/jvp(mlp)/w_out/dot_general"}'
)
# As XLA for GPU and TPU print it: whatever stands between start and done runs meanwhile.
PAIR = (
    HEAD
    + f"""ENTRY %main (w: f32[16,64], x: f32[64,64]) -> f32[64,64] {{
  %w = f32[16,64] parameter(0)
  %x = f32[64,64] parameter(1)
  %start = (f32[16,64], f32[64,64]) all-gather-start(%w), dimensions={{0}}, replica_groups={{{{0,1,2,3}}}}
  %between = f32[64,64] {DOT}
  %whole = f32[64,64] all-gather-done(%start)
  %after = f32[64,64] {DOT.replace("w_out", "w_in")}
  ROOT %y = f32[64,64] add(%whole, %after)
}}
"""
)
# As XLA for TPU cuts a gather: its first piece starts it, the second runs in one fusion with a product.
PIECE = """all-gather(%p), channel_id=7, dimensions={0}, replica_groups={{0,1,2,3}}, \
frontend_attributes={chain_id="3"}"""
CHAIN = (
    HEAD
    + f"""%begin (p: f32[16,64]) -> f32[64,64] {{
  %p = f32[16,64] parameter(0)
  %first = f32[64,64] {PIECE}
  ROOT %a = f32[64,64] custom-call(%first), custom_call_target="AsyncCollectiveStart"
}}

%go_on (p: f32[16,64], x: f32[64,64]) -> (f32[64,64], f32[64,64]) {{
  %p = f32[16,64] parameter(0)
  %x = f32[64,64] parameter(1)
  %second = f32[64,64] {PIECE}
  %beside = f32[64,64] {DOT}
  ROOT %both = (f32[64,64], f32[64,64]) tuple(%second, %beside)
}}

ENTRY %main (w: f32[16,64], x: f32[64,64]) -> f32[64,64] {{
  %w = f32[16,64] parameter(0)
  %x = f32[64,64] parameter(1)
  %started = f32[64,64] fusion(%w), kind=kCustom, calls=%begin
  %alone = f32[64,64] {DOT.replace("w_out", "w_in")}
  %two = (f32[64,64], f32[64,64]) fusion(%w, %x), kind=kCustom, calls=%go_on
  ROOT %whole = f32[64,64] get-tuple-element(%two), index=0
}}
"""
)


@pytest.mark.parametrize("text", [PAIR, CHAIN])
def test_a_collective_is_told_with_the_products_that_run_meanwhile(text: str) -> None:
    program = parse_hlo(text)
    (one,) = collectives(program)
    assert ProgramSchedule(program).is_async
    assert ProgramSchedule(program).overlapped_products(one.value) == ("mlp/w_out",)


def test_a_compiler_that_overlaps_others_leaves_this_one_alone() -> None:
    text = PAIR.replace("(f32[16,64], f32[64,64]) all-gather-start", "f32[64,64] all-gather")
    program = parse_hlo(text.replace("all-gather-done", "negate"))
    found = [on_mesh(one, Mesh({"fsdp": 4})) for one in collectives(program)]
    assert list(overlaps(ProgramSchedule(program), found).values()) == [None]
    assert list(overlaps(ProgramSchedule(program), found, can_overlap=True).values()) == [[]]


def test_what_stands_after_the_done_runs_alone() -> None:
    program = parse_hlo(PAIR.replace("%between = f32[64,64] dot(%x, %x)", "%between = f32[64,64] sine(%x)"))
    (one,) = collectives(program)
    assert ProgramSchedule(program).overlapped_products(one.value) == ()
