"""Ways to train and to serve a model on a machine, each with its largest batch and its speed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.dtypes import number_type, types_for
from meshwright.errors import LayoutError, ModelError, PlanError
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.precision import published_precision
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.bisection import first_false
from meshwright.plan.candidate import Candidate
from meshwright.plan.serve.layouts import most_heads
from meshwright.plan.serve.phase import PhasePoint, price_phase
from meshwright.plan.train import price
from meshwright.units import format_bytes

LORA_RANK = 16
# The narrowest type of weights that stay as they are next to adapters.
_BASE_DTYPE = min(
    types_for("frozen weights", "train"), key=lambda name: number_type(name).weight_bytes(inputs=1024)
)
# The keywords of a layout, and of the model, by the way's name.
TRAINING: Mapping[str, tuple[dict[str, str], dict[str, int]]] = {
    "train all weights": ({}, {}),
    "train all weights, 8-bit moments": ({"optimizer_dtype": "int8"}, {}),
    "train LoRA": ({}, {"lora_rank": LORA_RANK}),
    f"train QLoRA, {_BASE_DTYPE}": ({"weights_dtype": _BASE_DTYPE}, {"lora_rank": LORA_RANK}),
}
# The type of the weights, by the way's name.
SERVING: Mapping[str, str] = {f"serve in {dtype}": dtype for dtype in ("bf16", "fp8", "int8", "int4")}
# Lengths of context are tried in multiples of this.
_STEP = 128
_REMATS = ("none", "matmuls", "full")


@dataclass(frozen=True)
class Verdict:
    """A way to use the model, and whether it fits.

    max_batch: sequences of the asked length at once. max_context: tokens of a single sequence, at most the
    model's. tokens_per_second: at max_batch; one_stream: of generating for one sequence. needed_bytes: a
    chip's, with one sequence a chip. why_not: the reason if the way does not fit, or is not possible.
    not_run: the feature that is planned, but does not run yet.
    """

    way: str
    layout: str
    fits: bool
    max_batch: int
    max_context: int
    tokens_per_second: float | None
    one_stream: float | None
    needed_bytes: int | None
    why_not: str | None
    not_run: str | None


class _Way(NamedTuple):
    """A way to use a model. changes: new values of the model's fields."""

    name: str
    trains: bool
    layout: Layout
    changes: Mapping[str, Any] = MappingProxyType({})


def _ways(config: ModelConfig, hardware: Hardware) -> Iterator[_Way]:
    """The ways of TRAINING and SERVING, and serving in a type of published files that SERVING lacks.

    Training splits weights over all chips (FSDP). Serving splits heads over the most chips that divide, and
    serves replicas with the rest.
    """
    for name, (numbers, changes) in TRAINING.items():
        yield _Way(name, True, Layout.of(fsdp=hardware.num_chips).replace(**numbers), changes)
    served = most_heads(config, hardware.num_chips)
    ways = {name: {"weights_dtype": dtype} for name, dtype in SERVING.items()}
    published = published_precision(config, by_engine=True)
    if published and published.get("weights_dtype") not in SERVING.values():
        ways[f"serve as published, {config.stored_dtype}"] = published
    for name, words in ways.items():
        yield _Way(name, False, served.replace(**words))


def verdicts(config: ModelConfig, hardware: Hardware, seq_len: int) -> Iterator[Verdict]:
    """Whether each way to use a model fits, for all of `_ways`, with its largest batch and its speed."""
    for way in _ways(config, hardware):
        verdict = _training if way.trains else _serving
        try:
            yield verdict(replace(config, **way.changes), hardware, seq_len, way.name, way.layout)
        except (ModelError, PlanError, LayoutError) as error:
            yield _impossible(way.name, way.layout, str(error))


