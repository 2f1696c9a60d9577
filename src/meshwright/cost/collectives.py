"""Seconds of a collective on the links that its mesh axes take.

V below is the gathered array: its bytes divided by the product of the axes that stay sharded.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from meshwright.cost.arrays import larger, smaller
from meshwright.hardware.chip import EXCHANGE_PEERS, LinearCost, SharedMemory, Switch, Torus
from meshwright.hardware.links import Link, LinkKind, link_rates
from meshwright.hardware.topology import Placement
from meshwright.layout.grouped import nodes_of_token
from meshwright.points import share_at
from meshwright.units import Numeric

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
CollectiveBound = Literal["bandwidth", "latency"]
# Links between slices or NVLink domains; the others are inside one.
OUTER_LINKS = ("dcn", "network")


class CollectivePrice(NamedTuple):
    """Seconds of a collective and their cause.

    bound: limit of the slower phase. hops: messages in sequence. link: links of the slower phase; None for a
    single device, which moves nothing.
    """

    seconds: float
    bound: CollectiveBound
    hops: int
    link: LinkKind | None

    @property
    def resource(self) -> Literal["ici", "dcn"]:
        """The limiting links: inside a slice or NVLink domain, or between them."""
        return "dcn" if self.link in OUTER_LINKS else "ici"


NOTHING = CollectivePrice(0.0, "bandwidth", 0, None)


class Protocol(NamedTuple):
    """A protocol of NCCL for messages over a switch, relative to its protocol Simple.

    nvlink_hop, nic_hop: latency of one step inside a domain and between domains. bandwidth: of the links.
    """

    nvlink_hop: float
    nic_hop: float
    bandwidth: float


# Simple runs large messages at all of the bandwidth; LL128 and LL reach the next device sooner, with less.
# Source: NCCL src/graph/tuning.cc: ringLat of NVLINK 3.4, 1.9, 0.6 us and of NET 14, 4, 2.7 us; LL128 carries
# 120 of 128 bytes on NVLink (0.92 as tuned there), LL four of every eight.
PROTOCOLS = (Protocol(1.0, 1.0, 1.0), Protocol(1.9 / 3.4, 4 / 14, 0.92), Protocol(0.6 / 3.4, 2.7 / 14, 0.5))


# Collectives that pass blocks round a ring or along a tree.
_AROUND = ("all_gather", "reduce_scatter", "all_reduce")


class Copies(NamedTuple):
    """Rows of an all-to-all that are copies of one row, each for another device.

    rows: number of copies. Copies for one slice or domain cross to it once. groups: number of groups of
    devices. reached: groups that the copies of one row go to.
    """

    rows: int = 1
    groups: int = 1
    reached: int = 1

    def crossing(self, num_domains: int) -> float:
        """Share of the rows that cross if copies for one of `num_domains` cross once.

        >>> Copies().crossing(4), round(Copies(8).crossing(4), 3), round(Copies(8, 8, 4).crossing(8), 3)
        (1.0, 0.45, 0.45)
        """
        return nodes_of_token(num_domains, self.rows, self.groups, self.reached) / self.rows


ALONE = Copies()


def collective_seconds(
    op: Op,
    gathered_bytes: float,
    axes: str | tuple[str, ...],
    placement: Placement,
    *,
    copies: Copies = ALONE,
) -> CollectivePrice:
    """The price of one collective over one or several mesh axes at once.

        torus    t = sum over phases of max(bandwidth, latency)
        switch   t = min over algorithms and protocols of launch + sum of latencies + largest bandwidth

    Links inside a slice or NVLink domain are one phase. Links between slices or domains (`dcn`, `network`)
    are a second phase on the result of the first: V over the devices of the first. On calibrated hardware, a
    phase's bandwidth is the share that its bytes reach.

    On GPUs the launch of the kernel counts into the latency of the first phase. An all-gather or
    reduce-scatter is a ring over all n devices, with n - 1 steps; the steps between domains cross the
    network. An all-reduce is two rings or a tree, whichever is faster. Both pass blocks over all links at
    once, so the slowest links set the bandwidth. An all-to-all runs one phase after the other, unless its
    rows are copied on arrival: then its blocks pass over all links at once too.

    gathered_bytes: V. copies: of each row of an all-to-all; copies for one slice or domain cross to it once,
    and are copied there (DeepSeek-V3, 2024, section 3.2.2; DeepEP). An all-reduce is a reduce-scatter and an
    all-gather; a reduce-scatter over several dimensions of a torus takes the network's `scatter_passes`.

    Raises LayoutError for an axis that the mesh does not have. Source: How to Scale Your Model, "Sharded
    Matrices"; each phase has its formula in its function; NCCL src/graph/tuning.cc for the steps on a switch.
    """
    names, network = (axes,) if isinstance(axes, str) else tuple(axes), placement.network
    if isinstance(network, SharedMemory):
        return _host_price(op, gathered_bytes, placement.stretches(names), network.costs[op])
    ways = _ways_to_send(op, placement.stretches(names), network, copies)
    at_once = _at_once(op, network, copies)
    prices = (_way_price(op, gathered_bytes, way, network, at_once=at_once) for way in ways)
    return min(prices, key=lambda price: price.seconds, default=NOTHING)


def _way_price(
    op: Op, gathered_bytes: float, way: "tuple[_Part, ...]", network: Torus | Switch, *, at_once: bool
) -> CollectivePrice:
    prices = [_part_price(op, gathered_bytes, part, network) for part in way]
    slower = max(prices, key=lambda price: price.seconds)
    if op == "permute" or len(prices) == 1:  # a message takes the links of one part
        return slower
    seconds, hops = sum(price.seconds for price in prices), sum(price.hops for price in prices)
    if at_once:
        latency = sum(part.latency for part in way)
        bandwidth = max(price.seconds - part.latency for price, part in zip(prices, way, strict=True))
        seconds = latency + bandwidth
        bound: CollectiveBound = "bandwidth" if bandwidth >= latency else "latency"
        return CollectivePrice(seconds, bound, hops, slower.link)
    return CollectivePrice(seconds, slower.bound, hops, slower.link)


@lru_cache(maxsize=65536)
def seconds_by_bytes(op: Op, axes: tuple[str, ...], placement: Placement) -> Callable[[float], float]:
    """`collective_seconds` as a function of V, for thousands of evaluations."""
    network = placement.network
    if isinstance(network, SharedMemory) or network.efficiency:
        return lambda gathered_bytes: collective_seconds(op, gathered_bytes, axes, placement).seconds
    lines, adds = _kept_lines(op, placement.stretches(axes), network, ALONE), isinstance(network, Switch)
    return lambda gathered_bytes: along_lines(op, gathered_bytes, lines, adds=adds)


def seconds_of_many(
    op: Op, axes: tuple[str, ...], placements: Sequence[Placement], *, copies: Copies = ALONE
) -> Callable[[Any], Any]:
    """`collective_seconds` on each placement, as a function of an array with a V for each."""
    import numpy as np  # a tenth of a second, which the price of a single layout need not take

    network = placements[0].network
    if isinstance(network, SharedMemory) or network.efficiency:

        def one_by_one(gathered_bytes: Numeric) -> Any:
            sizes = np.broadcast_to(gathered_bytes, len(placements)).tolist()
            pairs = zip(sizes, placements, strict=True)
            return np.array([collective_seconds(op, v, axes, at, copies=copies).seconds for v, at in pairs])

        return one_by_one
    numbers: dict[tuple[Link, ...], int] = {}
    at = {
        place: numbers.setdefault(place.stretches(axes), len(numbers)) for place in dict.fromkeys(placements)
    }
    different = np.array([_kept_lines(op, links, network, copies) for links in numbers])
    # Axes: way, phase, figure, placement.
    lines = np.moveaxis(different[[at[place] for place in placements]], 0, -1)
    adds = isinstance(network, Switch)
    return lambda gathered_bytes: along_lines(op, gathered_bytes, lines, adds=adds)


# (seconds per byte of V, latency) for each way to send, for the inner and then the outer phase.
Lines = Any


def along_lines(op: Op, gathered_bytes: Numeric, lines: Lines, *, adds: bool) -> Any:
    """Seconds of the fastest way. adds: latency and bandwidth of a phase are a sum, not a maximum."""
    fastest = None
    for inner, outer in lines:
        first, second = (
            gathered_bytes * per_byte + latency if adds else larger(gathered_bytes * per_byte, latency)
            for per_byte, latency in (inner, outer)
        )
        seconds = larger(first, second) if op == "permute" else first + second
        fastest = seconds if fastest is None else smaller(fastest, seconds)
    return fastest


def lines_of(op: Op, links: tuple[Link, ...], network: Torus | Switch, copies: Copies) -> Lines:
    """The lines of `along_lines` over the links of a placement; zero for an absent phase."""
    ways = _ways_to_send(op, links, network, copies) or ((),) * _num_ways(op, network)
    lines, at_once = [], _at_once(op, network, copies)
    for way in ways:
        inner = outer = (0.0, 0.0)
        for part in way:
            line = part.bandwidth_seconds(1.0), part.latency
            inner, outer = (inner, line) if part.link in OUTER_LINKS else (line, outer)
        if at_once:
            inner, outer = (larger(inner[0], outer[0]), inner[1] + outer[1]), (0.0, 0.0)
        lines.append((inner, outer))
    return tuple(lines)


def _at_once(op: Op, network: Torus | Switch, copies: Copies) -> bool:
    """Whether blocks pass over all links of a switch at once.

    The slowest links set the bandwidth then.
    """
    return isinstance(network, Switch) and (op in _AROUND or copies.rows > 1)


_kept_lines = lru_cache(maxsize=65536)(lines_of)


class _Part(NamedTuple):
    """A phase of a collective, on links of one kind.

    bytes_of_gathered: the bytes that it handles, over V. seconds_per_byte: of the handled bytes. passes:
    number of runs. latency: seconds of all runs.
    """

    bytes_of_gathered: float
    seconds_per_byte: float
    passes: int
    hops: int
    latency: float
    link: LinkKind

    def bandwidth_seconds(self, gathered_bytes: float) -> float:
        """Seconds at the full bandwidth of the links."""
        return self.passes * gathered_bytes * self.bytes_of_gathered * self.seconds_per_byte


def _num_ways(op: Op, network: Torus | Switch) -> int:
    if not isinstance(network, Switch):
        return 1
    direct = 2 if op == "all_reduce" and network.direct_seconds else 0
    return len(PROTOCOLS) * (2 if op == "all_reduce" else 1) + direct


def _ways_to_send(
    op: Op, links: tuple[Link, ...], network: Torus | Switch, copies: Copies
) -> tuple[tuple[_Part, ...], ...]:
    """The algorithms of a collective as phases: one on a torus, several on a switch."""
    parts = _parts(op, links, network, copies)
    if not parts or not isinstance(network, Switch):
        return (parts,) if parts else ()
    ways, direct = [parts], ()
    if op in _AROUND:
        tree, ring = _tree_and_ring(links, parts, network)
        # Inside a domain of few devices a tree's steps take no less time than a ring's.
        other = tree if any(part.link in OUTER_LINKS for part in parts) else ring
        ways = [ring, other] if op == "all_reduce" else [ring]
        direct = _direct(op, links, parts, network)
    return (*(_under(protocol, way, network) for way in ways for protocol in PROTOCOLS), *direct)


def _direct(
    op: Op, links: tuple[Link, ...], parts: tuple[_Part, ...], network: Switch
) -> tuple[tuple[_Part, ...], ...]:
    """All-reduces inside a domain whose kernels read the memory of the other devices.

        one-shot    each device reads all of V from n - 1 others
        two-shot    a reduce-scatter and an all-gather, each with a barrier

    Source: vllm/csrc/custom_all_reduce.cuh; TensorRT-LLM's customAllReduceKernels.
    """
    if op != "all_reduce" or not network.direct_seconds:
        return ()
    if any(part.link in OUTER_LINKS for part in parts):
        return parts, parts  # callers expect two; outside of a domain these are never faster than a ring
    size, [part] = prod(link.size for link in links), parts
    rate, latency = 1 / links[0].one_way_bytes_per_second, network.direct_seconds
    direct = part._replace(seconds_per_byte=rate, passes=1)
    one_shot = direct._replace(bytes_of_gathered=size - 1, latency=latency)
    two_shot = direct._replace(bytes_of_gathered=2 * (size - 1) / size, latency=1.5 * latency)
    return (one_shot,), (two_shot,)


def _tree_and_ring(
    links: tuple[Link, ...], parts: tuple[_Part, ...], network: Switch
) -> tuple[tuple[_Part, ...], tuple[_Part, ...]]:
    """The phases of a tree and of a ring over all n devices of a switch.

    Each device sends V (n - 1)/n to the next one: over NVLink, or over the domain's network cards, which all
    its devices share. Of a ring's n - 1 steps, domains - 1 cross the network.
    """
    size = prod(link.size for link in links)
    domains = prod(link.size for link in links if link.is_outer)
    rates, tree, ring = link_rates(network), [], []
    for place, part in enumerate(parts):
        length = domains if part.link in OUTER_LINKS else size // domains
        rate = part.seconds_per_byte * (size - 1) / size / ((length - 1) / length)
        hops = part.passes * (domains - 1 if part.link in OUTER_LINKS else size - domains)
        launch = network.collective_launch_seconds if place == 0 else 0.0
        tree.append(part._replace(seconds_per_byte=rate))
        ring.append(tree[-1]._replace(hops=hops, latency=launch + hops * rates[part.link][1]))
    return tuple(tree), tuple(ring)


def _under(protocol: Protocol, way: tuple[_Part, ...], network: Switch) -> tuple[_Part, ...]:
    """`way`, with the latencies of Simple, under another protocol. The launch does not change."""
    parts = []
    for place, part in enumerate(way):
        launch = network.collective_launch_seconds if place == 0 else 0.0
        factor = protocol.nic_hop if part.link in OUTER_LINKS else protocol.nvlink_hop
        rate = part.seconds_per_byte / protocol.bandwidth
        latency = launch + (part.latency - launch) * factor
        parts.append(part._replace(latency=latency, seconds_per_byte=rate))
    return tuple(parts)


def _parts(op: Op, links: tuple[Link, ...], network: Torus | Switch, copies: Copies) -> tuple[_Part, ...]:
    """The phases of a collective: inside slices or domains, and between them.

    The phases of a permute run at once, since a block takes the links of one phase.
    """
    inner = tuple(link for link in links if not link.is_outer)
    outer = tuple(link for link in links if link.is_outer)
    num_inner, num_outer = prod(link.size for link in inner), prod(link.size for link in outer)
    launch = network.collective_launch_seconds if isinstance(network, Switch) else 0.0
    if op == "permute":
        share = 1 / (num_inner * num_outer)
        return tuple(_part(op, part, share, launch, 1) for part in (inner, outer) if part)
    # An all-to-all within one slice moves only its own devices' part: 1 / num_outer of the array.
    inner_share = 1 / num_outer if op == "all_to_all" else 1.0
    passes = 2 if op == "all_reduce" else 1
    spread = len({link.dim for link in inner}) > 1
    whole = (
        network.scatter_passes if op == "reduce_scatter" and spread and isinstance(network, Torus) else passes
    )
    parts = [_part(op, inner, inner_share, launch, whole)] if inner else []
    # Kernels that send copies of a row once are not NCCL's.
    if op == "all_to_all" and isinstance(network, Switch) and num_inner > EXCHANGE_PEERS and copies == ALONE:
        parts = [_at_exchange_rate(part, num_inner, network) for part in parts]
    if outer:
        between = _part(op, outer, copies.crossing(num_outer) / num_inner, 0.0 if inner else launch, passes)
        if isinstance(network, Switch):
            rate = between.seconds_per_byte / network.share_by_nodes(op, num_outer)
            between = between._replace(seconds_per_byte=rate)
        parts.append(between)
    return tuple(parts)


def _at_exchange_rate(part: _Part, num_devices: int, network: Switch) -> _Part:
    """`part` of an all-to-all at the program's rate inside a domain, if it has one and it is the lower rate.

    Each of n devices sends (n - 1) / n of its own V / n bytes. Source: `Switch.exchange_bytes_per_second`.
    """
    if not network.exchange_bytes_per_second:
        return part
    rate = (num_devices - 1) / num_devices**2 / network.exchange_bytes_per_second
    return part._replace(seconds_per_byte=larger(part.seconds_per_byte, rate))


def _part(op: Op, links: tuple[Link, ...], share: float, launch: float, passes: int) -> _Part:
    per_byte, hops, hop_seconds = _geometry(op, links)
    return _Part(share, per_byte, passes, passes * hops, launch + passes * hop_seconds, links[0].kind)


def _part_price(op: Op, gathered_bytes: float, part: _Part, network: Torus | Switch) -> CollectivePrice:
    """The price of one part: the larger of bandwidth and latency on a torus, their sum on a switch."""
    moved = gathered_bytes * part.bytes_of_gathered
    bandwidth = part.bandwidth_seconds(gathered_bytes) / _share(network, part.link, op, moved)
    bound: CollectiveBound = "bandwidth" if bandwidth >= part.latency else "latency"
    adds = isinstance(network, Switch)
    seconds = bandwidth + part.latency if adds else max(bandwidth, part.latency)
    return CollectivePrice(seconds, bound, part.hops, part.link)


def _share(network: Torus | Switch, kind: LinkKind, op: Op, num_bytes: float) -> float:
    """The calibrated share of the links' bandwidth for a collective of `num_bytes`."""
    if kind not in network.efficiency:
        return 1.0
    return share_at(network.efficiency[kind].get(op, ()), num_bytes)


