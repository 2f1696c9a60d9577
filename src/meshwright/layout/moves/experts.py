"""Reshards of experts: how the rows of tokens reach the experts that they chose, and return.

A device has a row for each of its tokens and each of the k experts that the token chose. With a capacity an
expert has the same number of rows from every device. Otherwise rows travel to their experts' devices and back
(AllToAll), or, grouped, every device of a group of experts reads all tokens of the group (AllGather) and
makes the rows of its own experts there.
"""

from collections.abc import Container
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.layout.axes import EXPERT_NODES
from meshwright.layout.layout import Layout
from meshwright.layout.rules import AxisTable
from meshwright.models.mixers import LIKE_LETTERS
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Reshard, cotangent, mirrored


class RowRouting(NamedTuple):
    """The mesh axes between tokens x[B, T, D] and the rows d[E, C, D] of a device's experts.

    tokens: axes of B and T. experts: axes of E. columns: axes of M.
    exchanged: axes of E between which rows travel.
    gathered: axes of the all-gather of tokens before sorting.
    rows: axes of the all-gather of rows after they travelled, since columns are split over them.
    repeated: axes of E and M that do not split tokens: each device has a part of the same tokens' results.
    nodes: axes of E that a token crosses once for all of its experts on a node. Within the node, its rows
    travel or the token is gathered.
    """

    tokens: Axes
    experts: Axes
    columns: Axes
    exchanged: Axes
    gathered: Axes
    rows: Axes
    repeated: Axes
    nodes: Axes = ()

    @property
    def within(self) -> Axes:
        """The axes of E within a node."""
        return tuple(axis for axis in self.experts if axis not in self.nodes)

    @property
    def to_nodes(self) -> "RowRouting":
        """The part until tokens cross to nodes; everything if none crosses."""
        return self._replace(gathered=()) if self.nodes else self

    @property
    def of_node(self) -> "RowRouting":
        """The part between a node's tokens and its own experts; everything if no token crosses."""
        return self._replace(experts=self.within, repeated=(), nodes=()) if self.nodes else self

    @property
    def devices(self) -> Axes:
        """The axes of devices with rows of their own, or with a part of the same."""
        return (*self.tokens, *self.repeated)


@lru_cache(maxsize=4096)
def routing_of(activations: AxisTable, *, grouped: bool, once: bool = False) -> RowRouting:
    """The routing by a table of activations.

    grouped: tokens are gathered, and no rows travel. once: tokens travel once over `expert_nodes`.

    >>> table = AxisTable((("E", ("Y",)), ("M", ("Z",)), ("B", ("X", "Y")), ("T", ("Z",)), ("C", ("X", "Z"))))
    >>> routing = routing_of(table, grouped=False)
    >>> routing.exchanged, routing.gathered, routing.rows
    (('Y',), (), ('Z',))
    """
    x, experts = activations.split("x", "BTD"), activations.axes_of("E")
    tokens = (*x.axes_of("B"), *x.axes_of("T"))
    columns = tuple(axis for axis in activations.axes_of("M") if axis not in experts)
    travelled = () if grouped else tuple(axis for axis in experts if axis in tokens)
    # A node has neighbouring experts: E is split over the nodes first.
    nodes = tuple(axis for axis in experts[:1] if once and axis == EXPERT_NODES.name and axis in travelled)
    exchanged = tuple(axis for axis in travelled if axis not in nodes)
    taken = {*experts, *columns} | ({*tokens} - {*activations.axes_of("C")})
    together = tuple(axis for axis in tokens if axis in taken and axis not in travelled)
    repeated = tuple(axis for axis in (*experts, *columns) if axis not in tokens)
    gathered, rows = ((), together) if exchanged else (together, ())
    return RowRouting(tokens, experts, columns, exchanged, gathered, rows, repeated, nodes)


def row_routing(layout: Layout) -> RowRouting:
    """The routing of rows to experts that have no capacity."""
    schedule = layout.schedule
    return routing_of(layout.table, grouped=schedule.grouped, once=schedule.dispatch == "once")


def has_fixed_rows(layout: Layout) -> bool:
    """Whether an expert has the same number of rows of each device: by capacity, unless it masks gates."""
    return layout.schedule.capacity is not None and not row_routing(layout).nodes


def expert_table(layout: Layout) -> AxisTable:
    """The table of activations for the rows of experts.

    If all devices have the same number of rows, sums over columns are scattered by row.
    """
    return layout.table if has_fixed_rows(layout) else _expert_table(layout.table, row_routing(layout))


@lru_cache(maxsize=4096)
def _expert_table(activations: AxisTable, routing: RowRouting) -> AxisTable:
    """The table that splits rows, C, as tokens, but whole over the axes of experts and of gathered tokens."""
    letters = dict(activations.letters)
    whole = {*routing.experts, *routing.gathered}
    letters["C"] = tuple(axis for axis in routing.tokens if axis not in whole)
    return replace(activations, letters=tuple((letter, axes) for letter, axes in letters.items() if axes))


def expert_rows(layout: Layout, name: str, letters: str = "ECD") -> ShardedArray:
    """An array of the rows of experts, on the experts' devices."""
    return expert_table(layout).split(name, letters)


def sorted_rows(layout: Layout, name: str, d: str = "D") -> ShardedArray:
    """The rows d[E, C, D] as the tokens' own devices sort them by expert, before they travel.

    An expert's tokens have no order: the axes that E takes are innermost, so one AllToAll moves them. d: the
    letter of a row's elements, here and below; m if experts read a latent.
    """
    way, experts = row_routing(layout), layout.table.axes_of("E")
    rows = tuple(
        sorted(
            (axis for axis in way.tokens if axis not in way.nodes),
            key=lambda axis: (axis in experts, axis in way.rows),
        )
    )
    columns = layout.activation(name, f"BT{d}").axes_of(d)
    return ShardedArray(name, ("E", "C", d), (_fixed_axes(layout), rows, columns))


