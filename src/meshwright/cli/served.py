"""What a server is asked for: known before JAX is imported, here or in the process of a replica."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.common import load_hardware
from meshwright.errors import PlanError
from meshwright.nn.start.devices import split_host, use_devices_of
from meshwright.plan_file import Plan
from meshwright.progress import Progress
from meshwright.serve.engine.policy import DISAGGREGATED
from meshwright.serve.http.client_limits import ClientLimits

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from meshwright.cli.serving import Service
    from meshwright.serve.device.prefill_pool import PrefilledElsewhere


_DEFAULT_SLOTS = 8


@dataclass(frozen=True)
class Serving:
    """How a checkpoint is served: what `mw serve` is asked beside its address.

    plan: whose layout, and whose dtypes, sequences and context where those are not asked for. dtype: of
    weights and products; None takes bf16, on CPUs that do not multiply it f32, there with bf16 weights if the
    native extension widens them. num_slots: sequences at once; None takes the plan's, or 8. mode:
    interleaved, batched or disaggregated. chunk: most prompt tokens of a step, None as
    `layout.paged.chunk_of` has it. host_cache_bytes: for pages that are evicted from the cache. has_pools:
    some servers prefill for others, which generate. weights_dtype: of stored weights alone; kv_dtype: of the
    cache. num_drafts: most guessed tokens of a sequence a step; 0 guesses none. batch_invariant: results of a
    request do not depend on others', bit for bit.
    """

    tensor: int = 1
    num_slots: int | None = None
    context: int | None = None
    plan: Plan | None = None
    dtype: str | None = None
    mode: str = "interleaved"
    prefix_cache: bool = True
    cache_tokens: int | None = None
    chunk: int | None = None
    num_drafts: int = 0
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    strict: bool = False
    draft_checkpoint: Path | None = None
    host_cache_bytes: int = 0
    has_pools: bool = False
    batch_invariant: bool = False

    def use_devices(self) -> None:
        """Makes JAX see the devices that are asked for. Call it before JAX is imported."""
        if self.plan is None:
            split_host(self.num_devices)
        else:
            use_devices_of(load_hardware(self.plan.hardware))

    @property
    def num_devices(self) -> int:
        """Devices of a layout over `tensor` alone; disaggregated, prefill and generation have their own."""
        return self.tensor * (2 if self.mode == DISAGGREGATED else 1)

    @property
    def hands_over(self) -> bool:
        """Whether pages of one cache are copied to another's."""
        return self.mode == DISAGGREGATED or self.has_pools

    @property
    def hands_over_by(self) -> str:
        """The option that asks for it."""
        return f"--mode {DISAGGREGATED}" if self.mode == DISAGGREGATED else "--prefill-replicas"

    def check_prefix_cache(self) -> None:
        """Raises PlanError where something is asked for that needs the prefix cache, and it is off."""
        if self.prefix_cache:
            return
        if self.host_cache_bytes:
            raise PlanError("--host-cache-bytes keeps evicted pages, which --no-prefix-cache forgets")
        if self.hands_over:
            raise PlanError(f"{self.hands_over_by} hands over pages, which --no-prefix-cache forgets")

    @property
    def slots(self) -> int:
        """Sequences generated at once: those asked for, or the plan's."""
        if self.num_slots is not None:
            return self.num_slots
        return _DEFAULT_SLOTS if self.plan is None else self.plan.workload.num_sequences


@dataclass(frozen=True)
class Served:
    """A checkpoint, how it is served, and what its clients may do.

    log_json: write a line a request. otlp_endpoint: of the collector that spans go to, or None.
    """

    checkpoint: Path
    asked: Serving
    limits: ClientLimits
    log_json: bool = False
    otlp_endpoint: str | None = None


@dataclass(frozen=True)
class Replicas:
    """How many servers there are, and how many besides that prefill for them; 0: each prefills for itself.

    autoscaling, prefill_autoscaling: settings of Ray Serve by name, of the ones and of the others.
    """

    num_servers: int = 1
    autoscaling: Mapping[str, str] = field(default_factory=dict)
    num_prefills: int = 0
    prefill_autoscaling: Mapping[str, str] = field(default_factory=dict)

    @property
    def are_one(self) -> bool:
        """Whether one process is the server."""
        return self == Replicas()


@contextmanager
def open_app(
    served: Served, report: Progress, prefilled: "Callable[[Service], PrefilledElsewhere] | None" = None
) -> Iterator[tuple["Starlette", str]]:
    """The application and the name of its model, compiled and running until the block ends.

    prefilled: makes what asks other servers to prefill for the service. Raises what `open_service` does. Call
    `use_devices` first.
    """
    from meshwright.cli.serving import open_service
    from meshwright.serve.http.app import create_app
    from meshwright.serve.http.log import log_as_json

    with ExitStack() as stack:
        service = stack.enter_context(open_service(served.checkpoint, served.asked, report))
        tracing = None
        if served.otlp_endpoint:
            from meshwright.serve.http.tracing import Tracing

            tracing = stack.enter_context(Tracing(served.otlp_endpoint, service.name))
        if served.log_json:
            log_as_json()
        app = create_app(
            service.engine,
            service.tokenizer,
            service.name,
            served.limits,
            tracing,
            prefilled(service) if prefilled else None,
        )
        yield app, service.name
