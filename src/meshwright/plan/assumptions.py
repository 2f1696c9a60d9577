"""The assumptions of a plan's price, in sentences: how FLOPs are counted, and every constant that matters.

A constant is a figure that was fitted or measured: a share of the chip's ratings that a step reaches
(`[step]`), a fixed time, a measured curve. The share of a step that depends on a constant is found by pricing
the step again with its ideal value, so the shares of several constants do not add up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.cost.step_cost import StepPricer
from meshwright.cost.transfer_prices import at_step_rates
from meshwright.hardware.catalog import step_warning
from meshwright.hardware.chip import RESERVED_SHARE, Chip, SharedMemory, Switch
from meshwright.hardware.links import LINK_FIELDS, Interconnect, link_rates
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import lacks_flash
from meshwright.layout.moves.experts import has_fixed_rows
from meshwright.layout.runnable import has_static_rows
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.spread import Spread, spread
from meshwright.plan.words import ASSUMPTIONS, sections
from meshwright.programs.program import DEFAULT
from meshwright.units import format_seconds

# Constants that affect a smaller share of the step are not listed.
LEAST_SHARE = 0.05
# Constants of `[step]` with one figure: field, words, ideal value, and fields that go with it.
_STEP: tuple[tuple[str, str, float, dict[str, float]], ...] = (
    ("experts", "grouped matmuls of several experts reach {:.0%} of the rate of one matmul", 1, {}),
    ("attention", "attention runs at {:.0%} of the {dtype} peak", 1, {"attention_half_keys": 0}),
    ("elementwise", "norms, activations and casts reach {:.0%} of the bandwidth of other memory-bound work",
     1, {}),
    ("overlap", "a collective with enough compute to overlap with hides {:.0%} of its time", 1, {}),
    ("waiting", "a matmul waits for {:.0%} of the time of the collectives that feed it", 0, {}),
    ("exchanging", "compute waits for {:.0%} of the time of the exchange of tokens between experts", 0, {}),
    ("host_seconds", "the host takes {} to launch an operation", 0, {"host_collective_seconds": 0}),
    ("kernel_seconds", "a kernel has a fixed cost of {}", 0, {}),
    ("launch_seconds", "the program of a microbatch takes {} to launch", 0, {}),
)  # fmt: skip


@dataclass(frozen=True)
class Constant:
    """A figure of a chip that was fitted or measured.

    text: the figure in words, the subject of a sentence. ideal: the chip with only this figure at its ideal
    value.
    """

    text: str
    source: str
    ideal: Chip


def assumptions(config: ModelConfig, workload: Workload, best: Candidate) -> tuple[str, ...]:
    """The assumptions of the price of `best`, a sentence each."""
    hardware, chip, layout = best.hardware, best.hardware.chip, best.layout
    trains = workload.phase == "train"
    has_capacity = not has_fixed_rows(layout) and has_static_rows(hardware, layout)
    dtype = layout.precision.compute_dtype
    known = chip.sources.get("hbm_usable_bytes")
    (section,) = sections(
        ASSUMPTIONS,
        "assumptions",
        warning=step_warning(chip),
        dtype=dtype,
        peak=chip.flops(dtype),
        constants=[of_step for of_step in shares(best) if of_step[0] > LEAST_SHARE],
        least=LEAST_SHARE,
        program=hardware.software.description if hardware.software.name != DEFAULT else None,
        spread=spread_of(best),
        slowdown=chip.step.slowdown,
        program_bytes=chip.program_bytes,
        known=known or f"{RESERVED_SHARE:.0%} of its HBM is left to the runtime",
        has_capacity=config.moe and layout.table.axes_of("E") and trains and has_capacity,
        lacks_flash=trains
        and hardware.software.flash
        and lacks_flash(config, hardware, layout, workload.seq_len),
        has_flash=chip.platform.flash,
        in_turn=hardware.num_chips if chip.platform.in_turn and hardware.num_chips > 1 else None,
    )
    return section.paragraphs


def spread_of(candidate: Candidate, figure: str = "time") -> Spread | None:
    """The errors of published sources similar to a layout; None if no published row has such chips."""
    has_experts = any(work.routed for _, node in candidate.graph.nodes() for work in node.forward)
    return spread_on(candidate.hardware, has_experts=has_experts, figure=figure)


def intervals_of(candidate: Candidate) -> dict[str, Any]:
    """The ranges of a candidate's step time and memory for 8 of 10 new sources, by their keys in JSON."""
    known, memory = spread_of(candidate), spread_of(candidate, "memory")
    seconds, total = candidate.step_seconds, candidate.memory.total
    return {
        "step_seconds_interval": None if known is None else list(known.interval(seconds)),
        "bytes_per_chip_interval": None if memory is None else list(map(round, memory.interval(total))),
    }


