"""Fits what steps reach of the chips' ratings, by chip and by software, on published rows.

    python benchmarks/fit_published.py > benchmarks/results/fit_published.json
    ... --leave-out    besides, every source and every panel predicted with figures fitted on the others
    ... --ablate       besides, the errors of left-out sources without each fitted figure and with each other
    ... --write        writes the [step] tables of hardware/shares/*.toml and hardware/chips/*.toml, and the
                       factors of programs/*.toml

A figure of a family of chips under a program is that of its kind (GPU or TPU), plus deviations of the family,
of the generic program and of a program with a source of its own, all in logits (seconds: in logarithms). All
have priors from physics, vendors and benchmarks of kernels, and only those in FITTED move. Minimised by least
squares over rows of

    soft_l1(log(predicted / published) / SCALE) . weight  +  priors

weight: a source of many rows counts as SOURCE_ROWS of them. Layouts are chosen by memory alone, so they are
recorded once and priced again, for all steps of a derivative at once: what a chip has as a figure is an array
here. Nothing looks at ids, models' names or notes.
"""

# pyright: reportArgumentType=false
import argparse
import csv
import json
import math
import platform
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np

from meshwright.cost.collectives import along_lines, lines_of
from meshwright.cost.graph import Graph, Transfer
from meshwright.cost.passes import Dtypes, SegmentPass
from meshwright.cost.pipeline import PassSeconds, Times, least_makespan, makespan
from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.state import StageState
from meshwright.cost.step_memory import flushes
from meshwright.cost.step_seconds import SegmentSeconds, StagePasses, Update, hop_transfer
from meshwright.cost.timed_passes import TimedPass, sent_together, timed_passes
from meshwright.cost.transfer_prices import as_sent, at_step_rates, lost_at_nodes, lost_between_stages
from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.hardware.chip import Chip, Switch
from meshwright.hardware.network import NETWORKS
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.plan.spread import quantile
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import DEFAULT, PROGRAMS, TrainingProgram
from meshwright.records import Folder
from meshwright.validate.choice import Mix, mixes
from meshwright.validate.published import MEMORY, STEP, PublishedRow, read_rows
from meshwright.validate.reproduce import Case, machine_of_row, reproduce
from meshwright.validate.score import (
    Prediction,
    memory_predictions,
    panel_of,
    predict,
    rankings,
)

HERE = Path(__file__).parent
TABLES = (HERE / "published/training.csv", HERE / "published/nanotron.csv")
CATALOG = HERE.parent / "src/meshwright/hardware/chips"
PROGRAM_FILES = HERE.parent / "src/meshwright/programs"
NETWORK_FILES = HERE.parent / "src/meshwright/hardware/networks"
OUT_OF_SAMPLE = HERE.parent / "src/meshwright/plan/out_of_sample.csv"
# The chips of one design; every other chip is a family of its own.
FAMILIES = {
    "a100": ("a100-80gb", "a100-40gb", "a800"),
    "h100": ("h100", "h200", "h800", "h100-pcie"),
    "blackwell": ("gb200-nvl72", "b200"),
    "blackwell-ultra": ("gb300-nvl72", "b300"),
}


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


@dataclass(frozen=True)
class Prior:
    """A guess and where it is from."""

    guess: float
    source: str


