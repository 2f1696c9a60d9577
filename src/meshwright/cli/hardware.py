"""mw hardware: the catalog of chips and networks; a machine's topology and roofs; sources of figures."""

from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.completions import chips
from meshwright.cli.console import JSON, emit, load_hardware, show
from meshwright.cli.hardware_tables import (
    catalog_table,
    figures_table,
    network_table,
    networks_table,
    num_hosts,
    roofs_table,
    shape,
)
from meshwright.errors import HardwareError
from meshwright.hardware import catalog
from meshwright.hardware.chip import Chip, SharedMemory
from meshwright.hardware.network import NETWORKS, Network
from meshwright.hardware.roofs import compute_bound_batch, largest_machine, roofs
from meshwright.hardware.topology import Hardware
from meshwright.options import option

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A chip (v5p), a machine (v5p:4x4x8), a network (efa) or a .toml.", autocompletion=chips
        ),
    ] = None,
    template: str | None = option(
        None, metavar="CHIP", help="Print this chip's TOML, as a start for your own."
    ),
    as_json: bool = JSON,
) -> None:
    """List known chips and networks, or show one: topology, bandwidths, every figure with its source.

    \b
    mw hardware
    mw hardware v5p:16x20x28
    mw hardware infiniband
    mw hardware --template h100 > mychip.toml
    mw hardware mychip.toml:8x8
    """
    if template is not None:
        if name is not None:
            raise HardwareError(f"--template prints the file of {template}; leave out {name}")
        text = catalog.template(template)
        return emit({"template": text}) if as_json else print(text, end="")
    if name in (None, "list", "all"):
        chips = [catalog.chip(known) for known in catalog.names()]
        networks = [NETWORKS[known] for known in NETWORKS.names]
        if as_json:
            documents = [network_document(network) for network in networks]
            emit({"hardware": [chip_document(chip) for chip in chips], "networks": documents})
        else:
            show(catalog_table(chips), networks_table(networks))
        return None
    if name in NETWORKS:
        network = NETWORKS[name]
        return emit(network_document(network)) if as_json else show(network_table(network))
    machine = _machine(name)
    if as_json:
        emit(hardware_document(machine) if machine else chip_document(catalog.chip(name)))
    else:
        show(*detail(machine or largest_machine(catalog.chip(name))))
    return None


def _machine(name: str) -> Hardware | None:
    """The machine of a spec or file; None for a chip of the catalog."""
    return load_hardware(name) if ":" in name or name.endswith(".toml") else None


def chip_document(chip: Chip) -> dict:
    """The figures of one chip with their sources, and its roofs in the largest slice or NVLink domain."""
    network = chip.network
    links = (
        {op: vars(cost) for op, cost in network.costs.items()}
        if isinstance(network, SharedMemory)
        else vars(network)
    )
    return {
        "name": chip.name,
        "aliases": list(chip.aliases),
        "kind": chip.kind,
        "flops_per_second": dict(chip.flops_per_second),
        "hbm_bytes": chip.hbm_bytes,
        "hbm_bytes_per_second": chip.hbm_bytes_per_second,
        "link_bytes_per_second": chip.link_bytes_per_second,
        "chips_per_host": chip.chips_per_host,
        "host_bytes": chip.host_bytes,
        "host_link_bytes_per_second": chip.host_link_bytes_per_second,
        "matrix_unit": chip.matrix_unit,
        "compute_capability": chip.compute_capability,
        "power_watts": chip.power_watts,
        "power_limit_watts": chip.power_limit_watts,
        "price_per_chip_hour": chip.price_per_chip_hour,
        "no_price": chip.no_price,
        "currency": chip.currency,
        "step": dict(vars(chip.step)),
        "inference": dict(vars(chip.inference)) if chip.inference else None,
        "network": {"kind": type(network).__name__, **links},
        "critical_batch": critical_batches(chip),
        "roofs": [roof.to_dict() for roof in roofs(largest_machine(chip))],
        "sources": dict(chip.sources),
    }


def network_document(network: Network) -> dict:
    """The figures of a network with their sources; its parent's included."""
    return {**vars(network), "also": list(network.also), "sources": dict(network.sources)}


def critical_batches(chip: Chip) -> dict[str, float]:
    """B_crit by the type of (weights, products): tokens of a pass above which FLOPs limit it."""
    wide, narrow = "bf16", "int8"
    pairs = ((wide, wide), (narrow, wide), (narrow, narrow))
    return {
        f"{weights}/{products}": compute_bound_batch(chip, weights, products) for weights, products in pairs
    }


def hardware_document(machine: Hardware) -> dict:
    """One machine: its topology, its roofs and its chip."""
    return {
        "spec": machine.spec,
        "num_chips": machine.num_chips,
        "num_slices": machine.num_slices,
        "num_hosts": num_hosts(machine),
        "dims": list(machine.dims),
        "wraparound": list(machine.wraparound),
        **chip_document(machine.chip),
        "roofs": [roof.to_dict() for roof in roofs(machine)],
    }


def detail(machine: Hardware) -> list[object]:
    """Output for one machine: its shape in words, its roofs, and its figures with their sources."""
    batches = ", ".join(f"{count:,.0f} {types}" for types, count in critical_batches(machine.chip).items())
    critical = (
        f"B_crit, tokens per step above which matmuls are compute-bound (weights/activations): {batches}"
    )
    return [shape(machine), roofs_table(machine), critical, figures_table(machine.chip)]
