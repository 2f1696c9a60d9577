"""The cheapest servers of an engine for a rate of requests and targets at their 95th percentile.

Each layout has a lower bound on its servers, from the time of the device that one request takes. Layouts are
simulated in the order of the price of this bound, with more servers until the targets are met. The search
ends when no bound is below the cheapest price found. The layouts with the lowest bounds are also simulated
with prefill and generation in pools apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import numpy as np

from meshwright.engines.serving_engine import ServingEngine
from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware.prices import per_hour, per_million_tokens, without_price
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.load.engine_server import EngineServer, transfer_seconds_of
from meshwright.load.rated_verdict import rated_verdict
from meshwright.load.simulator import Planned, simulate_server
from meshwright.load.traffic import Chat, Load, Turn, poisson
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.boot import boot_of
from meshwright.plan.serve.launch_line import has_settings_for, launch_line
from meshwright.plan.serve.layouts import serving_layouts
from meshwright.plan.serve.ranges import serving_ranges
from meshwright.plan.serve.search import Infeasible
from meshwright.plan.serve.with_engine import on_engine
from meshwright.plan_file import Plan
from meshwright.units import format_number_of, format_seconds

# Requests of a simulation: the arrivals of this many seconds, within these bounds.
_SECONDS, _LEAST, _MOST = 60, 300, 3000
# Layouts whose bounds are this many times the best found are not simulated; nor more layouts than this.
_MOST_SIMULATED = 40
_NUM_APART = 3
# Servers do not keep up if the wait for first tokens grows by more than this share of the time: a server with
# 5% more requests than it can answer has 3 s more to work off after a minute.
_GROWTH = 0.05
# Servers are added up to this many times the bound, then the layout counts as unable.
_MOST_TIMES = 3
# A layout is planned for this number of sequences at once.
_SEQUENCES = 256
_PERCENTILE = 95


@dataclass(frozen=True)
class RatedLoad:
    """Requests per second, targets in seconds, and (prompt, output) tokens of a sample of the requests.

    max_price_per_hour: of all servers, in the currency of the chip's price.
    """

    rate: float
    turns: Sequence[tuple[int, int]]
    ttft_p95: float = inf
    tpot_p95: float = inf
    max_price_per_hour: float = inf

    @property
    def context(self) -> int:
        return max(map(sum, self.turns)) + 1

    def load(self) -> Load:
        """Poisson arrivals of a sample of the requests."""
        count = min(max(_LEAST, ceil(self.rate * _SECONDS)), _MOST)
        arrivals = poisson(self.rate, 1, seed=0)
        chosen = np.random.default_rng(0).integers(0, len(self.turns), count).tolist()
        return Load([Chat(next(arrivals), (Turn(*self.turns[place]),)) for place in chosen], None)


@dataclass(frozen=True)
class RatedServers:
    """Simulated servers: replicas that generate, and replicas that only prefill if these are apart.

    ttft_p95, tpot_p95: simulated seconds. price_per_hour: None if the chip has no price. missed: the targets
    that are not met, in words; None if all are.
    """

    server: EngineServer
    replicas: int
    prefill_replicas: int
    ttft_p95: float
    tpot_p95: float
    missed: str | None

    @property
    def chips(self) -> int:
        return (self.replicas + self.prefill_replicas) * self.server.hardware.num_chips

    @property
    def price_per_hour(self) -> float | None:
        return per_hour(self.server.hardware.chip, self.chips)

    @property
    def cost(self) -> float:
        """Price per hour, or chips if the chip has no price."""
        return self.chips if self.price_per_hour is None else self.price_per_hour

    def to_dict(self) -> dict[str, Any]:
        """The keys of servers of `mw plan serve --rate` in docs/reference/json.md."""
        server = self.server
        return {
            "hardware": server.hardware.spec,
            "layout": str(server.layout),
            "weights_dtype": server.layout.precision.weights_dtype,
            "replicas": self.replicas,
            "prefill_replicas": self.prefill_replicas,
            "chips": self.chips,
            "price_per_hour": self.price_per_hour,
            "ttft_p95_seconds": self.ttft_p95,
            "tpot_p95_seconds": self.tpot_p95,
            "missed": self.missed,
            "ranges": serving_ranges(
                server.config,
                server.hardware,
                server.engine,
                ttft_seconds=self.ttft_p95,
                tpot_seconds=self.tpot_p95,
                pools_apart=bool(self.prefill_replicas),
            ),
        }


@dataclass(frozen=True)
class RatedPlan:
    """The cheapest servers that meet the targets, and cheaper ones that do not, from the highest price.

    other: the fewest servers of another chip that could hold the load, by its devices' time.
    """

    best: RatedServers
    cheaper: tuple[RatedServers, ...]
    other: "_Bound | None"
    simulated: int
    considered: int

    def to_dict(self, load: RatedLoad) -> dict[str, Any]:
        """The key `load` of `mw plan serve --rate` in docs/reference/json.md."""
        server = self.best.server
        line = launch_line(
            server.engine, server.config, server.layout, sequences=_SEQUENCES, context=load.context
        )
        boot = boot_of(server.config, server.hardware, server.layout, server.engine, load.context)
        prompts, answers = zip(*load.turns, strict=True)
        document = {
            "model": {"name": server.config.name},
            "engine": server.engine.name,
            "requests": {
                "prompt_tokens": round(np.mean(prompts)),
                "output_tokens": round(np.mean(answers)),
                "longest": load.context - 1,
            },
            "rate_per_second": load.rate,
            "ttft_p95_seconds": None if load.ttft_p95 == inf else load.ttft_p95,
            "tpot_p95_seconds": None if load.tpot_p95 == inf else load.tpot_p95,
            "best": self.best.to_dict(),
            **self._prices(load),
            "cheaper": [servers.to_dict() for servers in self.cheaper],
            "other": self.other and self.other.to_dict(),
            "simulated": self.simulated,
            "considered": self.considered,
            "launch": line.to_dict(),
            "boot": boot and boot.to_dict(),
        }
        return document | {"verdict": rated_verdict(document, server.hardware.chip)}

    def plan(self, load: RatedLoad) -> Plan:
        """The plan of a decode step of a server of the best deployment, with its largest batch."""
        server = self.best.server
        config = replace(server.config, max_seq_len=max(load.context, server.config.max_seq_len))
        slots = server.limits(load.context, _SEQUENCES).num_slots
        workload = Workload(slots, load.context, "generate")
        return Plan(config, server.hardware.spec, workload, server.layout, {})

    def _prices(self, load: RatedLoad) -> dict[str, float | None]:
        """Prices of a day, and of a million generated tokens at the load's rate."""
        hourly = self.best.price_per_hour
        tokens_per_second = load.rate * sum(answer for _, answer in load.turns) / len(load.turns)
        return {
            "price_per_day": None if hourly is None else 24 * hourly,
            "price_per_million_tokens": per_million_tokens(hourly, tokens_per_second),
        }


