"""Search for the smallest slice of a chip that trains a model, or trains it fast enough."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil, inf, prod

from meshwright.dtypes import dtype_bytes
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.chip import SharedMemory, Torus
from meshwright.hardware.prices import CATALOG_PRICES, ChipPrices
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params, train_flops_per_token
from meshwright.optimizers import OPTIMIZERS
from meshwright.plan.given import NOT_SEARCHED, Condition
from meshwright.plan.train import Search, search
from meshwright.units import format_bytes, format_seconds

# Above one pod: whole pods joined by the data-centre network.
_MOST_SLICES = 8
_MOST_GPUS = 32_768
# Sizes tried between a size that is too small and its double.
_MOST_BETWEEN = 6


@dataclass(frozen=True)
class Tried:
    """A size that was tried. why_not: the reason against it; None for the answer."""

    hardware: str
    num_chips: int
    step_seconds: float | None
    why_not: str | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Smallest:
    """The machine, the search on it, and the sizes tried."""

    hardware: Hardware
    search: Search
    tried: tuple[Tried, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "hardware": self.hardware.spec,
            "num_chips": self.hardware.num_chips,
            "tried": [tried.to_dict() for tried in self.tried],
        }


class NothingFits(PlanError):
    """No size works. tried: all sizes, with the reasons."""

    def __init__(self, model: str, tried: tuple[Tried, ...]) -> None:
        super().__init__(f"{model} on up to {tried[-1].hardware}: {tried[-1].why_not}")
        self.tried = tried


def smallest_machines(
    config: ModelConfig,
    spec: str,
    workload: Workload,
    *,
    weights_dtype: str,
    compute_dtypes: tuple[str, ...],
    given: Sequence[Condition] = (),
    runnable: bool | None = None,
    max_seconds: float | None = None,
    prices: ChipPrices = CATALOG_PRICES,
    on_progress: Callable[[str], None] | None = None,
) -> Smallest:
    """The fewest chips of `spec` that hold the model and reach `max_seconds` per step.

    spec: a chip (`v5p`), or a machine (`v5p:16x20x28`) that bounds the sizes tried. given, runnable: as
    in `search`. prices: of the machines. Doubles the chips until a size works, then tries the sizes between.
    Raises NothingFits if no size works.
    """
    tried: list[Tried] = []
    fixed = {one.field: one.value for one in given if one.field in NOT_SEARCHED}
    optimizer = str(fixed.get("optimizer", "adamw"))
    moments = str(fixed.get("optimizer_dtype", "f32"))
    bytes_per_param = dtype_bytes(weights_dtype) + len(OPTIMIZERS[optimizer].moments) * dtype_bytes(moments)
    dtypes = (str(fixed["matmul_dtype"]),) if fixed.get("matmul_dtype") else compute_dtypes

    def attempt(hardware: Hardware) -> Search | None:
        if on_progress:
            on_progress(hardware.spec)
        why_not = _hopeless(config, hardware, workload, bytes_per_param, dtypes, max_seconds)
        attempted = None
        if why_not is None:
            try:
                attempted = search(
                    config,
                    hardware,
                    workload,
                    weights_dtype=weights_dtype,
                    compute_dtypes=compute_dtypes,
                    given=given,
                    runnable=runnable,
                )
                why_not = _why_not(attempted, max_seconds)
            except PlanError as error:
                why_not = str(error)
        seconds = attempted.best.step_seconds if attempted else None
        tried.append(Tried(hardware.spec, hardware.num_chips, seconds, why_not))
        return None if why_not else attempted

    machines = prices.of(sizes(spec))
    doubled = [m for m in machines if m.num_chips & (m.num_chips - 1) == 0 or m is machines[-1]]
    too_small = 0
    for machine in doubled:
        if attempted := attempt(machine):
            between = [m for m in machines if too_small < m.num_chips < machine.num_chips]
            for smaller in between[:: max(1, -(-len(between) // _MOST_BETWEEN))]:
                if better := attempt(smaller):
                    return Smallest(smaller, better, tuple(tried))
            return Smallest(machine, attempted, tuple(tried))
        too_small = machine.num_chips
    raise NothingFits(config.name, tuple(tried))


def longest_step(
    workload: Workload, max_seconds: float | None, days: float | None, num_tokens: int | None
) -> float | None:
    """Seconds of the longest step that both limits allow; None without limits.

    max_seconds: of a step. days: of a run over `num_tokens` tokens. Raises PlanError for a limit that is
    not a positive number.
    """
    for option, value in (("--max-seconds", max_seconds), ("--days", days)):
        if value is not None and not 0 < value < inf:
            raise PlanError(f"{option} {value} is not a time; write a number above 0")
    limits = [] if max_seconds is None else [max_seconds]
    if days is not None:
        if num_tokens is None:
            raise PlanError("--days needs the length of the run; add --tokens 1T")
        limits.append(days * 86_400 / ceil(num_tokens / workload.num_tokens))
    return min(limits, default=None)


def sizes(spec: str) -> list[Hardware]:
    """The machines of a chip by number of chips, one topology each, up to the size of `spec`.

    TPU: slices of a pod, as near to a cube as possible: doublings until rings close, then whole cubes, then
    joined pods. GPU: doublings within a domain, then whole domains.
    """
    spec = catalog.usual(spec)
    name, _, topology = spec.partition(":")
    most = catalog.load(spec) if topology else None
    chip = most.chip if most else catalog.chip_of(name)
    if isinstance(chip.network, SharedMemory):
        raise PlanError(f"{spec} does not come in slices of several sizes, as v5p and h100 do")
    name = name.partition("*")[2] or name
    shapes = (
        _torus_shapes(chip.network) if isinstance(chip.network, Torus) else _nodes(chip.network.domain_size)
    )
    limit = most.num_chips if most else None
    by_chips: dict[int, str] = {}
    for slices, dims in sorted(
        shapes, key=lambda shape: (shape[0] * prod(shape[1]), shape[0], sum(shape[1]))
    ):
        prefix = f"{slices}*" if slices > 1 else ""
        by_chips.setdefault(slices * prod(dims), f"{prefix}{name}:{'x'.join(map(str, dims))}")
    machines = [catalog.load(text) for chips, text in by_chips.items() if limit is None or chips < limit]
    return [*machines, most] if most else machines


def _torus_shapes(torus: Torus) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(number of slices, ascending sides): the slices of a pod, then joined pods."""
    step = torus.wraparound_multiple_of or torus.wraparound_exactly or max(torus.pod)
    pod = sorted(torus.pod)

    def sides(most: int) -> list[int]:
        doublings = [2**n for n in range(most.bit_length()) if 2**n <= most]
        return sorted({*doublings, *range(step, most + 1, step)})

    for dims in product(*map(sides, pod)):
        whole = all(side % step == 0 for side in dims)
        if list(dims) == sorted(dims) and (whole or max(dims) <= step):
            yield 1, dims
    yield from ((slices, tuple(pod)) for slices in range(1, _MOST_SLICES + 1))