_SHARED = {
    "matmul.bf16": Prior(0.70, "large cuBLAS and XLA products reach 60 to 80% of dense peaks"),
    "experts": Prior(0.70, "the fullest of several experts has a third more rows than the mean"),
    "attention": Prior(
        0.53, "cuDNN's attention on an H100, causal, both passes: 0.50 to 0.55 (FlashAttention-3, 2024)"
    ),
    "memory": Prior(0.80, "STREAM on GPUs and TPUs reaches 80 to 92% of ratings"),
    "elementwise": Prior(0.50, "operands counted once; unfused steps read and write them again"),
    "overlap": Prior(0.80, "collectives beside products take memory bandwidth and processors"),
    "waiting": Prior(0.80, "tensor collectives in blocks beside products hide a part"),
    "exchanging": Prior(0.90, "products wait for an all-to-all; releases of 2025 hide a part"),
}
FIGURES: dict[str, dict[str, Prior]] = {
    "gpu": _SHARED
    | {
        "fp8": Prior(0.85, "of bf16's share: cuBLAS reaches 1.3 to 1.5e15 on an H100 in fp8"),
        "fp4": Prior(0.75, "of fp8's share: scales and casts take more of a shorter product"),
        "links.nvlink": Prior(0.75, "nccl-tests: 330 to 370 of 450 GB/s"),
        "links.network": Prior(0.80, "nccl-tests over InfiniBand: 75 to 95% of the line rate"),
        "network_latency": Prior(1.5, "of NCCL's tuning table; EFA's steps take several times it"),
        "matmul_half_outputs": Prior(5e5, "half a wave of 128 x 128 tiles on 108 to 148 processors"),
        "kernel_seconds": Prior(4e-6, "launch to launch of a stream's kernels, 2 to 8 us"),
        "launch_seconds": Prior(2e-3, "a step's start and end on the host"),
    },
    "tpu": _SHARED
    | {
        # XLA's large products alone reach 85 to 95% of a TPU's peak, in traces of any generation.
        "matmul.bf16": Prior(0.88, "85 to 95% of a TPU's peak in traces of any generation"),
        "links.ici": Prior(0.85, "How to Scale Your Model: profiles reach 80 to 95%"),
        "links.dcn": Prior(0.60, "a share of a host's card"),
        "kernel_seconds": Prior(2e-6, "profiles show gaps of 1 to 3 us"),
    },
}
# What is known of families: (figure, source).
KNOWN = {
    "mi300x": {
        "matmul.bf16": (
            0.47,
            "Ambati et al. (October 2025): 45% of the MI300X's peak in bf16 and fp8; AMD, "
            "Measuring Max-Achievable FLOPs (2025): 54% at the best shape",
        )
    }
}
# Deviations that benchmarks of kernels give, in logits: (owner, figure) to (deviation, source). A chip's own
# kernels use its instructions; FlashAttention-2, which programs on PyTorch and Megatron-LM run, was written
# for the A100 and falls behind on later chips.
_LATER = _logit(0.53) - _logit(0.30)
MEASURED = {
    ("a100", "attention"): (
        _logit(0.55) - _logit(0.30),
        "FlashAttention-2 (Dao, 2023): it reaches 0.53 to 0.60 of an A100, causal, both passes",
    ),
    ("blackwell", "attention"): (
        _logit(0.50) - _logit(0.53),
        "cudnn-frontend, benchmark/sdpa_benchmark_training: both passes, causal, at 8k to 32k tokens 0.44 to "
        "0.53 of a B200 (2025), 0.54 to 0.60 of a GB200 where an H200 has 0.57 to 0.61 (2026); "
        "FlashAttention-4 (2026): 1.3 times cuDNN's forward pass is 0.71",
    ),
    ("blackwell-ultra", "attention"): (
        _logit(0.56) - _logit(0.53),
        "cudnn-frontend, benchmark/sdpa_benchmark_training (2026): both passes, causal, at 8k to 32k tokens "
        "0.61 to 0.67 of a GB300, where a GB200 has 0.54 to 0.60; NVIDIA, Blackwell Ultra (2025): "
        "exponentials at twice the rate",
    ),
    ("mi300x", "attention"): (
        _logit(0.37) - _logit(0.53),
        "AITER, op_tests/cpp/mha/README.md (October 2025): both passes, causal, at 4k to 8k tokens 0.33 to "
        "0.35 of an MI300X; ROCm/flash-attention issue 142: FlashAttention-2 0.18",
    ),
} | {
    (f"software {name}", "attention"): (
        -_LATER,
        "FlashAttention-3 (Shah et al., 2024): FlashAttention-2 reaches 0.30 to 0.34 of an H100, cuDNN 0.53",
    )
    for name in ("pytorch-eager", "pytorch-compiled", "megatron", "deepspeed")
}
# Seconds of a software's host, where it launches operations one by one.
HOST = {
    "pytorch-eager": {"host_seconds": 6e-5, "host_collective_seconds": 1.5e-4},
    "pytorch-compiled": {"host_seconds": 3e-5, "host_collective_seconds": 1e-4},
    "megatron": {"host_seconds": 3e-5, "host_collective_seconds": 7e-5},
    "megatron-te": {"host_seconds": 2e-5, "host_collective_seconds": 7e-5},
    "deepspeed": {"host_seconds": 6e-5, "host_collective_seconds": 1.5e-4},
}
# Keys of half: FlashAttention-2, figure 6 (A100, head 128, causal): 45% of its best rate at 512 tokens, 65%
# at 1,024, 80% at 2,048; causal queries see half of the keys.
ATTENTION_HALF_KEYS = {"gpu": 256.0, "tpu": 0.0}
# What is known of a software, which rows are not asked.
KNOWN_OF_SOFTWARE = (
    "whole_sums",
    "gathers_first",
    "broadcasts",
    "unfused_norms",
    "host_node_seconds",
    "host_stage_seconds",
    "host_flush_seconds",
)
# Programs with fitted constants of their own, next to those of the generic program that their rows name.
OWN_PROGRAMS = ("deepspeed-2021", "nanotron")
# The program of the sweep of layouts: its other panels stay when one of them is left out.
SWEEP = "nanotron"
# The figures that are fitted, by owner, with the spread of their priors in logits or logarithms. All others
# stay at their priors: fitting them makes no source that is left out closer, as `--ablate` prints.
FITTED = {
    "gpu": {"attention": 0.4},
    "software megatron-te": {"waiting": 0.5},
    "software xla": {"elementwise": 0.4},
    # Of one source, and for its record only: other sources neither suggest nor feel them.
    "program deepspeed-2021": {"matmul.bf16": 0.3, "overlap": 0.7},
    "program nanotron": {"host_seconds": 0.06},
}
# The spread of a figure that stays at its prior.
_FIXED = 1e-4
# Factor on the spreads of priors, with which the evidence of rows is weighed.
EVIDENCE = 1.0
# Logits of the matmul share by log(watts), within a family: dense products draw all power, and the clock
# follows it (`Chip.clock_share`).
_BY_POWER = 0.4 / 0.3
# Families whose matmuls are those of another.
_SAME_PRODUCTS = {"blackwell-ultra": "blackwell"}
# Figures of a network's record, by the names that they are fitted under.
OF_NETWORKS = {"share": "links.network", "step_latency": "network_latency"}
SCALE = 0.08  # residuals below about this count squared, those above by their size
SMALL_REGRET = 0.05
SOURCE_ROWS = 12  # so many rows count a source of more
_STEP_SIZE = 1e-3
_FARTHEST = 1.5  # that a figure moves in a step, in logits
# Shares of a step that are tried, and what a step must gain of the cost (some 1,000) for another.
_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
_LEAST_GAIN = 0.3


