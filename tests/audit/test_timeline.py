"""The walk over a schedule with its clocks, on programs whose times are worked by hand."""

from dataclasses import replace

import pytest

from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.compiled_schedule import TPU_SHARE, StepTimeline, program_timeline
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.facts.narrow_arithmetic import host_transfers
from meshwright.audit.facts.seconds import Prices, step_prices
from meshwright.audit.hlo.read import parse_hlo
from meshwright.hardware.catalog import load
from meshwright.notation.mesh import Mesh

MACHINE, MESH = load("v5e:2x2"), Mesh({"fsdp": 4})
CYCLES = 1_500_000  # 1 ms at 1.5 GHz
GROUPS = "replica_groups={{0,1,2,3}}, dimensions={0}"

HEAD = "HloModule step, is_scheduled=true, num_partitions=4\n"
WORK = """%work (a: bf16[8,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %b = bf16[8,128]{1,0:T(8,128)} negate(%a)
}
"""


def _work(name: str, operand: str, cycles: int = CYCLES) -> str:
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    shape = "bf16[8,128]{1,0:T(8,128)}"
    return f"  %{name} = {shape} fusion(%{operand}), kind=kLoop, calls=%work, {config}\n"


def _program(*lines: str) -> str:
    body = "".join(lines)
    return f"{HEAD}{WORK}ENTRY %main (x: bf16[8,128], w: bf16[4096,4096]) -> bf16[8,128] {{\n" + (
        "  %x = bf16[8,128]{1,0:T(8,128)} parameter(0)\n"
        f"  %w = bf16[4096,4096]{{1,0:T(8,128)}} parameter(1)\n{body}"
        "  ROOT %end = bf16[8,128]{1,0:T(8,128)} bitcast(%last)\n}\n"
    )


START = (
    "  %go = (bf16[4096,4096]{1,0:T(8,128)}, bf16[16384,4096]{1,0:T(8,128)}) all-gather-start(%w), "
    f"channel_id=1, {GROUPS}\n"
)
DONE = "  %got = bf16[16384,4096]{1,0:T(8,128)} all-gather-done(%go)\n"
SYNC = f"  %got = bf16[16384,4096]{{1,0:T(8,128)}} all-gather(%w), channel_id=1, {GROUPS}\n"


def _walked(text: str) -> tuple[StepTimeline, float]:
    """The timeline before it is scaled, and the seconds of the program's one gather on the links."""
    program, prices = parse_hlo(text), step_prices(MACHINE, MESH)
    found = [on_mesh(one, MESH, widened=False) for one in collectives(program)]
    line = program_timeline(program, MACHINE.chip, prices, found)
    assert line
    whole = {key: seconds / TPU_SHARE for key, seconds in line.exposed.items()}
    line = StepTimeline(line.seconds / TPU_SHARE, line.compute_seconds / TPU_SHARE, whole)
    return line, sum(prices.seconds(e) or 0.0 for e in found)


def test_the_clock_of_a_tpu_follows_from_its_peak() -> None:
    assert MACHINE.chip.clock_hertz == pytest.approx(1.5e9, rel=0.01)
    assert load("v5p:2x2x1").chip.clock_hertz == pytest.approx(1.75e9, rel=0.01)
    assert load("h100:8").chip.clock_hertz is None


def test_a_synchronous_collective_holds_both_clocks() -> None:
    line, links = _walked(_program(_work("a", "x"), SYNC, _work("last", "a")))
    millisecond = CYCLES / (MACHINE.chip.clock_hertz or 0)
    assert line.compute_seconds == pytest.approx(2 * millisecond)
    assert line.seconds == pytest.approx(2 * millisecond + links)
    assert sum(line.exposed.values()) == pytest.approx(links)


def test_what_runs_between_start_and_done_hides_a_collective() -> None:
    millisecond = CYCLES / (MACHINE.chip.clock_hertz or 0)
    line, links = _walked(_program(START, _work("a", "x"), DONE, _work("last", "a")))
    assert links > millisecond
    assert line.seconds == pytest.approx(links + millisecond)
    assert sum(line.exposed.values()) == pytest.approx(links - millisecond)
    hidden, _ = _walked(_program(START, _work("a", "x", 100 * CYCLES), DONE, _work("last", "a")))
    assert hidden.seconds == pytest.approx(101 * millisecond) and sum(hidden.exposed.values()) == 0


