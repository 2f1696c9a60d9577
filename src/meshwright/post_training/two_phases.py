"""A step of post-training in two forms: both phases on the same chips, or on two pools.

together    all chips roll out, score and train in turn; weights move between two layouts of the chips
apart       one pool rolls out while the other trains on the rollouts before; weights cross the network
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, gcd, inf

from meshwright.cost.weights_move import WeightsMove, weights_move
from meshwright.errors import LayoutError, NotationError, PlanError
from meshwright.hardware import catalog
from meshwright.hardware.chip import Torus
from meshwright.hardware.prices import per_hour
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import train_flops_per_token
from meshwright.plan.candidate import Candidate
from meshwright.plan.serve.layouts import most_heads
from meshwright.plan.serve.phase import price_phase
from meshwright.plan.smallest import sizes
from meshwright.plan.train import search
from meshwright.post_training.rollout_pool import Rollouts, RolloutServers, best_rollouts, simulate_rollouts
from meshwright.post_training.work import PostTraining

# Sequences of a training batch are this long at most, and hold several rollouts.
_MOST_SEQ_LEN = 32_768
# Seconds of a rollout's request and answer, and of each of its tokens, as Python writes and reads them: by
# the messages of benchmarks/post_training_idle.py on two x86-64 cores.
_MESSAGE_SECONDS, _TOKEN_SECONDS = 6e-6, 1e-7
# First shares of the chips that roll out, as multiples of the share that balances both phases. The next is
# tried only if nothing fits with the earlier ones.
_AROUND = (1.0, 0.75, 1.35, 0.5, 1.7)
_MOST_SPLITS = 4


@dataclass(frozen=True)
class PoolPhase:
    """A part of a step on one pool. what: roll out, score, move weights, ..."""

    pool: str
    what: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True)
class RLStep:
    """One step of post-training in one form.

    form: "together, kept", "together, offloaded" or "apart". workload: of an update. idle_share: of
    chip-seconds. staleness: updates between the weights that roll out and the weights that learn from it.
    needed_bytes: of one chip, by phase. resident_bytes: of weights and states on a chip in rollouts.
    """

    form: str
    trainer: Candidate
    workload: Workload
    rollouts: Rollouts
    move: WeightsMove
    phases: tuple[PoolPhase, ...]
    seconds: float
    idle_share: float
    staleness: int
    needed_bytes: dict[str, float]
    resident_bytes: float

    @property
    def is_offloaded(self) -> bool:
        return self.form.endswith("offloaded")

    @property
    def num_chips(self) -> int:
        chips = self.trainer.hardware.num_chips
        return chips + self.rollouts.generator.num_chips if self.form == "apart" else chips

    @property
    def price(self) -> float | None:
        """Price of a step in the chip's currency; None if unknown."""
        hourly = per_hour(self.trainer.hardware.chip, self.num_chips)
        return None if hourly is None else hourly * self.seconds / 3600


@dataclass(frozen=True)
class Question:
    """A model, its machine and its work.

    judge: a model that scores every rollout. reference: whether the model as it was at first scores them too.
    """

    config: ModelConfig
    machine: Hardware
    work: PostTraining
    weights_dtype: str
    compute_dtypes: tuple[str, ...]
    judge: ModelConfig | None = None
    reference: bool = True


def together(asked: Question) -> Iterator[RLStep]:
    """The forms on all chips, with the trainer's states kept on the chips or offloaded to the host.

    A form whose memory does not suffice is left out.
    """
    trainer, workload = best_trainer(asked, asked.machine)
    states = float(trainer.memory.weights + trainer.memory.optimizer)
    chip = asked.machine.chip
    for offloaded in (False, True):
        held = 0.0 if offloaded else states
        if offloaded and states > chip.host_program_bytes:
            continue
        try:
            rollouts = best_rollouts(asked.config, asked.machine, asked.work, held, asked.weights_dtype)
            move = weights_move(asked.config, trainer.layout, rollouts.generator.of_pool, asked.machine)
        except (PlanError, LayoutError, NotationError):
            continue
        yield _in_turn(asked, (trainer, workload), rollouts, move, states if offloaded else 0.0, held)