class Array(np.ndarray):
    """An array that caches of prices can have in their keys: it equals itself alone."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def _array(values: Iterable[float]) -> Array:
    return np.array(list(values), dtype=float).view(Array)


@dataclass(frozen=True, eq=False)
class ManyEfficiencies(StepEfficiency):
    """StepEfficiency with an array for each figure; it equals itself alone."""


def family_of(chip: str) -> str:
    """The family that a chip belongs to."""
    return next((name for name, chips in FAMILIES.items() if chip in chips), chip)


# The most that a figure can be; shares are below 1, others have no such bound.
LARGEST = {"kernel_seconds": 1e-5}
_POSITIVE = ("network_latency", "matmul_half_outputs")


def _is_share(name: str) -> bool:
    return not name.endswith("_seconds") and name not in _POSITIVE


def _most(name: str) -> float | None:
    return 1.0 if _is_share(name) else LARGEST.get(name)


def _free(name: str, value: float) -> float:
    """A figure on an axis without bounds."""
    most = _most(name)
    return math.log(value / (most - value)) if most else math.log(value)


def _figure(name: str, value: Any) -> Any:
    most = _most(name)
    return most / (1 + np.exp(-value)) if most else np.exp(value)


def power_shift(chip: str) -> float:
    """Logits of the matmul share of a chip above that of the first with the same products, by its power."""
    family = _SAME_PRODUCTS.get(family_of(chip), family_of(chip))
    own, first = catalog.chip(chip), catalog.chip(FAMILIES.get(family, (chip,))[0])
    if not own.power_watts or not first.power_watts:
        return 0.0
    return _BY_POWER * math.log(own.power_watts / own.flops("bf16") / first.power_watts * first.flops("bf16"))


def efficiency(
    figures: Mapping[str, Any], kind: str, runs: TrainingProgram | None = None, falloff: float = 0.0
) -> StepEfficiency:
    """What figures named as in FIGURES and HOST describe, numbers or arrays, and what is known of `runs`.

    falloff: of the network.
    """
    links = {n.removeprefix("links."): v for n, v in figures.items() if n.startswith("links.")}
    bf16 = figures["matmul.bf16"]
    matmul = {"bf16": bf16, "f16": bf16, "f32": bf16, "int8": bf16}
    if kind == "gpu":  # narrower types never reach a larger share than wider ones
        matmul |= {"fp8": bf16 * figures["fp8"], "int8": bf16 * figures["fp8"]}
        matmul |= {"fp4": matmul["fp8"] * figures["fp4"]}
    own = ("fp8", "fp4")
    single = {name: value for name, value in figures.items() if "." not in name and name not in own}
    half = ATTENTION_HALF_KEYS[kind]
    arrays = isinstance(bf16, np.ndarray)
    made = ManyEfficiencies if arrays else StepEfficiency
    known = {name: getattr(runs, name) for name in KNOWN_OF_SOFTWARE} if runs else {}
    return made(
        matmul=matmul, links=links, attention_half_keys=half, network_falloff=falloff, **known, **single
    )


def step_seconds(graph: Graph, layout: Layout, hardware: Hardware, num_flushes: float = 0.0) -> Any:
    """The step time as StepPricer has it, of a chip whose figures are arrays.

    The bubble of a pipeline is simulated with the first of each, and follows its lower bound from there.
    """
    chip, dtypes = hardware.chip, Dtypes.of(layout)
    placement = at_step_rates(hardware).place(layout.mesh)
    adds = isinstance(placement.network, Switch)

    def sent(transfer: Transfer) -> Any:
        one = as_sent(transfer, layout, chip)
        lines = lines_of(one.op, placement.stretches(one.axes), placement.network, one.copies)
        lost = lost_at_nodes(one, placement, chip)
        return along_lines(one.op, one.gathered_bytes, lines, adds=adds) + lost

    def timed_pass(one: SegmentPass) -> TimedPass:
        def lost(transfer: Transfer) -> Any:
            return lost_between_stages(transfer, placement, chip)

        return TimedPass(one, sent_together(one.transfers, sent), chip, lost)

    segments = SegmentSeconds.of(timed_passes(graph, layout, dtypes, chip, timed_pass))
    for segment in graph.segments:  # prices of this chip, which are not read again
        for key in [key for key in segment.memo if chip in key]:
            del segment.memo[key]
    schedule, pipe, interleave = layout.schedule.pipeline, layout.pipe, layout.schedule.interleave
    microbatches = layout.schedule.microbatches
    passes = StagePasses(graph, (schedule, pipe, interleave), segments, chip.step)
    seconds = microbatches * passes.microbatch_seconds
    if pipe > 1:
        depths = [segments.run(counts) for counts in passes.by_depth]
        hop = sent(hop_transfer(graph, pipe))
        times = Times([PassSeconds(*map(_first, one)) for one in depths], _first(hop))
        whole = makespan(schedule, pipe, microbatches, interleave, times)
        size = len(hop) if np.ndim(hop) else 1
        columns = tuple(np.array([np.broadcast_to(d[i], size) for d in depths]) for i in range(3))
        count = np.full(size, microbatches)
        least = least_makespan(schedule, pipe, count, interleave, columns, np.broadcast_to(hop, size))
        seconds = np.maximum(seconds, whole * least / least[0])
    update = Update.of(StageState(graph, layout), microbatches, dtypes, chip)
    seconds = seconds + passes.exposed_seconds + update.chip_seconds + update.sent_seconds(sent)
    return seconds + chip.step.host_flush_seconds * num_flushes + chip.step.launch_seconds * microbatches


def _first(figure: Any) -> float:
    return float(np.ravel(figure)[0])


@dataclass
class Row:
    """A published row whose layouts are recorded."""

    published: PublishedRow
    case: Case
    parts: list[tuple[Mix, list[tuple[float, Layout, Graph, float]]]]
    weight: float = 1.0

    @classmethod
    def of(cls, published: PublishedRow) -> "Row":
        case = reproduce(published)
        parts = []
        for mix in mixes(case):
            recorded = []
            for share, layout in mix.parts:
                shape = PassShape.of_microbatch(case.workload, layout)
                graph = record_training(case.config, case.hardware, layout, shape)
                room = mix.hardware.chip.program_bytes
                short = flushes(graph, layout, mix.hardware.software, room) if len(mix.parts) == 1 else 0.0
                recorded.append((share, layout, graph, short))
            parts.append((mix, recorded))
        return cls(published, case, parts)

    @property
    def kind(self) -> str:
        return self.case.hardware.chip.kind

    @property
    def family(self) -> str:
        return family_of(self.published.chip)

    @property
    def software(self) -> str:
        """The program that has the constants of the row's."""
        return self.case.hardware.software.fitted_on

    @property
    def program(self) -> str | None:
        """The row's program, if it has deviations of its own."""
        name = self.case.hardware.software.name
        return name if name in OWN_PROGRAMS else None

    @property
    def is_swept(self) -> bool:
        """Whether the row is of the sweep of layouts."""
        return self.case.hardware.software.name == SWEEP

    @property
    def source(self) -> str:
        return self.published.source

    def log_errors(self, step: StepEfficiency) -> Any:
        """log(predicted step time / published), for each entry of the figures."""
        hardware = self.case.hardware
        hardware = replace(hardware, chip=replace(hardware.chip, step=step))
        seconds = [
            sum(share * step_seconds(graph, layout, hardware, n) for share, layout, graph, n in recorded)
            for _, recorded in self.parts
        ]
        return np.log(min(seconds, key=_first) / self.published.seconds())

    def error(self, log_error: float) -> float:
        """Of the figure in the row's unit."""
        return math.expm1(log_error if self.published.metric == STEP else -log_error)