def test_the_wait_for_the_links_belongs_to_the_collective_on_them() -> None:
    """A gather in flight holds the links: a second one begins when it ends, and exposes only its own time."""
    second = SYNC.replace("%got", "%other").replace("channel_id=1", "channel_id=2")
    line, links = _walked(_program(START, second, DONE, _work("last", "x")))
    assert list(line.exposed.values()) == pytest.approx([links / 2, links / 2])
    millisecond = CYCLES / (MACHINE.chip.clock_hertz or 0)
    assert line.seconds == pytest.approx(links + millisecond)
    start, done = (one.replace("%got", "%came").replace("%go", "%sent") for one in (START, DONE))
    start = start.replace("channel_id=1", "channel_id=2")
    line, links = _walked(_program(START, start, done, DONE, _work("last", "x")))
    assert list(line.exposed.values()) == pytest.approx([links / 2, links / 2])


LOOP = """%body (s: (s32[], bf16[8,128], bf16[4096,4096])) -> (s32[], bf16[8,128], bf16[4096,4096]) {{
  %s = (s32[], bf16[8,128]{{1,0:T(8,128)}}, bf16[4096,4096]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[8,128]{{1,0:T(8,128)}} get-tuple-element(%s), index=1
  %w = bf16[4096,4096]{{1,0:T(8,128)}} get-tuple-element(%s), index=2
{inside}  ROOT %next = (s32[], bf16[8,128], bf16[4096,4096]) tuple(%i, %last, %w)
}}
%more (s: (s32[], bf16[8,128], bf16[4096,4096])) -> pred[] {{
  %s = (s32[], bf16[8,128], bf16[4096,4096]) parameter(0)
  ROOT %yes = pred[] constant(true)
}}
"""
IN_LOOP = """  %zero = s32[] constant(0)
  %state = (s32[], bf16[8,128], bf16[4096,4096]) tuple(%zero, %x, %w)
  %turns = (s32[], bf16[8,128], bf16[4096,4096]) while(%state), condition=%more, body=%body, {trips}
  %last = bf16[8,128]{{1,0:T(8,128)}} get-tuple-element(%turns), index=1
"""


@pytest.mark.parametrize("trips", [1, 2, 10])
def test_a_loop_repeats_its_steady_turn(trips: int) -> None:
    inside = _work("a", "x") + SYNC + _work("last", "a")
    known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    text = _program(IN_LOOP.format(trips=known))
    text = text.replace("ENTRY", LOOP.format(inside=inside) + "ENTRY")
    line, links = _walked(text)
    once, one_gather = _walked(_program(_work("a", "x"), SYNC, _work("last", "a")))
    assert links == pytest.approx(trips * one_gather)
    assert line.seconds == pytest.approx(trips * once.seconds)
    assert line.compute_seconds == pytest.approx(trips * once.compute_seconds)
    assert sum(line.exposed.values()) == pytest.approx(links)


@pytest.mark.parametrize(
    "branches",
    [
        "conditional(%flag, %a, %a), true_computation=%met, false_computation=%none",
        "conditional(%number, %a, %a), branch_computations={%none, %met}",
    ],
)
def test_of_a_condition_whose_scope_says_how_often_it_holds_the_mean_branch_counts(branches: str) -> None:
    shape = "bf16[8,128]{1,0:T(8,128)}"
    of_branches = (
        f"%met (p: bf16[8,128]) -> bf16[8,128] {{\n  %p = {shape} parameter(0)\n"
        + _work("m", "p").replace("  %m", "  ROOT %m")
        + f"}}\n%none (n: bf16[8,128]) -> bf16[8,128] {{\n  ROOT %n = {shape} parameter(0)\n}}\n"
    )
    chosen = (
        "  %number = s32[]{:T(128)} parameter(2)\n  %flag = pred[]{:T(512)} parameter(3)\n"
        f"  %last = {shape} {branches}, "
        'metadata={op_name="jit(step)/attention/at_most_3_of_4_blocks/cond"}\n'
    )
    text = _program(_work("a", "x"), chosen).replace("ENTRY", f"{of_branches}ENTRY")
    line, _ = _walked(text)
    millisecond = CYCLES / (MACHINE.chip.clock_hertz or 0)
    assert line.seconds == pytest.approx(1.75 * millisecond)
    line, _ = _walked(text.replace("at_most_3_of_4_blocks/", ""))
    assert line.seconds == pytest.approx(2 * millisecond)


