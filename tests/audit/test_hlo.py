"""HLO text read into data, and the collectives found in it, worked by hand."""

import pytest

from meshwright.audit.facts.communication import EmittedCollective, collectives
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.hlo.op_names import phase_of, scope_of, split_op_name
from meshwright.audit.hlo.read import ArrayShape, parse_hlo
from meshwright.errors import AuditError

SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""


def program(entry: str, *computations: str, partitions: int = 4) -> str:
    head = f"HloModule test, is_scheduled=true, num_partitions={partitions}\n\n"
    return head + SUM + "\n" + "\n".join(computations) + "\nENTRY %main () -> f32[] {\n" + entry + "\n}\n"


def found(entry: str, *computations: str, partitions: int = 4) -> list[EmittedCollective]:
    return collectives(parse_hlo(program(entry, *computations, partitions=partitions)))


def test_an_instruction_is_read_whole() -> None:
    text = program(
        "  ROOT %c.1 = (bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s32[]) custom-call(f32[2]{0} %x, %y), "
        'custom_call_target="a,b)", backend_config={"k":"{1},\\"2"}, '
        'metadata={op_name="w[\\\'w_in\\\']" source_file="/a b.py" source_line=12}'
    )
    (line,) = parse_hlo(text).main.instructions.values()
    assert line.shapes == (ArrayShape("bf16", (2, 3), "{1,0:T(8,128)(2,1)S(1)}"), ArrayShape("s32", ()))
    assert (line.name, line.opcode, line.operands) == ("c.1", "custom-call", ("x", "y"))
    assert line.attributes["custom_call_target"] == '"a,b)"'
    assert (line.op_name, line.source_file, line.source_line) == ("w['w_in']", "/a b.py", 12)


def test_source_lines_come_from_the_tables_of_stack_frames() -> None:
    tables = (
        'FileNames\n1 "a.py"\n2 "b.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
        "7 {file_name_id=2 function_name_id=1 line=33 end_line=34 column=1 end_column=2}\n\n"
        "StackFrames\n5 {file_location_id=7 parent_frame_id=1}\n\n"
    )
    text = "HloModule m\n\n" + tables + "%f () -> f32[] {\n  ROOT %z = f32[] parameter(0)\n}\n"
    text += (
        'ENTRY %m () -> f32[] {\n  ROOT %x = f32[] parameter(0), metadata={op_name="x" stack_frame_id=5}\n}'
    )
    assert (parse_hlo(text).main.result.source_file, parse_hlo(text).main.result.source_line) == ("b.py", 33)


def test_text_that_is_not_hlo_is_refused() -> None:
    with pytest.raises(AuditError, match="it has no ENTRY computation"):
        parse_hlo("module @jit_f {}")
    with pytest.raises(AuditError, match="HLO shape not understood: 'wrong"):
        parse_hlo(program("  ROOT %x = wrong"))


