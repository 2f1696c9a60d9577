"""Prices of the transfers of a step on the links of one placement, or of many."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from meshwright.cost.arrays import larger
from meshwright.cost.collectives import CollectivePrice, collective_seconds, seconds_of_many
from meshwright.cost.graph import Transfer
from meshwright.hardware.chip import Chip, Switch, Torus
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.layout.rules import STAGES


class TransferPrices:
    """Seconds of transfers under a layout: numbers for one placement, arrays for a sequence of them.

    Launches of collectives and waits for hosts of other domains are included (`StepEfficiency`).
    """

    def __init__(self, layout: Layout, chip: Chip, placement: Placement | Sequence[Placement]) -> None:
        self._layout, self._chip = layout, chip
        self._single = placement if isinstance(placement, Placement) else None
        self._placements = [placement] if isinstance(placement, Placement) else placement
        self._prices: dict[tuple, Any] = {}

    def seconds(self, transfer: Transfer) -> Any:
        """Seconds of one run."""
        if self._single is not None:
            return self.price(transfer).seconds
        transfer = as_sent(transfer, self._layout, self._chip)
        key = (transfer.op, transfer.axes, transfer.copies)
        if key not in self._prices:
            op, axes, copies = key
            self._prices[key] = seconds_of_many(op, axes, self._placements, copies=copies)
        seconds = self._prices[key](transfer.gathered_bytes) + self._added(transfer)
        return larger(seconds, self._least(transfer)) if self._chip.step.exchange_seconds else seconds

    def price(self, transfer: Transfer) -> CollectivePrice:
        """Seconds of one run and their cause, for a single placement."""
        assert self._single is not None, "only a price on one placement has one cause"
        transfer = as_sent(transfer, self._layout, self._chip)
        key = (transfer.op, transfer.gathered_bytes, transfer.axes, transfer.copies, transfer.critical)
        if key not in self._prices:
            op, gathered_bytes, axes, copies, _ = key
            price = collective_seconds(op, gathered_bytes, axes, self._single, copies=copies)
            seconds = larger(price.seconds + self._added(transfer), self._least(transfer))
            self._prices[key] = price._replace(seconds=seconds)
        return self._prices[key]

    def lost_by_hosts(self, transfer: Transfer) -> Any:
        """Additional seconds of hosts to launch a collective."""
        return self._of_each(lost_between_stages, transfer) if self._chip.step.host_stage_seconds else 0.0

    def _added(self, transfer: Transfer) -> Any:
        """Seconds in addition to the links' time."""
        step = self._chip.step
        waits = self._of_each(lost_at_nodes, transfer) if step.host_node_seconds else 0.0
        return waits + self._of_each(_launch, transfer) if step.collective_seconds else waits

    def _least(self, transfer: Transfer) -> Any:
        """Least seconds of one run, whatever its bytes."""
        return self._of_each(_least, transfer) if self._chip.step.exchange_seconds else 0.0

    def _of_each(self, seconds: Callable[[Transfer, Placement, Chip], float], transfer: Transfer) -> Any:
        """Seconds on the placement, or an array with the seconds on each."""
        if self._single is not None:
            return seconds(transfer, self._single, self._chip)
        import numpy as np  # a tenth of a second, which the price of a single layout need not take

        return np.array([seconds(transfer, at, self._chip) for at in self._placements])


def as_sent(transfer: Transfer, layout: Layout, chip: Chip) -> Transfer:
    """`transfer` in the software's form: some sum whole gradients under ZeRO 1 (`whole_sums`)."""
    scattered = transfer.what == "gradients" and transfer.op == "reduce_scatter"
    if chip.step.whole_sums and scattered and layout.rules.zero_stage == 1:
        return replace(transfer, op="all_reduce")
    return transfer


def lost_at_nodes(transfer: Transfer, placement: Placement, chip: Chip) -> float:
    """Seconds that a collective waits for hosts of other domains (`StepEfficiency.host_node_seconds`)."""
    if not transfer.critical or transfer.op == "permute":
        return 0.0
    links = placement.stretches(transfer.axes)
    domains = prod(link.size for link in links if link.is_outer)
    return chip.step.host_node_seconds * (domains - 1)


def lost_between_stages(transfer: Transfer, placement: Placement, chip: Chip) -> float:
    """Additional seconds of hosts to launch a collective (`StepEfficiency.host_stage_seconds`)."""
    if not chip.step.host_stage_seconds or not transfer.critical or transfer.op == "permute":
        return 0.0
    stages = placement.stretches((STAGES,)) if placement.sizes.get(STAGES, 1) > 1 else ()
    if not any(link.is_outer for link in stages):
        return 0.0
    return chip.step.host_stage_seconds * prod(link.size for link in placement.stretches(transfer.axes))


def _launch(transfer: Transfer, placement: Placement, chip: Chip) -> float:
    """Seconds of a collective that moves something (`StepEfficiency.collective_seconds`)."""
    return chip.step.collective_seconds if placement.stretches(transfer.axes) else 0.0


def _least(transfer: Transfer, placement: Placement, chip: Chip) -> float:
    """Least seconds of an exchange between experts (`StepEfficiency.exchange_seconds`)."""
    is_exchange = transfer.op == "all_to_all" and placement.stretches(transfer.axes)
    return chip.step.exchange_seconds if is_exchange else 0.0


@lru_cache(maxsize=256)
def at_step_rates(hardware: Hardware) -> Hardware:
    """`hardware` with the bandwidth and the collectives of its links in a step."""
    network, shares = hardware.chip.network, hardware.chip.step.links
    is_roofline = hardware.chip.step.is_roofline
    if isinstance(network, Torus):
        network = replace(
            network,
            one_way_bytes_per_second=network.one_way_bytes_per_second * shares.get("ici", 1.0),
            dcn_bytes_per_second=network.dcn_bytes_per_second * shares.get("dcn", 1.0),
            scatter_passes=hardware.chip.step.scatter_passes,
        )
    elif isinstance(network, Switch):
        network = replace(
            network,
            nvlink_bytes_per_second=network.nvlink_bytes_per_second * shares.get("nvlink", 1.0),
            nic_bytes_per_second=network.nic_bytes_per_second * shares.get("network", 1.0),
            nic_hop_seconds=network.nic_hop_seconds * hardware.chip.step.network_latency,
            falloff=hardware.chip.step.network_falloff,
            exchange_bytes_per_second=0.0 if is_roofline else hardware.software.exchange_bytes_per_second,
        )
    return replace(hardware, chip=replace(hardware.chip, network=network))
