"""What the steps of a server get of a CPU, for the [inference] table of a calibrated machine.

They are no training steps: products have a row a sequence and read every weight, attention reads pages, and
Python makes the inputs of each step and reads its tokens. So the server's own programs are timed, with a
small model, as the engine calls them, and fitted one by one:

    launch_seconds     a step of a model that computes next to nothing
    kernel_seconds     a generate step of one sequence with many small layers
    memory             a generate step of one sequence, over a short context
    matmul             a prompt: products of many rows
    elementwise        a short prompt with the many small layers
    packed             a generate step of as many sequences as there are slots: products of few rows
    cache              the same over a long context

Where the server's extra is installed, the model is also served over HTTP to a client on the same machine:

    host_request_seconds    a request of one token, beside its step
    host_step_seconds       steps whose tokens are streamed, of one sequence and of all slots, beside the same
    host_token_seconds      steps without HTTP
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import jax

from meshwright.bench.timing import Listener, Prepared, TimedCall, Timing, tell
from meshwright.cost.serving_step import pass_cost
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.paged import DEFAULT_PAGE
from meshwright.models.config import ModelConfig
from meshwright.nn.params import init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.programs.efficiency import StepEfficiency
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.batch import Batch, SequenceWork
from meshwright.serve.engine.request import GREEDY, Request
from meshwright.serve.engine.sequence import TokenSequence

DTYPE = "f32"
_SLOTS, _SHORT, _LONG, _CONTEXT, _PROMPT = 8, 16, 448, 512, 256
_RAGGED = 144  # a block more than half of _PROMPT: the program of half is too small
_LITTLE = 64  # tokens of a prompt, about as many as fit beside answers
_FITS = 30
# Steps in a row that are timed as one. The figures are differences of times a tenth apart, so there are many
# rounds of few steps: whatever else runs on the machine comes and goes in seconds.
REPEATS, ROUNDS = 5, 12
# Tokens of an answer that is streamed.
_STREAMED = 64


def served_model() -> ModelConfig:
    """Some 17 million parameters: more than caches hold, quick to compile."""
    return ModelConfig("calibration-served", 4, 512, 1536, 8, 4, 64, 8192, _CONTEXT)


def no_model() -> ModelConfig:
    """A model whose steps take the time of their host alone."""
    return ModelConfig("calibration-host", 1, 32, 32, 1, 1, 32, 64, _CONTEXT)


def deep_model() -> ModelConfig:
    """Four times as many layers as `served_model` has, on four fifths of its bytes."""
    return ModelConfig("calibration-kernels", 16, 256, 768, 4, 4, 64, 1024, _CONTEXT)


@dataclass(frozen=True)
class MeasuredHttp:
    """Seconds of answers over HTTP: of one token and of many, of one sequence alone and of all slots."""

    alone: float
    together: float
    alone_streamed: float
    streamed: float

    def request_seconds(self, one: float) -> float:
        """What a request takes beside its step of one sequence."""
        return max(0.0, self.alone - one)

    def token_seconds(self, one: float, many: float) -> float:
        """What each further token adds to its step; steps take so long for one and for all without HTTP."""
        of_one, of_all = self._beside_steps(one, many)
        return max(0.0, of_all - of_one) / (_SLOTS - 1)

    def step_seconds(self, one: float, many: float) -> float:
        """What is left of a step, whatever its tokens."""
        of_one, _ = self._beside_steps(one, many)
        return max(0.0, of_one - self.token_seconds(one, many))

    def _beside_steps(self, one: float, many: float) -> tuple[float, float]:
        """What HTTP adds to a step of one sequence, and to one of all slots."""
        streams = (self.alone_streamed - self.alone, one), (self.streamed - self.together, many)
        of_one, of_all = (max(0.0, tokens / (_STREAMED - 1) - step) for tokens, step in streams)
        return of_one, of_all


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds of a step of the host alone, of one token of `deep_model`, of a prompt, and of generate steps.

    one, many: sequences over a short context. long: many over a long one. http: None where not measured.
    ragged: a prompt of _RAGGED tokens, in the program of one of _PROMPT. deep_prompt: one of _LITTLE tokens
    of `deep_model`. multiplies_padding: whether steps compute rows that nobody holds.
    """

    config: ModelConfig
    layout: Layout
    host: float
    deep: float
    prompt: float
    one: float
    many: float
    long: float
    ragged: float = 0.0
    deep_prompt: float = 0.0
    http: MeasuredHttp | None = None
    multiplies_padding: bool = True

    def price(self, hardware: Hardware, num_sequences: int, queries: int, context: int) -> float:
        """Seconds expected of the last `queries` of `context` positions of each sequence."""
        at = self.layout.at("generate" if queries == 1 else "prefill")
        return pass_cost(self.config, at, hardware, num_sequences, queries, context)[0].seconds

    @property
    def num_rows_beside(self) -> int:
        """Rows of a prompt's step that nobody holds and that are computed: one of each slot."""
        return _SLOTS if self.multiplies_padding else 0

    def padding(self, hardware: Hardware) -> float:
        """What a row that nobody holds takes on this hardware, as a share of a row that somebody does."""
        if self.multiplies_padding:
            return 1.0
        held, filled = (self.price(hardware, 1, each, each) for each in (_RAGGED, _PROMPT))
        return min(max(0.0, (self.ragged - held) / (filled - held)), 1.0)


