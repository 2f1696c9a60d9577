"""What is live at the peak, worked out by hand and beside XLA:CPU's own figure."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from meshwright.audit.compile.compile import compile_plan, program_text
from meshwright.audit.compile.planned_program import planned_step
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.facts.buffers import buffer_peak, chip_memory, layer_saved_bytes
from meshwright.audit.hlo.read import parse_hlo
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan
from meshwright.platforms import CPU

MIB = 2**20
# %a and %c are never live together; the loop writes slices into %stack and holds %row as it turns.
LOOP = """HloModule test, is_scheduled=true

%body (state: (s32[], f32[4,262144])) -> (s32[], f32[4,262144]) {
  %state = (s32[], f32[4,262144]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[4,262144] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %zero = s32[] constant(0)
  %row = f32[1,262144] iota(), iota_dimension=1, metadata={op_name="jit(f)/jvp(layers)/w_in/dot_general"}
  %written = f32[4,262144] dynamic-update-slice(%stack, %row, %i, %zero)
  ROOT %out = (s32[], f32[4,262144]) tuple(%next, %written)
}

%go (state: (s32[], f32[4,262144])) -> pred[] {
  %state = (s32[], f32[4,262144]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[262144]) -> f32[262144] {
  %x = f32[262144] parameter(0)
  %a = f32[262144] sine(%x), metadata={op_name="jit(f)/jvp(embed)/sin"}
  %b = f32[262144] cosine(%a), metadata={op_name="jit(f)/jvp(layers)/mlp_norm/cos"}
  %fill = f32[] constant(0)
  %empty = f32[4,262144] broadcast(%fill), dimensions={}
  %start = s32[] constant(0)
  %init = (s32[], f32[4,262144]) tuple(%start, %empty)
  %loop = (s32[], f32[4,262144]) while(%init), condition=%go, body=%body
  %made = f32[4,262144] get-tuple-element(%loop), index=1
  %last = f32[1,262144] slice(%made), slice={[3:4], [0:262144]}
  %c = f32[262144] bitcast(%last)
  ROOT %y = f32[262144] add(%b, %c)
}
"""


def test_the_peak_is_inside_the_loop() -> None:
    found = buffer_peak(parse_hlo(LOOP))
    assert found is not None
    told = [(one.instruction, one.tensor, one.num_bytes) for one in found.held if one.num_bytes >= MIB]
    assert told == [
        ("empty", "layers/w_in", 4 * MIB),
        ("b", "layers/mlp_norm", MIB),
        ("row", "layers/w_in", MIB),
    ]
    assert found.num_bytes - 6 * MIB < 100
    assert found.to_dict()["buffers"][0]["shape"] == "f32[4,262144]"
    assert found.by_tensor() == "`layers/w_in` (2 buffers, 5.24 MB), `layers/mlp_norm` (1 buffer, 1.05 MB)"


SHARED = """HloModule test, is_scheduled=true

%half (p: f32[262144]) -> f32[262144] {
  %p = f32[262144] parameter(0)
  ROOT %q = f32[262144] negate(%p)
}

ENTRY %main (x: f32[262144]) -> f32[] {
  %x = f32[262144] parameter(0)
  %a = f32[262144] sine(%x)
  %b = f32[262144] OPERATION
  %zero = f32[] constant(0)
  ROOT %y = f32[] reduce(%b, %zero), dimensions={0}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("operation", "buffers"),
    [
        ("sort(%a), dimensions={0}", 2),
        ("ragged-all-to-all(%x, %a, %x, %x, %x, %x), replica_groups={{0,1}}", 1),
        ("fusion(%a), kind=kLoop, calls=%half", 1),
        ("fusion(%x), kind=kInput, calls=%half, output_to_operand_aliasing={{}: (0, {})}", 1),
        ('custom-call(%a), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}', 1),
    ],
)
def test_a_result_may_take_the_place_of_what_it_is_made_of(operation: str, buffers: int) -> None:
    found = buffer_peak(parse_hlo(SHARED.replace("OPERATION", operation)))
    assert found is not None and found.num_bytes == buffers * MIB


def test_what_has_no_schedule_has_no_peak() -> None:
    assert buffer_peak(parse_hlo(LOOP.replace(", is_scheduled=true", ""))) is None


def test_memory_on_the_chip_is_not_counted_and_tiles_are_padded() -> None:
    small = LOOP.replace("%b = f32[262144] cosine", "%b = f32[262144]{0:T(1024)S(1)} cosine")
    narrow = LOOP.replace("%b = f32[262144] cosine", "%b = f32[262144,1]{1,0:T(8,128)} cosine")
    both = [buffer_peak(parse_hlo(text)) for text in (LOOP, small, narrow)]
    whole, less, more = [one.num_bytes for one in both if one]
    assert (whole - less, more - whole) == (MIB, 127 * MIB)


def test_the_peak_is_near_the_compilers_own() -> None:
    """A scan whose gradient keeps its steps: XLA:CPU's temporaries, alignment aside."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, w)[0].sum()

    w, x = jnp.zeros((8, 64, 64)), jnp.zeros((256, 64))
    compiled = jax.jit(jax.grad(loss)).lower(w, x).compile()
    found, told = buffer_peak(parse_hlo(program_text(compiled))), compiled.memory_analysis()
    assert found is not None and told is not None
    assert 0.95 < found.num_bytes / told.temp_size_in_bytes < 1.05


def test_what_a_loop_over_layers_keeps_for_the_backward_pass() -> None:
    """Of eight turns the state before each and what its product makes; not the state that they hand on."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(h @ w), None

        with jax.named_scope("layers"):
            return jax.lax.scan(layer, x, w)[0].sum()

    w, x = jnp.zeros((8, 64, 64)), jnp.zeros((256, 64))
    program = parse_hlo(program_text(jax.jit(jax.grad(loss)).lower(w, x).compile()))
    assert layer_saved_bytes(program) == 2 * 8 * 256 * 64 * 4
    assert layer_saved_bytes(parse_hlo(program_text(jax.jit(loss).lower(w, x).compile()))) == 0


@pytest.mark.slow
def test_layers_keep_in_fp8_what_is_planned_and_the_program_takes_less() -> None:
    """By XLA:CPU, which widens operands of fp8 products, and so takes more beside what layers keep."""
    found = []
    for words in ("remat=matmuls", "saved_dtype=fp8,remat=matmuls", "saved_dtype=fp8,matmul_scales=tiles"):
        layout = Layout.parse(f"matmul_dtype=fp8,weights_dtype=f32,{words}")
        model = replace(load_model("demo"), num_layers=3)
        plan = Plan(model, "cpu:1", Workload(4, 256), layout)
        compiled = compile_plan(plan, choose_target("cpu:1", layout, "cpu"), lambda _: None)
        planned, memory = planned_step(plan, load("cpu:1"), compared_on=CPU), compiled.memory_bytes
        assert layer_saved_bytes(parse_hlo(compiled.hlo)) == planned.layer_saved_bytes
        assert memory is not None
        found.append((memory["temporaries"], planned.memory["activations"]))
    (wide, wide_planned), (narrow, narrow_planned), _ = found
    assert 0 < wide_planned - narrow_planned <= wide - narrow


@pytest.mark.parametrize(("of_host", "is_of_chip"), [(None, True), (890 * MIB, False), (600 * MIB, True)])
def test_a_peak_of_the_hosts_memory_is_not_the_chips(of_host: int | None, is_of_chip: bool) -> None:
    """libtpu gives the larger of both; the chip's then follow from the text."""
    program = parse_hlo(LOOP)
    peak = buffer_peak(program)
    assert peak is not None and peak.num_bytes != 890 * MIB
    figures = {"arguments": 100 * MIB, "outputs": 0, "temporaries": 890 * MIB, "total": 990 * MIB}
    figures |= {"host": of_host} if of_host else {}
    memory = chip_memory(figures, program)
    assert memory is not None
    temporaries = 890 * MIB if is_of_chip else peak.num_bytes
    assert (memory["temporaries"], memory["total"]) == (temporaries, 100 * MIB + temporaries)
