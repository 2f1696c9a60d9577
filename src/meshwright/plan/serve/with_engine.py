"""Machines with the efficiency of a serving engine."""

from dataclasses import replace

from meshwright.engines.serving_engine import ServingEngine
from meshwright.hardware.chip import Switch
from meshwright.hardware.topology import Hardware


def with_engine(hardware: Hardware, engine: ServingEngine) -> Hardware:
    """`hardware` with the engine's shares of its chips, and its small all-reduce."""
    chip, network = hardware.chip, hardware.chip.network
    inference = engine.applied(chip.inference or chip.step, chip.kind)
    if isinstance(network, Switch):
        network = replace(network, direct_seconds=engine.direct_seconds)
    return replace(hardware, chip=replace(chip, inference=inference, network=network))


def on_engine(hardware: Hardware, engine: ServingEngine) -> Hardware:
    """`hardware` with the engine's efficiency and kernels; ours is left as it is.

    Kernels of engines multiply the rows that experts have, without blocks of padding.
    """
    if engine.name == "meshwright":
        return hardware
    machine = with_engine(hardware, engine)
    software = replace(machine.software, is_ours=False, flash=True, static_rows=False)
    return replace(machine, software=software)
