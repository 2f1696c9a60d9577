"""What the price of a plan rests on, in sentences: how FLOPs are counted, and every constant that matters.

A constant is a figure that was fitted or measured rather than rated: what a step reaches of the chip's
ratings (`[step]`), fixed times, measured curves. How much of a step rests on one is found by pricing the
step again with that constant at its ideal value, so the shares of several constants do not add up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.cost.lowering import has_static_rows, lacks_kernel
from meshwright.cost.step import StepPricer, at_step_rates
from meshwright.hardware.catalog import step_warning
from meshwright.hardware.chip import RESERVED_SHARE, Chip, SharedMemory, Switch
from meshwright.hardware.links import LINK_FIELDS, Interconnect, link_rates
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.spread import Spread, spread
from meshwright.programs.program import DEFAULT
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.plan.candidate import Candidate

# Constants on which less of the step rests are not listed.
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Constant:
    """A figure of a chip that was fitted or measured.

    text: the figure in words, the subject of a sentence. source: where it comes from. ideal: the chip
    with this figure at its ideal value, all others as they are.
    """

    text: str
    source: str
    ideal: Chip


def assumptions(config: ModelConfig, workload: Workload, best: "Candidate") -> Iterator[str]:
    """What the price of `best` rests on, a sentence each."""
    hardware, chip = best.hardware, best.hardware.chip
    if warning := step_warning(chip):
        yield warning
    yield (
        "MFU divides the model's FLOPs by the dense "
        f"{best.layout.compute_dtype} peak of {chip.flops(best.layout.compute_dtype):.3g} FLOP/s per chip; "
        "the "
        "model's FLOPs are 6 per matmul parameter and token, and 6 B T^2 N H per layer for causal attention"
    )
    weighty = [found for found in shares(best) if found[0] > LEAST_SHARE]
    for share, constant in weighty:
        yield f"{constant.text}: {share:.0%} of this step depends on it ({constant.source})"
    yield (
        f"no {'other ' if weighty else ''}fitted or measured constant affects more than {LEAST_SHARE:.0%} of "
        "this step"
    )
    if hardware.software.name != DEFAULT:
        yield hardware.software.description
    if found := spread_of(best):
        yield f"the error of the step time is {found}"
    if chip.step.slowdown != 1:
        yield f"the priced step is multiplied by {chip.step.slowdown:.3g}, the factor of the anchoring run"
    known = chip.sources.get("hbm_usable_bytes") or f"{RESERVED_SHARE:.0%} of its HBM is left to the runtime"
    yield f"a program can use {format_bytes(chip.program_bytes)} of a chip's memory ({known})"
    layout, trains = best.layout, workload.phase == "train"
    in_rounds = not layout.fixed_rows and has_static_rows(hardware, layout)
    if config.moe and layout.expert_axes and trains and in_rounds:
        yield (
            "experts are priced at an even load, with the memory of one round, which holds twice as many "
            "rows; rows beyond that take further rounds, and none is dropped"
        )
    lacking = lacks_kernel(config, hardware, layout, workload.seq_len)
    if trains and hardware.software.flash and lacking:
        yield (
            f"no flash kernel takes this attention ({lacking}): the scores of one block after another go "
            "through memory"
        )
    elif chip.kind != "cpu":
        yield "attention runs a flash kernel that skips masked blocks and keeps scores on chip"
    if chip.kind == "cpu" and hardware.num_chips > 1:
        yield (
            f"the {hardware.num_chips} virtual devices share one CPU, and the host waits for each step "
            "before "
            "it dispatches the next: none of its work between steps is hidden"
        )


def spread_of(candidate: "Candidate") -> Spread | None:
    """The errors of published layouts similar to this one; None where no row has such chips."""
    hardware, layout = candidate.hardware, candidate.layout
    chips, rows = hardware.num_chips, hardware.software.fitted_on
    return spread(hardware.chip.kind, rows, chips, layout.word("tensor"), layout.pipe)


def shares(best: "Candidate") -> list[tuple[float, Constant]]:
    """The share of the step of `best` that rests on each constant of its chip, the largest first.

    share = 1 - step with the constant at its ideal value / step
    """
    layout, hardware = best.layout, best.hardware

    def seconds(chip: Chip) -> float:
        machine = replace(hardware, chip=chip)
        placement = best.placement.over(at_step_rates(machine).chip.network)
        return StepPricer(best.graph, layout, machine, placement).seconds()

    whole = seconds(hardware.chip)
    found = [(1 - seconds(constant.ideal) / whole, constant) for constant in constants(hardware.chip, layout)]
    return sorted(found, key=lambda one: -one[0])


def constants(chip: Chip, layout: Layout) -> Iterator[Constant]:
    """The constants of a chip that are not ideal, as a step of `layout` meets them."""
    step, network = chip.step, chip.network
    for key, text, figures in _step_constants(chip, layout):
        if (ideal := replace(step, **figures)) != step:
            yield Constant(text, step.sources.get(key, _NO_SOURCE), replace(chip, step=ideal))
    for key, text, figures in _chip_constants(chip, layout):
        if (ideal := replace(chip, **figures)) != chip:
            yield Constant(text, chip.sources.get(key, _NO_SOURCE), ideal)
    for key, text, figures in _network_constants(network):
        if (ideal := replace(network, **figures)) != network:
            yield Constant(text, chip.sources.get(key, _NO_SOURCE), replace(chip, network=ideal))


_NO_SOURCE = "no source given"
# The key of a constant's source, what it says, and the fields that make it ideal.
_Row = tuple[str, str, dict[str, Any]]


def _step_constants(chip: Chip, layout: Layout) -> Iterator[_Row]:
    step, compute = chip.step, layout.compute_dtype
    matmul = layout.matmul_dtype or compute
    if matmul not in chip.matmul_rates:
        share = step.matmul_share(matmul)
        text = f"large matmuls in {matmul} run at {share:.0%} of the {matmul} peak"
        yield "matmul", text, {"matmul": {}, "matmul_half_outputs": 0.0}
    yield (
        "experts",
        f"grouped matmuls of several experts reach {step.experts:.0%} of the rate of one matmul",
        {"experts": 1.0},
    )
    yield (
        "attention",
        f"attention runs at {step.attention:.0%} of the {compute} peak",
        {"attention": 1.0, "attention_half_keys": 0.0},
    )
    yield (
        "memory" if step.memory < 1 else "memory_by_dtype",
        f"memory-bound work in {compute} reaches {step.memory_share(compute):.0%} of the HBM bandwidth",
        {"memory": 1.0, "memory_by_dtype": {}},
    )
    yield (
        "elementwise",
        f"norms, activations and casts reach {step.elementwise:.0%} of the bandwidth of other memory-bound "
        "work",
        {"elementwise": 1.0},
    )
    for kind, share in step.links.items():
        links = {other: one for other, one in step.links.items() if other != kind}
        even = {"network_falloff": 0.0} if kind == "network" else {}
        text = f"collectives reach {share:.0%} of the bandwidth of {kind}"
        yield "links", text, {"links": links, **even}
    yield (
        "overlap",
        f"a collective with enough compute beside it hides {step.overlap:.0%} of its time",
        {"overlap": 1.0},
    )
    yield (
        "waiting",
        f"a matmul waits for {step.waiting:.0%} of the time of the collectives that feed it",
        {"waiting": 0.0},
    )
    yield (
        "exchanging",
        f"compute waits for {step.exchanging:.0%} of the time in which experts exchange tokens",
        {"exchanging": 0.0},
    )
    text = f"the host takes {format_seconds(step.host_seconds)} to launch an operation"
    yield "host_seconds", text, {"host_seconds": 0.0, "host_collective_seconds": 0.0}
    yield (
        "kernel_seconds",
        f"a kernel has a fixed cost of {format_seconds(step.kernel_seconds)}",
        {"kernel_seconds": 0.0},
    )
    yield (
        "launch_seconds",
        f"the program of a microbatch takes {format_seconds(step.launch_seconds)} to launch",
        {"launch_seconds": 0.0},
    )


def _chip_constants(chip: Chip, layout: Layout) -> Iterator[_Row]:
    matmul = layout.matmul_dtype or layout.compute_dtype
    if matmul in chip.matmul_rates:
        ideal = {"matmul_rates": {}, "step": replace(chip.step, matmul={})}
        yield "matmul_rates", f"matmuls in {matmul} run at the rate measured for their size", ideal
    if chip.clock_share < 1:
        yield (
            "power_limit_watts",
            f"a power limit of {chip.power_limit_watts:g} W (rated {chip.power_watts:g} W) leaves the chip "
            f"{chip.clock_share:.0%} of its clock",
            {"power_limit_watts": None},
        )


def _network_constants(network: Interconnect) -> Iterator[_Row]:
    if isinstance(network, SharedMemory):
        slowest = max(cost.latency_seconds for cost in network.costs.values())
        yield (
            "network",
            f"a collective between devices of the host has a fixed cost of up to {format_seconds(slowest)}",
            {"costs": {op: replace(cost, latency_seconds=0.0) for op, cost in network.costs.items()}},
        )
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
