"""A layout in words: what every axis splits, what travels for it, and what that takes."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.layout.axes import AXES
from meshwright.layout.axes.expert import EXPERT
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan_file import written_shardings
from meshwright.units import format_bytes, format_count, format_seconds

_REMATS = {
    "none": "The forward pass keeps everything that the backward pass reads; nothing is recomputed "
    "(remat=none).",
    "attention": "The backward pass recomputes attention's scores and keeps the rest (remat=attention).",
    "matmuls": "The forward pass keeps the results of matmuls and of attention; the rest is "
    "recomputed (remat=matmuls).",
    "latents": "The forward pass keeps the results of matmuls and of attention, and the latents in place of "
    "queries, keys and values; the rest is recomputed (remat=latents).",
    "alternate": "The forward pass keeps attention and every second matmul; the rest is "
    "recomputed (remat=alternate).",
    "full": "Each layer keeps only its input, and the backward pass runs the layer again: a third more "
    "FLOPs, the least memory (remat=full).",
}


@dataclass(frozen=True)
class Traffic:
    """What a step's collectives over one axis take, on one chip. hidden: share that runs behind compute."""

    seconds: float
    num_bytes: float
    hidden: float

    def __str__(self) -> str:
        hidden = (
            f", {self.hidden:.0%} of it hidden behind compute" if self.hidden >= 0.005 else ", all exposed"
        )
        return f"{format_seconds(self.seconds)} per step{hidden}"


def traffic(candidate: Candidate, axis: str) -> Traffic | None:
    """The traffic of the collectives that involve `axis`; None where none is worth a word."""
    found = [planned for planned in candidate.cost.collectives if axis in planned.axes]
    seconds = sum(planned.step_seconds for planned in found)
    if not seconds:
        return None
    hidden = sum(planned.hidden_seconds for planned in found)
    num_bytes = sum(planned.step_bytes for planned in found)
    return Traffic(seconds, num_bytes, hidden / seconds)


def describe(config: ModelConfig, workload: Workload, candidate: Candidate) -> Iterator[str]:
    """Paragraphs: the mesh, each axis, the notation, the schedule."""
    layout, chips = candidate.layout, candidate.hardware.num_chips
    present = [axis for axis in AXES if layout.degree(axis.name) > 1]
    if not present:
        yield "There is one chip: nothing is split and no collective is needed."
    else:
        sizes = {axis.name: layout.degree(axis.name) for axis in present if axis is not EXPERT}
        product = " x ".join(f"{name} {degree}" for name, degree in sizes.items())
        yield f"The {chips:,} chips form a mesh, {product}."
    for axis in present:
        words = axis.words(config, workload, layout)
        moved = traffic(candidate, axis.name)
        yield f"{axis.name}={layout.degree(axis.name)}: {words}" + (f" ({moved})." if moved else ".")
    yield _notation(config, layout)
    yield _batch(workload, layout)
    yield _REMATS.get(layout.remat, f"remat={layout.remat}.") + (
        " Kept activations are offloaded to the host's memory." if layout.offload else ""
    )
    if layout.offload_optimizer:
        yield "The optimizer's state stays in the host's memory and is copied to the chips for each update."


def _notation(config: ModelConfig, layout: Layout) -> str:
    written = written_shardings(config, layout)
    weights = [text for name, text in written["weights"].items() if name in ("w_in", "we_in", "w_out", "wq")]
    activations = [text for name, text in written["activations"].items() if name in ("x", "h")]
    return f"In the notation: weights {', '.join(weights)}; activations {', '.join(activations)}."


def _batch(workload: Workload, layout: Layout) -> str:
    per_shard = workload.num_sequences / layout.num_batch_shards
    text = (
        f"A step takes {workload.num_sequences:,} sequences of {workload.seq_len:,} tokens "
        f"({format_count(workload.num_tokens)} tokens)"
    )
    if layout.num_batch_shards > 1:
        text += f", {per_shard:.3g} per shard over {layout.num_batch_shards:,} shards"
    if layout.microbatches > 1:
        text += f", in {layout.microbatches} microbatches of {per_shard / layout.microbatches:.3g}"
    return text + "."


def memory_words(candidate: Candidate, usable: int) -> str:
    """What fills a chip's memory, largest first."""
    parts = {key: value for key, value in candidate.memory.to_dict().items() if key != "total" and value}
    ordered = sorted(parts, key=parts.__getitem__, reverse=True)
    listed = ", ".join(f"{name} {format_bytes(parts[name])}" for name in ordered)
    total = candidate.memory.total
    return f"Each chip needs {format_bytes(total)} of the {format_bytes(usable)} it can use: {listed}."
