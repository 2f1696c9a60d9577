"""A simulated load test of a serving plan, for `mw bench serve`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from meshwright.collector import collector_paused
from meshwright.cost.serving_step import in_inference
from meshwright.errors import PlanError, nearest
from meshwright.hardware import catalog
from meshwright.hardware.prices import per_hour, per_million_tokens
from meshwright.hardware.topology import Hardware
from meshwright.layout.layout_checks import check_one_cache
from meshwright.layout.page_sizes import DEFAULT_PAGE
from meshwright.load.engine_server import transfer_seconds_of
from meshwright.load.padded import PaddedSteps
from meshwright.load.percentiles import load_figures
from meshwright.load.settings import LatencyTargets, SimulatedServers
from meshwright.load.simulator import Planned, StepPrices, Used, simulate_server
from meshwright.load.traffic import Load, num_cut, within
from meshwright.plan_file import Plan, load_plan
from meshwright.progress import Progress
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.policy import DISAGGREGATED, Mode, mode_of
from meshwright.units import format_number_of, format_seconds

_MODES = (*get_args(Mode), DISAGGREGATED)
ALL_MODES = "all"
# Maximum number of servers to try.
_MOST_REPLICAS = 4096
# Share of the answers that must meet the targets.
_GOOD = 0.95


class NotEnoughError(PlanError):
    """A load that no number of replicas can serve."""


def simulate_load(
    path: Path,
    servers: SimulatedServers,
    load: Load,
    targets: LatencyTargets,
    report: Progress,
    factor: float = 1.0,
) -> dict[str, Any]:
    """The document of `mw bench serve` for the plan at `path`, with the key `simulated`.

    Raises PlanError for a training plan or an unknown mode, NotEnoughError if no tried number of replicas is
    enough.
    """
    plan = load_plan(path)
    if plan.workload.phase == "train":
        raise PlanError(f"{path} trains; mw plan serve -o {path} writes a plan that serves")
    if servers.mode not in _MODES:
        raise PlanError(f"--mode {servers.mode!r} is unknown; {nearest(servers.mode, [*_MODES, ALL_MODES])}")
    if servers.mode == DISAGGREGATED and not servers.prefix_cache:
        raise PlanError(f"--mode {DISAGGREGATED} hands over cached pages; leave out --no-prefix-cache")
    if not servers.replicas and targets == LatencyTargets():
        raise PlanError("--replicas 0 needs a target; add --ttft or --tpot")
    report("pricing the plan's steps", None)
    server = _server(plan, servers)
    if factor != 1:
        server = replace(server, prices=ScaledPrices(server.prices, factor))
    chats = within(list(load.chats), plan.workload.seq_len, load.prefix_tokens)
    asked, load = load.chats, replace(load, chats=chats)
    if servers.replicas:
        document = simulated_figures(server, load, targets)
    else:
        server, document = _fewest(server, load, targets, report)
    machines = server.replicas + server.prefill_replicas
    step = plan.planned_step_seconds
    measured = document["tpot_seconds"]["p50"]
    row = {"name": "tpot", "seconds": measured, "predicted_seconds": step}
    row["ratio"] = measured / step if measured and step else None
    document["simulated"] |= {"mode": servers.mode, "replicas": server.replicas}
    document["simulated"] |= {"prefill_replicas": server.prefill_replicas, "hardware": plan.hardware}
    document["simulated"]["chips"] = machines * plan.layout.mesh.num_devices
    document["price"] = _price(plan, document["simulated"]["chips"], document["new_tokens_per_second"])
    head = {"kind": "serving", "url": str(path), "model": plan.model.name}
    return head | document | {"cut": num_cut(asked, chats), "results": [row]}


def simulated_modes(
    path: Path, servers: SimulatedServers, load: Load, targets: LatencyTargets, report: Progress
) -> dict[str, dict[str, Any]]:
    """The documents of `simulate_load` by mode."""
    return {mode: simulate_load(path, replace(servers, mode=mode), load, targets, report) for mode in _MODES}


@dataclass(frozen=True)
class ScaledPrices:
    """Step prices times a factor that a measured run gave."""

    prices: StepPrices
    factor: float

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int
    ) -> float:
        return self.factor * self.prices.seconds(num_sequences, mean_context, chunks, num_drafts)

    def generating(self, num_sequences: int, mean_contexts: np.ndarray) -> np.ndarray:
        return self.factor * self.prices.generating(num_sequences, mean_contexts)


def _server(plan: Plan, servers: SimulatedServers) -> Planned:
    hardware = catalog.load(plan.hardware)
    if servers.ideal:
        hardware = replace(hardware, chip=hardware.chip.roofline())
    context = plan.workload.seq_len
    limits = Limits.of_layout(
        plan.model,
        plan.layout,
        hardware.chip.platform,
        plan.workload.num_sequences,
        context,
        page_size=min(DEFAULT_PAGE, context),
    )
    limits = replace(limits, multiplies_padding=_multiplies_padding(plan, hardware))
    disaggregated = servers.mode == DISAGGREGATED
    if disaggregated:
        check_one_cache(plan.layout, plan.model, f"--mode {DISAGGREGATED}")
        limits = replace(limits, has_states=False)  # planned: states are handed over with the pages
    elif limits.has_states and servers.prefix_cache:
        limits = replace(limits, num_snapshots=limits.slots_per_replica)
    steps = PaddedSteps.of(plan.model, plan.layout, hardware, limits, servers.num_drafts)
    return Planned(
        limits,
        steps,
        mode_of(servers.mode),
        servers.prefix_cache,
        servers.replicas or 1,
        (servers.prefill_replicas or 1) if disaggregated else 0,
        transfer_seconds(plan, hardware) if disaggregated else 0.0,
        servers.num_drafts,
        servers.acceptance,
        idle=steps.idle_seconds,
        request_seconds=in_inference(hardware).chip.step.host_request_seconds,
    )


def _price(plan: Plan, chips: int, new_tokens_per_second: float) -> dict[str, Any]:
    """The price of the chips at this rate of generated tokens; None if it is unknown."""
    chip = catalog.load(plan.hardware).chip
    hourly = per_hour(chip, chips)
    per_million = per_million_tokens(hourly, new_tokens_per_second)
    return {"per_hour": hourly, "per_million_tokens": per_million, "currency": chip.currency}


def _multiplies_padding(plan: Plan, hardware: Hardware) -> bool:
    """Whether padding rows take the time of others: not if the machine skips them for this model."""
    if in_inference(hardware).chip.step.padding == 1:
        return True
    # This import needs JAX, which is installed if it has measured such a machine.
    from meshwright.nn.layer_weights import passes_over_zeros

    return not passes_over_zeros(plan.model, plan.layout.at("generate"))


def transfer_seconds(plan: Plan, hardware: Hardware) -> float:
    """Seconds to send one token's keys and values between two replicas, over each chip's network card."""
    return transfer_seconds_of(plan.model, plan.layout, hardware, plan.workload.seq_len)


def simulated_figures(server: Planned, load: Load, targets: LatencyTargets) -> dict[str, Any]:
    """The figures of `load` on a simulated server: of `load_figures`, and of its replicas."""
    with collector_paused():
        answers, used = simulate_server(server, load)
        figures = load_figures(answers, targets)
    return figures | {"simulated": _used(used, figures["seconds"], server)}


def _used(used: Used, seconds: float, server: Planned) -> dict[str, Any]:
    devices = server.replicas + server.prefill_replicas
    return {
        "steps": used.steps,
        "preempted": used.preempted,
        "prefix_hit_rate": used.cached_tokens / used.prompt_tokens if used.prompt_tokens else 0.0,
        "busy_share": used.busy_seconds / (devices * seconds) if seconds else 0.0,
    }


def _fewest(
    server: Planned, load: Load, targets: LatencyTargets, report: Progress
) -> tuple[Planned, dict[str, Any]]:
    """The smallest number of replicas that meets the targets, by doubling and bisection."""

    def tried(number: int) -> tuple[Planned, dict[str, Any], bool]:
        report(f"trying {format_number_of(number, 'replica')}", None)
        several = replace(
            server, replicas=number, prefill_replicas=number * server.prefill_replicas and number
        )
        figures = simulated_figures(several, load, targets)
        return several, figures, figures["goodput"] >= _GOOD * figures["requests_per_second"]

    number = 1
    while not (last := tried(number))[2]:
        if number >= min(_MOST_REPLICAS, len(load.chats)):
            best = last[1]
            raise NotEnoughError(
                f"with {format_number_of(number, 'replica')} "
                f"{best['goodput'] / best['requests_per_second']:.0%} of the answers meet the targets, and "
                f"{_GOOD:.0%} are wanted: {_beyond(best, targets)}. More replicas do not help; take a larger "
                "target, or plan for it: mw plan serve --ttft --tpot"
            )
        number *= 2
    low, enough = number // 2, last
    while number - low > 1:
        middle = (low + number) // 2
        here = tried(middle)
        low, number, enough = (low, middle, here) if here[2] else (middle, number, enough)
    return enough[0], enough[1]


def _beyond(figures: dict[str, Any], targets: LatencyTargets) -> str:
    """The targets that the 95th percentile of answers misses, each with its time."""
    asked = {"ttft": targets.ttft_seconds, "tpot": targets.tpot_seconds}
    reached = {name: figures[f"{name}_seconds"]["p95"] for name in asked}
    missed = [
        f"--{name} {format_seconds(target)}, where 95% are within {format_seconds(reached[name])}"
        for name, target in asked.items()
        if target is not None and (reached[name] or 0.0) > target
    ]
    return " and ".join(missed) or "more of them miss one target or the other than miss any single target"