class _Figures(NamedTuple):
    """What is fitted: bytes of weights and FLOPs of prompts a second, and figures of `StepEfficiency`."""

    bandwidth: float
    flops: float
    packed: float
    cache: float
    elementwise: float
    kernel: float


def prepare(progress: Listener, config: ModelConfig) -> Prepared[MeasuredSteps]:
    """The steps of servers of `config`, of `no_model` and of `deep_model`, on the first device."""
    layout = Layout.of(weights_dtype=DTYPE, compute_dtype=DTYPE)
    tell(progress, "compiling the steps of a server")
    runner, deep = _runner(config, layout, _PROMPT), _runner(deep_model(), layout, _LITTLE)
    programs = [
        steps(_runner(no_model(), layout, 1), _SLOTS, 1, _SHORT),
        steps(deep, 1, 1, _SHORT),
        steps(runner, 1, _PROMPT, _PROMPT),
        steps(runner, 1, 1, _SHORT),
        steps(runner, _SLOTS, 1, _SHORT),
        steps(runner, _SLOTS, 1, _LONG),
        steps(runner, 1, _RAGGED, _RAGGED),
        steps(deep, 1, _LITTLE, _LITTLE),
    ]
    over_http = _over_http(progress, runner)

    def finish(timings: list[Timing]) -> list[MeasuredSteps]:
        of_steps = (one.per(REPEATS).seconds for one in timings[: len(programs)])
        http = None if over_http is None else over_http.finish(timings[len(programs) :])[0]
        padded = runner.limits.multiplies_padding
        return [MeasuredSteps(config, layout, *of_steps, http=http, multiplies_padding=padded)]

    return Prepared([*programs, *(over_http.programs if over_http else ())], finish)


