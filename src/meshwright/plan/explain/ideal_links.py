"""A machine's links as the closed forms see them: alpha, and the axes that each layout takes."""

from dataclasses import dataclass
from math import prod

from meshwright.dtypes import dtype_bytes
from meshwright.hardware.chip import Switch, Torus
from meshwright.hardware.topology import Hardware


@dataclass(frozen=True)
class Links:
    """The ideal links of a machine, in the closed forms' terms.

    alpha: FLOPs a byte of one axis. num_axes: n, the axes that FSDP over every chip uses; a fraction
    where a machine's links differ. mixed_axes: (M_X, M_Y) of FSDP with TP. tensor_reach: chips that TP's
    links join.
    """

    alpha: float
    num_axes: float
    mixed_axes: tuple[float, float]
    tensor_reach: int

    @property
    def axes_ratio(self) -> float:
        return self.mixed_axes[0] / self.mixed_axes[1]

    @property
    def axes_product(self) -> float:
        return self.mixed_axes[0] * self.mixed_axes[1]


def links(hardware: Hardware, compute_dtype: str = "bf16", matmul_dtype: str | None = None) -> Links | None:
    """The links of `hardware`; None where nothing moves or devices only share a memory.

    TPU: W is both directions of a ring, one of a line; TP takes one axis and FSDP the others. GPU: W is
    what one GPU sends over NVLink. FSDP over several domains moves V over the network cards of a whole
    domain at once; where TP fills the domain, over its own.
    """
    # The forms are of two bytes an element.
    flops = hardware.chip.flops(matmul_dtype or compute_dtype) * dtype_bytes(compute_dtype) / 2
    network = hardware.chip.network
    if isinstance(network, Torus):
        return _torus_links(hardware, network, flops)
    if isinstance(network, Switch) and hardware.num_chips > 1:
        return _switch_links(hardware, network, flops)
    return None


def _torus_links(hardware: Hardware, torus: Torus, flops: float) -> Links | None:
    dims = zip(hardware.dims, hardware.wraparound, strict=True)
    directions = [2 if ring else 1 for size, ring in dims if size > 1]
    if not directions:
        return None
    widest = max(directions)
    num_axes = sum(directions) / widest
    alpha = flops / (widest * torus.one_way_bytes_per_second)
    return Links(alpha, num_axes, (max(1.0, num_axes - 1), 1.0), prod(hardware.dims))


def _switch_links(hardware: Hardware, switch: Switch, flops: float) -> Links:
    num_domains, inside = hardware.dims
    network = switch.nic_bytes_per_second / switch.nvlink_bytes_per_second
    if num_domains == 1:
        return Links(flops / switch.nvlink_bytes_per_second, 1.0, (1.0, 1.0), inside)
    return Links(flops / switch.nvlink_bytes_per_second, min(1.0, network * inside), (network, 1.0), inside)
