"""The passes of recorded segments with the seconds of their work, waits and transfers."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from meshwright.cost.arrays import larger, smaller
from meshwright.cost.graph import Graph, Transfer
from meshwright.cost.memory import saved_bytes
from meshwright.cost.passes import Dtypes, SegmentPass, passes
from meshwright.hardware.chip import Chip
from meshwright.layout import Layout
from meshwright.units import Numeric


class TimedPass:
    """One pass with the seconds of its transfers, per microbatch and per step.

    sent: its transfers, as from `sent_together`; arrays of seconds for many layouts. joined: whether another
    microbatch's pass overlaps it and hides its exchanges of tokens. lost_by_hosts: seconds of hosts to launch
    a transfer, in addition to `host_collective_seconds`. each, once: a transfer with the seconds of its runs
    in a row. prefetched: seconds of reading weights ahead. room: seconds that could hide more. held_up:
    seconds that the chip waits for the host to launch the pass. for_host: seconds that it waits for
    activations between chip and host.
    """

    def __init__(
        self,
        work: SegmentPass,
        sent: Sequence[tuple[Transfer, Any]],
        chip: Chip,
        lost_by_hosts: Callable[[Transfer], Any] = lambda _: 0.0,
        *,
        joined: bool = False,
    ) -> None:
        self.work, self._step, self._joined = work, chip.step, joined
        self.each = [pair for pair in sent if not pair[0].once]
        self.once = [pair for pair in sent if pair[0].once]
        self._behind = sum(seconds for transfer, seconds in self.each if not self._is_awaited(transfer))
        waited = sum(self._share(one) * seconds for one, seconds in self.each if self._is_awaited(one))
        free = work.seconds - work.looped
        covered = smaller(free, self._behind)
        self._hidden = chip.step.overlap * covered
        gaps = work.idle + waited
        self.prefetched = chip.step.prefetch * smaller(work.streamed, gaps) if chip.step.prefetch else 0.0
        busy = work.seconds + waited + self._behind - self._hidden - self.prefetched
        collectives = sum(
            transfer.repeat * (chip.step.host_collective_seconds + lost_by_hosts(transfer))
            for transfer, _ in self.each
        )
        launches = chip.step.host_seconds * work.launches + collectives
        self.seconds = larger(busy, launches)
        self.held_up = self.seconds - busy
        self.room = free - covered + self.held_up
        if chip.step.gathers_first and work.direction == "forward":  # which hides only updated weights
            self.room = 0.0 * self.room
        self.for_host: Any = 0.0

    def _is_awaited(self, transfer: Transfer) -> bool:
        if self._step.is_roofline:
            return False
        return transfer.critical and not (self._joined and transfer.what == "tokens")

    def _share(self, transfer: Transfer) -> float:
        return self._step.exchanging if transfer.what == "tokens" else self._step.waiting

    def exposed(self, transfer: Transfer) -> float:
        """The share of a transfer's time that compute waits for."""
        if self._is_awaited(transfer):
            return self._share(transfer)
        return 1 - self._hidden / self._behind if self._behind else 0.0

    def hiding_under(self, other: "TimedPass") -> "TimedPass":
        """This pass at the time of `other`: each hides exposed transfers under the other's free compute."""
        extended = copy(self)
        moved = smaller(self._behind - self._hidden, other.room)
        extended._hidden, extended.seconds = self._hidden + moved, self.seconds - moved
        extended.room = self.room - smaller(other._behind - other._hidden, self.room)
        return extended

    def beside(self, transfer_seconds: Numeric) -> "TimedPass":
        """This pass during a transfer between chip and host; it is not shorter than the transfer."""
        extended = copy(self)
        extended.seconds = larger(self.seconds, transfer_seconds)
        extended.for_host = extended.seconds - self.seconds
        return extended


_SENT_TOGETHER = ("weights", "gradients", "updated weights")


def sent_together(
    transfers: Iterable[Transfer], seconds_of: Callable[[Transfer], Any]
) -> list[tuple[Transfer, Any]]:
    """Each transfer with the seconds of its runs in a row. seconds_of: of one run.

    Weights and gradients that compute does not wait for are one message with others over the same axes, and
    have a share of its time by bytes.
    """
    groups: dict[tuple, list[Transfer]] = {}
    for place, transfer in enumerate(transfers):
        kind = (transfer.what, transfer.op, transfer.axes, transfer.once)
        together = transfer.what in _SENT_TOGETHER and not transfer.critical
        groups.setdefault(kind if together else (place,), []).append(transfer)
    pairs = []
    for group in groups.values():
        total = sum(one.gathered_bytes for one in group)
        seconds = seconds_of(replace(group[0], gathered_bytes=total)) * group[0].repeat
        pairs += [
            (each, seconds * (each.gathered_bytes / total) if len(group) > 1 else seconds) for each in group
        ]
    return pairs


def timed_passes(
    graph: Graph, layout: Layout, dtypes: Dtypes, chip: Chip, timed: Callable[[SegmentPass], TimedPass]
) -> list[list[TimedPass]]:
    """The passes of each segment, in each of the graph's directions under the layout's remat policy.

    If activations are offloaded, a layer's are sent during the next layer's forward pass, and return
    before its backward pass: neither of the two passes is shorter than the transfer. A roofline gathers ahead
    of time for the backward pass: recomputation and the backward pass hide each other's transfers.
    """
    by_segment = []
    for segment in graph.segments:
        of_segment = list(map(timed, passes(segment, graph.directions, layout.schedule.remat, dtypes, chip)))
        of_segment = _as_one_pass(of_segment) if chip.step.is_roofline else of_segment
        if layout.schedule.offload and segment.source:
            sent = host_seconds(saved_bytes(segment, layout.schedule.remat), chip)
            of_segment = [
                each if each.work.direction == "recompute" else each.beside(sent) for each in of_segment
            ]
        by_segment.append(of_segment)
    return by_segment


def _as_one_pass(of_segment: Sequence[TimedPass]) -> list[TimedPass]:
    """The passes; recomputation and the backward pass hide each other's transfers."""
    partner_of = {"recompute": "backward", "backward": "recompute"}
    by_direction = {each.work.direction: each for each in of_segment}
    pairs = ((each, by_direction.get(partner_of.get(each.work.direction, ""))) for each in of_segment)
    return [each.hiding_under(other) if other else each for each, other in pairs]


def host_seconds(num_bytes: Numeric, chip: Chip) -> Any:
    """Seconds of a transfer between chip and host, one way."""
    return 0.0 * num_bytes if chip.platform.host_memory else num_bytes / chip.host_link_bytes_per_second
