"""The record of a network: its latency and bandwidth, and the share of it that a training step reaches."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from meshwright.hardware.links import LinkKind
from meshwright.programs.efficiency import StepEfficiency
from meshwright.records import Curves, Folder, Record

# The link of the price (`Link.kind`) by the things that a network joins.
LINK_OF: dict[str, LinkKind] = {"nodes": "network", "slices": "dcn", "chips": "ici"}


@dataclass(frozen=True)
class Network(Record):
    """A network between nodes of GPUs, between TPU slices, or between the chips of a slice.

    hop_seconds: latency of one step of a large message. bytes_per_second: one way, a chip; None: the chip's
    port decides. step_latency: factor on the latency in a training step. share: of the bandwidth, as a
    training step reaches it; None: the chip's file says it. falloff: over several nodes that share is
    multiplied by (nodes / 2)^-falloff. by_size, by_nodes: measured shares by collective, as
    [[bytes, share], ...] and [[nodes, share], ...].
    """

    joins: str = field(default="nodes", metadata={"words": tuple(LINK_OF)})
    hop_seconds: float = 0.0
    bytes_per_second: float | None = None
    step_latency: float = 1.0
    share: float | None = field(default=None, metadata={"most": 1.0})
    falloff: float = 0.0
    by_size: Curves = field(default_factory=dict, hash=False)
    by_nodes: Curves = field(default_factory=dict, hash=False)

    @property
    def link(self) -> LinkKind:
        """The kind of link that this network is in prices."""
        return LINK_OF[self.joins]

    def applied(self, step: StepEfficiency, stated: Collection[str] = ()) -> StepEfficiency:
        """A step with this network's figures in place of its own. stated: keys of `step` that stay."""
        taken = {"network_falloff": "falloff", "network_latency": "step_latency"}
        taken = {key: name for key, name in taken.items() if self.joins == "nodes" and key not in stated}
        sources = {key: self.sources[name] for key, name in taken.items() if name in self.sources}
        links: Mapping[str, float] = step.links
        if self.share is not None and f"links.{self.link}" not in stated:
            links = {**links, self.link: self.share}
        figures = {key: vars(self)[name] for key, name in taken.items()}
        return replace(step, links=links, sources={**step.sources, **sources}, **figures)


NETWORKS = Folder(Network, "hardware.networks", "network")