class Model:
    """The figures as one vector: those of a kind, and deviations of families, software and programs.

    fitted: as FITTED.
    """

    def __init__(self, rows: Sequence[Row], fitted: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self.families = {row.family: row.kind for row in rows}
        self.softwares = {row.software: row.kind for row in rows}
        self.places: dict[tuple[str, str], int] = {}
        self.fitted = FITTED if fitted is None else fitted
        start, sigma = [], []

        def take(owner: str, name: str, value: float) -> None:
            self.places[owner, name] = len(start)
            start.append(value)
            sigma.append(self.fitted.get(owner, {}).get(name, _FIXED))

        kinds = sorted(set(self.families.values()))
        for kind in kinds:
            for name, prior in FIGURES[kind].items():
                take(kind, name, _free(name, prior.guess))
        softwares = [f"software {software}" for software in sorted(self.softwares)]
        programs = [f"program {name}" for name in sorted({row.program for row in rows if row.program})]
        for owner in (*self.families, *softwares, *programs):
            known = {name: value for (of, name), (value, _) in MEASURED.items() if of == owner}
            for name in {**known, **self.fitted.get(owner, {})}:
                take(owner, name, known.get(name, 0.0))
            for name, guess in HOST.get(owner.removeprefix("software "), {}).items():
                take(owner, name, math.log(guess))
        self.start, self.sigma = np.array(start), EVIDENCE * np.array(sigma)

    def owners(self, row: Row) -> tuple[str, ...]:
        return (row.kind, row.family, f"software {row.software}", f"program {row.program}")

    def names(self, kind: str, software: str) -> list[str]:
        return [*FIGURES[kind], *(HOST.get(software, {}) if kind == "gpu" else ())]

    def free(self, x: np.ndarray, owners: Sequence[str], name: str) -> float:
        return sum(float(x[self.places[one, name]]) for one in owners if (one, name) in self.places)

    def figures(
        self, x: np.ndarray, kind: str, family: str, software: str, chip: str = ""
    ) -> dict[str, float]:
        owners = (kind, family, f"software {software}")
        shift = {"matmul.bf16": power_shift(chip)} if chip else {}
        found = {
            n: float(_figure(n, self.free(x, owners, n) + shift.get(n, 0.0)))
            for n in self.names(kind, software)
        }
        return found | {name: figure for name, (figure, _) in KNOWN.get(family, {}).items()}

    def evaluate(self, row: Row, x: np.ndarray, *, slopes: bool) -> tuple[float, dict[str, float]]:
        """(log error, its derivative by each figure on its free axis)."""
        names, owners = self.names(row.kind, row.software), self.owners(row)
        values = {name: self.free(x, owners, name) for name in names}
        values["matmul.bf16"] += power_shift(row.published.chip)
        if row.case.hardware.software.calls_vendor_attention(row.case.hardware.chip.compute_capability):
            values["attention"] -= self.free(x, (f"software {row.software}",), "attention")
        known = KNOWN.get(row.family, {})
        values |= {name: _free(name, figure) for name, (figure, _) in known.items()}
        fitted = {name for owner in owners for name in self.fitted.get(owner, {})} - known.keys()
        moved = sorted(fitted) if slopes else []
        arrays = {
            name: _figure(name, _array([v, *(v + _STEP_SIZE * (name == other) for other in moved)]))
            for name, v in values.items()
        }
        machine = row.case.hardware
        step = efficiency(arrays, row.kind, machine.software, machine.chip.step.network_falloff)
        found = np.broadcast_to(row.log_errors(step), 1 + len(moved))
        pairs = zip(moved, found[1:], strict=True)
        return float(found[0]), {name: float(one - found[0]) / _STEP_SIZE for name, one in pairs}

    def log_errors(self, rows: Sequence[Row], x: np.ndarray) -> np.ndarray:
        return np.array([self.evaluate(row, x, slopes=False)[0] for row in rows])

    def jacobian(self, rows: Sequence[Row], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log errors, their derivatives by the vector)."""
        matrix, errors = np.zeros((len(rows), len(x))), np.zeros(len(rows))
        for place, row in enumerate(rows):
            errors[place], slopes = self.evaluate(row, x, slopes=True)
            for name, slope in slopes.items():
                for owner in self.owners(row):
                    if (owner, name) in self.places:
                        matrix[place, self.places[owner, name]] = slope
        return errors, matrix

    def solve(
        self, rows: Sequence[Row], x0: np.ndarray, errors: np.ndarray, matrix: np.ndarray
    ) -> np.ndarray:
        """The vector that predicts the rows best, were errors linear about x0 with this derivative.

        soft_l1 on rows alone, the prior stays a square: least squares with weights 1 / sqrt(1 + r^2).
        """
        weights, moves = np.array([row.weight for row in rows]), self.sigma > EVIDENCE * _FIXED
        slopes, spread, x = matrix[:, moves] / SCALE, self.sigma[moves], x0.copy()
        x[~moves] = self.start[~moves]
        begun = errors / SCALE + matrix[:, ~moves] @ (x - x0)[~moves] / SCALE
        for _ in range(12):
            r = begun + slopes @ (x - x0)[moves]
            held = weights / np.sqrt(1 + r**2)
            told = slopes.T @ (slopes * held[:, None]) + np.diag(1 / spread**2)
            wanted = slopes.T @ (held * (slopes @ x[moves] - r)) + self.start[moves] / spread**2
            solved = np.linalg.solve(told, wanted)
            x[moves] = np.clip(solved, x0[moves] - _FARTHEST, x0[moves] + _FARTHEST)
        return x

    def fit(self, rows: Sequence[Row], start: np.ndarray, steps: int) -> np.ndarray:
        """The vector that predicts the rows best, by Gauss-Newton steps.

        A step is halved until it gains: which layout a row means, and what bounds it, jumps with figures.
        """
        x, (errors, matrix) = start, self.jacobian(rows, start)
        least = self.cost(rows, x, errors)
        for number in range(steps):
            begun = time.perf_counter()
            towards = self.solve(rows, x, errors, matrix) - x
            for share in _SHARES:
                tried = x + share * towards
                errors, matrix = self.jacobian(rows, tried)
                if (cost := self.cost(rows, tried, errors)) < least:
                    break
            else:
                return x
            far, gained = share * float(np.max(np.abs(towards) / self.sigma)), least - cost
            x, least, seconds = tried, cost, time.perf_counter() - begun
            found = summary(np.expm1(errors))
            print(f"{number}: {found} {seconds:.0f} s, moved {far:.2f}, gained {gained:.2f}", file=sys.stderr)
            if far < 0.05 or gained < _LEAST_GAIN:
                break
        return x

    def cost(self, rows: Sequence[Row], x: np.ndarray, errors: np.ndarray) -> float:
        weights = np.array([row.weight for row in rows])
        of_rows = weights @ (2 * (np.sqrt(1 + (errors / SCALE) ** 2) - 1))
        return float(of_rows + np.sum(((x - self.start) / self.sigma) ** 2))

    def degrees_of_freedom(self, rows: Sequence[Row], x: np.ndarray) -> float:
        """Of the rows: the trace of the matrix that makes fitted values of measured ones."""
        errors, matrix = self.jacobian(rows, x)
        weights = np.array([row.weight for row in rows]) / np.sqrt(1 + (errors / SCALE) ** 2)
        told = matrix.T @ (matrix * weights[:, None]) / SCALE**2
        return float(np.trace(np.linalg.solve(told + np.diag(1 / self.sigma**2), told)))


# On more nodes than these, or with stages over several nodes, times of nanotron's sweep show other problems.
_NODES_HELD = 32


def heldable(row: PublishedRow) -> bool:
    """Whether the time of a row depends mainly on its layout.

    A third of nanotron's runs with stages over several nodes stall for a second per microbatch, and most with
    one stage on 64 nodes take 5 to 20 times longer than their work (Ultra-Scale Playbook, 2025).
    """
    program = PROGRAMS.of_table(row.source)
    num_nodes = max(1, row.chips // 8)
    if program is None or program.name != "nanotron" or row.zero == 3 or num_nodes == 1:
        return True
    return (row.pipe or 1) == 1 and num_nodes <= _NODES_HELD


def read(paths: Sequence[Path], *, held: bool = True) -> list[Row]:
    """The rows of step times that can be expressed, and held to; or those that cannot be held to."""
    rows = []
    for published in (row for path in paths for row in read_rows(path)):
        if not isinstance(published, PublishedRow) or published.metric == MEMORY:
            continue
        if heldable(published) != held:
            continue
        try:
            rows.append(Row.of(published))
        except MeshwrightError as error:
            print(f"{published.id}: {error}", file=sys.stderr)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.published.source] = counts.get(row.published.source, 0) + 1
    for row in rows:
        row.weight = min(1.0, SOURCE_ROWS / counts[row.published.source])
    return rows


def summary(errors: Iterable[float]) -> dict[str, float | int | None]:
    found = sorted(map(abs, errors))
    return {"rows": len(found), "median": quantile(found, 0.5), "p90": quantile(found, 0.9)}


def by(rows: Sequence[Row], errors: Sequence[float], key: Callable[[Row], str]) -> dict[str, dict]:
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        groups.setdefault(key(row), []).append(error)
    return {name: summary(found) | {"mean": statistics.mean(found)} for name, found in groups.items()}


def leave_out(model: Model, rows: Sequence[Row], x: np.ndarray, group_of: Callable[[Row], Any]) -> np.ndarray:
    """The log error of every row with figures fitted on other groups, and without its source's records.

    The fit without a group starts at that with it, from its derivatives, and is made once more from there.
    """
    errors, matrix = model.jacobian(rows, x)
    found = np.zeros(len(rows))
    groups = [group_of(row) for row in rows]
    for group in dict.fromkeys(groups):
        kept = np.array([one != group for one in groups])
        others = [row for row, keep in zip(rows, kept, strict=True) if keep]
        without = model.solve(others, x, errors[kept], matrix[kept])
        for place, (row, keep) in enumerate(zip(rows, kept, strict=True)):
            if not keep:
                found[place], _ = model.evaluate(_unnamed(row), without, slopes=False)
    return found


def ablate(rows: Sequence[Row], x: np.ndarray, model: Model) -> list[dict[str, Any]]:
    """Errors of sources left out without each fitted figure, and with each family's or software's as well.

    Errors are linear about the fitted vector. Of the sweep only panels are left out, so it is not scored.
    """
    candidates = {name: spread for of in FITTED.values() for name, spread in of.items() if name in _SHARED}
    candidates |= dict.fromkeys(_SHARED, 0.3)
    owners = [*model.families, *(f"software {name}" for name in model.softwares), *sorted(FITTED)]
    changes: list[tuple[str, dict[str, dict[str, float]]]] = [("as fitted", dict(FITTED))]
    for owner, figures in FITTED.items():
        for name in figures:
            fewer = {n: spread for n, spread in figures.items() if n != name}
            changes.append((f"without {name} of {owner}", {**FITTED, owner: fewer}))
    for owner in dict.fromkeys(owners):
        for name, spread in candidates.items():
            if name not in FITTED.get(owner, {}) and not owner.startswith("program"):
                more = {**FITTED.get(owner, {}), name: spread}
                changes.append((f"with {name} of {owner}", {**FITTED, owner: more}))
    everything = {owner: dict(candidates) for owner in owners} | {"gpu": dict.fromkeys(FIGURES["gpu"], 0.3)}
    full = Model(rows, {o: {**everything.get(o, {}), **FITTED.get(o, {})} for o in {*everything, *FITTED}})
    at = np.array(full.start)
    for key, place in model.places.items():
        at[full.places[key]] = x[place]
    unnamed = [_unnamed(row) for row in rows]
    seen, hidden = full.jacobian(rows, at), full.jacobian(unnamed, at)
    return [
        {"change": name, **_linear_errors(full, rows, at, Model(rows, fitted), seen, hidden)}
        for name, fitted in changes
    ]


def _linear_errors(
    full: Model,
    rows: Sequence[Row],
    at: np.ndarray,
    model: Model,
    seen: tuple[np.ndarray, np.ndarray],
    hidden: tuple[np.ndarray, np.ndarray],
) -> dict[str, float]:
    """Errors of sources left out, with the spreads of `model` and derivatives of `full`."""
    full.sigma = np.full(len(full.start), _FIXED)
    for key, place in model.places.items():
        full.sigma[full.places[key]] = model.sigma[place]
    (errors, matrix), (bare, slopes) = seen, hidden
    out, medians = [], []
    for source in dict.fromkeys(row.source for row in rows if not row.is_swept):
        kept = np.array([row.source != source for row in rows])
        others = [row for row, keep in zip(rows, kept, strict=True) if keep]
        moved = full.solve(others, at, errors[kept], matrix[kept]) - at
        found = [
            abs(row.error(float(bare[i] + slopes[i] @ moved))) for i, row in enumerate(rows) if not kept[i]
        ]
        out += found
        medians.append(statistics.median(found))
    weights = np.array([row.weight for row in rows]) / np.sqrt(1 + (errors / SCALE) ** 2)
    told = matrix.T @ (matrix * weights[:, None]) / SCALE**2
    freedom = float(np.trace(np.linalg.solve(told + np.diag(1 / full.sigma**2), told)))
    found = summary(out)
    return {
        "degrees_of_freedom": round(freedom, 2),
        "median": round(found["median"] or 0.0, 4),
        "p90": round(found["p90"] or 0.0, 4),
        "mean_of_sources": round(statistics.mean(medians), 4),
    }


def _unnamed(row: Row) -> Row:
    """The row without the records that its source names: under the parents of program and network.

    The sweep, of which other panels stay, keeps its own.
    """
    named = PROGRAMS.of_table(row.source), NETWORKS.of_table(row.source)
    if row.is_swept or not any(named):
        return row
    return Row.of(replace(row.published, source=""))


def rank_unseen(model: Model, rows: Sequence[Row], unheld: Sequence[Row], x: np.ndarray) -> list[dict]:
    """The rankings of the sweep's whole panels, each with figures fitted on the rows of the others.

    Rows that no constant is fitted on are ranked too: whoever chooses a layout has them before him.
    """
    errors, matrix = model.jacobian(rows, x)
    found = []
    swept = {row.published.source for row in unheld}
    every = [row for row in (*rows, *unheld) if row.published.source in swept]
    for panel in dict.fromkeys(panel_of(row.published) for row in every):
        kept = np.array([panel_of(row.published) != panel for row in rows])
        others = [row for row, keep in zip(rows, kept, strict=True) if keep]
        without = model.solve(others, x, errors[kept], matrix[kept])
        priced = []
        for row in every:
            one = row.published
            if panel_of(one) == panel:
                seconds = one.seconds() * math.exp(model.evaluate(row, without, slopes=False)[0])
                words = f"{one.data} {one.tensor} {one.pipe} {one.micro_batch} {one.zero}"
                priced.append(Prediction(one, one.in_unit(seconds), layout=words))
        for ranking in rankings(priced):
            of = priced[0].row
            told = {"chips": of.chips, "d_model": of.d_model, "n_kv_heads": of.n_kv_heads}
            found.append({**told, "rows": len(priced), **asdict(ranking)})
    return found


def ranking_summary(panels: Sequence[Mapping[str, Any]], chips: int) -> dict[str, float]:
    """Means over the panels of at most so many chips."""
    few = [panel for panel in panels if panel["chips"] <= chips]
    names = ("tau", "regret", "best_of_five", "rule_regret", "random_regret")
    means = {f"mean_{name}": statistics.mean(panel[name] for panel in few) for name in names}
    share = statistics.mean(panel["regret"] < SMALL_REGRET for panel in few)
    return {"panels": len(few), "share_under_5_percent": share, **means}


def step_tables(
    figures: Mapping[str, float], chip: Chip, note: str, notes: Mapping[str, str]
) -> dict[str, Mapping[str, object]]:
    """The `[step]` tables of a chip by heading. notes: for figures with a source of their own."""
    step = efficiency(figures, chip.kind)
    others = ("fp8", "fp4", *HOST["megatron"], *OF_NETWORKS.values())
    single = [name for name in figures if "." not in name and name not in others]
    sources = {key: notes.get(key, note) for key in [*single, "matmul", "links"]}
    shares = {name: getattr(step, name) for name in single}
    if chip.step.scatter_passes > 1:  # set by the compiler, not fitted
        shares = {"scatter_passes": chip.step.scatter_passes} | shares
        sources["scatter_passes"] = chip.step.sources["scatter_passes"]
    if step.attention_half_keys:
        shares["attention_half_keys"] = step.attention_half_keys
        sources["attention_half_keys"] = "FlashAttention-2 (Dao, 2023), figure 6: by length, head 128, causal"
    matmul = {dtype: share for dtype, share in step.matmul.items() if dtype in chip.flops_per_second}
    links = {link: share for link, share in step.links.items() if f"links.{link}" not in others}
    return {"step": shares, "step.matmul": matmul, "step.links": links, "step.sources": sources}


def write_catalog(model: Model, x: np.ndarray, rows: Sequence[Row]) -> None:
    """Replaces the `[step]` tables of the chips, as XLA has them, and the factors of the other software."""
    for kind in FIGURES:
        tables = {}
        for chip in map(catalog.chip, catalog.names()):
            stated = tomllib.loads((CATALOG / f"{chip.name}.toml").read_text())
            if chip.kind != kind or "shares" not in stated:
                continue  # without `shares`, it has another chip's [step] or none
            family = family_of(chip.name)
            count = sum(row.kind == kind for row in rows)
            note = f"benchmarks/fit_published.py on {count} published rows of all {kind.upper()}s"
            figures = model.figures(x, kind, family, DEFAULT, chip.name)
            tables[chip.name] = step_tables(figures, chip, note, source_notes(model, kind, family, note))
            if isinstance(chip.network, Switch) and chip.network.between:
                write_network(chip.network.between, figures)
        write_shares(kind, tables)
    owners = [row.program or row.software for row in rows if row.kind == "gpu"]
    for name in {*owners} - {DEFAULT}:
        count = owners.count(name)
        owner = name if name in OWN_PROGRAMS else stating(PROGRAMS, PROGRAM_FILES, name, "fitted_on")
        file = PROGRAM_FILES / f"{owner}.toml"
        file.write_text(software_text(model, x, name, owner, count, file.read_text()), encoding="utf-8")


def write_shares(kind: str, chips: Mapping[str, Mapping[str, Mapping[str, object]]]) -> None:
    """Writes the commonest figures to [step] of shares/KIND.toml, and others to the chips' files."""
    shared: dict[str, dict[str, object]] = {}
    for heading, table in next(iter(chips.values())).items():
        by_key = {key: [tables[heading].get(key) for tables in chips.values()] for key in table}
        shared[heading] = {key: mode(values) for key, values in by_key.items() if None not in values}
    replace_tables(CATALOG.parent / f"shares/{kind}.toml", "step", shared)
    for name, tables in chips.items():
        differs = {
            heading: {key: value for key, value in table.items() if shared[heading].get(key) != value}
            for heading, table in tables.items()
        }
        replace_tables(CATALOG / f"{name}.toml", "step", differs)


def replace_tables(file: Path, name: str, tables: Mapping[str, Mapping[str, object]]) -> None:
    """Replaces the tables NAME and NAME.* in a file of chips/ or shares/."""
    text = re.sub(rf"^\[{name}\b.*\n(?:.+\n)*\n?", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    following = "inference|compiler|sources" if name == "step" else "sources"
    after = re.search(rf"^\[(?:{following})\]$", text, re.MULTILINE)
    at = after.start() if after else len(text)
    head, tail = (text[:at].rstrip("\n"), text[at:])
    blocks = [toml_table(heading, table) for heading, table in tables.items() if table]
    file.write_text("\n\n".join([head, *blocks]) + "\n" + (f"\n{tail}" if tail else ""), encoding="utf-8")


def toml_table(heading: str, table: Mapping[str, object]) -> str:
    """A table of TOML, with floats rounded to three digits."""
    values = (float(f"{value:.3g}") if isinstance(value, float) else value for value in table.values())
    texts = (json.dumps(value, ensure_ascii=False) for value in values)
    return "\n".join([f"[{heading}]", *(f"{key} = {text}" for key, text in zip(table, texts, strict=True))])


def source_notes(model: Model, kind: str, family: str, note: str) -> dict[str, str]:
    """The source of each figure of a chip: `note` for a fitted one."""
    fitted = {name for owner in (kind, family, f"software {DEFAULT}") for name in model.fitted.get(owner, {})}
    notes = {name: note if name in fitted else prior.source for name, prior in FIGURES[kind].items()}
    for (owner, name), (_, source) in MEASURED.items():
        if owner == family:
            notes[name] = f"{notes[name]}; {source}"
    notes |= {name: source for name, (_, source) in KNOWN.get(family, {}).items()}
    first_of = {name.partition(".")[0]: name for name in reversed(notes)}
    return {short: notes[name] for short, name in first_of.items()}


def stating(records: Folder, files: Path, name: str, key: str) -> str:
    """The record that states the value that `name` has at `key`: itself or one above it."""
    while key not in tomllib.loads((files / f"{name}.toml").read_text()):
        name = records[name].parent
    return name


def write_network(name: str, figures: Mapping[str, float]) -> None:
    """Replaces the figures of a network that all GPUs share, in the records that state them."""
    for key, figure in OF_NETWORKS.items():
        file = NETWORK_FILES / f"{stating(NETWORKS, NETWORK_FILES, name, key)}.toml"
        source = FIGURES["gpu"][figure].source
        text = re.sub(rf"^{key} = [\d.e+-]+$", f"{key} = {figures[figure]:.3g}", file.read_text(), flags=re.M)
        file.write_text(re.sub(rf'^{key} = ".*"$', f'{key} = "{source}"', text, flags=re.M), encoding="utf-8")


def odds_of(model: Model, x: np.ndarray, owners: Sequence[str]) -> list[list[str]]:
    """The tables of factors over XLA's figures that a program's record has."""
    odds, seconds = ["[odds]"], ["[seconds]"]
    for figure in FIGURES["gpu"]:
        factor = math.exp(model.free(x, owners, figure) - model.free(x, (f"software {DEFAULT}",), figure))
        if f"{factor:.3g}" != "1":
            short = figure.partition(".")[0]
            (odds if _is_share(figure) else seconds).append(f"{short} = {factor:.3g}")
    return [table for table in (odds, seconds) if len(table) > 1]


def software_text(model: Model, x: np.ndarray, name: str, owner: str, count: int, text: str) -> str:
    """The file of a software: its head as it is, and what differs from its parent. owner: the record."""
    shared, parent = PROGRAMS[name].fitted_on, PROGRAMS[owner].parent
    head = text.split("\n\n")[0]
    head = "\n".join(line for line in head.splitlines() if line.partition(" ")[0] not in HOST.get(shared, {}))
    above = (f"software {PROGRAMS[parent].fitted_on}",) if parent else (f"software {DEFAULT}",)
    own = (f"software {shared}", f"program {name}")

    def seconds(owners: Sequence[str]) -> dict[str, str]:
        found = {figure: model.free(x, owners, figure) for figure in HOST.get(shared, {})}
        return {figure: f"{figure} = {math.exp(value):.3g}" for figure, value in found.items() if value}

    given = seconds(above)
    host = {figure: line for figure, line in seconds(own).items() if given.get(figure) != line}
    tables = odds_of(model, x, own)
    if tables == odds_of(model, x, above):
        tables = []
    note = f"benchmarks/fit_published.py on {count} published rows of this software"
    fitted = {figure for of in own for figure in model.fitted.get(of, {})}
    prior = "a prior: launches of Python's operations, modules or layers in profiles"
    measured = [source for (of, _), (_, source) in MEASURED.items() if of in own]
    of_odds = "; ".join([*([note] if not fitted.isdisjoint(FIGURES["gpu"]) else []), *measured])
    of_odds = of_odds or "XLA's figures are fitted by benchmarks/fit_published.py, and these are not"
    known = text.partition("[sources]\n")[2].splitlines()
    kept = [
        line for line in known if line.partition(" ")[0] not in ("odds", "seconds", *HOST.get(shared, {}))
    ]
    notes = {table[0].strip("[]"): of_odds for table in tables}
    notes |= {figure: note if figure in fitted else prior for figure in host}
    sources = ["[sources]", *(f'{key} = "{source}"' for key, source in notes.items()), *kept]
    parts = [[head, *host.values()], *tables, sources]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def write_out_of_sample(
    rows: Sequence[Row], document: Mapping[str, Any], memory: Sequence[Prediction]
) -> None:
    """The errors that `mw validate` and ranges have: each row's with figures fitted without its source.

    The sweep, a source of its own, leaves out panels. No constant is fitted on memory.
    """
    sources = document["leave_one_source_out"]["log_errors"]
    panels = document["leave_one_panel_out"]["log_errors"]
    places: dict[Any, int] = {}
    with OUT_OF_SAMPLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = (
            "id",
            "value",
            "source",
            "figure",
            "kind",
            "software",
            "chip",
            "experts",
            "panel",
            "log_error",
        )
        writer.writerow(names)

        def write(one: PublishedRow, figure: str, kind: str, software: str, error: float) -> None:
            panel = places.setdefault(panel_of(one), len(places))
            experts = int(one.experts is not None)
            line = (one.id, one.value, one.source, figure, kind, software, one.chip, experts, panel)
            writer.writerow((*line, round(error, 4)))

        for row in rows:
            error = (panels if row.is_swept else sources)[row.published.id]
            write(row.published, "time", row.kind, row.software, error)
        for one in memory:
            assert isinstance(one.row, PublishedRow) and one.predicted
            machine = machine_of_row(one.row)
            error = math.log(one.predicted / one.row.value)
            write(one.row, "memory", machine.chip.kind, machine.software.fitted_on, error)


def _is_memory(row: object) -> bool:
    return isinstance(row, PublishedRow) and row.metric == MEMORY


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", default=list(TABLES))
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--start", type=Path, help="A former result, to start from.")
    parser.add_argument("--steps", type=int, default=8, help="Of the fit, at most.")
    options = parser.parse_args()
    rows = read(options.files)
    model = Model(rows)
    x = model.start
    if options.start and options.start.exists():
        former = json.loads(options.start.read_text())["vector"]
        for (owner, name), place in model.places.items():
            x[place] = former.get(f"{owner}/{name}", x[place])
        model.start = Model(rows).start
    x = model.fit(rows, np.array(x), steps=options.steps)
    log_errors = model.log_errors(rows, x)
    errors = [row.error(e) for row, e in zip(rows, log_errors, strict=True)]
    document = {
        "benchmark": "fit_published",
        "command": "python benchmarks/fit_published.py" + " --leave-out" * options.leave_out,
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "cpu": platform.machine()},
        "fitted": summary(errors),
        "constants": len(model.start),
        "degrees_of_freedom": model.degrees_of_freedom(rows, x),
        "figures": {
            f"{family}, {software}": model.figures(x, kind, family, software)
            for family, kind, software in dict.fromkeys((r.family, r.kind, r.software) for r in rows)
        },
        "priors": {k: {n: vars(p) for n, p in figures.items()} for k, figures in FIGURES.items()},
        "fitted_figures": FITTED,
        "sources": by(rows, errors, lambda row: row.published.source),
        "vector": {
            f"{owner}/{name}": round(float(x[place]), 6) for (owner, name), place in model.places.items()
        },
    }
    if options.ablate:
        document["ablation"] = ablate(rows, x, model)
    if options.write:
        write_catalog(model, x, rows)
    if options.leave_out:
        ways = {
            "leave_one_source_out": lambda row: row.published.source,
            "leave_one_panel_out": lambda row: panel_of(row.published),
        }
        for name, group_of in ways.items():
            found = leave_out(model, rows, x, group_of)
            without = [row.error(e) for row, e in zip(rows, found, strict=True)]
            document[name] = {
                **summary(without),
                "sources": by(rows, without, lambda row: row.published.source),
                "chips": by(rows, without, lambda row: row.published.chip),
                "softwares": by(rows, without, lambda row: row.software),
                "log_errors": {
                    row.published.id: round(float(e), 4) for row, e in zip(rows, found, strict=True)
                },
            }
            print(f"{name}: {summary(without)}", file=sys.stderr)
        panels = rank_unseen(model, rows, read(options.files, held=False), x)
        document["rankings"] = {
            "up_to_8_nodes": ranking_summary(panels, 64),
            "all": ranking_summary(panels, 10**6),
            "panels": panels,
        }
        if options.write:
            memory = predict([row for file in options.files for row in read_rows(file) if _is_memory(row)])
            write_out_of_sample(rows, document, memory_predictions(memory))
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