def _fixed_axes(layout: Layout) -> Axes:
    """The axes of E that sorted rows do not cross."""
    if has_fixed_rows(layout):
        return ()
    way = row_routing(layout)
    return _among(layout.table.axes_of("E"), (*way.repeated, *way.nodes))


def to_experts(layout: Layout, name: str, d: str = "D") -> Reshard:
    """The reshard of rows from their tokens' devices, which sorted them, to d[E, C, D] on the experts'.

    >>> print(*to_experts(Layout.of(fsdp=4, expert=2), "d").forward)
    AllToAll_{expert} d[E, C_{fsdp,expert}, D] -> d[E_expert, C_fsdp, D]
    """
    used = expert_rows(layout, name, f"EC{d}")
    if not has_fixed_rows(layout):
        used = used.replace(axes={"E": (*_fixed_axes(layout), *row_routing(layout).exchanged)})
    return mirrored(sorted_rows(layout, name, d), used)


def from_experts(layout: Layout, name: str, d: str = "D") -> Reshard:
    """The reverse of `to_experts`."""
    dispatch = to_experts(layout, name, d)
    return mirrored(dispatch.used, dispatch.given)


def tokens_to_experts(layout: Layout, name: str, d: str = "D") -> Reshard:
    """The reshard of x[B, T, D] to the tokens whose rows a device makes, or sends to nodes.

    Every device that makes rows of a token, or that has columns of its experts, adds to its cotangent.

    >>> print(*tokens_to_experts(Layout.of(fsdp=4, expert=2, grouped=True), "x").forward)
    AllGather_{expert} x[B_{fsdp,expert}, T, D] -> x[B_fsdp, T, D]
    """
    tokens, way = layout.activation(name, f"BT{d}"), row_routing(layout).to_nodes
    kept = {*way.tokens} - {*way.gathered}
    used = tokens.replace(axes={letter: _among(tokens.axes_of(letter), kept) for letter in "BT"})
    return Reshard(tokens, used, cotangent(used).replace(unreduced=(*way.gathered, *way.repeated)))


def gates_to_experts(layout: Layout, name: str) -> Reshard:
    """The reshard of gates[B, T, E] to the gates of a device's rows: made, sent or summed there."""
    gates, tokens = layout.activation(name, "BTE"), tokens_to_experts(layout, name).used
    way = row_routing(layout).to_nodes
    kept = gates.axes_of("E") if way.exchanged or way.nodes else way.experts
    used = gates.replace(axes={"B": tokens.axes_of("B"), "T": tokens.axes_of("T"), "E": kept})
    partial = tuple(axis for axis in (*way.gathered, *way.repeated) if axis not in kept)
    return Reshard(gates, used, cotangent(used).replace(unreduced=partial))


def tokens_from_experts(layout: Layout, name: str, d: str = "D") -> Reshard:
    """The reshard to x[B, T, D] of the partial sums of each device's experts, or columns of experts."""
    dispatch = tokens_to_experts(layout, name, d)
    return mirrored(dispatch.used.replace(unreduced=dispatch.yielded.unreduced), dispatch.given)


def to_nodes(layout: Layout, name: str, letters: str = "ECD") -> Reshard:
    """The reshard that sends each token once to each node with one of its experts.

    Each node receives the rows' gates, E, for its own experts.

    >>> layout = Layout.of(fsdp=8, expert=4, expert_nodes=2, dispatch="once")
    >>> print(*to_nodes(layout, "x").forward)
    AllToAll_{expert_nodes} x[E, C_{fsdp,expert,expert_nodes}, D] -> x[E_expert_nodes, C_{fsdp,expert}, D]
    """
    rows, nodes = sorted_rows(layout, name), row_routing(layout).nodes
    axes = {"C": (*rows.axes_of("C"), *nodes)} | dict.fromkeys(LIKE_LETTERS["D"] + "D", rows.axes_of("D"))
    given = ShardedArray(name, tuple(letters), tuple(axes.get(letter, ()) for letter in letters))
    return mirrored(given, given.replace(axes={"E": nodes, "C": rows.axes_of("C")}))


def gathered_in_node(layout: Layout, name: str, letters: str = "ECD") -> Reshard:
    """The reshard of a node's tokens to the rows of all devices with columns of its experts.

    Each such device adds to the rows' cotangents. Nothing moves if rows travel within the node.
    """
    given, gathered = to_nodes(layout, name, letters).used, row_routing(layout).gathered
    used = given.replace(axes={"C": tuple(axis for axis in given.axes_of("C") if axis not in gathered)})
    return Reshard(given, used, cotangent(used).replace(unreduced=gathered))


def sums_from_node(layout: Layout, name: str, d: str = "D") -> Reshard:
    """The reshard of each device's sums over its columns to the devices that received the tokens."""
    dispatch = gathered_in_node(layout, name, f"EC{d}")
    return mirrored(dispatch.used.replace(unreduced=dispatch.yielded.unreduced), dispatch.given)


def sums_from_nodes(layout: Layout, name: str, d: str = "D") -> Reshard:
    """The reverse of `to_nodes`."""
    dispatch = to_nodes(layout, name, f"EC{d}")
    return mirrored(dispatch.used, dispatch.given)


def _among(axes: Axes, some: Container[str]) -> Axes:
    return tuple(axis for axis in axes if axis in some)