def fitting_ways(config: ModelConfig, hardware: Hardware, seq_len: int) -> list[str]:
    """The names of `_ways` that fit with one sequence of `seq_len` tokens a chip or replica."""
    names = []
    for way in _ways(config, hardware):
        with suppress(ModelError, PlanError, LayoutError):
            if way.trains:
                work, layout = Workload(hardware.num_chips, seq_len), way.layout.replace(remat="full")
                fits = price(replace(config, **way.changes), hardware, work, layout).fits
            else:
                work = Workload(way.layout.num_batch_shards, seq_len, "generate")
                fits = price_phase(config, hardware, work, [way.layout]).fits
            if fits:
                names.append(way.name)
    return names


def _impossible(way: str, layout: Layout, why: str) -> Verdict:
    return Verdict(way, str(layout), False, 0, 0, None, None, None, why, None)


def _training(config: ModelConfig, hardware: Hardware, seq_len: int, way: str, layout: Layout) -> Verdict:
    chips = hardware.num_chips

    @cache
    def candidate(remat: str, each: int, length: int) -> Candidate:
        return price(config, hardware, Workload(each * chips, length), layout.replace(remat=remat))

    least = candidate("full", 1, min(seq_len, _STEP))
    if not least.fits:
        return _too_large(way, least.layout, hardware, least.needed_bytes)
    most = _largest(1, lambda each: candidate("full", each, seq_len).fits)
    context = _longest(config, lambda length: candidate("full", 1, length).fits)
    tried = [candidate(remat, each, seq_len) for remat in _REMATS for each in {1, most} if each]
    fitting = [one for one in tried if one.fits]
    fastest = max(fitting, key=lambda option: option.num_tokens / option.step_seconds, default=None)
    single = candidate("full", 1, seq_len)
    layout = fastest.layout if fastest else single.layout
    return Verdict(
        way=way,
        layout=str(layout),
        fits=fastest is not None,
        max_batch=most * chips,
        max_context=context,
        tokens_per_second=fastest.num_tokens / fastest.step_seconds if fastest else None,
        one_stream=None,
        needed_bytes=round(single.needed_bytes),
        why_not=None if fastest else f"not one sequence of {seq_len:,} tokens fits; {context:,} do",
        not_run=why_not(config, layout, hardware=hardware),
    )


def _serving(config: ModelConfig, hardware: Hardware, seq_len: int, way: str, layout: Layout) -> Verdict:
    replicas = layout.num_batch_shards

    def point(sequences: int, length: int) -> PhasePoint:
        return price_phase(config, hardware, Workload(sequences, length, "generate"), [layout])

    least = point(replicas, _STEP)
    if not least.fits:
        return _too_large(way, layout, hardware, least.memory.total)
    option = point(replicas, seq_len)
    full = point(option.max_batch, seq_len) if option.max_batch else None
    context = _longest(config, lambda length: point(replicas, length).fits)
    return Verdict(
        way=way,
        layout=str(layout),
        fits=full is not None,
        max_batch=option.max_batch,
        max_context=context,
        tokens_per_second=full.num_tokens / full.step_seconds if full else None,
        one_stream=1 / option.step_seconds if full else None,
        needed_bytes=round(option.memory.total),
        why_not=None if full else f"not one sequence of {seq_len:,} tokens fits; {context:,} do",
        not_run=why_not(config, layout, "generate", hardware=hardware),
    )


def _too_large(way: str, layout: Layout, hardware: Hardware, needed: float) -> Verdict:
    usable = hardware.chip.program_bytes
    why = f"needs {format_bytes(needed)} a chip, {format_bytes(needed - usable)} more than it has"
    return Verdict(way, str(layout), False, 0, 0, None, None, round(needed), why, None)


def _longest(config: ModelConfig, fits: Callable[[int], bool]) -> int:
    """The longest sequence that fits, in steps of _STEP up to the model's context."""
    most = max(config.max_seq_len // _STEP, 1)
    return min(_largest(1, lambda steps: steps <= most and fits(steps * _STEP)), most) * _STEP


def _largest(least: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, from `least` on; 0 if that does not."""
    if not fits(least):
        return 0
    above = 2 * least
    while fits(above):
        above *= 2
    return first_false(fits, above // 2, above) - 1