@dataclass(frozen=True)
class _Bound:
    """A layout, and the servers that its devices' time needs at least."""

    server: EngineServer
    busy: float  # server-seconds a second: of generation
    busy_prefill: float

    @property
    def replicas(self) -> int:
        return max(1, ceil(self.busy + self.busy_prefill))

    @property
    def cost(self) -> float:
        hardware = self.server.hardware
        return self.replicas * hardware.num_chips * (hardware.chip.price_per_chip_hour or 1.0)

    def to_dict(self) -> dict[str, Any]:
        hardware, layout = self.server.hardware, self.server.layout
        return {
            "replicas": self.replicas,
            "hardware": hardware.spec,
            "layout": str(layout),
            "weights_dtype": layout.precision.weights_dtype,
            "chips": self.replicas * hardware.num_chips,
            "price_per_hour": per_hour(hardware.chip, self.replicas * hardware.num_chips),
        }


def cheapest_servers(
    config: ModelConfig,
    machines: Sequence[Hardware],
    engine: ServingEngine,
    load: RatedLoad,
    precisions: Sequence[Mapping[str, object]],
    layout: Layout | None = None,
) -> RatedPlan:
    """The cheapest servers for a load.

    Raises Infeasible if no simulated layout meets the targets, or if the cheapest costs more than the limit.
    """
    considered, holding = 0, list[_Alone]()
    for server in _servers(config, machines, engine, precisions, layout):
        considered += 1
        if alone := _alone(server, load):
            holding.append(alone)
    if not holding:
        raise Infeasible(
            f"{config.name}: no layout of {engine.name} on the given machines holds the weights and a "
            f"request of {load.context:,} tokens"
        )
    bounds = [bound for alone in holding if (bound := _bound(alone, load))]
    if not bounds:
        raise Infeasible(_too_slow(config, holding, load))
    bounds.sort(key=lambda bound: bound.cost)
    tried: list[RatedServers] = []
    best: RatedServers | None = None
    for place, bound in enumerate(bounds[:_MOST_SIMULATED]):
        if best is not None and bound.cost >= best.cost:
            break
        for servers in _grown(bound, load, apart=place < _NUM_APART, most=best.cost if best else inf):
            tried.append(servers)
            if servers.missed is None and (best is None or servers.cost < best.cost):
                best = servers
    if best is None:
        nearest = min(tried, key=lambda servers: _excess(servers, load))
        raise Infeasible(
            f"{config.name}: none of {format_number_of(len(tried), 'simulated choice')} meets the targets; "
            f"the nearest is {format_number_of(nearest.replicas, 'server')} of "
            f"{nearest.server.hardware.spec}, {nearest.server.layout}: {nearest.missed}"
        )
    while not any(servers.missed and servers.cost < best.cost for servers in tried):
        if best.prefill_replicas or best.replicas == 1:
            break
        tried.append(fewer := _simulated(best.server, best.replicas - 1, 0, load))
        best = best if fewer.missed else fewer
    cheaper = [servers for servers in tried if servers.missed and servers.cost < best.cost]
    cheaper.sort(key=lambda servers: (-servers.cost, _excess(servers, load)))
    _check_price(best, load.max_price_per_hour)
    chip = best.server.hardware.chip.name
    other = next((bound for bound in bounds if bound.server.hardware.chip.name != chip), None)
    return RatedPlan(best, tuple(cheaper[:5]), other, len(tried), considered)


