"""Machines with the efficiency of a serving engine."""

from dataclasses import replace

from meshwright.dtypes import number_type
from meshwright.engines.serving_engine import ServingEngine
from meshwright.hardware.chip import Switch
from meshwright.hardware.topology import Hardware


def with_engine(hardware: Hardware, engine: ServingEngine) -> Hardware:
    """`hardware` with the engine's shares of its chips, its small all-reduce and actual rows of experts.

    Collectives reach the share of the links that they reach in training (nccl-tests). Kernels of engines
    multiply the rows that experts have, without the blocks of padding of our programs.
    """
    chip, network = hardware.chip, hardware.chip.network
    inference = engine.applied(chip.inference or chip.step, chip.kind)
    inference = replace(inference, links=inference.links or chip.step.links)
    if isinstance(network, Switch):
        network = replace(network, direct_seconds=engine.direct_seconds)
    software = replace(hardware.software, static_rows=False)
    return replace(hardware, chip=replace(chip, inference=inference, network=network), software=software)


def on_engine(hardware: Hardware, engine: ServingEngine) -> Hardware:
    """`hardware` with the engine's efficiency and kernels; ours is left as it is."""
    if engine.name == "meshwright":
        return hardware
    machine = with_engine(hardware, engine)
    return replace(machine, software=replace(machine.software, is_ours=False, flash=True))


def engine_tables_dtype(weights_dtype: str, compute_dtype: str) -> str | None:
    """The dtype of an engine's embedding and output projection; None if it is the weights'.

    Engines quantise only the projections of layers. Sources: NVIDIA/Model-Optimizer,
    modelopt_recipes/configs/ptq/units/default_disabled_quantizers.yaml; vllm-project/llm-compressor, whose
    recipes ignore lm_head.
    """
    return None if number_type(weights_dtype).scales is None else compute_dtype