def _geometry(op: Op, links: tuple[Link, ...]) -> tuple[float, int, float]:
    """(seconds per byte of the phase at full bandwidth, hops, seconds of the hops)."""
    if op == "permute":
        return _shift(links)
    per_byte = _all_to_all_per_byte(links) if op == "all_to_all" else _all_gather_per_byte(links)
    return per_byte, sum(map(_hops, links)), sum(_hops(link) * link.hop_seconds for link in links)


def _all_gather_per_byte(links: tuple[Link, ...]) -> float:
    """Seconds a byte of V to all-gather, or reduce-scatter, over one or several links at once.

        ring          t = V / sum(W)            W = 2 w, both directions
        one-way ring  t = V (n - 1)/n / sum(w)
        line          t = V (n - 1)/n / sum(w)  the end of a line receives from one side only
        switch        t = V (n - 1)/n / w

    w: one-way bytes/s of a chip, divided by the stride, since the chips between use the same links. n:
    devices in all. A ring's (n - 1)/n is left out, as in the source, also if only one of the links is a ring.
    Several axes add their bandwidths.
    """
    inbound = sum(link.one_way_bytes_per_second / link.stride * (2 if _closes(link) else 1) for link in links)
    size = prod(link.size for link in links)
    share = 1.0 if any(map(_closes, links)) else (size - 1) / size
    return share / inbound