@pytest.mark.parametrize(
    ("line", "op", "gathered_bytes"),
    [
        ("f32[8,4]{1,0} all-gather(%x), replica_groups=[2,2]<=[4], dimensions={0}", "all_gather", 128),
        ("f32[2,4] reduce-scatter(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum", "reduce_scatter", 64),
        ("f32[4,4] all-reduce(%x), replica_groups={}, to_apply=%sum", "all_reduce", 64),
        ("f32[2,8] all-to-all(%x), replica_groups={{0,1},{2,3}}, dimensions={0}", "all_to_all", 64),
        ("f32[4,4] collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "permute", 64),
    ],
)
def test_gathered_bytes_are_the_result_of_a_gather_and_the_operand_of_the_rest(
    line: str, op: str, gathered_bytes: int
) -> None:
    (one,) = found(f"  %x = f32[4,4] parameter(0)\n  ROOT %c = {line}")
    assert (one.op, one.gathered_bytes, one.count, one.dtype) == (op, gathered_bytes, 1, "f32")


@pytest.mark.parametrize(
    ("start", "done", "op", "gathered_bytes"),
    [
        ("(f32[4,4], f32[8,4]) all-gather-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}",
         "f32[8,4] all-gather-done(%s)", "all_gather", 128),
        ("((f32[4,4], f32[4,4]), (f32[8,4], f32[8,4])) all-gather-start(%x, %x), replica_groups={}",
         "(f32[8,4], f32[8,4]) all-gather-done(%s)", "all_gather", 128),
        ("f32[4,4] all-reduce-start(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum",
         "f32[4,4] all-reduce-done(%s)", "all_reduce", 64),
        ("((f32[4,4]), f32[2,4], s32[]) reduce-scatter-start(%x), replica_groups={}, to_apply=%sum",
         "f32[2,4] reduce-scatter-done(%s)", "reduce_scatter", 64),
        ("(f32[4,4], f32[4,4], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
         "f32[4,4] collective-permute-done(%s)", "permute", 64),
    ],
)  # fmt: skip
def test_a_start_and_its_done_are_one(start: str, done: str, op: str, gathered_bytes: int) -> None:
    every = found(f"  %x = f32[4,4] parameter(0)\n  %s = {start}\n  ROOT %d = {done}")
    assert [(one.op, one.gathered_bytes, one.index) for one in every] == [
        (op, gathered_bytes, index) for index in range(2 if "%x, %x" in start else 1)
    ]


@pytest.mark.parametrize(
    ("scope", "op", "gathered_bytes"),
    [
        ("all_to_all_by_even_load_3_rows", "all_to_all", 3 * 16),
        ("all_gather_by_even_load_6_rows", "all_gather", 6 * 16),
        ("reduce_scatter_by_even_load_6_rows", "reduce_scatter", 6 * 16),
    ],
)
@pytest.mark.parametrize("is_ragged", [True, False])
def test_rows_of_experts_are_as_many_as_their_scope_says(
    scope: str, op: str, gathered_bytes: int, is_ragged: bool
) -> None:
    """As a ragged exchange, of a TPU's tiles, or of 10 rows of a device (CPU), of which some are room."""
    shape = "f32[10,2,2]" if is_ragged else "f32[10,4]"
    result, whole_bytes = {"all_gather": ("f32[20,4]", 320), "reduce_scatter": ("f32[5,4]", 160)}.get(
        op, ("f32[10,4]", 160)
    )
    at = f'metadata={{op_name="jit(step)/jvp(layers)/dispatch/{scope}/reduce_precision"}}'
    padded = f"{result} {op.replace('_', '-')}(%x), dimensions={{0}}"
    padded += ", to_apply=%sum" if op == "reduce_scatter" else ""
    exchange = f"{shape} ragged-all-to-all(%x, %o, %n, %n, %n, %n)" if is_ragged else padded
    (one,) = found(
        f"  %x = {shape} parameter(0)\n  %o = {shape} parameter(1)\n  %n = s32[2] parameter(2)\n"
        f"  ROOT %c = {exchange}, replica_groups={{{{0,1}},{{2,3}}}}, {at}"
    )
    assert (one.op, one.gathered_bytes, one.scope[1]) == (op, gathered_bytes, "dispatch")
    assert one.padding_bytes == (0 if is_ragged else whole_bytes - gathered_bytes)


def test_an_exchange_that_does_not_say_how_much_travels_is_not_counted() -> None:
    text = "  %x = f32[10,4] parameter(0)\n  %n = s32[2] parameter(1)\n  ROOT %c = f32[10,4] "
    text += "ragged-all-to-all(%x, %x, %n, %n, %n, %n), replica_groups={{0,1},{2,3}}"
    assert found(text) == []
    assert "ragged-all-to-all communicates" in not_understood(parse_hlo(program(text)))[0]


def test_a_collective_wrapped_in_a_generic_start_is_found_once() -> None:
    wrapped = """%wrapped (p: f32[4,4]) -> f32[2,4] {
  %p = f32[4,4] parameter(0)
  ROOT %rs = f32[2,4] reduce-scatter(%p), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%sum
}
"""
    entry = """  %x = f32[4,4] parameter(0), metadata={op_name="grads"}
  %s = ((f32[4,4]), f32[2,4], s32[]) async-start(%x), calls=%wrapped
  ROOT %d = f32[2,4] async-done(%s), calls=%wrapped"""
    (one,) = found(entry, wrapped)
    assert (one.name, one.op, one.parameter, one.reduction) == ("rs", "reduce_scatter", "grads", "add")


def test_a_combined_collective_gives_each_tensor_with_its_own_name_and_input() -> None:
    entry = """  %x = bf16[4,4] parameter(0), metadata={op_name="w_in"}
  %y = f32[8] parameter(1), metadata={op_name="w_out"}
  %wide = f32[4,4] convert(%x)
  %both = (f32[4,4], f32[8]) all-reduce(%wide, %y), replica_groups={}, to_apply=%sum, \
metadata={op_name="jit(f)/mlp/(w_in/mul:w_out/add)"}
  %first = f32[4,4] get-tuple-element(%both), index=0, metadata={op_name="jit(f)/mlp/w_in/dot_general"}
  ROOT %second = f32[8] get-tuple-element(%both), index=1"""
    first, second = found(entry)
    assert (first.op_name, first.gathered_bytes, first.parameter) == (
        "jit(f)/mlp/w_in/dot_general",
        64,
        "w_in",
    )
    assert (second.op_name, second.gathered_bytes, second.parameter) == ("jit(f)/mlp/w_out/add", 32, "w_out")
    assert (first.dtype, first.source_dtype, first.uncast_bytes) == ("f32", "bf16", 32)
    assert (second.scope, second.primitive) == (("mlp", "w_out"), "add")


@pytest.mark.parametrize(
    ("op", "name", "sent"),
    [
        ("all-gather", "", "bf16"),
        ("all-gather", "squeeze", "f32"),
        ("all-reduce", "dot_general", "bf16"),
        ("all-reduce", "convert_element_type", "f32"),
    ],
)
def test_a_cast_of_the_program_is_told_from_one_of_the_compiler(op: str, name: str, sent: str) -> None:
    """XLA:CPU widens what it gathers without a name, sums of a product under the product's."""
    tail = "dimensions={0}" if op == "all-gather" else "to_apply=%sum"
    rows = 8 if op == "all-gather" else 4
    cast = f', metadata={{op_name="jit(f)/jvp(w)/{name}"}}' if name else ""
    entry = f"""  %x = bf16[4,4] parameter(0)
  %wide = f32[4,4] convert(%x){cast}
  ROOT %c = f32[{rows},4] {op}(%wide), replica_groups={{{{0,1}},{{2,3}}}}, {tail}, \
metadata={{op_name="jit(f)/jvp(w)/x"}}"""
    (one,) = found(entry)
    assert (one.dtype, one.source_dtype, one.uncast_dtype) == ("f32", "bf16", sent)


def test_pieces_of_an_all_to_all_are_one_array() -> None:
    entry = """  %x = f32[2,4] parameter(0)
  ROOT %c = (f32[2,4], f32[2,4]) all-to-all(%x, %x), replica_groups={{0,1},{2,3}}"""
    (one,) = found(entry)
    assert (one.op, one.gathered_bytes, one.groups.size) == ("all_to_all", 64, 2)


LOOP = """%body (p: (s32[], f32[4], f32[2])) -> (s32[], f32[4], f32[2]) {
  %p = (s32[], f32[4], f32[2]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[2] get-tuple-element(%p), index=2
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %gathered = f32[4] all-gather(%w), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %t = (s32[], f32[4], f32[2]) tuple(%next, %gathered, %w)
}

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%condition (p: (s32[], f32[4], f32[2])) -> pred[] {
  %p = (s32[], f32[4], f32[2]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] BOUND
  ROOT %c = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}
"""
LOOP_ENTRY = """  %zero = s32[] constant(1)
  %w = f32[2] parameter(0), metadata={op_name="params['w']"}
  %x = f32[4] parameter(1)
  %init = (s32[], f32[4], f32[2]) tuple(%zero, %x, %w)
  ROOT %while.1 = (s32[], f32[4], f32[2]) while(%init), condition=%condition, body=%bodyKNOWN"""


@pytest.mark.parametrize(
    ("bound", "step", "known", "count"),
    [
        ("constant(7)", "1", "", 6),
        ("constant(7)", "4", "", 2),
        ("constant(0)", "1", "", 0),
        ("constant(7)", "1", ', backend_config={"known_trip_count":{"n":"5"}}', 5),
        ("parameter(1)", "1", "", None),
    ],
)
def test_a_collective_in_a_loop_counts_by_its_trips(
    bound: str, step: str, known: str, count: int | None
) -> None:
    loop = LOOP.replace("BOUND", bound).replace("STEP", step)
    if count is None:
        loop = loop.replace("parameter(1)\n  ROOT %c", "negate(%i)\n  ROOT %c")
    parsed = parse_hlo(program(LOOP_ENTRY.replace("KNOWN", known), loop))
    (one,) = collectives(parsed)
    assert (one.count, one.parameter) == (count, "params['w']")
    unknown = ["while.1: its trip count is unknown, so its body is counted once"]
    assert not_understood(parsed) == (unknown if count is None else [])


@pytest.mark.parametrize(("first", "parameter"), [("w", "params['w']"), ("other", "")])
def test_what_a_loop_fetches_a_turn_ahead_is_what_it_fetches_it_from(first: str, parameter: str) -> None:
    """The fourth element is filled again from the third, and all turns see it if the first one does."""
    fetch = "%fetch = (f32[2], f32[2], u32[]) copy-start(%w)\n  %fetched = f32[2] copy-done(%fetch)"
    loop = LOOP.replace("BOUND", "constant(7)").replace("STEP", "1").replace("f32[2])", "f32[2], f32[2])")
    loop = loop.replace("%w), replica", "%now), replica").replace(
        "%gathered, %w)", "%gathered, %w, %fetched)"
    )
    loop = loop.replace("  %step =", f"  %now = f32[2] get-tuple-element(%p), index=3\n  {fetch}\n  %step =")
    entry = LOOP_ENTRY.replace("KNOWN", "").replace("f32[2])", "f32[2], f32[2])")
    entry = entry.replace("%x, %w)", f"%x, %w, %{first})")
    (one,) = found("  %other = f32[2] parameter(2)\n" + entry, loop)
    assert (one.count, one.parameter or "") == (6, parameter)


REDUCED_THEN_SLICED = """%slice_it (p: f32[4,4], at: s32[]) -> f32[2,4] {
  %p = f32[4,4] parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %kept = f32[2,4] dynamic-slice(%p, %at, %zero), dynamic_slice_sizes={2,4}
}
"""
REDUCED_ENTRY = """  %x = f32[4,4] parameter(0)
  %id = u32[] partition-id()
  %table = s32[4] constant({OFFSETS})
  %one = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %at = s32[] bitcast(%one)
  %sum.1 = f32[4,4] all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum
  ROOT %kept = f32[2,4] fusion(%sum.1, %at), kind=kLoop, calls=%slice_it"""


@pytest.mark.parametrize(("offsets", "scattered"), [("0, 2, 0, 2", True), ("0, 0, 2, 2", False)])
def test_an_all_reduce_of_which_each_keeps_its_slice_is_scattered(offsets: str, scattered: bool) -> None:
    """Only a slice along the group's own devices makes a reduce-scatter of it."""
    (one,) = found(REDUCED_ENTRY.replace("OFFSETS", offsets), REDUCED_THEN_SLICED)
    assert one.scattered is scattered
    assert one.slice_offsets == (((0, 0), (2, 0), (0, 0), (2, 0)) if scattered else None)


def test_an_all_reduce_that_is_also_used_whole_is_not_scattered() -> None:
    entry = REDUCED_ENTRY.replace("OFFSETS", "0, 2, 0, 2").replace("ROOT %kept", "%kept")
    (one,) = found(entry + "\n  ROOT %norm = f32[4,4] multiply(%sum.1, %sum.1)", REDUCED_THEN_SLICED)
    assert not one.scattered


# Of one replica, so the second device id is the first.
DEVICE_IDS = [
    "%id = u32[] partition-id()",
    """%partition = u32[] partition-id()
  %replica = u32[] replica-id()
  %before = u32[] multiply(%replica, %two)
  %id = u32[] add(%before, %partition)""",
]


@pytest.mark.parametrize("device_id", DEVICE_IDS)
@pytest.mark.parametrize(("fill", "gathers"), [("0", True), ("1", False)])
def test_an_all_reduce_of_shards_in_zeros_gathers(fill: str, gathers: bool, device_id: str) -> None:
    entry = f"""  %x = f32[2] parameter(0)
  %fill = f32[] constant({fill})
  %empty = f32[8] broadcast(%fill), dimensions={{}}
  %two = u32[] constant(2)
  {device_id}
  %at = u32[] multiply(%id, %two)
  %placed = f32[8] dynamic-update-slice(%empty, %x, %at)
  ROOT %all = f32[8] all-reduce(%placed), replica_groups={{}}, to_apply=%sum"""
    (one,) = found(entry)
    assert one.gathers is gathers


def test_a_sum_without_a_name_has_that_of_what_takes_it_on() -> None:
    entry = """  %x = f32[8] parameter(0)
  %whole = f32[8] all-reduce(%x), replica_groups={}, to_apply=%sum
  ROOT %row = f32[1,8] reshape(%whole), metadata={op_name="jit(step)/logits/squeeze"}"""
    (one,) = found(entry)
    assert (one.scope, one.phase) == (("logits",), "forward")


def test_overlapped_pieces_of_one_collective_count_once() -> None:
    attributes = 'channel_id=4, replica_groups={{0,1},{2,3}}, frontend_attributes={chain_id="0"}'
    names = "%g.0", "%g.1", "ROOT %g.2"
    pieces = "\n".join(f"  {name} = f32[4] all-gather(%x), {attributes}" for name in names)
    assert len(found("  %x = f32[2] parameter(0)\n" + pieces)) == 1
    assert len(found("  %x = f32[2] parameter(0)\n" + pieces.replace('chain_id="0"', ""))) == 3


def test_branches_are_conditional() -> None:
    branch = """%then (p: f32[2]) -> f32[4] {
  %p = f32[2] parameter(0)
  ROOT %g = f32[4] all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}
%otherwise (q: f32[2]) -> f32[4] {
  %q = f32[2] parameter(0)
  ROOT %c = f32[4] concatenate(%q, %q), dimensions={0}
}
"""
    entry = """  %flag = s32[] parameter(0)
  %x = f32[2] parameter(1), metadata={op_name="x"}
  ROOT %if = f32[4] conditional(%flag, %x, %x), branch_computations={%then, %otherwise}"""
    (one,) = found(entry, branch)
    assert (one.conditional, one.parameter) == (True, "x")


def test_what_is_not_understood_is_listed() -> None:
    entry = """  %x = f32[4] parameter(0)
  %s = (f32[4], u32[], token[]) send(%x, %x), channel_id=1
  %k = f32[4] custom-call(%x), custom_call_target="my_kernel", metadata={op_name="jit(f)/attn"}
  %i = f32[4] custom-call(%x), custom_call_target="InvertDiagBlocksLowerTriangular"
  ROOT %t = (f32[1], s32[1]) custom-call(%x), custom_call_target="TopK\""""
    assert not_understood(parse_hlo(program(entry))) == [
        "s: send communicates; its bytes are not counted",
        "k (jit(f)/attn): custom call my_kernel; its FLOPs and bytes are not counted",
    ]


@pytest.mark.parametrize(
    ("op_name", "phase", "scope"),
    [
        ("jit(step)/jvp(mlp)/w_in/reshard", "forward", ("mlp", "w_in")),
        ("jit(step)/jvp()/while/body/closed_call/mlp/w_in/reshard", "forward", ("mlp", "w_in")),
        ("jit(step)/jvp()/while/body/eval_jaxpr/mlp/w_in/reshard", "forward", ("mlp", "w_in")),
        ("jit(f)/transpose(jvp(mlp))/w_in/BD,DF->BF/dot_general", "backward", ("mlp", "w_in", "BD,DF->BF")),
        ("jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/mul", "remat", ("mlp",)),
        ("jit(step)/adam/sub", "update", ("adam",)),
    ],
)  # fmt: skip
def test_op_names_tell_pass_and_scopes(op_name: str, phase: str, scope: tuple[str, ...]) -> None:
    assert (phase_of(op_name, differentiated=True), scope_of(op_name)) == (phase, scope)


def test_merged_op_names_are_told_apart() -> None:
    merged = "jit(step)/(transpose(jvp(attn))/wq/dot_general:jvp(loss)/reduce_sum)"
    assert split_op_name(merged) == [
        "jit(step)/transpose(jvp(attn))/wq/dot_general",
        "jit(step)/jvp(loss)/reduce_sum",
    ]


def test_what_is_laid_end_to_end_is_summed_tensor_by_tensor() -> None:
    """XLA for GPU sums several gradients as one flat array, and names none of them."""
    computation = """%cat (p: bf16[16], q: bf16[8]) -> bf16[24] {
  %p = bf16[16] parameter(0)
  %q = bf16[8] parameter(1)
  ROOT %flat = bf16[24] concatenate(%p, %q), dimensions={0}
}
"""
    entry = """  %dw = bf16[4,4] multiply(%x, %x), metadata={op_name="jit(f)/transpose(jvp(mlp))/w_in/dot"}
  %dv = bf16[8] multiply(%y, %y), metadata={op_name="jit(f)/transpose(jvp(mlp))/w_out/dot_general"}
  %rs = ((bf16[4,4], bf16[8]), (bf16[4,4], bf16[8])) reduce-scatter-start(%dw, %dv), \
replica_groups={{0},{1},{2},{3}}, dimensions={0}, to_apply=%sum
  %rd = (bf16[4,4], bf16[8]) reduce-scatter-done(%rs)
  %a = bf16[4,4] get-tuple-element(%rd), index=0
  %b = bf16[8] get-tuple-element(%rd), index=1
  %flat_a = bf16[16] bitcast(%a)
  %one = bf16[24] fusion(%flat_a, %b), kind=kLoop, calls=%cat
  ROOT %sum_of_all = bf16[24] all-reduce(%one), replica_groups={}, to_apply=%sum"""
    sums = [one for one in found(entry, computation) if one.op == "all_reduce"]
    assert [(one.scope, one.gathered_bytes) for one in sums] == [
        (("mlp", "w_in"), 32),
        (("mlp", "w_out"), 16),
    ]


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        (
            "jit(f)/transpose(jvp(mlp))/(norm/reduce_sum:w_out/reduce_sum)",
            [("mlp", "norm"), ("mlp", "w_out")],
        ),
        # Names that are all the same are written once.
        ("jit(f)/update/reduce_sum", [("update",), ("update",)]),
    ],
)
def test_a_row_of_tensors_is_summed_under_the_names_of_all(name: str, scopes: list[tuple[str, ...]]) -> None:
    """As XLA for GPU does from JAX 0.11 on, with the operands of a start beside its results."""
    computation = """%cat (p: bf16[16], q: bf16[8]) -> bf16[24] {
  %p = bf16[16] parameter(0)
  %q = bf16[8] parameter(1)
  ROOT %row = bf16[24] concatenate(%p, %q), dimensions={0}
}
"""
    entry = f"""  %p.1 = bf16[16] parameter(0)
  %q.1 = bf16[8] parameter(1)
  %row.1 = bf16[24] fusion(%p.1, %q.1), kind=kLoop, calls=%cat
  %start = ((bf16[24]), bf16[24]) all-reduce-start(%row.1), replica_groups={{}}, to_apply=%sum, \
metadata={{op_name="{name}"}}
  ROOT %done = bf16[24] all-reduce-done(%start), metadata={{op_name="{name}"}}"""
    sums = found(entry, computation)
    assert [(one.scope, one.gathered_bytes) for one in sums] == list(zip(scopes, (32, 16), strict=True))


