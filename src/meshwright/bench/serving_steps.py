"""Efficiency of a server's steps on a CPU, for the [inference] table of a calibrated machine.

A server's steps differ from training steps: products have a row a sequence and read every weight, attention
reads pages, and Python makes the inputs of each step and reads its tokens. So the server's programs are
timed with small models, as the engine calls them. Each figure is fitted to the time of one step:

    launch_seconds     a step of a model with hardly any work
    kernel_seconds     a generate step of one sequence, with many small layers
    memory             a generate step of one sequence, over a short context
    matmul             a prompt: products of many rows
    elementwise        a short prompt, with the many small layers
    packed             a generate step with a sequence in every slot: products of few rows
    cache              the same over a long context

If the `serve` extra is installed, the model also answers over HTTP to a client on the same machine:

    host_request_seconds    a request of one token, minus its step
    host_step_seconds       a step of one sequence with streamed tokens, minus that step without HTTP
    host_token_seconds      a step of all slots with streamed tokens, minus the same, for each further token
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import jax

from meshwright.bench.timing import Listener, Prepared, TimedCall, Timing, tell
from meshwright.cost.serving_step import pass_cost
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.page_sizes import DEFAULT_PAGE
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
_RAGGED = 144  # a block more than half of _PROMPT, so that the program of half is too small
_LITTLE = 64  # tokens of a prompt, about the number that a step with answers has capacity for
_FITS = 30
# Consecutive steps in one timing. The figures are differences of times a tenth apart, so there are many
# rounds of few steps: other work on the machine comes and goes in seconds.
REPEATS, ROUNDS = 5, 12
# Tokens of a streamed answer.
_STREAMED = 64


def served_model() -> ModelConfig:
    """17 million parameters: larger than the caches, quick to compile."""
    return ModelConfig("calibration-served", 4, 512, 1536, 8, 4, 64, 8192, _CONTEXT)


def no_model() -> ModelConfig:
    """A model so small that its steps take only host time."""
    return ModelConfig("calibration-host", 1, 32, 32, 1, 1, 32, 64, _CONTEXT)


def deep_model() -> ModelConfig:
    """Four times the layers of `served_model` in four fifths of its bytes."""
    return ModelConfig("calibration-kernels", 16, 256, 768, 4, 4, 64, 1024, _CONTEXT)


@dataclass(frozen=True)
class MeasuredHttp:
    """Seconds of answers over HTTP.

    alone, together: answers of one token, for one sequence and for all slots. alone_streamed, streamed: the
    same with _STREAMED tokens. Methods take seconds of steps without HTTP: `step` has one sequence,
    `full_step` has all slots.
    """

    alone: float
    together: float
    alone_streamed: float
    streamed: float

    def request_seconds(self, step: float) -> float:
        """Seconds of a request, without its step."""
        return max(0.0, self.alone - step)

    def token_seconds(self, step: float, full_step: float) -> float:
        """Seconds that each token after the first adds to its step."""
        added, added_full = self._added_seconds(step, full_step)
        return max(0.0, added_full - added) / (_SLOTS - 1)

    def step_seconds(self, step: float, full_step: float) -> float:
        """Seconds that HTTP adds to a step for any number of tokens."""
        added, _ = self._added_seconds(step, full_step)
        return max(0.0, added - self.token_seconds(step, full_step))

    def _added_seconds(self, step: float, full_step: float) -> tuple[float, float]:
        """Seconds that HTTP adds to a step of one sequence, and to a step of all slots."""
        streams = (self.alone_streamed - self.alone, step), (self.streamed - self.together, full_step)
        added, added_full = (max(0.0, tokens / (_STREAMED - 1) - seconds) for tokens, seconds in streams)
        return added, added_full


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds of a server's steps.

    host: a generate step of `no_model`. deep: a generate step of one sequence of `deep_model`. prompt: a
    prompt of _PROMPT tokens. one_sequence, many: a generate step of one and of all slots, over a short
    context. long: the same of all slots over a long context. ragged: a prompt of _RAGGED tokens in the
    program of _PROMPT tokens. deep_prompt: a prompt of _LITTLE tokens of `deep_model`. http: None if not
    measured. multiplies_padding: whether steps compute padding rows.
    """

    config: ModelConfig
    layout: Layout
    host: float
    deep: float
    prompt: float
    one_sequence: float
    many: float
    long: float
    ragged: float = 0.0
    deep_prompt: float = 0.0
    http: MeasuredHttp | None = None
    multiplies_padding: bool = True

    def price(self, hardware: Hardware, num_sequences: int, queries: int, context: int) -> float:
        """Predicted seconds of the last `queries` of `context` positions of each sequence."""
        at = self.layout.at("generate" if queries == 1 else "prefill")
        return pass_cost(self.config, at, hardware, num_sequences, queries, context)[0].seconds

    @property
    def num_padding_rows(self) -> int:
        """Padding rows that a prompt's step computes: one of each slot."""
        return _SLOTS if self.multiplies_padding else 0

    def padding(self, hardware: Hardware) -> float:
        """Seconds of a padding row on this hardware, as a share of a token's row."""
        if self.multiplies_padding:
            return 1.0
        held, filled = (self.price(hardware, 1, each, each) for each in (_RAGGED, _PROMPT))
        return min(max(0.0, (self.ragged - held) / (filled - held)), 1.0)


