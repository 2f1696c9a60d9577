"""What runs on the chips, as far as it sets what a step reaches of their ratings: a file each, as chips have.

A chip's `[step]` says what XLA's programs reach of it. Another software has in its file

    odds     factors on the odds s / (1 - s) of a share s of the chip, which keep it between 0 and 1
    seconds  factors on the fixed times, and on how the network falls off
    host     the seconds that the host takes to launch an operation or a collective: a step whose operations
             are launched one by one is never faster than that, whatever the chip

and how it sums gradients, counts memory and attends. Every figure has its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from meshwright.checked_toml import CheckedToml
from meshwright.errors import HardwareError, nearest
from meshwright.programs.efficiency import StepEfficiency

DEFAULT = "xla"
_ODDS = ("matmul", "experts", "attention", "memory", "elementwise", "overlap", "waiting", "exchanging")
_SECONDS = ("kernel_seconds", "launch_seconds", "network_falloff")
_HOST = (
    "host_seconds", "host_collective_seconds", "host_node_seconds", "host_stage_seconds",
    "host_flush_seconds",
)  # fmt: skip
_FLAGS = (
    "whole_sums", "wide_sums", "gathers_first", "unfused_norms", "eager", "counts_head", "whole_logits",
    "buckets", "holds_sent", "reports_first_stage", "static_rows", "is_ours",
)  # fmt: skip
# Operations of which PyTorch runs, and keeps for the backward pass, every step.
STEPS = ("norms", "gates", "keys")


@dataclass(frozen=True)
class Software:
    """A training framework and its kernels.

    odds, seconds: factors on figures of StepEfficiency, by name. host_*, whole_sums, gathers_first,
    unfused_norms: as there. eager: whether operations run one by one, each with memory of its own, or as a
    program that a compiler planned. flash_since: the year from which its attention keeps scores on the chip.
    flash: whether it does.
    fused: operations (norms, gates of activations, keys repeated for every query head) that are one kernel
    and keep their operands alone, where others keep what their steps make. loss_arrays: float32 arrays as
    large as the logits that a loss has besides, split_loss_arrays: where the vocabulary is split; 0: as many
    as PyTorch's. whole_logits: whether logits of a vocabulary
    that is split are gathered before it. fused_loss: whether one kernel makes the cotangents of the logits,
    as Flash Attention's and Liger's cross-entropy do.
    buckets: whether data ranks sum gradients in copies of them (DistributedDataParallel's buckets).
    holds_sent: whether what a collective sends stays until its stream is done (`Tensor.record_stream`,
    PyTorch's way unless TORCH_NCCL_AVOID_RECORD_STREAMS is set).
    reports_first_stage: whether the memory that it tells of is that of the first stage, not of the fullest.
    counts_head: whether stages are filled with whole layers until each is past its share of all parameters,
    the head's among them; else layers alone are dealt out.
    once_since: the year from which a token goes to a node once, for all of its experts there
    (`Schedule.dispatch`); 0: never.
    static_rows: whether shapes do not depend on data: the rows of experts then have the room of a round.
    wide_sums: whether gradients of whole weights are summed in float32, however little room that leaves.
    is_ours: whether its programs are those of this project: attention has the kernels that JAX has
    (layout/flash.py); others are taken to have one for every model.
    sources: where each figure comes from, by key.
    """

    name: str
    about: str
    odds: Mapping[str, float] = field(default_factory=dict, hash=False)
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    host_seconds: float = 0.0
    host_collective_seconds: float = 0.0
    host_node_seconds: float = 0.0
    host_stage_seconds: float = 0.0
    host_flush_seconds: float = 0.0
    whole_sums: bool = False
    wide_sums: bool = False
    gathers_first: bool = False
    unfused_norms: bool = False
    eager: bool = False
    whole_logits: bool = False
    counts_head: bool = False
    static_rows: bool = False
    is_ours: bool = False
    flash_since: int = 0
    once_since: int = 0
    flash: bool = True
    fused: tuple[str, ...] = ()
    loss_arrays: int = 0
    split_loss_arrays: int = 0
    buckets: bool = False
    holds_sent: bool = False
    reports_first_stage: bool = False
    fused_loss: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def applied(self, step: StepEfficiency) -> StepEfficiency:
        """What a step of this software reaches on a chip of which XLA's reaches `step`."""
        figures: dict[str, Any] = {
            name: at_odds(getattr(step, name), factor)
            for name, factor in self.odds.items()
            if name != "matmul"
        }
        if "matmul" in self.odds:
            factor = self.odds["matmul"]
            figures["matmul"] = {dtype: at_odds(share, factor) for dtype, share in step.matmul.items()}
        figures |= {name: getattr(step, name) * factor for name, factor in self.seconds.items()}
        told = {name: self.sources["odds"] for name in self.odds if "odds" in self.sources}
        told |= {name: self.sources["seconds"] for name in self.seconds if "seconds" in self.sources}
        told |= {name: self.sources[name] for name in _HOST if name in self.sources}
        return replace(
            step,
            **figures,
            sources={**step.sources, **told},
            **{name: getattr(self, name) for name in _HOST},
            whole_sums=self.whole_sums,
            gathers_first=self.gathers_first,
            unfused_norms=self.unfused_norms,
        )


def at_odds(share: float, factor: float) -> float:
    """The share whose odds are `factor` times those of `share`.

    >>> at_odds(0.5, 3.0), at_odds(1.0, 0.5)
    (0.75, 1.0)
    """
    return factor * share / (1 - share + factor * share)


@cache
def software(name: str) -> Software:
    """The software called `name`. Raises HardwareError naming the nearest known one."""
    file = _folder() / f"{name}.toml"
    if name not in software_names():
        raise HardwareError(f"software {name!r} is unknown; {nearest(name, list(software_names()))}")
    return read_software(file.read_text(encoding="utf-8"), f"programs/{file.name}")


@cache
def software_names() -> tuple[str, ...]:
    """The names of all software in the catalog."""
    files = (path.name for path in _folder().iterdir() if path.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in files))


def read_software(text: str, origin: str) -> Software:
    """The software that TOML `text` describes. Raises HardwareError naming file, line and key of a fault."""
    file = CheckedToml(origin, text)
    data = file.parse()
    counts = ("flash_since", "once_since", "loss_arrays", "split_loss_arrays")
    known_keys = ("name", "about", "odds", "seconds", "sources", "fused", *counts, *_HOST, *_FLAGS)
    file.refuse_unknown(data, known_keys)
    factors: dict[str, dict[str, float]] = {}
    for key, known in (("odds", _ODDS), ("seconds", _SECONDS)):
        table = file.table(data, key) if key in data else {}
        file.refuse_unknown(table, known, f"{key}.")
        factors[key] = {name: file.figure(table, name, f"{key}.") for name in table}
    flags = {key: data.get(key, False) for key in _FLAGS}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise file.error(key, f"is {value!r}, not true or false")
    numbers: dict[str, Any] = {key: file.count(data, key) for key in counts if key in data}
    fused = data.get("fused", [])
    if not isinstance(fused, list) or not set(fused) <= set(STEPS):
        raise file.error("fused", f"is {fused!r}; fits: a list of {', '.join(STEPS)}")
    return Software(
        name=file.string(data, "name"),
        about=file.string(data, "about"),
        odds=factors["odds"],
        seconds=factors["seconds"],
        **{key: file.figure(data, key) for key in _HOST if key in data},
        **flags,
        **numbers,
        fused=tuple(fused),
        sources=file.strings(data, "sources"),
    )


def _folder() -> Any:
    return resources.files("meshwright.programs")
