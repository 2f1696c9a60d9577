"""FLOPs of the factorisations for which XLA calls LAPACK (on CPUs) or cuSOLVER (on GPUs).

The leading terms of each algorithm, for A[m, n] with m >= n:

    potrf   n^3 / 3                          A = L L^T
    getrf   m n^2 - n^3 / 3                  P A = L U
    geqrf   2 m n^2 - 2 n^3 / 3              A = Q R, with Q as reflectors; orgqr forms Q, at the same cost
    syevd   9 n^3, values only 4 n^3 / 3     eigenvalues of a symmetric A
    geev    25 n^3, values only 10 n^3       eigenvalues of any square A
    gesdd   6 m n^2 + 20 n^3, values only 2 m n^2 + 2 n^3
    trsm    m n^2                            A X = B for a triangular A[n, n] and m right-hand sides

Source: Golub & Van Loan, "Matrix Computations", 4th edition, sections 3.2, 4.2, 5.2, 5.4, 7.5, 8.3, 8.6.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import prod

from meshwright.audit.hlo.read import Computation, Instruction

# FLOPs by m, n, and whether vectors are computed next to the values.
_Count = Callable[[int, int, bool], Fraction | int]


def _orthogonal(m: int, n: int, _: bool) -> Fraction:
    return 2 * m * n**2 - Fraction(2, 3) * n**3


def _singular(m: int, n: int, vectors: bool) -> int:
    return 6 * m * n**2 + 20 * n**3 if vectors else 2 * m * n**2 + 2 * n**3


_OF_A_MATRIX: Mapping[str, _Count] = {
    "potrf": lambda m, n, _: Fraction(n**3, 3),
    "getrf": lambda m, n, _: m * n**2 - Fraction(n**3, 3),
    "geqrf": _orthogonal,
    "orgqr": _orthogonal,
    "ungqr": _orthogonal,
    "syevd": lambda m, n, vectors: 9 * n**3 if vectors else Fraction(4 * n**3, 3),
    "heevd": lambda m, n, vectors: 9 * n**3 if vectors else Fraction(4 * n**3, 3),
    "geev": lambda m, n, vectors: 25 * n**3 if vectors else 10 * n**3,
    "gesdd": _singular,
    "gesvd": _singular,
    "trsm": lambda m, n, _: m * n**2,
}
_CALL = re.compile(rf"(?:lapack_([sdcz])|cusolver_)({'|'.join(_OF_A_MATRIX)})_ffi")
# LAPACK's letter "N": no vectors.
_VALUES_ONLY = re.compile(rf"\b(?:mode|compute_left) = {ord('N')}\b")
# A complex product takes four real ones.
_REAL_PRODUCTS = {"c64": 4, "c128": 4}


def factorisation_flops(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of a call of LAPACK or cuSOLVER; 0 for other instructions."""
    if instruction.opcode != "custom-call":
        return 0
    call = _CALL.fullmatch(instruction.attributes.get("custom_call_target", "").strip('"'))
    if not call:
        return 0
    # The right-hand sides of a triangular system are its second operand.
    index = 1 if call[2] == "trsm" else 0
    shape = computation.instructions[instruction.operands[index]].shapes[0]
    *batch, rows, columns = shape.dims
    m, n = max(rows, columns), min(rows, columns)
    if call[2] == "trsm":
        n = computation.instructions[instruction.operands[0]].shapes[0].dims[-1]
        m = rows * columns // n
    vectors = not _VALUES_ONLY.search(instruction.attributes.get("backend_config", ""))
    flops = _OF_A_MATRIX[call[2]](m, n, vectors)
    return round(prod(batch) * flops * _REAL_PRODUCTS.get(shape.dtype, 1))
