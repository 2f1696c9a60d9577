"""The price of a collective, against the published figures and a count of what each link carries."""

import csv
from collections import defaultdict
from dataclasses import replace
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.cost.collectives import ALONE, Copies, Op, collective_seconds
from meshwright.cost.transfer_prices import at_step_rates
from meshwright.errors import LayoutError
from meshwright.hardware import catalog
from meshwright.hardware.catalog import load
from meshwright.hardware.chip import LinearCost, SharedMemory, Switch, Torus
from meshwright.hardware.description import read_chip
from meshwright.hardware.topology import Link, Placement
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array


def _place(spec: str, **sizes: int) -> Placement:
    return load(spec).place(Mesh(sizes))


CUBE = {"X": 4, "Y": 4, "Z": 4}
V = 1024 * 4096 * 2  # bf16 [B=1024, D=4096]


@pytest.mark.parametrize(
    ("op", "gathered_bytes", "axes", "seconds", "bound", "hops"),
    [
        # AllGather_X([B_X, D_Y]): Y stays, so V / 4 over one ring.
        ("all_gather", V / 4, ("X",), 23e-6, "bandwidth", 2),
        ("all_gather", V, ("X", "Y"), 46e-6, "bandwidth", 4),
        # AllReduce_Z([B_X, D_Y]{U_Z}): X and Y stay; twice an all-gather.
        ("all_reduce", V / 16, ("Z",), 11.6e-6, "bandwidth", 4),
        ("all_gather", 128 * 2, ("X",), 2e-6, "latency", 2),
    ],
)
def test_v4p_cube(
    op: Op, gathered_bytes: float, axes: tuple[str, ...], seconds: float, bound: str, hops: int
) -> None:
    """How to Scale Your Model, "Sharded Matrices", questions on v4p 4x4x4; W = 9e10."""
    price = collective_seconds(op, gathered_bytes, axes, _place("v4p:4x4x4", **CUBE))
    assert price.seconds == pytest.approx(seconds, rel=0.02)  # the source rounds to two digits
    assert (price.bound, price.hops, price.link) == (bound, hops, "ici")


def test_v5e_line() -> None:
    """AllGather_Y([E_Y, F]) on v5e 8x4: 560 us over the line of 4; a profile showed 680 and 8 us."""
    placement = _place("v5e:8x4", X=8, Y=4)
    price = collective_seconds("all_gather", 2048 * 8192 * 2, "Y", placement)
    assert price.seconds == pytest.approx(3 * (2048 * 8192 * 2 / 4) / 4.5e10)
    assert price.seconds == pytest.approx(560e-6, rel=0.01)
    small = collective_seconds("all_gather", 256 * 256 * 2, "Y", placement)
    assert (small.seconds, small.bound, small.hops) == (pytest.approx(3e-6), "latency", 3)


def test_the_same_gather_on_a_ring() -> None:
    """With wraparound 377 us, where the source rounds 33.55 MB to 34 MB."""
    price = collective_seconds("all_gather", 34e6, "Y", _place("v4p:4x4x4", X=16, Y=4))
    assert price.seconds == pytest.approx(377e-6, rel=0.005)


def test_dcn_alpha() -> None:
    """An all-reduce over slices costs compute what C / W_dcn tokens do: 73,440 by the chip table.

    The source prints 71,360, from C = 4.46e14.
    """
    chip = load("v5p:4x4x4").chip
    placement = _place("64*v5p:4x4x4", data=64, fsdp=64)
    seconds_per_byte = collective_seconds("all_reduce", 1e12, "data", placement).seconds / 1e12
    # 12BDF/X compute against 8DF / W: B / X = (8/12) (C / W); per byte of V = 2DF both ways: C * t / 2.
    tokens = chip.flops("bf16") * seconds_per_byte / 2 * 64 / 63
    assert tokens == pytest.approx(4.59e14 / 6.25e9)
    assert tokens * 4.46 / 4.59 == pytest.approx(71_360)


