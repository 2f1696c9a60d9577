"""FLOPs of dots, convolutions and library matmuls, worked by hand."""

import pytest

from meshwright.audit.compare.findings import product_findings
from meshwright.audit.compare.flops import _without_merged, compare_products
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.instruction_work import InstructionSeconds
from meshwright.audit.facts.matmuls import dot_flops, products, smaller_branches
from meshwright.audit.facts.naming import origin_name
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.foreign import audit_program
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.hlo.trace import TracedValue, places
from meshwright.hardware.catalog import load
from meshwright.models.scopes import at_most_blocks, in_extra_passes
from meshwright.notation.mesh import Mesh

UNPRICED = Prices(Mesh({}), None, None)


def flops(line: str, left: str, right: str) -> float:
    head = "HloModule test\n\nENTRY %main () -> f32[] {\n"
    operands = f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
    return dot_flops(parse_hlo(head + operands + f"  ROOT %c = {line}\n}}\n"))


def test_a_dot_is_two_per_multiply_add_over_its_contracting_dims() -> None:
    dims = "lhs_batch_dims={0}, lhs_contracting_dims={1,3}, rhs_batch_dims={0}, rhs_contracting_dims={1,2}"
    assert flops(f"f32[5,2,7] dot(%a, %b), {dims}", "f32[5,3,2,4]", "f32[5,3,4,7]") == 2 * 5 * 2 * 7 * 3 * 4


@pytest.mark.parametrize(
    ("window", "labels", "left", "right", "result", "expected"),
    [
        # TPU's form of a plain matmul.
        ("", "bf_io->bf", "f32[6,5]", "f32[5,3]", "f32[6,3]", 2 * 6 * 5 * 3),
        # TPU's form of a matmul batched over 4: a reversed kernel that meets one input element at a time.
        ("window={size=4 stride=3 pad=0_0 lhs_dilate=4}", "0bf_0io->0bf",
         "f32[4,6,5]", "f32[4,5,3]", "f32[4,6,3]", 2 * 4 * 6 * 5 * 3),
        # 3 taps over 8 positions with one of padding on each side: 8 * 3 pairs, less the 2 in the padding.
        ("window={size=3 pad=1_1}", "b0f_0io->b0f",
         "f32[2,8,5]", "f32[3,5,7]", "f32[2,8,7]", 2 * 2 * 5 * 7 * 22),
    ],
)  # fmt: skip
def test_a_convolution_counts_only_taps_on_real_input(
    window: str, labels: str, left: str, right: str, result: str, expected: int
) -> None:
    line = f"{result} convolution(%a, %b), {window + ', ' if window else ''}dim_labels={labels}"
    assert flops(line, left, right) == expected


@pytest.mark.parametrize("target", ["__onednn$matmul", "__cublas$gemm", "__cublas$lt$matmul$f8"])
def test_library_matmuls_are_counted_by_their_shapes(target: str) -> None:
    line = f'(bf16[4,6,3], s8[99]) custom-call(%a, %b), custom_call_target="{target}"'
    assert flops(line, "bf16[4,6,5]", "bf16[4,5,3]") == 2 * 4 * 6 * 5 * 3


# Two sequences, 3 heads over one of keys, T = 1024, H = 64: of four blocks of 512 by 512 one is hidden.
SPLASH = """HloModule test

ENTRY %main () -> f32[] {{
  %next = s8[1,2,2] constant({{ {{ {{ 0, 0 }}, {{ 0, 1 }} }} }})
  %visited = s8[1,2,2] constant({{{visited}}})
  %moved = s8[1,2,2] copy(%visited)
  %q = bf16[2,3,1024,64] parameter(0)
  %k = bf16[2,1,1024,64] parameter(1)
  %v = bf16[2,1,1024,64] parameter(2)
  ROOT %kernel = {results} custom-call(%next, %moved, %q, %k, %v), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q{suffix}\\": 512, \\"block_kv{suffix}\\": 512, \\"block_kv_compute\\": 512}}"
}}}}, metadata={{op_name="jit(step)/attention/splash_mha_{which}_residuals/pallas_call"}}
}}
"""
CAUSAL = " { { 1, 0 }, { 2, 1 } } "
ONE_PRODUCT = 2 * (2 * 3) * (3 * 512 * 512) * 64


@pytest.mark.parametrize(
    ("which", "results", "products"),
    [
        ("fwd", "bf16[2,3,1024,64]", 2),
        ("dq", "bf16[2,3,1024,64]", 3),
        ("dkv", "(bf16[2,1,1024,64], bf16[2,1,1024,64])", 4),
        ("dkv", "(bf16[2,2,3,1024,64], bf16[2,1,1024,64], bf16[2,1,1024,64])", 5),
    ],
)
def test_a_kernel_of_splash_attention_counts_the_blocks_that_it_visits(
    which: str, results: str, products: int
) -> None:
    suffix = "" if which == "fwd" else f"_{which}"
    program = parse_hlo(SPLASH.format(visited=CAUSAL, results=results, suffix=suffix, which=which))
    assert dot_flops(program) == products * ONE_PRODUCT
    assert not_understood(program) == []