def _in_turn(
    asked: Question,
    trained: tuple[Candidate, Workload],
    rollouts: Rollouts,
    move: WeightsMove,
    offloaded: float,
    held: float,
) -> RLStep:
    trainer, workload = trained
    pool, chip = asked.machine.spec, asked.machine.chip
    scoring = score_seconds(asked, rollouts.generator)
    swap = offloaded / chip.host_link_bytes_per_second
    parts = [
        ("roll out", rollouts.seconds),
        ("score", scoring),
        ("states from the host", swap),
        ("train", training_seconds(asked, trained)),
        ("states to the host", swap),
        ("move weights", move.seconds),
    ]
    phases, now = [], 0.0
    for what, seconds in parts:
        if seconds:
            phases.append(PoolPhase(pool, what, now, seconds))
            now += seconds
    needed = {"train": float(trainer.needed_bytes), "roll out": held + rollouts.needed_bytes}
    idle = rollouts.idle_share * rollouts.seconds / now
    form = "together, offloaded" if offloaded else "together, kept"
    resident = held + rollouts.weights_bytes
    return RLStep(form, trainer, workload, rollouts, move, tuple(phases), now, idle, 0, needed, resident)


def apart(asked: Question, near: RLStep | None) -> Iterator[RLStep]:
    """Steps of the form on two pools, each faster than the one before.

    Each next split of the chips balances both pools by the chip-seconds of the last split. The search of a
    trainer is slow: it waits until the rollouts suggest no untried split. The iterator ends once a lower
    bound on training rules out a faster step. near: a step of the other form, whose chip-seconds give the
    first split; None begins with half of the chips.
    """
    best, total = inf, asked.machine.num_chips
    counts = _rolling_counts(asked.machine)
    learning = near and _learning_seconds(near) * total
    shares = [min(1.0, _share(near) * around) for around in _AROUND]
    rolled, tried = dict[int, _Pools](), set[int]()
    while counts and shares and len(tried) < _MOST_SPLITS:
        share = shares.pop(0)
        number = _nearest(counts, share * total)
        if number in tried:
            continue
        try:
            pools = rolled[number] = rolled.get(number) or _pools_of(asked, number)
            rolling = pools.rollouts.seconds * number
            share = rolling / (rolling + learning) if learning else share
            if _nearest(counts, share * total) not in {*rolled, *tried}:
                shares.insert(0, share)
                continue
            tried.add(number)
            if pools.seconds(pools.scoring + least_training_seconds(asked, pools.trains)) >= best:
                return
            step = _at_once(pools, best_trainer(asked, pools.trains))
        except (PlanError, LayoutError, NotationError):
            tried.add(number)
            continue
        learning = _learning_seconds(step) * (total - number)
        shares = [rolling / (rolling + learning)]
        if step.seconds < best:
            best = step.seconds
            yield step


def _nearest(counts: Sequence[int], wanted: float) -> int:
    return min(counts, key=lambda chips: (abs(chips - wanted), chips))


def _pools_of(asked: Question, number: int) -> "_Pools":
    """The two pools if `number` chips roll out. Raises PlanError or LayoutError if no server fits."""
    trains, rolls = (_part(asked.machine, chips) for chips in (asked.machine.num_chips - number, number))
    rollouts = best_rollouts(asked.config, rolls, asked.work, 0.0, asked.weights_dtype)
    crossing = crossing_layout(asked.config, number)
    move = weights_move(asked.config, crossing, rollouts.generator.of_pool, rolls)
    return _Pools(asked, trains, rolls, rollouts, move)