def test_v5p_alpha() -> None:
    """C / W on one axis of v5p is 2550 tokens, and 850 on three."""
    placement = _place("v5p:16x16x16", X=16, Y=16, Z=16)
    flops = load("v5p:4x4x4").chip.flops("bf16")
    assert flops * collective_seconds("all_gather", 1e12, "X", placement).seconds / 1e12 == pytest.approx(
        2550
    )
    three = collective_seconds("all_gather", 1e12, ("X", "Y", "Z"), placement).seconds
    assert flops * three / 1e12 == pytest.approx(850)


def test_all_to_all_is_a_quarter_of_an_all_gather_on_a_ring() -> None:
    placement = _place("v5p:4x4x4", X=16, Y=4)
    gather = collective_seconds("all_gather", V, "Y", placement)
    assert collective_seconds("all_to_all", V, "Y", placement).seconds == pytest.approx(gather.seconds / 4)


_NETWORK = load("v5p:4x4x4").chip.network


def _torus(dims: tuple[int, ...], ring: bool, two_way: bool = True) -> Placement:
    """One axis `X` over a whole torus of unit links without latency."""
    links = tuple(Link("ici", size, 1.0, 0.0, dim, 1, ring, two_way) for dim, size in enumerate(dims))
    return Placement({"X": 0}, {"X": links}, _NETWORK)


def _route(start: int, end: int, size: int, ring: bool, two_way: bool) -> list[list[tuple[int, int]]]:
    """The shortest ways between two places of one dimension, as steps (place, direction)."""
    right = [((start + i) % size, +1) for i in range((end - start) % size)]
    left = [((start - i) % size, -1) for i in range((start - end) % size)]
    if ring and not two_way:
        return [right]
    if not ring:
        return [right] if end >= start else [left]
    shortest = min(len(right), len(left))
    return [way for way in (right, left) if len(way) == shortest]


def _busiest_link(dims: tuple[int, ...], ring: bool, two_way: bool = True) -> float:
    """Bytes over the busiest directed link when every pair exchanges 1 / n^2, dimension by dimension."""
    places = list(product(*(range(size) for size in dims)))
    load: dict[tuple[int, ...], float] = defaultdict(float)
    for start, end in product(places, repeat=2):
        at = list(start)
        for dim, size in enumerate(dims):
            ways = _route(at[dim], end[dim], size, ring, two_way)
            for way in ways:
                for place, direction in way:
                    link = (*at[:dim], place, *at[dim + 1 :], dim, direction)
                    load[link] += 1 / len(ways)
            at[dim] = end[dim]
    return max(load.values()) / len(places) ** 2


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("dims", [(4,), (8,), (4, 4), (8, 4), (4, 4, 2)])
def test_all_to_all_against_a_count_of_every_link(dims: tuple[int, ...], ring: bool) -> None:
    price = collective_seconds("all_to_all", 1.0, "X", _torus(dims, ring))
    assert price.seconds == pytest.approx(_busiest_link(dims, ring))


@pytest.mark.parametrize("dims", [(4,), (5,), (4, 4), (8, 4)])
def test_all_to_all_one_way_against_a_count_of_every_link(dims: tuple[int, ...]) -> None:
    price = collective_seconds("all_to_all", 1.0, "X", _torus(dims, ring=True, two_way=False))
    assert price.seconds == pytest.approx(_busiest_link(dims, ring=True, two_way=False))


