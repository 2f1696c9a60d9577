"""The rooflines of a machine: each bandwidth, and the FLOPs a byte above which it is not the bound."""

from dataclasses import asdict, dataclass
from math import prod

from meshwright.dtypes import dtype_bytes
from meshwright.hardware.chip import Chip, Switch, Torus
from meshwright.hardware.topology import Hardware


@dataclass(frozen=True)
class Roof:
    """One bandwidth of a chip and the arithmetic intensity below which it is the bound.

    kind: hbm, host_link, or a kind of link. dims: the torus dimensions it takes, by number.
    size: devices that it joins; 1 for a memory, and if this machine has only one slice or domain.
    ring: whether the links close. bytes_per_second: a gather's rate: both directions of a ring, one
    of a line or of a switch. flops_per_byte: alpha = C / W, C the dense peak in bf16.
    """

    kind: str
    size: int
    one_way_bytes_per_second: float
    bytes_per_second: float
    flops_per_byte: float
    dims: tuple[int, ...] = ()
    ring: bool = False

    def to_dict(self) -> dict:
        return asdict(self)


def roofs(hardware: Hardware) -> list[Roof]:
    """The roofs of a machine: HBM, each torus dimension and all at once (or NVLink), DCN or network, host."""
    chip, network = hardware.chip, hardware.chip.network
    memory_and_links = [_roof(chip, "hbm", 1, chip.hbm_bytes_per_second)]
    if isinstance(network, Torus):
        memory_and_links += [*_torus(hardware, network)]
        memory_and_links.append(_roof(chip, "dcn", hardware.num_slices, network.dcn_bytes_per_second))
    elif isinstance(network, Switch):
        memory_and_links.append(_roof(chip, "nvlink", hardware.dims[1], network.nvlink_bytes_per_second))
        memory_and_links.append(_roof(chip, "network", hardware.dims[0], network.nic_bytes_per_second))
    else:
        memory_and_links.append(
            _roof(chip, "host", hardware.num_chips, network.costs["all_gather"].bytes_per_second)
        )
        return memory_and_links
    return [*memory_and_links, _roof(chip, "host_link", 1, chip.host_link_bytes_per_second)]


def largest_machine(chip: Chip) -> Hardware:
    """The largest machine of one slice or NVLink domain; a single device of a host."""
    network = chip.network
    if isinstance(network, Torus):
        return Hardware(f"{chip.name}:{'x'.join(map(str, network.pod))}", chip, network.pod)
    if isinstance(network, Switch):
        return Hardware(f"{chip.name}:{network.domain_size}", chip, (1, network.domain_size))
    return Hardware(f"{chip.name}:1", chip, (1,))


def _roof(chip: Chip, kind: str, size: int, bytes_per_second: float) -> Roof:
    return Roof(kind, size, bytes_per_second, bytes_per_second, chip.flops("bf16") / bytes_per_second)


def _torus(hardware: Hardware, torus: Torus) -> list[Roof]:
    flops, one_way = hardware.chip.flops("bf16"), torus.one_way_bytes_per_second
    dimensions = [
        Roof(
            "ici",
            size,
            one_way,
            one_way * (2 if ring else 1),
            flops / (one_way * (2 if ring else 1)),
            (dim,),
            ring,
        )
        for dim, (size, ring) in enumerate(zip(hardware.dims, hardware.wraparound, strict=True))
        if size > 1
    ]
    if len(dimensions) > 1:
        reached = sum(roof.bytes_per_second for roof in dimensions)
        dims = tuple(dim for roof in dimensions for dim in roof.dims)
        rings = all(roof.ring for roof in dimensions)
        size = prod(roof.size for roof in dimensions)
        dimensions.append(Roof("ici", size, one_way * len(dimensions), reached, flops / reached, dims, rings))
    return dimensions


def compute_bound_batch(chip: Chip, weights_dtype: str = "bf16", matmul_dtype: str = "bf16") -> float:
    """B_crit: the least tokens of a pass whose products are bound by FLOPs, not by reading weights.

        2 B P / C = P w / W  at  B = beta alpha,  alpha = C / W,  beta = w / 2

    C: dense peak in matmul_dtype. W: HBM bytes a second. w: bytes of a stored weight. A mixture of
    experts needs E / k times this. Source: How to Scale Your Model, "Inference".
    """
    return chip.flops(matmul_dtype) * dtype_bytes(weights_dtype) / 2 / chip.hbm_bytes_per_second