def spread_on(
    hardware: Hardware, *, has_experts: bool, figure: str = "time", without: str | None = None
) -> Spread | None:
    """The spread of a figure (time or memory) on a machine. without: a published source to leave out."""
    chip = hardware.chip
    between = chip.network.between if isinstance(chip.network, Switch) else None
    network = between if hardware.num_chips > hardware.chips_per_node else None
    return spread(chip.kind, hardware.software.fitted_on, chip.name, has_experts, network, figure, without)


def shares(best: Candidate) -> list[tuple[float, Constant]]:
    """The share of the step of `best` that depends on each constant of its chip, the largest first.

    share = 1 - step with the constant at its ideal value / step
    """
    layout, hardware = best.layout, best.hardware

    def seconds(chip: Chip) -> float:
        machine = replace(hardware, chip=chip)
        placement = best.placement.over(at_step_rates(machine).chip.network)
        return StepPricer(best.graph, layout, machine, placement).cost().seconds

    whole = seconds(hardware.chip)
    shares = [
        (1 - seconds(constant.ideal) / whole, constant) for constant in constants(hardware.chip, layout)
    ]
    return sorted(shares, key=lambda share: -share[0])


def constants(chip: Chip, layout: Layout) -> Iterator[Constant]:
    """The constants of a chip that are not ideal and apply to a step of `layout`."""
    step, network, unknown = chip.step, chip.network, "no source given"
    for key, text, figures in _step_constants(chip, layout):
        if (ideal := replace(step, **figures)) != step:
            yield Constant(text, step.sources.get(key, unknown), replace(chip, step=ideal))
    for key, text, figures in _chip_constants(chip, layout):
        if (ideal := replace(chip, **figures)) != chip:
            yield Constant(text, chip.sources.get(key, unknown), ideal)
    for key, text, figures in _network_constants(network):
        if (ideal := replace(network, **figures)) != network:
            yield Constant(text, chip.sources.get(key, unknown), replace(chip, network=ideal))


# The key of a constant's source, its words, and the fields that make it ideal.
_Row = tuple[str, str, dict[str, Any]]


def _step_constants(chip: Chip, layout: Layout) -> Iterator[_Row]:
    step, compute = chip.step, layout.precision.compute_dtype
    matmul = layout.precision.matmul_dtype or compute
    if matmul not in chip.matmul_rates:
        text = f"large matmuls in {matmul} run at {step.matmul_share(matmul):.0%} of the {matmul} peak"
        yield "matmul", text, {"matmul": {}, "matmul_half_outputs": 0.0}
    text = f"memory-bound work in {compute} reaches {step.memory_share(compute):.0%} of the HBM bandwidth"
    key = "memory" if step.memory < 1 else "memory_by_dtype"
    yield key, text, {"memory": 1.0, "memory_by_dtype": {}}
    for kind, share in step.links.items():
        links = {other: one for other, one in step.links.items() if other != kind}
        even = {"network_falloff": 0.0} if kind == "network" else {}
        yield "links", f"collectives reach {share:.0%} of the bandwidth of {kind}", {"links": links, **even}
    for key, words, ideal, others in _STEP:
        value = getattr(step, key)
        figure = format_seconds(value) if key.endswith("seconds") else value
        yield key, words.format(figure, dtype=compute), {key: float(ideal), **others}


def _chip_constants(chip: Chip, layout: Layout) -> Iterator[_Row]:
    matmul = layout.precision.operand_dtype
    if matmul in chip.matmul_rates:
        ideal = {"matmul_rates": {}, "step": replace(chip.step, matmul={})}
        yield "matmul_rates", f"matmuls in {matmul} run at the rate measured for their size", ideal
    if chip.clock_share < 1:
        limit = f"a power limit of {chip.power_limit_watts:g} W (rated {chip.power_watts:g} W)"
        text = f"{limit} leaves the chip {chip.clock_share:.0%} of its clock"
        yield "power_limit_watts", text, {"power_limit_watts": None}


def _network_constants(network: Interconnect) -> Iterator[_Row]:
    if isinstance(network, SharedMemory):
        slowest = format_seconds(max(cost.latency_seconds for cost in network.costs.values()))
        costs = {op: replace(cost, latency_seconds=0.0) for op, cost in network.costs.items()}
        text = f"a collective between devices of the host has a fixed cost of up to {slowest}"
        yield "network", text, {"costs": costs}
        return
    for kind, (_, hop_seconds) in link_rates(network).items():
        _, field = LINK_FIELDS[kind]
        yield field, f"a hop over {kind} takes {format_seconds(hop_seconds)}", {field: 0.0}
    if isinstance(network, Switch):
        seconds = format_seconds(network.collective_launch_seconds)
        launch = "collective_launch_seconds"
        yield launch, f"a collective takes {seconds} to launch", {launch: 0.0}
    text = "collectives reach the share of link bandwidth that was measured for their size"
    yield "efficiency", text, {"efficiency": {}}
