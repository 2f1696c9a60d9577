"""Reshards of mixers with a state: positions gathered for a convolution, and states for other devices."""

from functools import lru_cache

from meshwright.layout.layout import Layout
from meshwright.layout.rules import AxisTable
from meshwright.notation.einsum import Reshard, cotangent


def all_positions(layout: Layout, name: str, letters: str) -> Reshard:
    """The reshard of x[B, T, ...], which all heads share, to the positions of a device of the heads.

    Their cotangents are then equal, so each device keeps its own positions. Axes that split only positions
    still split them.
    """
    given = layout.activation(name, letters)
    used = given.replace(axes={"T": layout.activation(name, "BTu").axes_of("T")})
    return Reshard(given, used, cotangent(used))


def gathered_states(layout: Layout, name: str, letters: str) -> Reshard:
    """The gather of an array over the pieces T of a sequence.

    Every device reads the pieces before its own, and adds to their cotangents.

    >>> states = gathered_states(Layout.of(context=4, tensor=2), "delta_rule", "BTgusp")
    >>> print(*states.forward)
    AllGather_{context} delta_rule[B, T_context, g_tensor, u, s, p] -> delta_rule[B, T, g_tensor, u, s, p]
    """
    return _gathered(layout.table, name, letters)


@lru_cache(maxsize=4096)
def _gathered(activations: AxisTable, name: str, letters: str) -> Reshard:
    given = activations.split(name, letters)
    used = given.replace(axes={"T": ()})
    return Reshard(given, used, cotangent(used).replace(unreduced=given.axes_of("T")))
