"""FLOPs of dots, convolutions and library matmuls, worked by hand."""

import pytest

from meshwright.audit.flops import dot_flops
from meshwright.audit.hlo import parse_hlo


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