def test_a_ring_used_one_way() -> None:
    """AllGather V/w (n-1)/n over n - 1 hops, AllReduce twice, AllToAll half of the gather."""
    placement = _place("v5p:4x4x4", X=16, Y=4).one_way()
    w = 9e10
    gather = collective_seconds("all_gather", V, "Y", placement)
    assert (gather.seconds, gather.hops) == (pytest.approx(V / w * 3 / 4), 3)
    reduce = collective_seconds("all_reduce", V, "Y", placement)
    assert (reduce.seconds, reduce.hops) == (pytest.approx(2 * gather.seconds), 6)
    moved = collective_seconds("all_to_all", V, "Y", placement)
    assert moved.seconds == pytest.approx(gather.seconds / 2)
    assert collective_seconds("all_gather", 1, "Y", placement).seconds == pytest.approx(3e-6)
    # A line has no other direction to give up.
    line = _place("v5e:4x4", X=4, Y=4)
    assert collective_seconds("all_gather", V, "Y", line.one_way()) == collective_seconds(
        "all_gather", V, "Y", line
    )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_to_all_on_odd_lines(size: int) -> None:
    price = collective_seconds("all_to_all", 1.0, "X", _torus((size,), ring=False))
    assert price.seconds == pytest.approx(_busiest_link((size,), ring=False))


@pytest.mark.parametrize("dims", [(2, 2), (4, 2), (2, 2, 2), (8, 4)])
def test_a_gather_is_never_faster_than_what_the_corner_chip_receives(dims: tuple[int, ...]) -> None:
    n, links = 1, len(dims)
    for size in dims:
        n *= size
    price = collective_seconds("all_gather", 1.0, "X", _torus(dims, ring=False))
    assert price.seconds == pytest.approx((n - 1) / n / links)


def test_interleaved_groups_share_their_links() -> None:
    """X = 4 every fourth chip of a ring of 16: four groups use the same links."""
    placement = _place("v5e:16x16", X=4, Y=4, Z=16)
    across = collective_seconds("all_gather", 1e9, "X", placement)
    whole = collective_seconds("all_gather", 1e9, ("X", "Y"), placement)
    assert across.seconds == pytest.approx(4 * whole.seconds)
    assert collective_seconds("all_gather", 1, "X", placement).hops == 8


def test_nvlink() -> None:
    """A switch: each GPU receives (n - 1) / n of V at 450 GB/s, in 7 steps of 3.4 us after a launch."""
    price = collective_seconds("all_gather", 8e9, "tensor", _place("h100:64", data=8, tensor=8))
    assert price.seconds == pytest.approx(7e9 / 450e9 + 8.4e-6 + 7 * 3.4e-6)
    assert price.link == "nvlink"


def test_a_reduce_scatter_over_nodes_is_one_ring() -> None:
    """V over 8 x 8: 63/64 V round all GPUs, by a node's 8 cards at once; 7 of 63 steps cross the network."""
    placement = _place("h100:64", fsdp=64)
    price = collective_seconds("reduce_scatter", 64e9, "fsdp", placement)
    assert price.seconds == pytest.approx(63e9 / (8 * 50e9) + 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6)
    assert (price.link, price.bound, price.hops) == ("network", "bandwidth", 63)
    moved = collective_seconds("all_to_all", 64e9, "fsdp", placement)
    # Each GPU holds 1 GB and sends 1/64 of it to everyone: 7/8 leaves the node, and passes NVLink in part.
    assert moved.seconds == pytest.approx(0.875e9 / 450e9 + 0.875e9 / 50e9, rel=5e-3)


def test_a_ring_over_all_ranks_costs_steps_that_one_within_a_node_does_not() -> None:
    """128 MB of weights: over 8 GPUs 0.3 ms, over 512 three times that at the same bandwidth of a node."""
    within = collective_seconds("all_gather", 128e6, "x", _place("h100:8", x=8)).seconds
    over_all = collective_seconds("all_gather", 128e6, "x", _place("h100:64x8", x=512)).seconds
    assert within == pytest.approx(112e6 / 450e9 + 8.4e-6 + 7 * 1.9e-6, rel=0.15)
    assert 3 * within < over_all < 6 * within


def test_small_messages_run_under_the_protocol_that_is_there_first() -> None:
    """NCCL's LL: 0.6 us a step; of LL128 1.9 us at 92% of the bandwidth; Simple 3.4 us at all of it."""
    placement = _place("h100:8", x=8)
    steps = {8: 0.6e-6, 32e6: 1.9e-6, 8e9: 3.4e-6}
    shares = {8: 0.5, 32e6: 0.92, 8e9: 1.0}
    for size, step in steps.items():
        bandwidth = size * 7 / 8 / 450e9 / shares[size]
        price = collective_seconds("all_gather", size, "x", placement)
        assert price.seconds == pytest.approx(8.4e-6 + 7 * step + bandwidth)


