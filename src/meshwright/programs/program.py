"""Training programs: how a program's step differs from XLA's on the same chip; one TOML each.

A chip's `[step]` has the shares of its ratings that XLA's programs reach. The record of another program has

    odds     factors on the odds s / (1 - s) of a share s of the chip, which keep it between 0 and 1
    seconds  factors on the fixed times
    host_*   seconds that the host takes to launch an operation or a collective

and how it sums gradients, counts memory and computes attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.programs.efficiency import StepEfficiency
from meshwright.records import Folder, Record

DEFAULT = "xla"
_ODDS = ("matmul", "experts", "attention", "memory", "elementwise", "overlap", "waiting", "exchanging")
_SECONDS = ("kernel_seconds", "launch_seconds")
_OF_PROGRAMS = (
    "host_seconds", "host_collective_seconds", "host_node_seconds", "host_stage_seconds",
    "host_flush_seconds", "whole_sums", "gathers_first", "sends_by_chunks", "broadcasts", "unfused_norms",
)  # fmt: skip
# Operations that PyTorch runs, and keeps for the backward pass, step by step.
STEPS = ("norms", "gates", "keys")
# The widest head of `TrainingProgram.narrow_flash_from`.
NARROW_HEAD = 128


@dataclass(frozen=True)
class TrainingProgram(Record):
    """A training program and its kernels.

    fitted_on: the `software` of the published rows that its constants were fitted on.
    odds, seconds: factors on figures of StepEfficiency, by name. host_*, whole_sums, gathers_first,
    sends_by_chunks, broadcasts, unfused_norms: as in StepEfficiency.
    eager: whether operations run one by one, each with memory of its own, or as a program that a compiler
    planned. flash: whether its attention is a flash kernel, which keeps scores on the chip. flash_since: the
    first year in which it is.
    vendor_attention_from: the least compute capability whose attention is the vendor's kernel, as XLA's, so
    that the odds of attention do not apply; 0: never.
    narrow_flash_from: the least compute capability whose flash kernels take heads of at most NARROW_HEAD
    elements, so that models with wider heads keep scores in memory; 0: on all chips for any.
    fused: operations (norms, gates of activations, keys repeated for every query head) that are one kernel
    and keep only their operands; others keep the results of their steps.
    loss_arrays: number of further float32 arrays, as large as the logits, that a loss has; split_loss_arrays:
    their number if the vocabulary is split. 0: the number in PyTorch.
    whole_logits: whether logits of a split vocabulary are gathered before the loss. compiled_loss_since: from
    this year on the loss has one such array, since it is compiled; 0: never. fused_loss: whether one kernel
    makes the cotangents of the logits, as Flash Attention's and Liger's cross-entropy do.
    selective: the layout's `remat` that this program calls selective recomputation.
    buckets: whether data ranks sum gradients in copies of them (DistributedDataParallel's buckets).
    holds_sent: whether sent arrays stay until the collective's stream is done (`Tensor.record_stream`,
    PyTorch's way unless TORCH_NCCL_AVOID_RECORD_STREAMS is set).
    reports_first_stage: whether its memory figure is the first stage's; otherwise the fullest stage's.
    memory_figure: its figure of memory: "allocated" arrays; "reserved", with the blocks that its allocator
    keeps; or "device", all that the driver says a process holds, with the context and buffers of collectives.
    joins_keys: whether values are a view of one product of queries, keys and values, which stays whole.
    weighs_early: whether weights of chosen experts multiply the activations within an expert, so that its
    results are not kept.
    casts_operands: whether operands that are cast to a narrower type are kept in that type, together with
    two copies of each weight in it, by rows and by columns. casts_weights: whether these copies replace the
    weights, which the optimizer has in float32, and are gathered once they are updated, if they have 8 bits.
    narrow_states: whether weights and summed gradients have the type of products, with a float32 copy of
    weights in the optimizer, however they are sharded.
    by_tensor_lists: whether the optimizer updates lists of tensors at once (`foreach`), with an array of the
    size of a moment in addition.
    counts_head: whether the head counts as layers when layers are divided over stages.
    once_since: from this year on a token goes to a node once, for all of its experts there
    (`Schedule.dispatch`); 0: never.
    exchange_bytes_per_second: that a GPU sends in NCCL's all-to-all over more than EXCHANGE_PEERS GPUs of an
    NVLink domain, if the program sends tokens to experts by it; 0: as in other collectives.
    folds_experts: whether expert groups may take ranks of `tensor` and `context` first (`fold`), or not.
    static_rows: whether shapes do not depend on data: the rows of experts then have a fixed capacity.
    wide_sums: whether gradients are summed in float32, and sharded weights are float32, even if little memory
    is left.
    narrow_sums: whether gradients of sharded weights are summed in the type of products.
    is_ours: whether its programs are this project's: attention has the platform's kernels. Others are taken
    to have a kernel for every model.
    """

    fitted_on: str = DEFAULT
    odds: Mapping[str, float] = field(default_factory=dict, hash=False, metadata={"keys": _ODDS})
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False, metadata={"keys": _SECONDS})
    host_seconds: float = 0.0
    host_collective_seconds: float = 0.0
    host_node_seconds: float = 0.0
    host_stage_seconds: float = 0.0
    host_flush_seconds: float = 0.0
    whole_sums: bool = False
    wide_sums: bool = False
    narrow_sums: bool = False
    gathers_first: bool = False
    sends_by_chunks: bool = False
    broadcasts: bool = False
    unfused_norms: bool = False
    eager: bool = False
    whole_logits: bool = False
    counts_head: bool = False
    folds_experts: bool = False
    static_rows: bool = False
    is_ours: bool = False
    flash_since: int = 0
    vendor_attention_from: float = 0.0
    narrow_flash_from: float = 0.0
    once_since: int = 0
    exchange_bytes_per_second: float = 0.0
    flash: bool = True
    fused: tuple[str, ...] = field(default=(), metadata={"words": STEPS})
    selective: str = "attention"
    loss_arrays: int = 0
    split_loss_arrays: int = 0
    compiled_loss_since: int = 0
    buckets: bool = False
    holds_sent: bool = False
    reports_first_stage: bool = False
    memory_figure: str = "allocated"
    joins_keys: bool = False
    weighs_early: bool = False
    casts_operands: bool = False
    casts_weights: bool = False
    narrow_states: bool = False
    by_tensor_lists: bool = False
    fused_loss: bool = False

    def calls_vendor_attention(self, compute_capability: float | None) -> bool:
        """Whether attention is the vendor's kernel, as XLA's, on a chip of this compute capability."""
        return bool(self.vendor_attention_from) and self.vendor_attention_from <= (compute_capability or 0)

    def has_flash(self, d_head: int, compute_capability: float | None) -> bool:
        """Whether attention with heads of this size is a flash kernel on a chip of a compute capability."""
        is_narrow = 0 < self.narrow_flash_from <= (compute_capability or 0)
        return self.flash and (not is_narrow or d_head <= NARROW_HEAD)

    def applied(self, step: StepEfficiency, compute_capability: float | None = None) -> StepEfficiency:
        """The efficiency of this program's steps on a chip whose XLA steps have `step`."""
        odds = dict(self.odds)
        if self.calls_vendor_attention(compute_capability):
            odds.pop("attention", None)
        figures: dict[str, Any] = {
            name: at_odds(getattr(step, name), odds[name]) for name in odds if name != "matmul"
        }
        if factor := odds.get("matmul"):
            figures["matmul"] = {dtype: at_odds(share, factor) for dtype, share in step.matmul.items()}
        figures |= {name: getattr(step, name) * factor for name, factor in self.seconds.items()}
        given = {name: self.sources["odds"] for name in odds if "odds" in self.sources}
        given |= {name: self.sources["seconds"] for name in self.seconds if "seconds" in self.sources}
        given |= {name: self.sources[name] for name in _OF_PROGRAMS if name in self.sources}
        return replace(
            step,
            **figures,
            sources={**step.sources, **given},
            **{name: getattr(self, name) for name in _OF_PROGRAMS},
        )

    @property
    def description(self) -> str:
        """A sentence for the assumptions of a plan."""
        text = f"the step is priced as {self.name} runs it ({self.about})"
        if self.name == self.fitted_on:
            return text
        return f"{text}, with constants fitted on published rows of {self.fitted_on}"


def at_odds(share: float, factor: float) -> float:
    """The share with `factor` times the odds of `share`.

    >>> at_odds(0.5, 3.0), at_odds(1.0, 0.5)
    (0.75, 1.0)
    """
    return factor * share / (1 - share + factor * share)


PROGRAMS = Folder(TrainingProgram, "programs", "software")