def crossing_layout(config: ModelConfig, num_chips: int) -> Layout:
    """The layout in which the pool that rolls out receives weights: sharded as far as they divide."""
    shards = gcd(num_chips, config.d_model)
    return Layout.of(data=num_chips // shards, fsdp=shards)


def least_training_seconds(asked: Question, machine: Hardware) -> float:
    """Lower bound of a step's training: the model's FLOPs at the peak of every chip."""
    workload = workload_of(asked)
    peak = max(machine.chip.flops(dtype) for dtype in asked.compute_dtypes)
    flops = train_flops_per_token(asked.config, workload.attended_len) * asked.work.num_tokens
    return flops / (peak * machine.num_chips)


@dataclass(frozen=True)
class _Pools:
    """Two pools, and a step's parts that do not depend on the trainer's layout."""

    asked: Question
    trains: Hardware
    rolls: Hardware
    rollouts: Rollouts
    move: WeightsMove

    @cached_property
    def moving(self) -> float:
        """Seconds to move weights: over the network, then between servers.

        Every chip of the smaller pool sends or receives its share.
        """
        smaller = min(self.trains.num_chips, self.rolls.num_chips)
        crossing = self.move.bytes_before * self.rolls.num_chips / smaller
        return crossing / _between(self.asked.machine) + self.move.seconds

    @cached_property
    def scoring(self) -> float:
        """Seconds of scores on the trainer's chips, in the layout of the servers."""
        servers = self.trains.num_chips // self.rollouts.generator.machine.num_chips
        return score_seconds(self.asked, replace(self.rollouts.generator, replicas=max(1, servers)))

    @cached_property
    def messages(self) -> float:
        """Seconds of requests and rollouts on their way between the pools."""
        work = self.asked.work
        return work.num_rollouts * _MESSAGE_SECONDS + work.num_tokens * _TOKEN_SECONDS

    def seconds(self, learning: float) -> float:
        """Seconds of a step whose scores and training take `learning`."""
        return max(learning, self.rollouts.seconds + self.messages) + self.moving


def _at_once(pools: _Pools, trained: tuple[Candidate, Workload]) -> RLStep:
    (trainer, workload), rollouts, moving = trained, pools.rollouts, pools.moving
    training = training_seconds(pools.asked, trained)
    busy = {"train": pools.scoring + training, "roll out": rollouts.seconds}
    seconds = pools.seconds(busy["train"])
    phases = (
        PoolPhase("roll out", "roll out", 0.0, rollouts.seconds),
        PoolPhase("train", "score", 0.0, pools.scoring),
        PoolPhase("train", "train", pools.scoring, training),
        PoolPhase("roll out", "messages", rollouts.seconds, pools.messages),
        PoolPhase("both", "move weights", seconds - moving, moving),
    )
    chips = {"train": pools.trains.num_chips, "roll out": pools.rolls.num_chips}
    waiting = chips["roll out"] * rollouts.idle_share * rollouts.seconds
    idle = idle_share(chips, busy, moving, pools.messages) + waiting / (seconds * sum(chips.values()))
    needed = {"train": float(trainer.needed_bytes), "roll out": rollouts.needed_bytes}
    resident = rollouts.weights_bytes
    return RLStep(
        "apart", trainer, workload, rollouts, pools.move, phases, seconds, idle, 1, needed, resident
    )


def idle_share(
    chips: Mapping[str, int], busy: Mapping[str, float], moving: float, messages: float = 0.0
) -> float:
    """The share of a step's chip-seconds that a pool spends waiting for the other.

    chips, busy: chips of each pool, and seconds of its work. moving: seconds when all chips move weights.
    messages: seconds of requests and rollouts on their way, when chips that roll out wait.
    """
    longest = max(seconds + (messages if pool == "roll out" else 0.0) for pool, seconds in busy.items())
    waiting = sum(chips[pool] * (longest - busy[pool]) for pool in chips)
    return waiting / ((longest + moving) * sum(chips.values()))


def best_trainer(asked: Question, machine: Hardware) -> tuple[Candidate, Workload]:
    """The fastest layout that fits, and the sequences that rollouts are packed into.

    Raises PlanError if none fits.
    """
    searched = search(
        asked.config,
        machine,
        workload_of(asked),
        weights_dtype=asked.weights_dtype,
        compute_dtypes=asked.compute_dtypes,
        num_ranked=3,
        explained=False,
    )
    if not searched.best.fits:
        lack = searched.best.shortage
        raise PlanError(
            f"{asked.config.name} on {machine.spec}: the nearest layout to train with, "
            f"{searched.best.layout}, needs {lack.over_bytes / 1e9:.1f} GB {lack.where} more than available"
        )
    return searched.best, searched.workload


def workload_of(asked: Question) -> Workload:
    """The sequences of an update, into which rollouts are packed; each attends only within itself.

    A multiple of a power of two, up to 1/64 more than needed, so that many layouts divide it.
    """
    work = asked.work
    seq_len = min(_MOST_SEQ_LEN, asked.config.max_seq_len, 1 << (work.context - 1).bit_length())
    needed = ceil(work.num_tokens / work.num_updates / seq_len)
    multiple = 1 << max(0, (needed // 64).bit_length() - 1)
    document = min(seq_len, work.document_tokens)
    return Workload(-(-needed // multiple) * multiple, seq_len, document_tokens=document)


def training_seconds(asked: Question, trained: tuple[Candidate, Workload]) -> float:
    """Seconds of all updates of a step; with a smaller planned batch there are more updates."""
    trainer, planned = trained
    more = max(1.0, workload_of(asked).num_sequences / planned.num_sequences)
    return trainer.step_seconds * asked.work.num_updates * more


def score_seconds(asked: Question, generator: RolloutServers) -> float:
    """Seconds of the passes that score all rollouts: the old policy, the reference and the judge."""
    models = [asked.config] * (2 if asked.reference else 1) + ([asked.judge] if asked.judge else [])
    mean = max(1, asked.work.num_tokens // asked.work.num_rollouts)
    each = -(-asked.work.num_rollouts // generator.replicas)
    shards = generator.layout.num_batch_shards
    total = 0.0
    for model, passes in Counter(models).items():
        is_policy = model == asked.config
        layout = generator.layout if is_policy else most_heads(model, generator.machine.num_chips)
        point = price_phase(model, generator.machine, Workload(shards, mean, "prefill"), [layout])
        total += passes * point.step_seconds * each / shards
    return total


def _learning_seconds(step: RLStep) -> float:
    """Seconds of a step's scores and training."""
    return sum(phase.seconds for phase in step.phases if phase.what in ("score", "train"))


def _share(near: RLStep | None) -> float:
    """The share of the chips that rolls out if both pools are to end at once."""
    if near is None:
        return 0.5
    rolling = near.rollouts.seconds
    return rolling / (rolling + _learning_seconds(near))


def _rolling_counts(machine: Hardware) -> list[int]:
    """Numbers of chips that may roll out while the rest trains; both parts must be machines that exist.

    GPUs are split between nodes, or inside the node if there is only one.
    """
    if not isinstance(machine.chip.network, Torus) and machine.num_chips > (node := machine.dims[-1]):
        return list(range(node, machine.num_chips, node))
    parts = {part.num_chips for part in sizes(machine.spec)}
    return [chips for chips in sorted(parts) if machine.num_chips - chips in parts]


def _part(machine: Hardware, chips: int) -> Hardware:
    """`chips` of a machine."""
    node = machine.dims[-1]
    if not isinstance(machine.chip.network, Torus) and machine.num_chips > node:
        part = catalog.load(f"{machine.chip.name}:{chips // node}x{node}")
    else:
        part = next(part for part in sizes(machine.spec) if part.num_chips == chips)
    return replace(part, chip=machine.chip)


def _between(machine: Hardware) -> float:
    """Bytes a second of one chip to another pool."""
    network = machine.chip.network
    if isinstance(network, Torus):
        return network.dcn_bytes_per_second if machine.num_slices > 1 else network.one_way_bytes_per_second
    return getattr(network, "nic_bytes_per_second", machine.chip.link_bytes_per_second)


def crossover(
    asked: Question, first: RLStep, other: RLStep, scales: tuple[float, ...]
) -> list[dict[str, float]]:
    """Seconds of two steps in their layouts, with lengths of rollouts multiplied by each of `scales`.

    Training and scoring grow with the tokens; rollouts are simulated again.
    """
    rows = []
    for scale in scales:
        work = replace(
            asked.work,
            output_tokens=max(1, round(asked.work.output_tokens * scale)),
            most_output_tokens=max(1, round(asked.work.longest_answer * scale)),
        )
        growth = work.num_tokens / asked.work.num_tokens
        seconds = {}
        for step in (first, other):
            parts = {phase.what: phase.seconds for phase in step.phases}
            again = simulate_rollouts(asked.config, step.rollouts.generator, work).seconds
            again += growth * parts.get("messages", 0.0)
            learning = growth * (parts.get("train", 0.0) + parts.get("score", 0.0))
            rest = sum(
                seconds
                for what, seconds in parts.items()
                if what not in ("train", "score", "roll out", "messages")
            )
            seconds[step.form] = (max(again, learning) if step.staleness else again + learning) + rest
        rows.append({"output_tokens": work.output_tokens, **seconds})
    return rows
