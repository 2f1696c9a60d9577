"""Hardware with measured collectives."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import cast

from meshwright.bench.collective_times import MeasuredCollective
from meshwright.bench.regression import fit_cost, monotone
from meshwright.cost.collectives import CollectivePrice, Op, collective_seconds
from meshwright.hardware.chip import COLLECTIVES, LinearCost, SharedMemory, Switch, Torus
from meshwright.hardware.links import LinkKind
from meshwright.hardware.topology import Hardware


def with_collectives(hardware: Hardware, measured: Sequence[MeasuredCollective]) -> Hardware:
    """`hardware` with measured collectives: costs by size on a CPU, otherwise latency and shares."""
    network = hardware.chip.network
    if isinstance(network, SharedMemory):
        return _with(hardware, SharedMemory({op: _host_cost(measured, op) for op in COLLECTIVES}))
    slow = _with(hardware, replace(network, efficiency={}))
    return _with_shares(_with_latency(slow, network, measured), measured)


def predicted(hardware: Hardware, collective: MeasuredCollective) -> CollectivePrice:
    """The cost model's price of a measured point."""
    point = collective.point
    return collective_seconds(
        cast("Op", point.op), point.gathered_bytes, point.axes, hardware.place(point.mesh)
    )


def _with(hardware: Hardware, network: Torus | Switch | SharedMemory) -> Hardware:
    return replace(hardware, chip=replace(hardware.chip, network=network))


def _host_cost(measured: Sequence[MeasuredCollective], op: str) -> LinearCost:
    ours = [one for one in measured if one.point.op == op]
    return fit_cost([one.point.priced_bytes for one in ours], [one.timing.seconds for one in ours])


def _with_latency(
    hardware: Hardware, network: Torus | Switch, measured: Sequence[MeasuredCollective]
) -> Hardware:
    """The hardware with the latency of the smallest messages.

    On a torus the latency of a hop is the median of t / hops. On a switch a hop keeps its latency, and
    the latency of a launch is the median of t - hops * t_hop.
    """
    least = min(one.point.gathered_bytes for one in measured)
    small = [one for one in measured if one.point.gathered_bytes == least]
    if isinstance(network, Torus):
        hops = [one.timing.seconds / predicted(hardware, one).hops for one in small]
        return _with(hardware, replace(network, hop_seconds=median(hops), efficiency={}))
    bare = replace(network, collective_launch_seconds=0.0, efficiency={})
    launches = [one.timing.seconds - predicted(_with(hardware, bare), one).seconds for one in small]
    return _with(hardware, replace(bare, collective_launch_seconds=max(0.0, median(launches))))


def _with_shares(hardware: Hardware, measured: Sequence[MeasuredCollective]) -> Hardware:
    """The hardware with shares of bandwidth by kind of link, collective and size.

    share = price / t, if bandwidth limits the price. On a switch both are without the latency of an empty
    message, since it adds to the time of the bytes. Points over several kinds of links are left out: they
    do not show which kind was slow.
    """
    network = hardware.chip.network
    assert not isinstance(network, SharedMemory)
    shares: dict[LinkKind, dict[str, dict[float, list[float]]]] = {}
    for collective in measured:
        point, seconds = collective.point, collective.timing.seconds
        kinds: set[LinkKind] = {link.kind for link in hardware.place(point.mesh).stretches(point.axes)}
        price = predicted(hardware, collective)
        if len(kinds) == 1 and price.bound == "bandwidth":
            by_size = shares.setdefault(kinds.pop(), {}).setdefault(point.op, {})
            latency = _empty_seconds(hardware, collective) if isinstance(network, Switch) else 0.0
            share = (price.seconds - latency) / max(seconds - latency, price.seconds - latency)
            by_size.setdefault(_curve_bytes(collective), []).append(share)
    efficiency = {
        kind: {op: monotone((size, median(s)) for size, s in sizes.items()) for op, sizes in by_op.items()}
        for kind, by_op in shares.items()
    }
    return _with(hardware, replace(network, efficiency=efficiency))


def _empty_seconds(hardware: Hardware, collective: MeasuredCollective) -> float:
    point = collective.point
    return collective_seconds(cast("Op", point.op), 0, point.axes, hardware.place(point.mesh)).seconds


def _curve_bytes(collective: MeasuredCollective) -> float:
    """The bytes that the price looks up a share for: V, or a permute's block."""
    point = collective.point
    return point.gathered_bytes / (point.num_devices if point.op == "permute" else 1)
