"""The record of a serving engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.programs.efficiency import StepEfficiency
from meshwright.records import Folder, Record

_REACHED = {
    "keys": (
        "memory", "cache", "widened", "waiting", "prefetch", "elementwise", "attention", "experts",
        "matmul.bf16", "matmul.fp8", "kernel_seconds", "experts_seconds", "collective_seconds",
        "launch_seconds",
    )
}  # fmt: skip


@dataclass(frozen=True)
class Engine(Record):
    """A serving engine.

    versions: of its published rows. tpu, gpu, cpu: figures of `StepEfficiency` on that kind of chip, with
    `matmul.bf16` for a key of `matmul`; a missing figure is the chip's `[inference]`.
    """

    versions: tuple[str, ...] = ()
    tpu: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_REACHED)
    gpu: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_REACHED)
    cpu: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_REACHED)

    def applied(self, inference: StepEfficiency, kind: str) -> StepEfficiency:
        """The efficiency of this engine's steps on a chip of a kind, whose `[inference]` is given."""
        figures: Mapping[str, float] = getattr(self, kind)
        products = {key.partition(".")[2]: value for key, value in figures.items() if "." in key}
        others: dict[str, Any] = {key: value for key, value in figures.items() if "." not in key}
        return replace(inference, matmul={**inference.matmul, **products}, **others)


ENGINES = Folder(Engine, "engines", "engine")
