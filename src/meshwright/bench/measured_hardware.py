"""Hardware whose collectives are as measured."""

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
    """`hardware` with the collectives as measured: costs by size on a host, else latency and shares."""
    network = hardware.chip.network
    if isinstance(network, SharedMemory):
        return _with(hardware, SharedMemory({op: _host_cost(measured, op) for op in COLLECTIVES}))
    slow = _with(hardware, replace(network, efficiency={}))
    return _with_shares(_with_latency(slow, network, measured), measured)


def predicted(hardware: Hardware, one: MeasuredCollective) -> CollectivePrice:
    """What the cost model says of a measured point."""
    point = one.point
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
    """The hardware with the latency that the smallest messages show.

    On a torus that of a hop: the median of t / hops. On a switch hops stay as they are, and the
    launch takes the rest: the median of t - hops * t_hop.
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
    """The hardware with the share of each kind of link that each collective reaches by size.

    share = price / t where bandwidth sets the price and t is beyond latency, both without the latency of an
    empty message on a switch, where it adds to them; points over several kinds of links do not say which of
    them was slow, and are left out.
    """
    network = hardware.chip.network
    assert not isinstance(network, SharedMemory)
    found: dict[LinkKind, dict[str, dict[float, list[float]]]] = {}
    for one in measured:
        kinds: set[LinkKind] = {
            link.kind for link in hardware.place(one.point.mesh).stretches(one.point.axes)
        }
        price = predicted(hardware, one)
        if len(kinds) == 1 and price.bound == "bandwidth":
            by_size = found.setdefault(kinds.pop(), {}).setdefault(one.point.op, {})
            latency = _empty_seconds(hardware, one) if isinstance(network, Switch) else 0.0
            share = (price.seconds - latency) / max(one.timing.seconds - latency, price.seconds - latency)
            by_size.setdefault(_curve_bytes(one), []).append(share)
    efficiency = {
        kind: {op: monotone((size, median(s)) for size, s in sizes.items()) for op, sizes in by_op.items()}
        for kind, by_op in found.items()
    }
    return _with(hardware, replace(network, efficiency=efficiency))


def _empty_seconds(hardware: Hardware, one: MeasuredCollective) -> float:
    point = one.point
    return collective_seconds(cast("Op", point.op), 0, point.axes, hardware.place(point.mesh)).seconds


def _curve_bytes(one: MeasuredCollective) -> float:
    """The bytes by which the price reads a share: V, or the block that a permute sends."""
    point = one.point
    return point.gathered_bytes / (point.num_devices if point.op == "permute" else 1)
