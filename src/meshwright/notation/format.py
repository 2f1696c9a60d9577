"""The notation as text in three styles: ASCII, Unicode and LaTeX.

    ascii     A[I_X, J_YZ]{U_W}              what str() prints
    unicode   A[I₍X₎, J₍YZ₎]{U₍W₎}            Dₜₑₙₛₒᵣ where every character has a subscript
    latex     A[I_{X}, J_{YZ}]\\{U_{W}\\}       for a formula

Unicode has subscripts of the digits and of some small letters, and of no capital. One axis whose
whole name can be written so is; any other subscript stands in subscript parentheses: ₍XY₎ is X and
then Y, ₍data,fsdp₎ two words, ₍XY,₎ one. notation/parse.py reads the first two styles back.
"""

from typing import Literal, get_args

from meshwright.errors import NotationError, nearest
from meshwright.notation.array import SUBSCRIPTS, Axes, ShardedArray, split_subscript, subscript
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction

Style = Literal["ascii", "unicode", "latex"]

_ARROWS = {"ascii": "->", "unicode": "→", "latex": r"\to"}
_DOTS = {"ascii": ".", "unicode": "·", "latex": r"\cdot"}


def format_array(array: ShardedArray, style: Style = "ascii") -> str:
    """`array` in one of the styles.

    >>> from meshwright.notation.parse import parse_array
    >>> array = parse_array("w[D_fsdp, N_tensor, H]{U_XY}")
    >>> print(format_array(array, "unicode"))
    w[D₍fsdp₎, Nₜₑₙₛₒᵣ, H]{U₍XY₎}
    >>> print(format_array(array, "latex"))
    w[D_{\\mathrm{fsdp}}, N_{\\mathrm{tensor}}, H]\\{U_{XY}\\}
    """
    _check(style)
    dims = ", ".join(
        _word(dim, style) + _subscript(axes, style) for dim, axes in zip(array.dims, array.axes, strict=True)
    )
    left, right = (r"\{", r"\}") if style == "latex" else ("{", "}")
    partial = f"{left}U{_subscript(array.unreduced, style)}{right}" if array.unreduced else ""
    return f"{_word(array.name, style)}[{dims}]{partial}"


def format_collective(step: Collective, style: Style = "ascii") -> str:
    """`step` with its operand and result.

    >>> from meshwright.notation.parse import parse_array as a
    >>> step = Collective("all_gather", ("X",), a("A[I_X, J]"), a("A[I, J]"))
    >>> print(format_collective(step), format_collective(step, "unicode"), sep="; ")
    AllGather_{X} A[I_X, J] -> A[I, J]; AllGather₍X₎ A[I₍X₎, J] → A[I, J]
    """
    _check(style)
    if style == "ascii":
        return str(step)
    title = _word(step.title, style) + _subscript(step.axes, style)
    space = r" \, " if style == "latex" else " "
    operand, result = format_array(step.operand, style), format_array(step.result, style)
    return f"{title}{space}{operand} {_ARROWS[style]} {result}"


def format_contraction(plan: Contraction, style: Style = "ascii") -> str:
    """The local product of `plan`: its operands as they are multiplied and what that yields.

    >>> from meshwright.notation.einsum import contraction
    >>> from meshwright.notation.parse import parse_array as a
    >>> arrays = a("A[I, J_X]"), a("B[J_X, K]"), a("C[I, K]")
    >>> plan = contraction("IJ,JK->IK", *arrays, {"X": "J"})
    >>> print(format_contraction(plan), format_contraction(plan, "unicode"), sep="; ")
    A[I, J_X] ._J B[J_X, K] -> C[I, K]{U_X}; A[I, J₍X₎] ·₍J₎ B[J₍X₎, K] → C[I, K]{U₍X₎}
    """
    _check(style)
    summed = _subscript(tuple(plan.einsum.contracted), style)
    lhs, rhs, out = (format_array(a, style) for a in (plan.lhs_computed, plan.rhs_computed, plan.product))
    return f"{lhs} {_DOTS[style]}{summed} {rhs} {_ARROWS[style]} {out}"


def _check(style: str) -> None:
    if style not in get_args(Style):
        raise NotationError(f"style {style!r} is unknown; {nearest(style, list(get_args(Style)))}")


def _subscript(axes: Axes, style: Style) -> str:
    if style == "ascii" or not axes:
        return subscript(axes)
    if style == "latex":
        separator = "" if all(len(axis) == 1 for axis in axes) else ","
        return f"_{{{separator.join(_word(axis, style) for axis in axes)}}}"
    if len(axes) == 1 and all(character in SUBSCRIPTS for character in axes[0]):
        return "".join(SUBSCRIPTS[character] for character in axes[0])
    bare = "".join(axes)
    inside = bare if split_subscript(bare) == axes else ",".join(axes) if len(axes) > 1 else f"{bare},"
    return f"₍{inside}₎"


def _word(word: str, style: Style) -> str:
    """A name; in LaTeX one of several letters stands upright, lest it be read as a product."""
    if style != "latex" or len(word) < 2:
        return word
    escaped = word.replace("_", r"\_")
    return rf"\mathrm{{{escaped}}}"
