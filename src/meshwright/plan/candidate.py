"""A layout with its price."""

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.cost.graph import Graph
from meshwright.cost.memory import Memory
from meshwright.cost.step_cost import StepCost
from meshwright.hardware.links import bound_name
from meshwright.hardware.prices import per_hour, per_million_tokens
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.units import format_bytes, format_seconds


class Shortage(NamedTuple):
    """A memory that is too small for a layout. where: `per chip`, or of its host."""

    needed_bytes: float
    usable_bytes: float
    where: str

    @property
    def over_bytes(self) -> float:
        return self.needed_bytes - self.usable_bytes


@dataclass(frozen=True)
class Candidate:
    """A layout with its price. placement: the links that its axes use.

    graph: of a microbatch, as recorded. compiled_bytes: of one chip, from a compiler; None if it was not
    compiled.
    """

    layout: Layout
    cost: StepCost
    memory: Memory
    model_flops: float
    num_tokens: float
    hardware: Hardware
    placement: Placement
    graph: Graph = field(repr=False, compare=False)
    compiled_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Candidate({self})"

    def __str__(self) -> str:
        """The layout and its headlines: `fsdp=64,remat=full: 2.61 s per step, MFU 48.3%, 8.6 GB per chip`."""
        fits = "" if self.fits else ", does not fit"
        needed = f"{format_bytes(self.needed_bytes)} per chip{fits}"
        return f"{self.layout}: {format_seconds(self.step_seconds)} per step, MFU {self.mfu:.1%}, {needed}"

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds

    @property
    def needed_bytes(self) -> int:
        """Bytes that one chip needs: the compiler's figure if there is one."""
        return self.memory.total if self.compiled_bytes is None else self.compiled_bytes

    @property
    def lacking_bytes(self) -> float:
        """Bytes that a chip, or its share of the host, is short of; 0 if it fits."""
        return self.hardware.chip.lacking_bytes(self.needed_bytes, self.memory.host)

    @property
    def fits(self) -> bool:
        return not self.lacking_bytes

    @property
    def shortage(self) -> Shortage:
        """The memory that a layout lacks if it does not fit: the chip's, otherwise the host's."""
        chip = self.hardware.chip
        if self.needed_bytes > chip.program_bytes:
            return Shortage(self.needed_bytes, chip.program_bytes, "per chip")
        return Shortage(self.memory.host, chip.host_program_bytes, "of host memory per chip")

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak: causal attention counted half, recomputation not at all."""
        return self.model_flops / (self.cost.seconds * self._peak_flops)

    @property
    def hfu(self) -> float:
        """Executed FLOPs, recomputation included, over the dense peak."""
        chips = self.hardware.num_chips
        return self.cost.executed_flops * chips / (self.cost.seconds * self._peak_flops)

    @property
    def _peak_flops(self) -> float:
        layout = self.layout
        return self.hardware.num_chips * self.hardware.chip.flops(layout.precision.operand_dtype)

    @property
    def price_per_hour(self) -> float | None:
        return per_hour(self.hardware.chip, self.hardware.num_chips)

    @property
    def price_per_million_tokens(self) -> float | None:
        """The price of a million trained tokens."""
        return per_million_tokens(self.price_per_hour, self.num_tokens / self.step_seconds)

    def to_dict(self) -> dict:
        """The keys of `mw plan train` in docs/reference/json.md."""
        chips, seconds = self.hardware.num_chips, self.cost.seconds
        network = self.hardware.chip.network
        return {
            "layout": str(self.layout),
            "mesh": dict(self.layout.mesh.sizes),
            "placement": {axis: list(map(str, links)) for axis, links in self.placement.links.items()},
            "step_seconds": seconds,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tflops_per_chip": self.model_flops / seconds / chips / 1e12,
            "tokens_per_second_per_chip": self.num_tokens / seconds / chips,
            "bytes_per_chip": self.memory.to_dict(),
            **({} if self.compiled_bytes is None else {"compiled_bytes_per_chip": self.compiled_bytes}),
            "fits": self.fits,
            "bound": self.cost.bound,
            "bound_name": bound_name(self.cost.bound, network),
            "breakdown": [
                {
                    "name": t.name,
                    "seconds": t.seconds,
                    "share": t.seconds / seconds,
                    "bound": t.bound,
                    "bound_name": bound_name(t.bound, network),
                }
                for t in self.cost.terms
            ],
        }