def test_collectives_as_published_of_another_network() -> None:
    """Bus bandwidths of 256 MB on H100s with EFA (benchmarks/published), from its table of shares by nodes.

    The machine's table has 2, 8, 32 and 64 nodes; 4 and 16 are interpolated, and within 25% as well.
    """
    rows = list(csv.DictReader(NCCL.read_text().splitlines()))
    assert len(rows) == 14
    for row in rows:
        num_gpus, num_bytes = int(row["nodes"]) * 8, float(row["bytes"])
        passes = 2 if row["op"] == "all_reduce" else 1
        bus = float(row["bus_gigabytes_per_second"]) * 1e9
        measured = passes * num_bytes * (num_gpus - 1) / num_gpus / bus
        machine = read_chip(EFA, "efa.toml").chip
        placement = _place(f"h100:{row['nodes']}x8", x=num_gpus).over(machine.network)
        priced = collective_seconds(cast("Op", row["op"]), num_bytes, "x", placement).seconds
        assert priced == pytest.approx(measured, rel=0.25), row


NCCL = Path(__file__).parents[2] / "benchmarks/published/nccl-h100-efa.csv"
_H100 = Path(catalog.__file__).with_name("chips") / "h100.toml"
EFA = _H100.read_text().replace(
    "[sources]",
    """[network.efficiency.nvlink]
all_gather = [[1, 0.575]]
all_reduce = [[1, 0.995]]

[network.by_nodes]
all_gather = [[2, 0.49], [8, 0.19], [32, 0.08], [64, 0.031]]
all_reduce = [[2, 0.94], [8, 0.26], [32, 0.166], [64, 0.084]]

[sources]""",
    1,
)


def test_dcn_takes_what_the_slice_leaves() -> None:
    placement = _place("2*v5p:4x4x4", data=128)
    price = collective_seconds("reduce_scatter", 1e12, "data", placement)
    assert price.seconds == pytest.approx(1e12 / (3 * 1.8e11) + (1e12 / 64) / 2 / 6.25e9)


def test_permute() -> None:
    ring = collective_seconds("permute", 64e9, "Y", _place("v5p:4x4x4", X=16, Y=4))
    assert (ring.seconds, ring.hops) == (pytest.approx(16e9 / 9e10), 1)
    line = collective_seconds("permute", 64, "Y", _place("v5e:4x4", X=4, Y=4))
    assert (line.seconds, line.hops, line.bound) == (pytest.approx(3e-6), 3, "latency")
    nodes = collective_seconds("permute", 64e9, "pipe", _place("h100:64", pipe=8, tensor=8))
    assert (nodes.seconds, nodes.link) == (pytest.approx(8e9 / 50e9 + 8.4e-6 + 14e-6), "network")


def _busiest_link_of_a_shift(
    dims: tuple[int, ...], parts: list[tuple[int, int, int]], ring: bool, two_way: bool
) -> tuple[float, int]:
    """(blocks over the busiest directed link, hops of the longest way) where every chip of a torus sends to
    the next of its group. parts: (dim, size, stride) of what the axis takes, innermost first. What does
    not close a ring is a line, used both ways."""
    closed = [ring and any(d == dim and n * s == dims[dim] for d, n, s in parts) for dim in range(len(dims))]
    load: dict[tuple[int, ...], float] = defaultdict(float)
    longest = 0
    for start in product(*(range(size) for size in dims)):
        end, carry = list(start), True
        for dim, size, stride in parts:
            index = start[dim] // stride % size
            if carry:
                end[dim] += stride * ((index + 1) % size - index)
                carry = index == size - 1
        at, hops = list(start), 0
        for dim, size in enumerate(dims):
            ways = _route(at[dim], end[dim], size, closed[dim], two_way)
            for way in ways:
                for place, direction in way:
                    load[*at[:dim], place, *at[dim + 1 :], dim, direction] += 1 / len(ways)
            at[dim], hops = end[dim], hops + len(ways[0])
        longest = max(longest, hops)
    return max(load.values()), longest