def test_an_array_that_the_program_laid_together_is_one() -> None:
    entry = """  %p = bf16[16] parameter(0)
  %q = bf16[8] parameter(1)
  %row = bf16[24] concatenate(%p, %q), dimensions={0}, metadata={op_name="jit(f)/mlp/concatenate"}
  ROOT %whole = bf16[24] all-reduce(%row), replica_groups={}, to_apply=%sum, \
metadata={op_name="jit(f)/mlp/reduce_sum"}"""
    assert [one.gathered_bytes for one in found(entry)] == [48]


def test_a_fusion_that_is_started_is_a_fusion() -> None:
    computation = """%cut (p: bf16[16,8], i: s32[]) -> bf16[1,8] {
  %p = bf16[16,8] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = bf16[1,8] dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
}
"""
    entry = """  %rows = bf16[16,8] parameter(0)
  %at = s32[] parameter(1)
  %start = ((bf16[16,8], s32[]), bf16[1,8], u32[]) fusion-start(%rows, %at), kind=kLoop, calls=%cut
  %done = bf16[1,8] fusion-done(%start)
  ROOT %sum.1 = bf16[1,8] all-reduce(%done), replica_groups={}, to_apply=%sum"""
    read = parse_hlo(program(entry, computation))
    start = read.main.instructions["start"]
    assert (start.opcode, start.shape) == ("fusion", ArrayShape("bf16", (1, 8)))
    assert not not_understood(read)
    [one] = collectives(read)
    assert one.parameter == "rows"


def test_a_collective_between_slices_is_a_send_and_a_recv() -> None:
    told = (
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_reduce_operation="SUM",'
        '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    entry = f"""  %dw = bf16[4,8] multiply(%x, %x), metadata={{op_name="jit(f)/transpose(jvp(mlp))/w_in/dot"}}
  %token = token[] after-all()
  %s = (bf16[4,8], u32[], token[]) send(%dw, %token), channel_id=2, is_host_transfer=true, {told}
  %r = (bf16[4,8], u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, {told}
  %sd = token[] send-done(%s), channel_id=2, is_host_transfer=true
  ROOT %rd = (bf16[4,8], token[]) recv-done(%r), channel_id=1, is_host_transfer=true"""
    (one,) = found(entry)
    assert (one.op, one.gathered_bytes, one.scope) == ("all_reduce", 64, ("mlp", "w_in"))
    assert one.groups.members == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert not_understood(parse_hlo(program(entry))) == []
    other = entry.replace("ALL_REDUCE", "ONE_TO_MANY")
    assert found(other) == []
    assert len(not_understood(parse_hlo(program(other)))) == 2
