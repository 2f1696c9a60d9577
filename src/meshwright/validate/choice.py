"""The choice among the possible layouts of a published row, by their memory.

A policy that saves more than fits is mixed with full rematerialisation: the policy applies to the layers that
fit on the chip and, if activations are offloaded, on the host. If PyTorch's loss does not fit, a fused loss
is tried first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import floor

from meshwright.cost.graph import Graph
from meshwright.cost.memory import Memory
from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_memory import reported_bytes, step_memory
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.plan.candidate import Candidate
from meshwright.plan.train import price
from meshwright.validate.reproduce import Case

# The same layout is priced for its memory with each loss and in mixes, and then for its time.
_kept_record = lru_cache(maxsize=32)(record_training)
# The share of the layers is rounded down to a multiple of 1 / this.
_PARTS = 1000


@dataclass(frozen=True)
class Mix:
    """Layouts that differ only in remat, each for a share of the layers; the row's layout is first.

    hardware: with the software that runs them.
    """

    hardware: Hardware
    parts: tuple[tuple[float, Layout], ...]

    @cached_property
    def layout(self) -> Layout:
        return self.parts[0][1]

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return str(self.layout)
        (share, layout), (_, other) = self.parts
        return f"{layout} for {share:.0%} of the layers, remat={other.schedule.remat} for the rest"


@dataclass(frozen=True)
class PricedMix:
    """A mix with its prices. bytes_per_chip: memory of the program."""

    case: Case
    mix: Mix
    candidates: tuple[Candidate, ...]
    bytes_per_chip: float

    @cached_property
    def reported_bytes(self) -> float:
        """Memory of a chip as the mix's software reports it."""
        hardware = self.mix.hardware
        capacity = hardware.chip.program_bytes
        return sum(
            share * reported_bytes(_graph(self.case, part), part, hardware.software, capacity)
            for share, part in self.mix.parts
        )

    @cached_property
    def step_seconds(self) -> float:
        return sum(
            share * candidate.step_seconds
            for (share, _), candidate in zip(self.mix.parts, self.candidates, strict=True)
        )


def fastest_mix(case: Case) -> PricedMix:
    """The fastest mix of a case."""
    return min((_priced(case, mix) for mix in mixes(case)), key=lambda choice: choice.step_seconds)


def _priced(case: Case, mix: Mix) -> PricedMix:
    hardware = mix.hardware
    if len(mix.parts) > 1:  # a mix fills the memory exactly, so it does not run out
        hardware = hardware.with_step(replace(hardware.chip.step, host_flush_seconds=0.0))
    candidates = (
        price(case.config, hardware, case.workload, layout, whole=False, graph=_graph(case, layout))
        for _, layout in mix.parts
    )
    total = sum(share * memory_of(case, mix.hardware, part).total for share, part in mix.parts)
    return PricedMix(case, mix, tuple(candidates), total)


def mixes(case: Case) -> list[Mix]:
    """The mixes of the first group of layouts in which one fits; if none fits, of the nearest to fitting.

    If the source leaves the policy open, matmuls are kept in the layers that fit.
    """
    nearest: tuple[float, Hardware, Layout] | None = None
    for group, hardware in product(case.layouts, _with_losses(case.hardware)):
        excess = [(_excess(case, hardware, layout), layout) for layout in group]
        if fitting := [layout for over, layout in excess if over == 0]:
            return [_less_than_full(case, hardware, layout) for layout in fitting]
        over, closest = min(excess, key=lambda pair: pair[0])
        nearest = (over, hardware, closest) if nearest is None or over < nearest[0] else nearest
    assert nearest is not None, "a case has layouts"
    return [_with_full(case, *nearest[1:])]


def _with_losses(hardware: Hardware) -> Iterator[Hardware]:
    """The hardware with its software's loss and, for plain PyTorch, with a fused loss."""
    yield hardware
    software = hardware.software
    if software.eager and not (software.loss_arrays or software.whole_logits):
        yield replace(hardware, software=replace(software, fused_loss=True))


@lru_cache(maxsize=32)
def memory_of(case: Case, hardware: Hardware, layout: Layout) -> Memory:
    """Memory of a layout on a chip, for eager programs or as XLA plans it."""
    return step_memory(_graph(case, layout), layout, hardware.software)


def _graph(case: Case, layout: Layout) -> Graph:
    return _kept_record(case.config, case.hardware, layout, PassShape.of_microbatch(case.workload, layout))


def _excess(case: Case, hardware: Hardware, layout: Layout) -> float:
    """Bytes that do not fit, on the chip and on its share of the host."""
    memory = memory_of(case, hardware, layout)
    return hardware.chip.lacking_bytes(memory.total, memory.host)


def _less_than_full(case: Case, hardware: Hardware, layout: Layout) -> Mix:
    """`layout`, or full rematerialisation for fewer layers if the source leaves it open."""
    less = layout.replace(remat="matmuls")
    if layout.schedule.remat == "full" and any(less in group for group in case.layouts):
        return _with_full(case, hardware, less)
    return Mix(hardware, ((1.0, layout),))


def _with_full(case: Case, hardware: Hardware, layout: Layout) -> Mix:
    """`layout` for the layers that fit, and full rematerialisation for the rest."""
    other = layout.replace(remat="full")
    if layout.schedule.remat in ("full", "none"):
        return Mix(hardware, ((1.0, layout),))
    asked, least = memory_of(case, hardware, layout), memory_of(case, hardware, other)
    room = max(0.0, hardware.chip.program_bytes - least.total)
    if layout.schedule.offload:
        room += max(0.0, hardware.chip.host_program_bytes - least.host)
    share = min(1.0, room / max(1.0, asked.total + asked.host - least.total - least.host))
    share = floor(share * _PARTS) / _PARTS
    return Mix(hardware, ((share, layout), (1 - share, other)))