def _check_price(best: RatedServers, limit: float) -> None:
    """Raise Infeasible for servers over a limit on the price of an hour, PlanError without a price."""
    hourly = best.price_per_hour
    if hourly is None and limit < inf:
        name = best.server.hardware.chip.name
        raise PlanError(without_price(name, "--max-price-per-hour"))
    if hourly is not None and hourly > limit:
        servers = f"{format_number_of(best.replicas, 'server')} of {best.server.hardware.spec}"
        raise Infeasible(
            f"the cheapest servers that hold the load, {servers}, cost {hourly:,.2f} an hour, more than "
            f"--max-price-per-hour {limit:g}"
        )


def _servers(
    config: ModelConfig,
    machines: Sequence[Hardware],
    engine: ServingEngine,
    precisions: Sequence[Mapping[str, object]],
    layout: Layout | None,
) -> Iterator[EngineServer]:
    for plain in machines:
        machine = on_engine(plain, engine)
        for precision in precisions:
            layouts = (
                [layout.replace(**precision)]
                if layout
                else serving_layouts(config, machine, precision, replicas=config.moe is not None)
            )
            for each in layouts:
                # Replicas are servers of their own, unless they share experts.
                shares = each.data == 1 or config.moe is not None
                if has_settings_for(engine, each) and shares and each.mesh.num_devices == machine.num_chips:
                    yield EngineServer(config, each, machine, engine)


@dataclass(frozen=True)
class _Alone:
    """A layout with the seconds of a mean prompt, and of decode steps by their number of sequences.

    For a layout that no other request delays.
    """

    server: EngineServer
    prompt_seconds: float
    steps: Mapping[int, float]


def _alone(server: EngineServer, load: RatedLoad) -> _Alone | None:
    """The times of a server's layout; None if it does not hold a request."""
    try:
        limits = server.limits(load.context, _SEQUENCES)
    except MeshwrightError:
        return None
    prices = server.steps(limits)
    prompt = round(np.mean([prompt for prompt, _ in load.turns]))
    output = float(np.mean([output for _, output in load.turns]))
    context = prompt + output / 2
    sizes = [n for n in (1 << k for k in range(16)) if n <= limits.num_slots]
    steps = {n: prices.seconds(n, context, (), 0) for n in sizes}
    return _Alone(server, prices.seconds(0, 0.0, [(prompt, prompt)], 0), steps)


def _bound(alone: _Alone, load: RatedLoad) -> _Bound | None:
    """A bound of the servers that a load needs; None if the layout is too slow for a single request."""
    fitting = [seconds / n for n, seconds in alone.steps.items() if seconds <= load.tpot_p95]
    if not fitting or alone.prompt_seconds > load.ttft_p95:
        return None
    generation = float(np.mean([output for _, output in load.turns])) * min(fitting)
    prefill = load.rate * alone.prompt_seconds / alone.server.data
    return _Bound(alone.server, load.rate * generation, prefill)