def _closes(link: Link) -> bool:
    """Whether messages reach a chip from both sides."""
    return link.ring and link.two_way


def _all_to_all_per_byte(links: tuple[Link, ...]) -> float:
    """Seconds of the busiest link in an all-to-all, per byte of V.

    Every pair of n devices exchanges V / n^2. Along a dimension of a devices, each of n / a parallel lines
    carries:

        ring          t = V (a/n) / (8 w)                 mean way a/4, over 2 a directed links
        one-way ring  t = V (a/n) (a - 1)/a / (2 w)       mean way (a - 1)/2, over a links
        line          t = V (a/n) floor(a/2) ceil(a/2)/a^2 / w    all pairs across the middle link
        switch        t = V (a - 1)/a / n / w             each device's sent bytes

    On one ring (a = n) this is V / (4 W), a quarter of an all-gather's time; on a one-way ring it is half.
    w: one-way bytes/s, divided by the stride.
    """
    size = prod(link.size for link in links)
    return max(
        link.size / size * _link_load(link) * link.stride / link.one_way_bytes_per_second for link in links
    )


def _link_load(link: Link) -> float:
    """Share of V that crosses the busiest link in an all-to-all over only this stretch."""
    if link.kind != "ici":
        return (link.size - 1) / link.size**2
    if link.ring:
        return 1 / 8 if link.two_way else (link.size - 1) / link.size / 2
    return (link.size // 2) * ((link.size + 1) // 2) / link.size**2


def _hops(link: Link) -> int:
    """Messages in sequence until the farthest device is reached.

    n - 1 along a line or one-way ring, half in both directions, times the stride. Through a switch
    ceil(log2 n), as by a tree; `_tree_and_ring` has the steps of a ring there.
    """
    if link.kind != "ici":
        return (link.size - 1).bit_length()
    return (link.size // 2 if _closes(link) else link.size - 1) * link.stride


def _shift(links: tuple[Link, ...]) -> tuple[float, int, float]:
    """Each device sends its block V / n to the next along the axes, the last to the first.

        torus    t = max(block . load / w, hops . t_hop)
        switch   t = max(block / w, t_hop)

    load: blocks over the busiest link if every group of devices shifts at once. Messages take one dimension
    of a torus after another, and devices are numbered in the same order of dimensions. The last device of a
    stretch sends to the first of the next stretch; the last device of all sends to the first of all.
    """
    w, hop_seconds = links[0].one_way_bytes_per_second, links[0].hop_seconds
    if links[0].kind != "ici":
        return 1 / w, 1, hop_seconds
    by_dim: dict[int, list[Link]] = {}
    for link in links:
        by_dim.setdefault(link.dim, []).append(link)
    shifts = [_shift_along(sorted(stretches, key=lambda link: link.stride)) for stretches in by_dim.values()]
    hops = sum(hops for _, hops in shifts)
    return max(load for load, _ in shifts) / w, hops, hops * hop_seconds


def _shift_along(stretches: list[Link]) -> tuple[float, int]:
    """(load of the busiest link, hops of the longest way) in one dimension, by counting."""
    extent = stretches[-1].stride * stretches[-1].size
    loads = [[0.0] * extent, [0.0] * extent]
    longest = 0
    for place in range(extent):
        ways = _ways(_shifted(place, stretches) - place, extent, stretches[-1])
        for way in ways:
            forward = loads[way > 0]
            for step in range(abs(way)):
                forward[(place + step if way > 0 else place - step - 1) % extent] += 1 / len(ways)
            longest = max(longest, abs(way))
    return max(map(max, loads)), longest


def _shifted(place: int, stretches: list[Link]) -> int:
    """The device that the one at `place` sends to, innermost stretch first."""
    for link in stretches:
        if place // link.stride % link.size < link.size - 1:
            return place + link.stride
        place -= (link.size - 1) * link.stride
    return place


def _ways(distance: int, extent: int, outermost: Link) -> list[int]:
    """The shortest ways along a dimension, ahead or back; both if they are equally long."""
    if not outermost.ring:
        return [distance]
    ahead = distance % extent
    if not outermost.two_way or ahead < extent - ahead:
        return [ahead]
    return [ahead - extent] if ahead > extent - ahead else [ahead, -ahead]


def _host_price(op: Op, gathered_bytes: float, links: tuple[Link, ...], cost: LinearCost) -> CollectivePrice:
    """t = latency + bytes / bandwidth as measured; see LinearCost for the bytes."""
    if not links:
        return NOTHING
    num_devices = prod(link.size for link in links)
    moved = gathered_bytes / num_devices if op in ("all_to_all", "permute") else gathered_bytes
    seconds = cost.seconds(moved)
    bound: CollectiveBound = "bandwidth" if seconds >= 2 * cost.latency_seconds else "latency"
    return CollectivePrice(seconds, bound, 1, "host")


def forget_prices() -> None:
    """Empty the caches of prices."""
    for cached in (seconds_by_bytes, _kept_lines):
        cached.cache_clear()