@pytest.mark.parametrize("two_way", [True, False])
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(
    ("dims", "parts"),
    [
        ((4,), [(0, 4, 1)]),  # a whole dimension
        ((2,), [(0, 2, 1)]),
        ((12,), [(0, 4, 1)]),  # its first part, a line
        ((12,), [(0, 3, 4)]),  # every fourth chip, four groups at once
        ((8,), [(0, 2, 4)]),  # half-way round: as far ahead as back
        ((16,), [(0, 4, 1), (0, 2, 8)]),  # parts that another axis keeps apart
        ((24,), [(0, 2, 2), (0, 3, 8)]),
        ((4, 4), [(1, 4, 1), (0, 4, 1)]),  # folded over two dimensions, row by row
        ((4, 4), [(0, 4, 1), (1, 4, 1)]),
        ((4, 8), [(1, 4, 2), (0, 2, 2)]),  # strided in both
        ((4, 2, 3), [(2, 3, 1), (1, 2, 1), (0, 4, 1)]),
        ((16, 2), [(0, 4, 1), (0, 2, 8), (1, 2, 1)]),
    ],
)
def test_a_permute_against_a_count_of_every_link(
    dims: tuple[int, ...], parts: list[tuple[int, int, int]], ring: bool, two_way: bool
) -> None:
    """A shift by one: what the busiest link carries, and how far the farthest block travels."""
    links = tuple(
        Link("ici", size, 1.0, 1.0, dim, stride, ring and size * stride == dims[dim], two_way)
        for dim, size, stride in parts
    )
    placement = Placement({"X": prod(link.size for link in links)}, {"X": links}, _NETWORK)
    load, hops = _busiest_link_of_a_shift(dims, parts, ring, two_way)
    devices = prod(size for _, size, _ in parts)
    large = collective_seconds("permute", 1e6 * devices, "X", placement)
    assert (large.seconds, large.hops) == (pytest.approx(1e6 * load), hops)
    assert collective_seconds("permute", 1e-6, "X", placement).seconds == hops


def test_a_gpu_collective_starts_with_one_launch() -> None:
    """NCCL: 8.4 us of launch, then 7 steps of 0.6 us (LL) round 8 GPUs; a sum goes by trees, 3 of 2.7."""
    placement = _place("h100:64", data=8, tensor=8)
    inside = collective_seconds("all_gather", 8, "tensor", placement)
    assert (inside.seconds, inside.bound) == (pytest.approx(8.4e-6 + 7 * 0.6e-6, rel=1e-3), "latency")
    both = collective_seconds("all_reduce", 64, ("data", "tensor"), placement)
    assert both.seconds == pytest.approx(8.4e-6 + 6 * 0.6e-6 + 6 * 2.7e-6, rel=1e-3)
    assert collective_seconds("permute", 8, "data", placement).seconds == pytest.approx(
        8.4e-6 + 2.7e-6, rel=1e-3
    )


def _measured(spec: str, link: str, **sizes: int) -> tuple[Placement, Placement]:
    """(as in the catalog, the same with all-gathers at half speed up to 1 MB and full from 4 MB)."""
    plain = _place(spec, **sizes)
    assert isinstance(plain.network, Switch | Torus)
    points = {link: {"all_gather": ((1e6, 0.5), (4e6, 1.0))}}
    return plain, Placement(plain.sizes, plain.links, replace(plain.network, efficiency=points))


