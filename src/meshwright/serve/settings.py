"""The settings of a server: its engine, its limits and its replicas. Imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware import catalog
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.nn.start.devices import split_host, use_devices_of
from meshwright.options import option
from meshwright.plan_file import Plan
from meshwright.serve.engine.policy import DISAGGREGATED
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.units import parse_count, parse_length

_DEFAULT_SLOTS = 8


@dataclass(frozen=True)
class EngineSettings:
    """How the engine serves a checkpoint.

    plan: gives the layout, and the dtypes, slots and context that the options leave open. has_pools: some
    servers prefill for others, which generate.
    """

    num_slots: int | None = option(
        None, flag="--slots", least=1, help="Sequences that generate at once.", unset="the plan's, or 8"
    )
    context: int | None = option(
        None,
        parser=parse_length,
        help="The most tokens of prompt and answer.",
        unset="the model's, up to 4096",
    )
    tensor: int = option(1, least=1, help="Devices to split the model over.")
    dtype: Literal["f32", "bf16"] | None = option(
        None, help="Dtype of weights and matmuls.", unset="the plan's; bf16, matmuls f32 on CPUs without it"
    )
    weights_dtype: Literal["f32", "bf16", "int8", "fp8", "int4"] | None = option(
        None, help="Dtype of stored weights, quantised as they are read.", unset="as computed"
    )
    kv_dtype: Literal["int8", "fp8"] | None = option(None, help="Dtype of the KV cache.", unset="as computed")
    mode: Literal["interleaved", "batched", "disaggregated"] = option(
        "interleaved",
        help="Prefill in the same steps as generation, one batch at a time, or on separate devices.",
    )
    prefix_cache: bool = option(True, help="Reuse cached pages of shared prompt prefixes.")
    cache_tokens: int | None = option(
        None, parser=parse_count, help="Tokens in the KV cache.", unset="slots x context"
    )
    host_cache_bytes: int | None = option(
        None, parser=parse_count, help="Host memory for evicted cache pages: 8G.", unset="none"
    )
    chunk: int | None = option(
        None,
        parser=parse_count,
        help="Most prompt tokens per step; smaller chunks delay running answers less.",
        unset=f"{DEFAULT_CHUNK}; whole prompts with context",
    )
    num_drafts: int = option(
        0,
        flag="--drafts",
        least=0,
        most=15,
        help="Draft tokens per step (speculative decoding by n-gram look-up).",
    )
    draft_head: bool = option(False, help="The model's own head makes the --drafts.")
    draft_checkpoint: Path | None = option(
        None, help="A smaller model that makes the --drafts.", unset="n-gram look-up"
    )
    ratio_test: bool = option(
        False, help="Accept sampled drafts of a model or head by the ratio of probabilities."
    )
    batch_invariant: bool = option(
        False, help="Make results bitwise independent of other requests, at some cost in speed."
    )
    strict: bool = option(False, help="Stop if anything is compiled after the start.")
    plan: Plan | None = None
    has_pools: bool = False

    def use_devices(self) -> None:
        """Make JAX see the devices of the layout. Call it before JAX is imported."""
        if self.plan is None:
            split_host(self.num_devices)
        else:
            use_devices_of(catalog.load(self.plan.hardware))

    @property
    def num_devices(self) -> int:
        """Devices of a layout over `tensor`, doubled for a disaggregated server."""
        return self.tensor * (2 if self.mode == DISAGGREGATED else 1)

    @property
    def hands_over(self) -> bool:
        """Whether the pages of one cache are copied to another."""
        return self.mode == DISAGGREGATED or self.has_pools

    @property
    def hands_over_by(self) -> str:
        """The option that makes it hand over pages."""
        return f"--mode {DISAGGREGATED}" if self.mode == DISAGGREGATED else "--prefill-replicas"

    def check_prefix_cache(self) -> None:
        """Raise PlanError if the prefix cache is off and another setting needs it."""
        if self.prefix_cache:
            return
        if self.host_cache_bytes:
            raise PlanError("--host-cache-bytes keeps evicted pages, which --no-prefix-cache forgets")
        if self.hands_over:
            raise PlanError(f"{self.hands_over_by} hands over pages, which --no-prefix-cache forgets")

    @property
    def slots(self) -> int:
        """Sequences that generate at once."""
        if self.num_slots is not None:
            return self.num_slots
        return _DEFAULT_SLOTS if self.plan is None else self.plan.workload.num_sequences


@dataclass(frozen=True)
class Server:
    """A checkpoint, its engine, and the limits of its clients.

    log_json: log a line for each request. otlp_endpoint: the address of the collector of its spans.
    """

    checkpoint: Path
    engine: EngineSettings
    limits: ClientLimits
    log_json: bool = False
    otlp_endpoint: str | None = None


@dataclass(frozen=True)
class Replicas:
    """The number of servers, and of further servers that prefill for them; 0: each prefills for itself.

    autoscaling, prefill_autoscaling: NAME=VALUE, settings of Ray Serve for both kinds.
    """

    num_servers: int = option(1, flag="--replicas", least=1, help="Servers at one address, on Ray Serve.")
    autoscaling: tuple[str, ...] = option(
        (), metavar="K=V", help="A Ray Serve autoscaling setting: max_replicas=8; repeatable.", unset="none"
    )
    num_prefills: int = option(
        0,
        flag="--prefill-replicas",
        least=0,
        help="Separate servers that prefill for the --replicas; 0: each replica does both.",
    )
    prefill_autoscaling: tuple[str, ...] = option(
        (), metavar="K=V", help="The same for the --prefill-replicas.", unset="none"
    )

    def __post_init__(self) -> None:
        _ = self.pools  # checks both

    @property
    def pools(self) -> tuple[tuple[int, dict[str, str]], tuple[int, dict[str, str]]]:
        """The number of servers and their autoscaling settings by name, for both kinds."""
        prefills = _named(self.prefill_autoscaling, "--prefill-autoscaling")
        return (self.num_servers, _named(self.autoscaling, "--autoscaling")), (self.num_prefills, prefills)

    @property
    def is_single(self) -> bool:
        """Whether one process is the server."""
        return self == Replicas()


def _named(words: Sequence[str], flag: str) -> dict[str, str]:
    """Settings by name. Raises MeshwrightError for a word that is not NAME=VALUE, and for a repeated name."""
    settings: dict[str, str] = {}
    for text in words:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in settings:
            raise MeshwrightError(f"{flag} {text!r}: each is NAME=VALUE, once, such as max_replicas=8")
        if name.endswith("_replicas") and not value.isdecimal():
            raise MeshwrightError(f"{flag} {text!r}: {value!r} is not a number of replicas")
        settings[name] = value
    return settings