def _too_slow(config: ModelConfig, holding: Sequence[_Alone], load: RatedLoad) -> str:
    """The message that no layout meets the targets for a single request, with the nearest layout."""

    def excess(alone: _Alone) -> float:
        return max(alone.prompt_seconds / load.ttft_p95, min(alone.steps.values()) / load.tpot_p95)

    nearest = min(holding, key=excess)
    token = min(nearest.steps.values())
    late = [
        f"{name} in {format_seconds(seconds)}, not {format_seconds(target)}"
        for name, seconds, target in (
            ("the first token", nearest.prompt_seconds, load.ttft_p95),
            ("a token", token, load.tpot_p95),
        )
        if seconds > target
    ]
    return (
        f"{config.name}: no layout meets the targets even for a single request; the nearest is "
        f"{nearest.server.hardware.spec}, {nearest.server.layout}, which gives {' and '.join(late)}"
    )


def _grown(bound: _Bound, load: RatedLoad, *, apart: bool, most: float) -> Iterator[RatedServers]:
    """Servers of a layout, more and more until the targets are met or the price reaches `most`."""
    each = bound.cost / bound.replicas
    number = bound.replicas
    while number * each < most and number <= max(_MOST_TIMES * bound.replicas, bound.replicas + 2):
        servers = _simulated(bound.server, number, 0, load)
        yield servers
        if servers.missed is None:
            most = servers.cost
            break
        number += max(1, number // 8)
    if not apart:
        return
    prefill, decode = (max(1, ceil(busy / 0.8)) for busy in (bound.busy_prefill, bound.busy))
    while (prefill + decode) * each < most and prefill + decode <= _MOST_TIMES * bound.replicas + 2:
        servers = _simulated(bound.server, decode, prefill, load)
        yield servers
        if servers.missed is None:
            return
        late = servers.ttft_p95 / load.ttft_p95 > servers.tpot_p95 / load.tpot_p95
        prefill, decode = prefill + late, decode + (not late)


def _simulated(server: EngineServer, replicas: int, prefill: int, load: RatedLoad) -> RatedServers:
    limits = server.limits(load.context, _SEQUENCES)
    steps = server.steps(limits)
    planned = Planned(limits, steps, policy=server.policy, prefix_cache=False, replicas=replicas)
    if prefill:
        receives = replace(server, receives=True)
        seconds = transfer_seconds_of(server.config, server.layout, server.hardware, load.context)
        planned = replace(
            planned,
            prices=receives.steps(limits),
            policy=receives.policy,
            prefill=planned,
            prefill_replicas=prefill,
            transfer_seconds=seconds,
        )
    answers, _ = simulate_server(planned, load.load())
    sent = [answer.first_sent(pools_apart=prefill > 0) for answer in answers]
    waits = [first - answer.start_seconds for first, answer in zip(sent, answers, strict=True)]
    gaps = [
        (answer.piece_seconds[-1] - first) / (answer.num_tokens - 1)
        for first, answer in zip(sent, answers, strict=True)
        if answer.num_tokens > 1
    ]
    ttft = float(np.percentile(waits, _PERCENTILE)) + server.engine.request_seconds
    tpot = float(np.percentile(gaps, _PERCENTILE)) if gaps else 0.0
    starts = [answer.start_seconds for answer in answers]
    missed = _missed(ttft, tpot, load, _growth(starts, waits))
    return RatedServers(server, replicas, prefill, ttft, tpot, missed)


def _growth(starts: Sequence[float], waits: Sequence[float]) -> float:
    """Seconds that the wait for the first token grows by in a second, from the middle to the last third."""
    order = np.argsort(starts)
    middle, last = (order[len(order) * part // 3 : len(order) * (part + 1) // 3] for part in (1, 2))
    at, waited = np.asarray(starts), np.asarray(waits)
    return float((waited[last].mean() - waited[middle].mean()) / (at[last].mean() - at[middle].mean()))


def _missed(ttft: float, tpot: float, load: RatedLoad, growth: float) -> str | None:
    grows = f"the wait for first tokens grows by {format_seconds(60 * growth)} a minute"
    parts = [grows] if growth > _GROWTH else []
    parts += [
        f"{_PERCENTILE}% of {what} are within {format_seconds(value)}, not {format_seconds(target)}"
        for what, value, target in (
            ("first tokens", ttft, load.ttft_p95),
            ("times per token", tpot, load.tpot_p95),
        )
        if value > target
    ]
    return " and ".join(parts) or None


def _excess(servers: RatedServers, load: RatedLoad) -> float:
    return max(servers.ttft_p95 / load.ttft_p95, servers.tpot_p95 / load.tpot_p95)