def test_a_kernel_whose_mask_is_not_printed_is_not_understood() -> None:
    text = SPLASH.format(visited="...", results="bf16[2,3,1024,64]", suffix="", which="fwd")
    assert "not printed" in not_understood(parse_hlo(text))[0]


OF_TPU = """
  %a = s32[4] parameter(0)
  %b = s32[4,3] parameter(1)
  %c = s32[5] parameter(2)
  %d = s32[2] parameter(3)
  %e = s32[1] parameter(4)
  %f = bf16[4,6,128] parameter(5)
  %g = bf16[32,16,4,128] parameter(6)
  ROOT %out = bf16[4,6,128] custom-call(%a, %b, %c, %d, %e, %f, %g), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/attention/jit(ragged_paged_attention)/ragged_paged_attention_kernel/pallas_call"}
"""
# Narrow keys and values with their scales.
OF_GPU = """
  %a = bf16[4,2,3,128] parameter(0)
  %b = s8[1024,128] parameter(1)
  %c = f32[1024] parameter(2)
  %d = s32[4,3] parameter(3)
  %e = s32[4,1] parameter(4)
  ROOT %out = bf16[4,2,1,3,128] custom-call(%a, %b, %b, %c, %c, %d, %e), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/attention/\
decode_pages_of_16/pallas_call"}
"""