class _Figures(NamedTuple):
    """Fitted figures: weight bytes and prompt FLOPs a second, and figures of `StepEfficiency`."""

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
        of_steps = (timing.per(REPEATS).seconds for timing in timings[: len(programs)])
        http = None if over_http is None else over_http.finish(timings[len(programs) :])[0]
        padded = runner.limits.multiplies_padding
        return [MeasuredSteps(config, layout, *of_steps, http=http, multiplies_padding=padded)]

    return Prepared([*programs, *(over_http.programs if over_http else ())], finish)


def _over_http(progress: Listener, runner: JaxRunner) -> Prepared[MeasuredHttp] | None:
    """Answers of the runner over HTTP; None, with a message, if the `serve` extra is not installed."""
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
        return [MeasuredHttp(alone.per(REPEATS).seconds, *(timing.seconds for timing in others))]

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
    """Steps that compute the last `queries` of `context` positions of each sequence.

    As in the engine, a step is dispatched before the tokens of the previous step are read.
    """
    pages = -(-context // DEFAULT_PAGE)
    works = tuple(
        SequenceWork(
            # Greedy, as in load tests: sampling from a vocabulary takes a CPU about the time of a small
            # model.
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
    """`hardware` with the measured efficiency of a server's steps.

    If a server reads weights or multiplies prompts faster than the chip's ratings, these rates become the
    ratings, and the shares of training are lowered accordingly: it also computes products of gradients.
    """
    chip, http = hardware.chip, measured.http
    inference = StepEfficiency(
        roofline=0.0,
        overlap=0.0,
        launch_seconds=measured.host,
        host_request_seconds=http.request_seconds(measured.one_sequence) if http else 0.0,
        host_step_seconds=http.step_seconds(measured.one_sequence, measured.many) if http else 0.0,
        host_token_seconds=http.token_seconds(measured.one_sequence, measured.many) if http else 0.0,
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
        """The rate, at most `high`, that gives the step this time: with roofline 0 it is a + b / rate."""
        at_high, at_half = (
            of.price(priced(others._replace(**{name: each})), *step) for each in (high, high / 2)
        )
        return high / (1 + max(0.0, time - at_high) / (at_half - at_high))

    def kernel_seconds(others: _Figures) -> float:
        """Seconds of each operation of the deep model's step, without the seconds of its bytes."""
        bare, slow = (deep.price(priced(others._replace(kernel=each)), 1, 1, _SHORT) for each in (0.0, 1.0))
        return max(0.0, (measured.deep - bare) / (slow - bare))

    most = 1e3 * chip.flops(DTYPE)
    figures = _Figures(most, most, 1.0, 1.0, 1.0, 0.0)
    # (model, figure, its maximum, (sequences, queries, context) of the step that determines it, its time).
    # In a prompt's step every slot has a padding row, which counts as a query.
    prompt, little = (count + measured.num_padding_rows for count in (_PROMPT, _LITTLE))
    fits = [
        (measured, "bandwidth", most, (1, 1, _SHORT), measured.one_sequence),
        (measured, "flops", most, (1, prompt, prompt), measured.prompt),
        (measured, "packed", 1.0, (_SLOTS, 1, _SHORT), measured.many),
        (measured, "cache", 1.0, (_SLOTS, 1, _LONG), measured.long),
        (deep, "elementwise", 1.0, (1, little, little), measured.deep_prompt),
    ]
    for _ in range(_FITS):
        figures = figures._replace(kernel=kernel_seconds(figures))
        for of, name, high, step, time in fits:
            figures = figures._replace(**{name: rate(of, name, figures, step, time, high)})
    efficiency = replace(reached(figures), padding=measured.padding(priced(figures)))
    return replace(hardware, chip=_with_ratings(chip, efficiency, figures.bandwidth, figures.flops))


def _with_ratings(chip: Chip, inference: StepEfficiency, bandwidth: float, flops: float) -> Chip:
    """The chip with the measured rates of a server's steps, its ratings raised to them if they are lower."""
    rating, peak = max(bandwidth, chip.hbm_bytes_per_second), max(flops, chip.flops(DTYPE))
    of_training = chip.flops(DTYPE) / peak
    return replace(
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
            inference, memory=bandwidth / rating, matmul={DTYPE: flops / peak}, attention=flops / peak
        ),
    )


def _sources(*, has_http: bool) -> dict[str, str]:
    where = f"measured by mw calibrate with the programs of mw serve, JAX {jax.__version__}"
    http = {
        "host_request_seconds": f"{where}: an answer of one token over HTTP, minus its step",
        "host_step_seconds": f"{where}: steps of one sequence with tokens streamed to a client on the same "
        "machine, minus such steps without HTTP",
        "host_token_seconds": f"{where}: the same of {_SLOTS} sequences, minus the time of one",
    }
    return (http if has_http else {}) | {
        "matmul": f"{where}: a prompt of {_PROMPT} tokens",
        "attention": f"{where}: a prompt of {_PROMPT} tokens, whose products are assumed equally fast",
        "padding": f"{where}: a prompt of {_RAGGED} tokens in the program of {_PROMPT}",
        "roofline": "0: the same cores load weights and multiply them",
        "packed": f"{where}: generate steps of {_SLOTS} sequences, compared with one",
        "memory": f"{where}: weights of a generate step of one sequence",
        "cache": f"{where}: generate steps of {_SLOTS} sequences over {_LONG} and {_SHORT} positions",
        "elementwise": f"{where}: a prompt of {_LITTLE} tokens of 16 small layers",
        "kernel_seconds": f"{where}: generate steps of one sequence, of 16 small layers and of 4 large ones",
        "launch_seconds": f"{where}: a generate step of {_SLOTS} sequences of a model with one narrow layer",
    }