def _over_http(progress: Listener, runner: JaxRunner) -> Prepared[MeasuredHttp] | None:
    """Answers of the runner over HTTP; None where what serves is not installed, which is told."""
    missing = [name for name in ("httpx", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        tell(progress, f"HTTP is not measured: {', '.join(missing)} are missing, of meshwright[serve]")
        return None
    from meshwright.load.loopback import Loopback

    loopback = Loopback(runner)
    programs: list[TimedCall] = [
        partial(loopback.ask, 1, 1, REPEATS),
        partial(loopback.ask, _SLOTS, 1, 1),
        partial(loopback.ask, 1, _STREAMED, 1),
        partial(loopback.ask, _SLOTS, _STREAMED, 1),
    ]

    def finish(timings: list[Timing]) -> list[MeasuredHttp]:
        loopback.close()
        alone, *others = timings
        return [MeasuredHttp(alone.per(REPEATS).seconds, *(one.seconds for one in others))]

    return Prepared(programs, finish)


def _runner(config: ModelConfig, layout: Layout, chunk: int) -> JaxRunner:
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(config, layout, mesh, 0)
    runner = JaxRunner(params, config, layout, mesh, num_slots=_SLOTS, context=_CONTEXT, chunk=chunk)
    runner.warm_up()
    return runner


def steps(
    runner: JaxRunner, num_sequences: int, queries: int, context: int, repeats: int = REPEATS
) -> TimedCall:
    """So many steps of `queries` more tokens of each sequence, up to so many positions.

    As in the engine, the next one is dispatched before the tokens of this one are read.
    """
    pages = -(-context // DEFAULT_PAGE)
    works = tuple(
        SequenceWork(
            # As load tests ask: to sample from a vocabulary takes a CPU about as long as a small model.
            TokenSequence(Request((1,) * context, sampling=GREEDY), 1, 0, lambda _: None),
            slot,
            context - queries,
            (1,) * queries,
            tuple(range(slot * pages, (slot + 1) * pages)),
        )
        for slot in range(num_sequences)
    )

    def run() -> None:
        under_way = runner.run(Batch(works))
        for _ in range(repeats - 1):
            following = runner.run(Batch(works))
            under_way.read()
            under_way = following
        under_way.read()

    return run


def with_inference(measured: MeasuredSteps, hardware: Hardware) -> Hardware:
    """`hardware` with what steps of a server get of it.

    Its ratings become the bandwidth of the weights and the rate of a prompt's products where these are more,
    of which training gets its own shares: its products are those of gradients, too.
    """
    chip, http, one, many = hardware.chip, measured.http, measured.one, measured.many
    inference = StepEfficiency(
        roofline=0.0,
        overlap=0.0,
        launch_seconds=measured.host,
        host_request_seconds=http.request_seconds(one) if http else 0.0,
        host_step_seconds=http.step_seconds(one, many) if http else 0.0,
        host_token_seconds=http.token_seconds(one, many) if http else 0.0,
        sources=_sources(has_http=http is not None),
    )

    def reached(figures: _Figures) -> StepEfficiency:
        return replace(
            inference,
            kernel_seconds=figures.kernel,
            packed={DTYPE: figures.packed},
            cache=figures.cache,
            elementwise=figures.elementwise,
        )

    def priced(figures: _Figures) -> Hardware:
        rated = replace(
            chip,
            hbm_bytes_per_second=figures.bandwidth,
            flops_per_second={**chip.flops_per_second, DTYPE: figures.flops},
            inference=replace(reached(figures), matmul={DTYPE: 1.0}),
        )
        return replace(hardware, chip=rated)

    deep = replace(measured, config=deep_model())

    def rate(
        of: MeasuredSteps, name: str, others: _Figures, step: tuple[int, int, int], time: float, high: float
    ) -> float:
        """The rate at which the step takes the time, at most `high`: prices are a + b / rate (roofline 0)."""
        at_high, at_half = (
            of.price(priced(others._replace(**{name: each})), *step) for each in (high, high / 2)
        )
        return high / (1 + max(0.0, time - at_high) / (at_half - at_high))

    def kernel_seconds(others: _Figures) -> float:
        """What is left of the deep model's step beside its bytes, for each of its operations."""
        bare, one = (deep.price(priced(others._replace(kernel=each)), 1, 1, _SHORT) for each in (0.0, 1.0))
        return max(0.0, (measured.deep - bare) / (one - bare))

    most = 1e3 * chip.flops(DTYPE)
    figures = _Figures(most, most, 1.0, 1.0, 1.0, 0.0)
    # (of which model, which figure, what it may be at most, the step that tells it: sequences, queries,
    # context; its time). Beside a prompt every slot has a row that nobody holds: more queries.
    prompt, little = (count + measured.num_rows_beside for count in (_PROMPT, _LITTLE))
    told = [
        (measured, "bandwidth", most, (1, 1, _SHORT), measured.one),
        (measured, "flops", most, (1, prompt, prompt), measured.prompt),
        (measured, "packed", 1.0, (_SLOTS, 1, _SHORT), measured.many),
        (measured, "cache", 1.0, (_SLOTS, 1, _LONG), measured.long),
        (deep, "elementwise", 1.0, (1, little, little), measured.deep_prompt),
    ]
    for _ in range(_FITS):
        figures = figures._replace(kernel=kernel_seconds(figures))
        for of, name, high, step, time in told:
            figures = figures._replace(**{name: rate(of, name, figures, step, time, high)})
    bandwidth, flops = figures.bandwidth, figures.flops
    rating, peak = max(bandwidth, chip.hbm_bytes_per_second), max(flops, chip.flops(DTYPE))
    of_training = chip.flops(DTYPE) / peak
    return replace(
        hardware,
        chip=replace(
            chip,
            hbm_bytes_per_second=rating,
            flops_per_second={**chip.flops_per_second, DTYPE: peak},
            step=replace(
                chip.step,
                memory=chip.step.memory * chip.hbm_bytes_per_second / rating,
                matmul=dict.fromkeys(chip.flops_per_second, 1.0) | {DTYPE: of_training},
                attention=chip.step.attention * of_training,
            ),
            inference=replace(
                reached(figures),
                padding=measured.padding(priced(figures)),
                memory=bandwidth / rating,
                matmul={DTYPE: flops / peak},
                attention=flops / peak,
            ),
        ),
    )


def _sources(*, has_http: bool) -> dict[str, str]:
    where = f"measured by mw calibrate with the programs of mw serve, JAX {jax.__version__}"
    http = {
        "host_request_seconds": f"{where}: an answer of one token over HTTP beside its step",
        "host_step_seconds": f"{where}: steps of one sequence whose tokens are streamed to a client on the "
        "same machine, beside such steps without HTTP",
        "host_token_seconds": f"{where}: the same of {_SLOTS} sequences, beside those of one",
    }
    return (http if has_http else {}) | {
        "matmul": f"{where}: a prompt of {_PROMPT} tokens",
        "attention": f"{where}: a prompt of {_PROMPT} tokens, whose products are all taken to be as fast",
        "padding": f"{where}: a prompt of {_RAGGED} tokens in the program of {_PROMPT}",
        "roofline": "0: the same cores load weights and multiply them",
        "packed": f"{where}: generate steps of {_SLOTS} sequences beside those of one",
        "memory": f"{where}: weights of a generate step of one sequence",
        "cache": f"{where}: generate steps of {_SLOTS} sequences over {_LONG} and {_SHORT} positions",
        "elementwise": f"{where}: a prompt of {_LITTLE} tokens of 16 small layers",
        "kernel_seconds": f"{where}: generate steps of one sequence, of 16 small layers and of 4 large ones",
        "launch_seconds": f"{where}: a generate step of {_SLOTS} sequences of a model with one narrow layer",
    }