@pytest.mark.parametrize(
    ("text", "chip", "queries", "of_a_key"),
    [(OF_TPU, "v5e", 4 * 6 * 128, 4 * 128 * 2), (OF_GPU, "h100", 4 * 6 * 128, 2 * 2 * (128 + 4))],
)
def test_a_kernel_over_pages_counts_all_positions_of_its_tables(
    text: str, chip: str, queries: int, of_a_key: int
) -> None:
    """Four queries of six heads, each over three pages of sixteen positions of two KV heads."""
    program, machine = (
        parse_hlo(f"HloModule test\n\nENTRY %main () -> f32[] {{{text}}}\n"),
        load(f"{chip}:1").chip,
    )
    assert dot_flops(program) == 2 * 2 * (4 * 6 * 128) * (3 * 16)
    assert not_understood(program) == []
    [place] = places(program)
    found = TracedValue(place.computation.instructions["out"], place)
    num_bytes = 4 * 3 * 16 * of_a_key + 2 * 2 * queries
    wanted = num_bytes / machine.memory_bytes_per_second("bf16") + machine.step.kernel_seconds
    assert InstructionSeconds(program, machine).seconds(found) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("mask", "window", "pairs"), [("CAUSAL", 0, 8 * 9 // 2), ("CAUSAL", 3, 21), ("NO_MASK", 0, 64)]
)
@pytest.mark.parametrize(("target", "products"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
def test_a_kernel_of_cudnn_counts_the_scores_that_its_mask_leaves(
    mask: str, window: int, pairs: int, target: str, products: int
) -> None:
    """T = 8 queries see 1 to 8 keys; of a window of 3 they see 1, 2 and six times 3."""
    notes = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "8", "8"]}, '
    notes += f'"mask_type": "{mask}", "sliding_window_length": {window}'
    text = f"""HloModule test

ENTRY %main () -> f32[] {{
  %q = bf16[2,8,4,64] parameter(0)
  %k = bf16[2,8,1,64] parameter(1)
  ROOT %out = bf16[2,4,8,64] custom-call(%q, %k, %k), custom_call_target="__cudnn${target}", \
backend_config={{"cudnn_fmha_backend_config": {{{notes}}}}}
}}
"""
    program = parse_hlo(text)
    assert dot_flops(program) == products * 2 * (2 * 4) * pairs * 64
    assert not_understood(program) == []


@pytest.mark.parametrize(
    ("result", "lhs", "rhs", "dims"),
    [
        ("f32[64,32]", "f32[64,16]", "f32[4,16,32]", "lhs_contracting_dims={1}, lhs_ragged_dims={0}"),
        ("f32[4,16,32]", "f32[64,16]", "f32[64,32]", "lhs_contracting_dims={0}, lhs_ragged_dims={0}"),
    ],
)
def test_a_ragged_dot_multiplies_each_row_with_one_group(result: str, lhs: str, rhs: str, dims: str) -> None:
    text = f"""HloModule m
ENTRY %main (x: {lhs}, w: {rhs}, n: s32[4]) -> {result} {{
  %x = {lhs} parameter(0)
  %w = {rhs} parameter(1)
  %n = s32[4] parameter(2)
  ROOT %y = {result} ragged-dot(%x, %w, %n), {dims}
}}
"""
    assert dot_flops(parse_hlo(text)) == 2 * 64 * 16 * 32


BRANCHES = """HloModule branches, num_partitions=2

%small (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8] parameter(0)
  ROOT %n = f32[8,8] negate(%a)
}

%large (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8] parameter(0)
  ROOT %d = f32[8,8] dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%other (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8] parameter(0)
  ROOT %e = f32[8,8] dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (flag: s32[], x: f32[8,8]) -> f32[8,8] {
  %flag = s32[] parameter(0)
  %x = f32[8,8] parameter(1)
  %d0 = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %if = f32[8,8] conditional(%flag, %d0, %d0, %d0), branch_computations={%small, %large, %other}
}
"""


def test_of_a_conditional_the_largest_branch_counts_and_is_said() -> None:
    """One product before it, and one in each of two of its three branches."""
    program = parse_hlo(BRANCHES)
    assert dot_flops(program) == 2 * (2 * 8**3)
    (said,) = audit_program(program)["branches"]
    assert said == "if: the largest of 3 branches is counted, 1.02k FLOPs (others: 0, 1.02k)"


def test_all_branches_count_that_a_list_in_the_program_chooses() -> None:
    """As the kinds of layers do: two of four runs take the second branch, two the third."""
    chosen = """%kinds = s32[4] constant({1, 2, 1, 2})
  %at = s32[] parameter(0)
  %kind = s32[1] dynamic-slice(%kinds, %at), dynamic_slice_sizes={1}
  %flag = s32[] bitcast(%kind)"""
    program = parse_hlo(BRANCHES.replace("%flag = s32[] parameter(0)", chosen))
    assert smaller_branches(parse_hlo(BRANCHES)) and not smaller_branches(program)


def test_a_branch_counts_by_the_share_of_runs_that_its_scope_says() -> None:
    """Three of eight runs take the one with a product: no whole number of the one run of this program."""
    said = f', metadata={{op_name="jit(f)/{at_most_blocks(3, 8)}/cond"}}'
    text = BRANCHES.replace(
        "branch_computations={%small, %large, %other}", "branch_computations={%small, %large}"
    )
    program = parse_hlo(text.replace("%d0, %d0, %d0)", "%d0, %d0)").replace("%large}\n", f"%large}}{said}\n"))
    assert dot_flops(program) == 2 * 8**3 * (1 + 3 / 8)


NAMELESS = """HloModule test

%library (x: f32[4,8,2], y: f32[4,2,8]) -> f32[4,8,8] {
  %x = f32[4,8,2] parameter(0)
  %y = f32[4,2,8] parameter(1)
  ROOT %dot = f32[4,8,8] dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

ENTRY %main () -> f32[4,8,8] {
  %a = f32[4,8,2] parameter(0)
  %b = f32[4,2,8] parameter(1)
  %q = f32[4,8,2] copy(%a), metadata={op_name="OPERAND"}
  %ynn = f32[4,8,8] fusion(%q, %b), kind=kCustom, calls=%library, metadata={op_name="FUSION"}
  ROOT %s = f32[4,8,8] negate(%ynn), metadata={op_name="jit(f)/attention/where"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("fusion", "operand", "name"),
    [
        ("jit(f)/wo/dot_general", "", "jit(f)/wo/dot_general"),
        ("", "jit(f)/rope_q/pad", "jit(f)/attention/where"),
        ("", "jit(f)/attention/BTKGH,BSKH->BKGTS/transpose", "jit(f)/attention/BTKGH,BSKH->BKGTS/transpose"),
    ],
)
def test_a_product_in_a_fusion_without_a_name_has_that_of_what_is_beside_it(
    fusion: str, operand: str, name: str
) -> None:
    """As XLA for CPU leaves batched products that it hands to a library."""
    (product,) = products(parse_hlo(NAMELESS.replace("FUSION", fusion).replace("OPERAND", operand)))
    assert product.op_name == name


ALIKE = """HloModule test

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="PRODUCT"}
  ROOT %t = (s32[], f32[8,8]) tuple(%next, %y)
}

