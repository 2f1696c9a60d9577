"""The record of a serving engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.programs.efficiency import StepEfficiency
from meshwright.records import Folder, Record

_REACHED = {
    "keys": (
        "memory", "cache", "widened", "waiting", "prefetch", "elementwise", "attention", "experts",
        "matmul.bf16", "matmul.fp8", "matmul.fp4", "kernel_seconds", "experts_seconds", "collective_seconds",
        "exchange_seconds", "launch_seconds",
    )
}  # fmt: skip


# Settings of a plan that engines have.
FLAGS = (
    "tensor", "data", "replicas", "devices", "expert", "experts", "sequences", "all_sequences", "step_tokens",
    "context", "memory_share", "cache",
)  # fmt: skip


@dataclass(frozen=True)
class ServingEngine(Record):
    """A serving engine.

    versions: of its published rows. tpu, gpu, cpu: figures of `StepEfficiency` on that kind of chip, with
    `matmul.bf16` for a key of `matmul`; a missing figure is the chip's `[inference]`.

    step_tokens: maximum tokens of a replica in a step. cuts_prompts, counts_generated: as in
    `serve.engine.shared_tokens`. separate_prompts: prompts have a program of their own, and sequences that
    generate wait for it. reserves_answers: a request starts if its whole answer has memory, so none loses its
    pages. memory_share: share of a chip's memory for weights, caches and workspace. shares_free: it is
    instead the caches' share of the memory that weights and workspace leave. max_sequences: sequences of a
    replica at once. request_seconds: of HTTP and of the tokeniser, for each request. step_seconds: of the
    host for each step, while devices wait. grouped_experts: one kernel multiplies all experts of a device.
    adds_shared: a device adds its partial sums of chosen and of shared experts, and one all-reduce has both.
    direct_seconds: of its small all-reduce (`Switch.direct_seconds`). prompt_layer_seconds: of the host for
    each layer of a step with prompts, which has no CUDA graph.
    routes_in_turn: requests go to replicas in turn, not to the one with the fewest.
    balances_prompts: groups of devices with sequences of their own wait to compute prompts together. apart:
    the record of its pools apart. outside_bytes: of a chip, for graphs, programs and libraries beyond
    `memory_share`. load_bytes_per_second: of weights on a host. compile_seconds: to compile and to
    capture graphs.

    command: starts the server, with {model}. flags, file: how the command line or its file of settings sets
    each of FLAGS, with {} for its value; an empty flag is a parent's that this engine does not use. needs:
    a further condition of a setting. cache_names: its names of types of caches. defaults: settings that a
    plan leaves as they are.
    """

    versions: tuple[str, ...] = ()
    step_tokens: int = 8192
    max_sequences: int = 1024
    memory_share: float = 0.9
    shares_free: bool = False
    cuts_prompts: bool = True
    counts_generated: bool = True
    separate_prompts: bool = False
    reserves_answers: bool = False
    request_seconds: float = 0.0
    step_seconds: float = 0.0
    grouped_experts: bool = False
    adds_shared: bool = False
    direct_seconds: float = 0.0
    prompt_layer_seconds: float = 0.0
    routes_in_turn: bool = False
    balances_prompts: bool = False
    apart: str = ""
    outside_bytes: float = 0.0
    load_bytes_per_second: float = 1e9
    compile_seconds: float = 0.0
    command: str = ""
    flags: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"keys": FLAGS})
    file: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"keys": FLAGS})
    needs: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"keys": FLAGS})
    cache_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    defaults: tuple[str, ...] = ()
    tpu: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_REACHED)
    gpu: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_REACHED)
    cpu: Mapping[str, float] = field(default_factory=dict, hash=False, metadata=_REACHED)

    def applied(self, inference: StepEfficiency, kind: str) -> StepEfficiency:
        """The efficiency of this engine's steps on a chip of a kind, whose `[inference]` is given."""
        figures: Mapping[str, float] = getattr(self, kind)
        products = {key.partition(".")[2]: value for key, value in figures.items() if "." in key}
        others: dict[str, Any] = {key: value for key, value in figures.items() if "." not in key}
        matmul = {**inference.matmul, **products}
        facts = {"grouped": self.grouped_experts, "adds_shared": self.adds_shared}
        return replace(inference, matmul=matmul, **facts, **others)

    def cache_bytes(self, device_bytes: float, used_bytes: float) -> float:
        """Memory for caches on a chip with `device_bytes`. used_bytes: of weights and workspace."""
        if self.shares_free:
            return self.memory_share * (device_bytes - used_bytes)
        return self.memory_share * device_bytes - used_bytes


ENGINES = Folder(ServingEngine, "engines", "engine")