@pytest.mark.parametrize(
    ("num_bytes", "slower"), [(1e6, 2.0), (0.5e6, 2.0), (2e6, 2**0.5), (4e6, 1.0), (1e9, 1.0)]
)
def test_a_calibrated_link_reaches_the_share_of_its_size(num_bytes: float, slower: float) -> None:
    plain, measured = _measured("v5p:4x4x4", "ici", X=16, Y=4)
    seconds = [collective_seconds("all_gather", num_bytes, "Y", one).seconds for one in (plain, measured)]
    assert seconds[1] / seconds[0] == pytest.approx(slower)
    others = [collective_seconds("all_reduce", num_bytes, "Y", one) for one in (plain, measured)]
    assert others[0] == others[1]


def test_each_phase_has_the_share_of_its_own_bytes() -> None:
    """8 MB over 8 x 8: NVLink carries 8 MB, the cards 1 MB, which only half fills them."""
    plain, measured = _measured("h100:64", "network", fsdp=64)
    latency = 8.4e-6 + 56 * 1.9e-6 + 7 * 4e-6
    found = [collective_seconds("all_gather", 8e6, "fsdp", one).seconds for one in (plain, measured)]
    assert found[0] == pytest.approx(8.4e-6 + 56 * 0.6e-6 + 7 * 2.7e-6 + 7.875e6 / (400e9 * 0.5))
    assert found[1] < latency + 2 * 7.875e6 / (400e9 * 0.92)
    large = [collective_seconds("all_gather", 80e9, "fsdp", one) for one in (plain, measured)]
    assert large[0] == large[1]


def test_a_measured_host_reaches_the_share_of_its_size() -> None:
    cost = LinearCost(1e-4, 1e9, ((1e6, 1.0), (4e6, 0.25)))
    assert cost.seconds(1e6) == pytest.approx(1e-4 + 1e-3)
    assert cost.seconds(2e6) == pytest.approx(1e-4 + 4e-3)
    assert cost.seconds(8e6) == pytest.approx(1e-4 + 32e-3)


def test_repeated_matmul_flops_of_the_published_question() -> None:
    """A[B_X, D_Y] W[D_Y, F] on X4 Y8 Z4: 2BDF / (XY) a device, so all devices do Z times the work."""
    mesh, sizes = Mesh({"X": 4, "Y": 8, "Z": 4}), {"B": 64, "D": 128, "F": 256}
    local = parse_array("A[B_X, D_Y]").local_shape(mesh, sizes)
    flops = 2 * local[0] * local[1] * sizes["F"]
    assert flops == 2 * 64 * 128 * 256 // 32
    assert flops * mesh.num_devices == 4 * 2 * 64 * 128 * 256


def test_host_is_the_measured_line() -> None:
    placement = _place("cpu:8", data=4, tensor=2)
    network = placement.network
    assert isinstance(network, SharedMemory)
    cost = network.costs["all_gather"]
    price = collective_seconds("all_gather", 1e6, ("data", "tensor"), placement)
    assert price.seconds == pytest.approx(cost.latency_seconds + 1e6 / cost.bytes_per_second)
    assert price.seconds == collective_seconds("all_gather", 1e6, "tensor", placement).seconds
    cost = network.costs["all_to_all"]
    moved = collective_seconds("all_to_all", 1e6, "data", placement)
    assert moved.seconds == pytest.approx(cost.latency_seconds + 1e6 / 4 / cost.bytes_per_second)
    assert collective_seconds("all_gather", 1, "data", placement).bound == "latency"


def test_one_device_moves_nothing() -> None:
    price = collective_seconds("all_reduce", 1e9, "fsdp", _place("cpu:8", data=8, fsdp=1))
    assert (price.seconds, price.hops, price.link) == (0.0, 0, None)


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="mesh axis W is unknown; this mesh has X, Y, Z"):
        collective_seconds("all_gather", 1, "W", _place("v4p:4x4x4", **CUBE))


SPECS = ["v4p:4x4x4", "v5e:8x8", "v5p:4x8x2", "4*v5e:4x4", "h100:64", "gb200-nvl72:64", "cpu:64"]
OPS: list[Op] = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
AXES = [("data",), ("fsdp",), ("tensor",), ("fsdp", "tensor"), ("data", "fsdp", "tensor")]

