"""Rollouts of a step on a pool of chips: the layout of its servers, and their simulated time."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from meshwright.errors import LayoutError, MeshwrightError, PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.page_sizes import DEFAULT_PAGE
from meshwright.layout.workload import Workload
from meshwright.load.simulator import Planned, simulate_server
from meshwright.load.traffic import Chat, Load
from meshwright.models.config import ModelConfig
from meshwright.models.count import widest_window
from meshwright.plan.serve.layouts import serving_layouts
from meshwright.plan.serve.phase import max_batch, price_phase
from meshwright.plan.serve.steps import StepSeconds
from meshwright.post_training.work import PostTraining
from meshwright.serve.engine.limits import Limits

# Servers that are simulated of each pool, and layouts of a pool that are simulated after a first look.
_SIMULATED, _LAYOUTS = 3, 2
# Servers are tried up to this many times the smallest that fits.
_LARGER = 8
# Sequences of a server at most.
_MOST_SLOTS = 1024


@dataclass(frozen=True)
class RolloutServers:
    """Servers of one layout on a pool. layout: of one server; machine: its chips; slots: its sequences."""

    layout: Layout
    machine: Hardware
    replicas: int
    slots: int

    @property
    def num_chips(self) -> int:
        return self.replicas * self.machine.num_chips

    @property
    def of_pool(self) -> Layout:
        """The layout of all servers as one: replicas are data ranks."""
        return self.layout.replace(data=self.layout.data * self.replicas)


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a step.

    seconds: until the last rollout ends. idle_share: the share of chip-seconds after a chip's server is done.
    weights_bytes: of one chip. needed_bytes: weights, caches of the mean length and buffers of one chip.
    """

    generator: RolloutServers
    seconds: float
    idle_share: float
    tokens_per_second: float
    weights_bytes: float
    needed_bytes: float


def generators(
    config: ModelConfig, pool: Hardware, work: PostTraining, held_bytes: float, weights_dtype: str
) -> list[RolloutServers]:
    """The layouts whose static price promises most tokens a second, best first.

    held_bytes: of each chip's memory, taken by the trainer. Raises PlanError if no server fits.
    """
    rated: list[tuple[float, RolloutServers]] = []
    smallest = pool.num_chips
    for machine in _servers(pool):
        if machine.num_chips > _LARGER * smallest:
            break
        replicas = pool.num_chips // machine.num_chips
        held = min(held_bytes, machine.chip.program_bytes - 1)
        free = replace(machine, chip=machine.chip.leaving(held))
        share = -(-work.num_rollouts // replicas)
        for layout in serving_layouts(config, free, {"weights_dtype": weights_dtype}, replicas=False):
            at = layout.at("generate")
            mean = work.prompt_tokens + work.output_tokens // 2
            try:
                most = max_batch(config, free, at, 1, work.prompt_tokens + work.output_tokens)
                shards = at.num_batch_shards
                slots = min(share, most, _MOST_SLOTS) // shards * shards
                if slots < 1:
                    continue
                point = price_phase(config, free, Workload(slots, mean, "generate"), [layout])
            except (PlanError, LayoutError):
                continue
            # A slot takes the next rollout as soon as its own ends, so a last wave need not be full.
            waves = max(1.0, share / slots)
            smallest = min(smallest, machine.num_chips)
            rated.append((waves * point.step_seconds, RolloutServers(layout, machine, replicas, slots)))
    if not rated:
        raise PlanError(
            f"{config.name}: no server fits {pool.spec} with {held_bytes / 1e9:.1f} GB a chip taken"
        )
    rated.sort(key=lambda candidate: candidate[0])
    return [generator for _, generator in rated[:_LAYOUTS]]


def best_rollouts(
    config: ModelConfig, pool: Hardware, work: PostTraining, held_bytes: float, weights_dtype: str
) -> Rollouts:
    """The rollouts of the layout that ends them first, by simulation."""
    first, *others = generators(config, pool, work, held_bytes, weights_dtype)
    best = simulate_rollouts(config, first, work)
    for generator in others:
        if ends := server_ends(config, generator, work, best.seconds):
            best = _rollouts(config, generator, work, ends)
    return best


def simulate_rollouts(config: ModelConfig, generator: RolloutServers, work: PostTraining) -> Rollouts:
    """The rollouts by the server's scheduler, of some servers; one of them has the longest rollout."""
    return _rollouts(config, generator, work, server_ends(config, generator, work))


# Keeping and offloading states often give the same servers, which are simulated once.
@lru_cache(maxsize=16)
def server_ends(
    config: ModelConfig, generator: RolloutServers, work: PostTraining, within: float = inf
) -> tuple[float, ...]:
    """Seconds until each simulated server is done; empty if any of them takes `within` or more."""
    # Every slot has the pages of a whole context, so that their size changes no time, and pages of a whole
    # context are the fastest to simulate. Layers with a window free their pages, and need the usual size.
    page = work.context if widest_window(config) is None else min(DEFAULT_PAGE, work.context)
    limits = Limits.of_layout(
        config,
        generator.layout,
        generator.machine.chip.platform,
        generator.slots,
        work.context,
        page_size=page,
    )
    prices = StepSeconds(
        config, generator.layout, generator.machine, limits.max_step_tokens(0), limits.context
    )
    ends: list[float] = []
    for turns in work.shares(generator.replicas, _SIMULATED):
        chats = [Chat(0.0, (turn,)) for turn in turns]
        answers, _ = simulate_server(Planned(limits, prices, prefix_cache=False), Load(chats, None))
        ends.append(max(answer.end_seconds for answer in answers))
        if ends[-1] >= within:
            return ()
    return tuple(ends)


def _rollouts(
    config: ModelConfig, generator: RolloutServers, work: PostTraining, ends: Sequence[float]
) -> Rollouts:
    """The rollouts of a generator. ends: seconds until each simulated server is done."""
    seconds = max(ends)
    shares = work.shares(generator.replicas, _SIMULATED)
    tokens = sum(turn.output_tokens for turns in shares for turn in turns)
    held = Workload(generator.slots, work.prompt_tokens + work.output_tokens, "generate")
    memory = price_phase(config, generator.machine, held, [generator.layout]).memory
    return Rollouts(
        generator,
        seconds,
        idle_share=1 - sum(ends) / (len(ends) * seconds),
        tokens_per_second=tokens / len(ends) * generator.replicas / seconds,
        weights_bytes=memory.weights,
        needed_bytes=memory.total,
    )


def _servers(pool: Hardware) -> Iterator[Hardware]:
    """Machines of one server: parts of the pool that divide it."""
    name = pool.spec.partition(":")[0].partition("*")[2] or pool.spec.partition(":")[0]
    size = 1
    while size <= pool.num_chips:
        if pool.num_chips % size == 0:
            with suppress(MeshwrightError):  # a size that no machine of the chip has
                yield replace(catalog.load(f"{name}:{size}"), chip=pool.chip)
        size *= 2