def test_without_a_schedule_links_or_a_clock_there_is_no_price() -> None:
    text = _program(_work("last", "x"))
    prices, program = step_prices(MACHINE, MESH), parse_hlo(text)
    assert (
        program_timeline(parse_hlo(text.replace("is_scheduled=true, ", "")), MACHINE.chip, prices, []) is None
    )
    assert program_timeline(program, MACHINE.chip, Prices(MESH, None, None), []) is None
    assert program_timeline(program, load("h100:8").chip, prices, []) is None
    assert program_timeline(program, replace(MACHINE.chip, num_matrix_units=None), prices, []) is None


def test_a_gpu_is_priced_by_the_roofline_of_each_fusion() -> None:
    """A product of 2 x 8192^3 FLOPs, and a slice of a stack of which only the slice is read."""
    machine = load("h100:4")
    text = """HloModule step, is_scheduled=true, num_partitions=4
%take (s: bf16[64,8192,8192], i: s32[]) -> bf16[1,8192,8192] {
  %s = bf16[64,8192,8192]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = bf16[1,8192,8192]{2,1,0} dynamic-slice(%s, %i, %zero, %zero), dynamic_slice_sizes={1,8192,8192}
}
ENTRY %main (s: bf16[64,8192,8192], i: s32[], x: bf16[8192,8192]) -> bf16[8192,8192] {
  %s = bf16[64,8192,8192]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[8192,8192]{1,0} parameter(2)
  %w = bf16[1,8192,8192]{2,1,0} fusion(%s, %i), kind=kLoop, calls=%take
  %flat = bf16[8192,8192]{1,0} bitcast(%w)
  ROOT %y = bf16[8192,8192]{1,0} dot(%x, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    chip = machine.chip
    line = program_timeline(parse_hlo(text), chip, step_prices(machine, Mesh({"fsdp": 4})), [])
    assert line
    product = 2 * 8192**3 / chip.matmul_flops_per_second("bf16")
    moved = 2 * 2 * 8192**2 / chip.memory_bytes_per_second("bf16")
    assert line.seconds == pytest.approx(product + moved + 2 * chip.step.kernel_seconds, rel=1e-3)


def _on_gpus(text: str, mesh: Mesh = Mesh({"fsdp": 4})) -> StepTimeline:  # noqa: B008 - immutable
    machine, program = load("h100:4"), parse_hlo(text)
    found = [on_mesh(one, mesh, widened=False) for one in collectives(program)]
    line = program_timeline(program, machine.chip, step_prices(machine, mesh), found)
    assert line
    return line


def test_products_are_priced_in_the_type_of_their_operands() -> None:
    text = """HloModule step, is_scheduled=true, num_partitions=4