placements = st.builds(
    lambda spec, fsdp, tensor: _place(spec, data=64 // (fsdp * tensor), fsdp=fsdp, tensor=tensor),
    st.sampled_from(SPECS),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
)


@given(placements, st.sampled_from(OPS), st.sampled_from(AXES), st.floats(0, 1e15), st.floats(0, 1e15))
def test_more_bytes_never_take_less_time(
    placement: Placement, op: Op, axes: tuple[str, ...], first: float, second: float
) -> None:
    few, many = sorted((first, second))
    less, more = (collective_seconds(op, size, axes, placement).seconds for size in (few, many))
    assert isfinite(less)
    assert isfinite(more)
    assert 0 <= less <= more


@given(placements, st.sampled_from(AXES), st.floats(0, 1e15))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    placement: Placement, axes: tuple[str, ...], size: float
) -> None:
    """On TPUs; on GPUs the two are one kernel, launched once, or a tree of fewer steps."""
    assume(not isinstance(placement.network, SharedMemory))  # measured apart
    prices = [collective_seconds(op, size, axes, placement) for op in ("all_gather", "reduce_scatter")]
    reduce = collective_seconds("all_reduce", size, axes, placement)
    assert prices[0] == prices[1]
    assert reduce.seconds <= 2 * prices[0].seconds * (1 + 1e-9)
    if isinstance(placement.network, Torus):
        assert 2 * prices[0].seconds <= reduce.seconds * (1 + 1e-9)
        assert reduce.hops == 2 * prices[0].hops


def test_copies_of_a_row_cross_to_a_node_once() -> None:
    """Of 8 copies for the devices of 4 nodes 4 (1 - (3/4)^8) = 3.6 cross, beside what is copied inside, which
    is sent after the others where each row goes for itself (DeepSeek-V3, 2024).
    """
    placement = _place("h100:4x8", expert=32)
    alone, with_copies = (
        collective_seconds("all_to_all", 1e13, "expert", placement, copies=copies).seconds
        for copies in (ALONE, Copies(8))
    )
    inner = collective_seconds("all_to_all", 1e13 / 4, "x", _place("h100:8", x=8)).seconds
    assert with_copies / (alone - inner) == pytest.approx(4 * (1 - 0.75**8) / 8, rel=1e-2)
    # All of it would go over NVLink, 450 GB/s beside a card's 50, if copies were more than 9 times as many.
    many = collective_seconds("all_to_all", 1e13, "expert", placement, copies=Copies(64)).seconds
    assert many == pytest.approx(inner, rel=1e-2)
    inside = _place("h100:8", expert=8)
    assert collective_seconds("all_to_all", 1e9, "expert", inside, copies=Copies(8)) == collective_seconds(
        "all_to_all", 1e9, "expert", inside
    )


def test_nccls_exchange_is_slow_over_many_gpus_of_a_domain() -> None:
    """64 GPUs of an NVL72 send (n - 1)/n of V / n each; kernels that send a token once are not NCCL's."""
    num_bytes = 64 * 1e9

    def seconds(op: Op, size: int, copies: Copies = ALONE, program: str = "nemo-25.04") -> float:
        placement = at_step_rates(load(f"gb200:{size}").running(program)).place(Mesh({"x": size}))
        return collective_seconds(op, num_bytes * size / 64, "x", placement, copies=copies).seconds

    assert seconds("all_to_all", 64) == pytest.approx(63 / 64 * 1e9 / 4.29e10, rel=0.01)
    assert seconds("all_to_all", 8) < seconds("all_to_all", 64) / 10
    assert seconds("all_to_all", 64, Copies(8)) < seconds("all_to_all", 64) / 10
    assert seconds("all_to_all", 64, program="nemo") < seconds("all_to_all", 64) / 10
    assert seconds("all_gather", 64) == seconds("all_gather", 64, program="nemo")