def _nodes(domain: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(1, (domains, GPUs per domain)): parts of a domain, then whole domains."""
    for gpus in {*(2**n for n in range(domain.bit_length()) if 2**n <= domain), domain}:
        yield 1, (1, gpus)
    nodes = 1
    while nodes * domain <= _MOST_GPUS:
        yield 1, (nodes, domain)
        nodes += max(1, 2 ** (nodes.bit_length() - 3))  # in steps of a quarter to an eighth


def _hopeless(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    bytes_per_param: float,
    dtypes: tuple[str, ...],
    max_seconds: float | None,
) -> str | None:
    """The reason why no layout can work: stored bytes, or FLOPs at the peak; None if one may."""
    stored = count_params(config).total * bytes_per_param
    chips, usable = hardware.num_chips, hardware.chip.program_bytes
    if stored > chips * usable:
        return (
            f"weights and moments need {format_bytes(stored / chips)} per chip, "
            f"{format_bytes(stored / chips - usable)} more than available"
        )
    peak = max(hardware.chip.flops(dtype) for dtype in dtypes)
    least = train_flops_per_token(config, workload.seq_len) * workload.num_tokens / (chips * peak)
    if max_seconds is not None and least > max_seconds:
        return (
            f"a step takes {format_seconds(least)} even at the peak, more than {format_seconds(max_seconds)}"
        )
    return None


def _why_not(search_of: Search, max_seconds: float | None) -> str | None:
    best = search_of.best
    if not best.fits:
        lack = best.shortage
        over = f"{format_bytes(lack.over_bytes)} {lack.where}"
        return f"the nearest layout, {best.layout}, needs {over} more than available"
    if max_seconds is not None and best.step_seconds > max_seconds:
        return f"a step takes {format_seconds(best.step_seconds)}, more than {format_seconds(max_seconds)}"
    return None