ENTRY %main (x: TYPE[8192,8192], w: OTHER[8192,8192]) -> bf16[8192,8192] {
  %x = TYPE[8192,8192]{1,0} parameter(0)
  %w = OTHER[8192,8192]{1,0} parameter(1)
  ROOT %y = bf16[8192,8192]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    chip = load("h100:4").chip
    flops = 2 * 8192**3
    pairs = {
        ("bf16", "bf16"): "bf16",
        ("f8e4m3fn", "f8e4m3fn"): "fp8",
        ("f8e5m2", "f8e4m3fn"): "fp8",
        ("f32", "bf16"): "f32",
        ("s32", "s32"): "f32",
    }
    for (left, right), dtype in pairs.items():
        line = _on_gpus(text.replace("TYPE", left).replace("OTHER", right))
        expected = flops / chip.matmul_flops_per_second(dtype) + chip.step.kernel_seconds
        assert line.seconds == pytest.approx(expected), (left, right)


def test_a_stack_that_a_fusion_reads_and_updates_is_not_read_whole() -> None:
    """A slice plus x, written back: slice and x are read, and the slice is written."""
    text = """HloModule step, is_scheduled=true, num_partitions=4
%add_to (s: f32[64,4096,4096], x: f32[1,4096,4096], i: s32[]) -> f32[64,4096,4096] {
  %s = f32[64,4096,4096]{2,1,0} parameter(0)
  %x = f32[1,4096,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %own = f32[1,4096,4096]{2,1,0} dynamic-slice(%s, %i, %zero, %zero), dynamic_slice_sizes={1,4096,4096}
  %sum = f32[1,4096,4096]{2,1,0} add(%own, %x)
  ROOT %new = f32[64,4096,4096]{2,1,0} dynamic-update-slice(%s, %sum, %i, %zero, %zero)
}
ENTRY %main (s: f32[64,4096,4096], x: f32[1,4096,4096], i: s32[]) -> f32[64,4096,4096] {
  %s = f32[64,4096,4096]{2,1,0} parameter(0)
  %x = f32[1,4096,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = f32[64,4096,4096]{2,1,0} fusion(%s, %x, %i), kind=kLoop, calls=%add_to
}
"""
    chip = load("h100:4").chip
    moved = 3 * 4 * 4096**2 / chip.memory_bytes_per_second("bf16")
    assert _on_gpus(text).seconds == pytest.approx(moved + chip.step.kernel_seconds, rel=1e-3)


def test_a_hidden_collective_of_gpus_slows_compute() -> None:
    text = """HloModule step, is_scheduled=true, num_partitions=4
ENTRY %main (x: bf16[16384,16384], w: bf16[1024,4096]) -> bf16[16384,16384] {
  %x = bf16[16384,16384]{1,0} parameter(0)
  %w = bf16[1024,4096]{1,0} parameter(1)
  %go = (bf16[1024,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%w), channel_id=1, \
replica_groups={{0,1,2,3}}, dimensions={0}
  %y = bf16[16384,16384]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %got = bf16[4096,4096]{1,0} all-gather-done(%go)
  ROOT %z = bf16[16384,16384]{1,0} bitcast(%y)
}
""".replace("\\\n", "")
    machine = load("h100:4")
    prices = step_prices(machine, Mesh({"fsdp": 4}))
    [gather] = [on_mesh(one, Mesh({"fsdp": 4}), widened=False) for one in collectives(parse_hlo(text))]
    added = (1 - machine.chip.step.overlap) * (prices.seconds(gather) or 0)
    line = _on_gpus(text)
    assert added > 0 and sum(line.exposed.values()) == pytest.approx(added)
    assert line.seconds == pytest.approx(line.compute_seconds + added)


@pytest.mark.parametrize("back", [False, True])
def test_copies_to_and_from_the_host_take_their_link(back: bool) -> None:
    """Synchronous, they hold compute; with a start and a done, products hide them."""
    host, chip = "{1,0:S(5)}", "{1,0}"
    source, made = (host, chip) if back else (chip, host)
    head = f"""HloModule step, is_scheduled=true, num_partitions=4
ENTRY %main (x: bf16[16384,16384], a: bf16[4096,4096]) -> bf16[4096,4096] {{
  %x = bf16[16384,16384]{{1,0}} parameter(0)
  %a = bf16[4096,4096]{source} parameter(1)
"""
    product = (
        "  %y = bf16[16384,16384]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    )
    copy = f"  ROOT %b = bf16[4096,4096]{made} copy(%a)\n}}\n"
    start = f"  %go = (bf16[4096,4096]{made}, bf16[4096,4096]{source}, u32[]) copy-start(%a)\n"
    done = f"  ROOT %b = bf16[4096,4096]{made} copy-done(%go)\n}}\n"
    link = 2 * 4096**2 / load("h100:4").chip.host_link_bytes_per_second
    whole = _on_gpus(head + product + copy)
    assert whole.seconds == pytest.approx(whole.compute_seconds + link)
    hidden = _on_gpus(head + start + product + done)
    assert hidden.compute_seconds > link and hidden.seconds == pytest.approx(hidden.compute_seconds)
    waited = _on_gpus(head + start + done)
    assert waited.seconds == pytest.approx(link)


def test_a_slice_written_to_the_host_counts_and_not_its_stack() -> None:
    text = """HloModule step, is_scheduled=true, num_partitions=4
%put (s: bf16[16,4096,4096], x: bf16[1,4096,4096], i: s32[]) -> bf16[16,4096,4096] {
  %s = bf16[16,4096,4096]{2,1,0:S(5)} parameter(0)
  %x = bf16[1,4096,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = bf16[16,4096,4096]{2,1,0:S(5)} dynamic-update-slice(%s, %x, %i, %zero, %zero)
}
ENTRY %main (s: bf16[16,4096,4096], x: bf16[1,4096,4096], i: s32[]) -> bf16[16,4096,4096] {
  %s = bf16[16,4096,4096]{2,1,0:S(5)} parameter(0)
  %x = bf16[1,4096,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = bf16[16,4096,4096]{2,1,0:S(5)} fusion(%s, %x, %i), kind=kCustom, calls=%put
}
"""
    assert _on_gpus(text).seconds == pytest.approx(
        2 * 4096**2 / load("h100:4").chip.host_link_bytes_per_second
    )
    [copy] = host_transfers(parse_hlo(text))
    assert (copy.num_bytes, copy.is_call) == (2 * 4096**2, False)