%condition (p: (s32[], f32[8,8])) -> pred[] {
  %p = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8,8]) -> (s32[], f32[8,8]) {
  %zero = s32[] constant(0)
  %x = f32[8,8] parameter(0)
  %init = (s32[], f32[8,8]) tuple(%zero, %x)
  %first = (s32[], f32[8,8]) while(%init), condition=%condition, body=%body, metadata={op_name="FIRST"}
  ROOT %second = (s32[], f32[8,8]) while(%first), condition=%condition, body=%body, metadata={op_name="SECOND"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("product", "second", "names"),
    [
        ("jvp(gate)/while/body/ab", "jvp(in)/while", ["gate)/while/body/ab", "in)/while/body/ab"]),
        # With the name of a loop within another.
        ("jvp(a)/while/body/b/while/body/ab", "jvp(in)/while", ["gate)/while/body/ab", "in)/while/body/ab"]),
        # Moved into the loop by the compiler, from where no loop is; and a loop that no name is left of.
        ("jvp(gate)/ab", "jvp(in)/while", ["gate)/ab", "gate)/ab"]),
        ("jvp(gate)/while/body/ab", "", ["gate)/while/body/ab", "gate)/while/body/ab"]),
    ],
)
def test_a_product_in_a_body_that_loops_share_has_the_name_of_its_loop(
    product: str, second: str, names: list[str]
) -> None:
    """As XLA for GPU merges loops over rows of experts, forward and recomputed."""
    text = ALIKE.replace("PRODUCT", f"jit(f)/{product}/dot").replace("FIRST", "jit(f)/jvp(gate)/while")
    text = text.replace("SECOND", f"jit(f)/{second}" if second else "")
    assert [one.op_name for one in products(parse_hlo(text))] == [f"jit(f)/jvp({name}/dot" for name in names]


def _alike(second: str) -> str:
    """Two loops with one body, whose product has the name of the first."""
    text = ALIKE.replace("PRODUCT", "jit(f)/jvp(gate)/while/body/ab/dot")
    return text.replace("FIRST", "jit(f)/jvp(gate)/while").replace("SECOND", second)


def test_a_sum_in_a_body_that_loops_share_has_the_name_of_its_loop() -> None:
    """As the gradients of two weights of experts, each added up by a loop over rows."""
    program = parse_hlo(_alike("jit(f)/jvp(in)/while"))
    main = next(place for place in places(program) if not place.frames)
    results = (TracedValue(main.computation.instructions[loop], main, (1,)) for loop in ("first", "second"))
    names = [origin_name(program, result) for result in results]
    assert names == [f"jit(f)/jvp({name})/while/body/ab/dot" for name in ("gate", "in")]


def test_a_product_that_the_compiler_repeats_to_save_memory_is_said() -> None:
    text = _alike("jit(f)/jvp(gate)/while")
    once = list(products(parse_hlo(text)))
    twice = once + list(products(parse_hlo(text.replace("%y", "%y.remat2"))))
    planned = {("gate", "forward"): sum(one.flops for one in once)}
    (difference,) = compare_products(planned, twice, differentiated=False)
    assert difference.repeated == difference.extra_flops == difference.planned
    (finding,) = product_findings([difference], UNPRICED, "bf16")
    assert "since memory is short" in finding.change


def test_loops_over_the_rounds_that_an_even_load_does_not_take_are_left_out() -> None:
    """Of two loops the second alone counts, once: it begins where the other ended, which is not known."""
    text = ALIKE.replace("PRODUCT", "").replace("FIRST", f"jit(f)/{in_extra_passes()}/while")
    assert dot_flops(parse_hlo(text.replace("SECOND", "jit(f)/while"))) == 2 * 8**3


_READERS = frozenset({"wq", "wk", "wv", "state_gate", "state_x", "state_b", "state_c", "state_step"})


def test_a_product_may_replace_others_of_the_same_input() -> None:
    """In Falcon-H1's generation the queries' has all that read the input; sizes are columns of weights."""
    merged = {("wq", "forward"): 1048.0 + 2 * 3072, ("state_step", "forward"): -24.0}
    merged |= {(name, "forward"): -256.0 for name in ("wk", "wv", "state_b", "state_c")}
    merged |= {("state_gate", "forward"): -3072.0, ("state_x", "forward"): -3072.0}
    assert _without_merged(merged, [_READERS]) == {}
    assert _without_merged(merged, [_READERS - {"wv"}, frozenset({"wv", "wo"})]) != {}
    del merged["state_step", "forward"]  # less than a hundredth of the surplus
    assert _without_merged(merged, [_READERS]) == merged


def test_merged_products_may_share_tensors() -> None:
    """Falcon-H1's backward pass: recomputed with the queries, and gradients of weights with B's."""
    merged = {("wq", "backward"): 1048.0, ("state_b", "backward"): 3864.0 - 256.0}
    merged |= {(name, "backward"): -512.0 for name in ("wk", "wv", "state_c")}
    merged |= {("state_step", "backward"): -48.0, ("state_gate", "backward"): -3072.0}
    forward = {("wq", "forward"): 24.0}
    assert _without_merged(merged | forward, [_READERS]) == forward
    less = merged | {("wv", "backward"): -256.0}
    assert _without_merged(less, [_READERS]) == less
