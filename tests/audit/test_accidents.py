"""Accidents that XLA:CPU does not have, in hand-made programs: of asynchronous compilers, and of casts."""

import pytest

from meshwright.audit.foreign import audit_program
from meshwright.audit.hlo.read import parse_hlo
from meshwright.notation.mesh import Mesh

HEAD = """\
HloModule jit_f, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main {
"""
GATHERED = """\
  %w = bf16[256,1024]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="w"}
  %x = bf16[4096,1024]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}, metadata={op_name="x"}
"""
START = "  %s = (bf16[256,1024], bf16[1024,1024]) all-gather-start(%w), dimensions={0}, replica_groups={}\n"
DONE = "  %d = bf16[1024,1024]{1,0} all-gather-done(%s)\n"
BETWEEN = "  %h = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
END = "  ROOT %y = bf16[4096,1024]{1,0} dot(%x, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"


def _kinds(*lines: str, mesh: Mesh | None = None) -> list[str]:
    found = audit_program(parse_hlo(HEAD + "".join(lines)), "v5e", mesh or Mesh({"fsdp": 4}))
    assert found["not_understood"] == []
    return [one["kind"] for one in found["warnings"]]


def test_a_gather_that_no_product_hides_is_on_the_critical_path() -> None:
    assert _kinds(GATHERED, START, DONE, BETWEEN, END) == ["gather_on_critical_path"]


def test_a_gather_under_a_product_is_not() -> None:
    assert _kinds(GATHERED, START, BETWEEN, DONE, END) == []


@pytest.mark.parametrize(("cast", "kinds"), [("convert_element_type", ["widened"]), ("dot_general", [])])
def test_numbers_sent_wide_are_told_where_the_user_cast_them(cast: str, kinds: list[str]) -> None:
    """XLA:CPU widens by itself what it multiplies."""
    lines = f"""\
  %x = bf16[64,128]{{1,0}} parameter(0), sharding={{devices=[4,1]<=[4]}}, metadata={{op_name="x"}}
  %wide = f32[64,128]{{1,0}} convert(%x), metadata={{op_name="jit(f)/{cast}"}}
  %whole = f32[256,128]{{1,0}} all-gather(%wide), dimensions={{0}}, replica_groups={{{{0,1,2,3}}}}
  ROOT %y = f32[256,128]{{1,0}} sine(%whole)
}}
"""
    assert _kinds(lines) == kinds


SUM = """\
  %x = f32[64,128]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="x"}
  %id = u32[] partition-id()
  %at = s32[] convert(%id)
  %rows = s32[] constant(16)
  %zero = s32[] constant(0)
  %start = s32[] multiply(%at, %rows)
  %sum = f32[64,128]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="jit(f)/psum"}
  %mine = f32[16,128]{1,0} dynamic-slice(%sum, %start, %zero), dynamic_slice_sizes={16,128}
"""  # noqa: E501


def test_a_sum_that_a_user_wrote_and_only_slices_is_told() -> None:
    assert _kinds(SUM, "  ROOT %y = f32[16,128]{1,0} negate(%mine)\n}\n") == ["summed_whole"]


def test_a_sum_that_the_partitioner_wrote_and_slices_is_a_reduce_scatter() -> None:
    partitioned = SUM.replace("psum", "dot_general")
    assert _kinds(partitioned, "  ROOT %y = f32[16,128]{1,0} negate(%mine)\n}\n") == []


def test_groups_of_unequal_size_are_listed_without_a_time() -> None:
    text = HEAD + SUM.replace("{{0,1,2,3}}", "{{0,1,2},{3}}") + "  ROOT %y = f32[64,128]{1,0} sine(%sum)\n}\n"
    found = audit_program(parse_hlo(text), "v5e", Mesh({"fsdp": 4}))
    (one,) = found["emitted"]
    assert (one["axes"], one["seconds"], found["seconds"]) == ([], None, None)
    assert one["note"].startswith("groups differ")


@pytest.mark.parametrize(
    ("pairs", "kinds"),
    [("{{0,1},{1,2},{2,3},{3,0}}", []), ("{{0,0},{1,2},{2,1},{3,3}}", ["input_resharded"])],
)
def test_blocks_passed_round_a_ring_are_a_collective_in_steps(pairs: str, kinds: list[str]) -> None:
    lines = f"""\
  %w = bf16[256,128]{{1,0}} parameter(0), sharding={{devices=[4,1]<=[4]}}, metadata={{op_name="w"}}
  %moved = bf16[256,128]{{1,0}} collective-permute(%w), source_target_pairs={pairs}
  ROOT %y = bf16[256,128]{{1,0}} sine(%moved)
}}
"""
    assert _kinds(lines) == kinds


def test_rows_that_a_sum_fetches_from_other_devices_are_looked_up() -> None:
    """XLA for TPUs sums what each device has of the rows; XLA for CPU gathers the array."""
    lines = """\
  %cache = bf16[16,1024]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="cache"}
  %parents = s32[16]{0} parameter(1), sharding={devices=[4]<=[4]}, metadata={op_name="parents"}
  %all = s32[64]{0} all-gather(%parents), dimensions={0}, replica_groups={{0,1,2,3}}
  %rows = bf16[64,1024]{1,0} gather(%cache, %all), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,1024}
  %sum = bf16[64,1024]{1,0} all-reduce(%rows), replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="jit(f)/gather"}
  %wave = bf16[64,1024]{1,0} sine(%sum)
  ROOT %both = (bf16[16,1024]{1,0}, bf16[64,1024]{1,0}) tuple(%cache, %wave)
}
"""  # noqa: E501
    assert _kinds(lines) == ["table_gathered"]


@pytest.mark.parametrize(("num_rows", "kinds"), [(64, ["table_summed"]), (65536, [])])
def test_a_whole_table_summed_for_a_few_rows_is_reported(num_rows: int, kinds: list[str]) -> None:
    """With more rows than the table has, the sum of the table sends less than the rows would."""
    lines = f"""\
  %table = f32[4096,256]{{1,0}} parameter(0), metadata={{op_name="table"}}
  %ids = s32[{num_rows},1]{{1,0}} parameter(1), sharding={{devices=[4,1]<=[4]}}, metadata={{op_name="ids"}}
  %y = f32[{num_rows},256]{{1,0}} parameter(2), sharding={{devices=[4,1]<=[4]}}, metadata={{op_name="y"}}
  %zero = f32[] constant(0)
  %zeros = f32[4096,256]{{1,0}} broadcast(%zero), dimensions={{}}
  %rows = f32[{num_rows},256]{{1,0}} sine(%y), metadata={{op_name="jit(f)/jvp()/sin"}}
  %own = f32[4096,256]{{1,0}} scatter(%zeros, %ids, %rows), update_window_dims={{1}}, inserted_window_dims={{0}}, scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply=%add
  %sum = f32[4096,256]{{1,0}} all-reduce(%own), replica_groups={{{{0,1,2,3}}}}, to_apply=%add, metadata={{op_name="jit(f)/transpose(jvp())/scatter-add"}}
  ROOT %new = f32[4096,256]{{1,0}} subtract(%table, %sum)
}}
"""  # noqa: E501
    assert _kinds(lines) == kinds
