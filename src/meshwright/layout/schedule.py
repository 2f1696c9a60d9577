"""The schedule of a step: microbatches, order of passes over stages, rematerialization, offloading."""

from dataclasses import dataclass

from meshwright.errors import LayoutError, nearest
from meshwright.layout.pipelines import SCHEDULES

REMATS = ("none", "attention", "matmuls", "latents", "alternate", "full")
DISPATCHES = ("each", "once")
# Other programs' names for a choice of remat.
REMAT_ALSO = {
    "selective": "attention",  # Korthikanti et al., 2022: the scores
    "core_attn": "attention",  # Megatron's recomputed modules: the scores
    "block": "full",
    "uniform": "full",
    "minimal": "matmuls",  # MaxText: products are kept
    "dots": "matmuls",  # JAX's checkpoint policies
    "true": "full",
    "false": "none",
}


@dataclass(frozen=True)
class Schedule:
    """The order of a step's work, and the activations that it keeps.

    microbatches: microbatches a step; without stages they accumulate gradients.
    pipeline: the order of passes over the stages (layout/pipelines/).
    interleave: chunks of layers a stage.
    remat: activations that the backward pass recomputes: "none"; scores of "attention"; all but "matmuls" and
    attention; also products of "latents"; "alternate" matmuls as well; the "full" block.
    offload: saved activations wait in the host's memory.
    offload_optimizer: optimizer state and float32 weights wait in the host's memory between updates.
    capacity: maximum tokens of an expert, as a multiple of its even share of a device's tokens. Further
    tokens skip the expert. None: no limit.
    grouped: devices of a group of experts gather tokens, and no row travels (layout/grouped.py).
    dispatch: "each" row travels to its expert, or a token travels "once" to each node and is copied on the
    node (DeepSeek-V3, 2024, section 3.2.2). For "once" a layout names the nodes (`expert_nodes`) if its
    programs run here; other software asks the machine.
    """

    microbatches: int = 1
    pipeline: str = "1f1b"
    interleave: int = 1
    remat: str = "none"
    offload: bool = False
    offload_optimizer: bool = False
    capacity: float | None = None
    grouped: bool = False
    dispatch: str = "each"

    def __post_init__(self) -> None:
        for name in ("microbatches", "interleave"):
            check_positive(name, getattr(self, name))
        if self.capacity is not None and not (isinstance(self.capacity, int | float) and self.capacity > 0):
            raise LayoutError(
                f"layout: capacity = {self.capacity!r}; it must be a number above 0, such as 1.25"
            )
        if self.grouped and self.capacity is not None:
            raise LayoutError(
                f"layout: capacity = {self.capacity} limits the tokens of an expert, but with grouped = true "
                "experts take all tokens that choose them; fits: one of the two"
            )
        if self.grouped and self.dispatch != "each":
            raise LayoutError(
                f"layout: dispatch = {self.dispatch}, but with grouped = true no row moves between devices; "
                "fits: one of the two"
            )
        choices = ("remat", self.remat, REMATS), ("dispatch", self.dispatch, DISPATCHES)
        for name, value, known in (*choices, ("schedule", self.pipeline, SCHEDULES)):
            if value not in known:
                if name == "remat" and (ours := REMAT_ALSO.get(str(value).lower())):
                    raise LayoutError(f"layout: remat = {value} is remat = {ours} here; write remat={ours}")
                raise LayoutError(f"layout: {name} = {value!r}; {nearest(value, list(known))}")
        if self.interleave > 1 and self.pipeline == "1f1b":
            object.__setattr__(self, "pipeline", "interleaved")  # what 1F1B over chunks is called

    @property
    def is_spmd(self) -> bool:
        """Whether all stages run one program (layout/pipelines/pipeline.py)."""
        return SCHEDULES[self.pipeline].spmd

    def num_passes(self, num_stages: int) -> int:
        """Forward passes of a layer in a step, idle passes of its stage included."""
        return SCHEDULES[self.pipeline].num_passes(num_stages, self.microbatches)


def check_positive(name: str, value: object) -> None:
    """Raises LayoutError where `value` is no positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        hint = ", and settings are joined by commas" if " " in str(value) else ""
        raise LayoutError(f"layout: {name} = {value!r}; it must be a positive integer{hint}")
