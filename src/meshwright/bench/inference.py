"""What the steps of a server get of a CPU, for the [inference] table of a calibrated machine.

They are no training steps: products have a row a sequence and read every weight, attention reads pages, and
Python makes the inputs of each step and reads its tokens. So the server's own programs are timed, with a
small model, as the engine calls them, and fitted one by one:

    launch_seconds   a step of a model that computes next to nothing
    memory           a generate step of one sequence, over a short context
    matmul_rates     a generate step of as many sequences as there are slots: products of few rows
    cache            the same over a long context
"""

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import jax

from meshwright.bench.fit import monotone, rate_of_time
from meshwright.bench.timing import Listener, Prepared, TimedCall, tell
from meshwright.cost.inference import pass_cost
from meshwright.hardware.chip import StepEfficiency
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.paged import DEFAULT_PAGE
from meshwright.models.config import ModelConfig
from meshwright.nn.mesh import device_mesh
from meshwright.nn.params import init_params
from meshwright.serve.batch import Batch, SequenceWork
from meshwright.serve.runner import JaxRunner
from meshwright.serve.sequence import GREEDY, Request, Sequence

DTYPE = "f32"
_SLOTS, _SHORT, _LONG, _CONTEXT = 8, 16, 448, 512
_FITS = 4
# Steps in a row that are timed as one.
_REPEATS = 4


def served_model() -> ModelConfig:
    """Some 17 million parameters: more than caches hold, quick to compile."""
    return ModelConfig("calibration-served", 4, 512, 1536, 8, 4, 64, 8192, _CONTEXT)


def no_model() -> ModelConfig:
    """A model whose steps take the time of their host alone."""
    return ModelConfig("calibration-host", 1, 32, 32, 1, 1, 32, 64, _CONTEXT)


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds of generate steps: host, one and many over a short context, and many over a long one."""

    config: ModelConfig
    layout: Layout
    host: float
    one: float
    many: float
    long: float

    def price(self, hardware: Hardware, num_sequences: int, context: int) -> float:
        """Seconds that the cost model expects of a generate step."""
        at = self.layout.at("generate")
        return pass_cost(self.config, at, hardware, num_sequences, 1, context)[0].seconds


class _Figures(NamedTuple):
    """What is fitted: bytes a second of weights, FLOPs a second of small products, the cache's share."""

    bandwidth: float
    small: float
    cache: float


def prepare(progress: Listener, config: ModelConfig, host: ModelConfig) -> Prepared[MeasuredSteps]:
    """The generate steps of a server of `config`, and of one of `host`, on the first device."""
    layout = Layout.of(weights_dtype=DTYPE, compute_dtype=DTYPE)
    tell(progress, "compiling the steps of a server")
    runner, nothing = _runner(config, layout), _runner(host, layout)
    programs = [
        _steps(nothing, _SLOTS, _SHORT),
        _steps(runner, 1, _SHORT),
        _steps(runner, _SLOTS, _SHORT),
        _steps(runner, _SLOTS, _LONG),
    ]
    return Prepared(
        programs,
        lambda timings: [MeasuredSteps(config, layout, *(one.per(_REPEATS).seconds for one in timings))],
    )


def _runner(config: ModelConfig, layout: Layout) -> JaxRunner:
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(config, layout, mesh, 0)
    runner = JaxRunner(params, config, layout, mesh, num_slots=_SLOTS, context=_CONTEXT, chunk=1)
    runner.warm_up()
    return runner


def _steps(runner: JaxRunner, num_sequences: int, context: int) -> TimedCall:
    """Steps of one more token of each sequence, the last of so many positions."""
    pages = -(-context // DEFAULT_PAGE)
    works = tuple(
        SequenceWork(
            # As load tests ask: to sample from a vocabulary takes a CPU about as long as a small model.
            Sequence(Request((1,) * context, sampling=GREEDY), 1, 0, lambda _: None),
            slot,
            context - 1,
            (1,),
            tuple(range(slot * pages, (slot + 1) * pages)),
        )
        for slot in range(num_sequences)
    )

    def run() -> None:
        for _ in range(_REPEATS):
            runner.run(Batch(works)).read()

    return run


def with_inference(measured: MeasuredSteps, hardware: Hardware) -> Hardware:
    """`hardware` with what steps of a server get of it.

    Its bandwidth becomes that of the weights where this is more, of which training gets its own share.
    """
    chip = hardware.chip
    inference = StepEfficiency(overlap=0.0, launch_seconds=measured.host, sources=_sources())

    def priced(figures: _Figures) -> Hardware:
        point = _small_product(measured.config), figures.small
        rates = dict(chip.matmul_rates)
        rates[DTYPE] = monotone([point, *rates[DTYPE]], most=float("inf"))
        step = replace(inference, cache=figures.cache)
        return replace(
            hardware,
            chip=replace(chip, hbm_bytes_per_second=figures.bandwidth, matmul_rates=rates, inference=step),
        )

    def seconds(name: str, others: _Figures, step: tuple[int, int], value: float) -> float:
        return measured.price(priced(others._replace(**{name: value})), *step)

    most = chip.flops(DTYPE)
    figures = _Figures(1e3 * most, 10 * most, 1.0)
    # (which figure, what it may be at most, the step that tells it as sequences and context, its time)
    told = [
        ("bandwidth", 1e3 * most, (1, _SHORT), measured.one),
        ("small", 10 * most, (_SLOTS, _SHORT), measured.many),
        ("cache", 1.0, (_SLOTS, _LONG), measured.long),
    ]
    for _ in range(_FITS):
        for name, high, step, time in told:
            found = rate_of_time(partial(seconds, name, figures, step), time, high, 1e-8)
            figures = figures._replace(**{name: found})
    found, bandwidth = priced(figures).chip, figures.bandwidth
    rating = max(bandwidth, chip.hbm_bytes_per_second)
    return replace(
        hardware,
        chip=replace(
            found,
            hbm_bytes_per_second=rating,
            step=replace(chip.step, memory=chip.step.memory * chip.hbm_bytes_per_second / rating),
            inference=replace(inference, memory=bandwidth / rating, cache=figures.cache),
        ),
    )


def _small_product(config: ModelConfig) -> float:
    """FLOPs of the median product of a generate step of all slots."""
    width = config.num_heads * config.d_head
    columns = [width, width, config.d_ff, config.d_ff, config.d_ff]
    return 2.0 * _SLOTS * config.d_model * median(columns)


def _sources() -> dict[str, str]:
    where = f"measured by mw calibrate with the programs of mw serve, JAX {jax.__version__}"
    return {
        "memory": f"{where}: weights of a generate step of one sequence",
        "cache": f"{where}: generate steps of {_SLOTS} sequences over {_LONG} and {_SHORT} positions",
        "launch_seconds": f"{where}: a generate step of {_SLOTS} sequences of a model with one narrow layer",
    }
