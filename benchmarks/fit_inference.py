"""Shares of ratings in inference: the [inference] tables of hardware/shares/, fitted to published rows.

    python -m benchmarks.fit_inference published/inference.csv [--write]

One set of figures for each family (TPUs, GPUs): shares of the HBM bandwidth and of the dense peak, seconds of
kernels, collectives and launches; and for each engine deviations from them. Both have priors, in logarithms,
and are fitted together by least squares over rows of

    soft_l1(log(predicted / published) / SCALE) . weight  +  priors

so that what is one engine's own does not become the family's, and chips and engines without rows are
predicted by what all have in common. A source of many rows counts as SOURCE_ROWS of them. First printed are
the errors with each source left out in turn, then of all rows.

The time of a row is linear in prefill and step, and each of these a sum over pieces of work, so that one
evaluation is a few array operations: the pieces are recorded once.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.fit_published import replace_tables

from meshwright import engines
from meshwright.cost.collectives import collective_seconds
from meshwright.cost.passes import Dtypes
from meshwright.cost.record_inference import record_pass
from meshwright.cost.recorder import PassShape
from meshwright.cost.transfer_prices import at_step_rates
from meshwright.engines.serving_engine import ENGINES
from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.validate import static_batches
from meshwright.validate.out_of_sample import OF_SERVING
from meshwright.validate.published import InferenceRow, read_rows
from meshwright.validate.score import quantile
from meshwright.validate.static_batches import ServedCase, engine_of, reproduce_inference

# Figure: (guess, spread of its logarithm).
PRIORS = {
    "memory": (0.8, 0.15),
    "cache": (0.8, 0.3),
    "widened": (0.9, 0.3),
    "waiting": (0.7, 0.4),
    "prefetch": (0.7, 0.3),
    "elementwise": (0.7, 0.4),
    "matmul.bf16": (0.7, 0.2),
    "matmul.fp8": (0.6, 0.2),
    "attention": (0.4, 0.5),
    "experts": (0.7, 0.3),
    "kernel_seconds": (1.5e-6, 0.8),
    "experts_seconds": (2e-5, 1.0),
    "collective_seconds": (3e-6, 1.0),
    "launch_seconds": (3e-4, 1.0),
}
# XLA:TPU streams weights at 90 to 95% of the bandwidth, widens them inside the product, and reads them ahead.
PRIORS_OF = {
    "tpu": PRIORS | {"memory": (0.92, 0.1), "widened": (0.97, 0.1), "prefetch": (0.85, 0.3)},
    "gpu": PRIORS,
}
# XLA:TPU alone reads weights ahead. No row of a GPU tells the time of routing from that of other kernels.
OF_TPUS = ("prefetch", "experts_seconds")
NAMES = {"tpu": tuple(PRIORS), "gpu": tuple(name for name in PRIORS if name not in OF_TPUS)}
SHARES = tuple(name for name in PRIORS if not name.endswith("_seconds"))
# The spread of a family's figure, of that of the prior.
FAMILY = 0.5
# The spread of an engine's deviation: of a share that of its prior, of seconds this.
ENGINE_SECONDS = 1.0
SCALE = 0.1  # residuals below about this count squared, those above by their size
SOURCE_ROWS = 8
_STEP_SIZE = 0.02
# What an engine has of its own; the rest is the family's.
OF_ENGINES = (
    "memory",
    "cache",
    "widened",
    "waiting",
    "prefetch",
    "matmul.bf16",
    "kernel_seconds",
    "collective_seconds",
    "launch_seconds",
)


@dataclass(frozen=True)
class Recorded:
    """The pieces of one row: weight, ideal seconds of FLOPs and bytes, kernels; its ideal transfers.

    measured: seconds of the same sum of passes.
    """

    row: InferenceRow
    kind: str
    measured: float
    pieces: Any
    transfers: Any


# Columns of `pieces`: weight, compute and HBM seconds, kernels, which share of each; launches; the pass.
_COMPUTE = {"matmul": 0, "fp8": 1, "attention": 2, "none": 3, "experts": 4}
_MEMORY = {"matmul": 0, "attention": 1, "other": 2, "widened": 3}


def record(row: InferenceRow) -> Recorded:
    """The pieces of a row's passes on its chip's ratings."""
    case = reproduce_inference(row)
    layout, _ = case.choice
    batch = case.capacity(layout) if row.metric != "ttft_s" else row.batch
    waves = -(-row.batch // batch)
    context = row.prompt_len + max(1, row.output_len // 2)
    weights = {
        "ttft_s": (1.0, 0.0),
        "tpot_s": (0.0, 1.0),
        "request_latency_s": (float(waves), float(waves * row.output_len)),
        "tokens_per_s": (1.0, float(row.output_len)),
    }[row.metric]
    pieces: list[list[float]] = []
    transfers: list[list[float]] = []
    for weight, phase, queries, keys in (
        (weights[0], "prefill", row.prompt_len, row.prompt_len),
        (weights[1], "generate", 1, context),
    ):
        if weight:
            at = layout.at(phase)
            pieces_a_batch, times = case.microbatches(at, batch)
            before = int(pieces[-1][-1]) + 1 if pieces else 0
            found = _pass(case, at, batch / pieces_a_batch, queries, keys, weight * times, before)
            pieces += found[0]
            transfers += found[1]
    kind = case.hardware.chip.kind
    return Recorded(row, kind, row.seconds(batch=batch), np.array(pieces), np.array(transfers).reshape(-1, 3))


def _pass(
    case: ServedCase, layout: Layout, batch: float, queries: int, keys: int, weight: float, before: int
) -> tuple:
    """The pieces and the transfers of a pass; before: passes of segments that there are already."""
    chip, dtypes = case.hardware.chip, Dtypes.of(layout)
    graph = record_pass(case.config, layout, PassShape(batch, queries, keys))
    placement = at_step_rates(case.hardware).place(layout.mesh)
    pieces, transfers = [[weight, 0.0, 0.0, 0.0, 3, 0, 1.0, before]], []  # the launch
    for number, segment in enumerate(graph.segments, before + 1):
        for node in segment.nodes:
            for work in node.forward:
                compute, which = 0.0, "none"
                if node.kind == "attention":
                    assert work.shape is not None
                    filled = min(1.0, work.shape[1] / chip.matrix_unit) if chip.matrix_unit else 1.0
                    compute, which = work.flops / chip.flops(dtypes.compute) / filled, "attention"
                elif node.kind == "matmul":
                    compute = work.flops / chip.flops(dtypes.matmul)
                    which = "fp8" if dtypes.matmul == "fp8" else "experts" if work.routed else "matmul"
                memory = "widened" if work.widened else node.kind if node.kind in _MEMORY else "other"
                pieces.append(
                    [
                        weight * segment.count,
                        compute / chip.clock_share,
                        work.hbm_bytes / chip.hbm_bytes_per_second,
                        work.kernels,
                        _COMPUTE[which],
                        _MEMORY[memory],
                        0.0,
                        number,
                    ]
                )
            for one in node.forward_transfers:
                price = collective_seconds(one.op, one.gathered_bytes, one.axes, placement, copies=one.copies)
                if price.link:
                    times = weight * segment.count * one.repeat
                    transfers.append([times * price.seconds, times, number])
    return pieces, transfers


def predicted(one: Recorded, figures: dict[str, float]) -> float:
    """Seconds of the row's passes."""
    bf16, fp8 = figures["matmul.bf16"], figures["matmul.fp8"]
    compute = np.array([bf16, fp8, figures["attention"], 1.0, bf16 * figures["experts"]])
    memory = figures["memory"] * np.array([1.0, figures["cache"], figures["elementwise"], figures["widened"]])
    weight, flops, hbm, kernels, which, where, launches, number = one.pieces.T
    computed, moved = flops / compute[which.astype(int)], hbm / memory[where.astype(int)]
    overhead = kernels * figures["kernel_seconds"]
    work = np.maximum(computed, moved) + overhead + launches * figures["launch_seconds"]
    sent = one.transfers[:, 0] + one.transfers[:, 1] * figures["collective_seconds"]
    routed = (weight * ((which == _COMPUTE["experts"]) & (flops > 0))).sum()
    seconds = (weight * work).sum() + figures["waiting"] * sent.sum() + routed * figures["experts_seconds"]
    if not figures["prefetch"]:
        return float(seconds)
    # As in cost/step_cost.py: weights are read while kernels begin and end and transfers are waited for.
    passes, groups = int(number[-1]) + 1, number.astype(int)
    is_product = np.isin(where, [_MEMORY["matmul"], _MEMORY["widened"]])
    reads = weight * is_product * np.maximum(moved - computed, 0.0)
    gaps = np.bincount(groups, weight * overhead, passes)
    gaps += figures["waiting"] * np.bincount(one.transfers[:, 2].astype(int), sent, passes)
    return float(seconds - figures["prefetch"] * np.minimum(np.bincount(groups, reads, passes), gaps).sum())


def log_error(one: Recorded, figures: dict[str, float]) -> float:
    """The logarithm of predicted over measured seconds."""
    return log(predicted(one, figures) / one.measured)


def in_unit(one: Recorded, log_error: float) -> float:
    """The relative error in the row's own unit."""
    return exp(-log_error if one.row.metric == "tokens_per_s" else log_error) - 1


def error(one: Recorded, figures: dict[str, float]) -> float:
    """Relative, in the row's own unit."""
    return in_unit(one, log_error(one, figures))


class Fit:
    """The figures of a kind of chips and the deviations of its engines, a vector in units of the spreads."""

    def __init__(self, rows: Sequence[Recorded]) -> None:
        self.rows, self.kind = rows, rows[0].kind
        names = NAMES[self.kind]
        engines = dict.fromkeys(engine_of(one.row) for one in rows)
        owned = [(engine, name) for engine in engines for name in OF_ENGINES if name in names]
        self.places = {key: place for place, key in enumerate([*((None, name) for name in names), *owned])}
        self.x = self._minimum()

    def figures(self, engine: str | None, x: Any = None) -> dict[str, float]:
        """What an engine reaches; of one without rows what the family does."""
        x, found = self.x if x is None else x, dict.fromkeys(PRIORS, 0.0)
        for name in NAMES[self.kind]:
            guess, spread = PRIORS_OF[self.kind][name]
            off = FAMILY * spread * x[self.places[None, name]]
            if engine and (engine, name) in self.places:
                own = spread if name in SHARES else ENGINE_SECONDS
                off += own * x[self.places[engine, name]]
            value = guess * exp(float(np.clip(off, -4, 4)))
            found[name] = min(value, 1.0) if name in SHARES else value
        return found

    def _residuals(self, x: Any) -> Any:
        figures = {engine: self.figures(engine, x) for engine in {engine_of(one.row) for one in self.rows}}
        return np.array([log_error(one, figures[engine_of(one.row)]) for one in self.rows]) / SCALE

    def _minimum(self, rounds: int = 12) -> Any:
        """Least squares, reweighted: soft_l1 on rows alone, the prior stays a square."""
        counts: dict[str, int] = {}
        for one in self.rows:
            counts[one.row.source] = counts.get(one.row.source, 0) + 1
        weights = np.array([min(1.0, SOURCE_ROWS / counts[one.row.source]) for one in self.rows])
        size = len(self.places)
        x = best = np.zeros(size)
        least = float("inf")
        for _ in range(rounds):
            at = self._residuals(x)
            cost = float(weights @ (2 * (np.sqrt(1 + at**2) - 1)) + x @ x)
            if cost < least:
                best, least = x, cost
            moved = (self._residuals(x + _STEP_SIZE * one) for one in np.eye(size))
            slopes = np.array([(after - at) / _STEP_SIZE for after in moved]).T
            y = x
            for _ in range(10):
                held = weights / np.sqrt(1 + (at + slopes @ (y - x)) ** 2)
                told = slopes.T @ (slopes * held[:, None]) + np.eye(size)
                y = np.clip(np.linalg.solve(told, slopes.T @ (held * (slopes @ x - at))), x - 1, x + 1)
            x = y
        return best


def summary(errors: Sequence[float]) -> str:
    """Median and 90th percentile of the absolute errors."""
    ordered = sorted(map(abs, errors))
    return f"{len(ordered)} rows: median {median(ordered):.1%}, p90 {quantile(ordered, 0.9):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", action="store_true", help="list every row")
    parser.add_argument("--kind", choices=["tpu", "gpu"], help="this family alone")
    parser.add_argument("--write", action="store_true", help="write the tables into the catalog")
    arguments = parser.parse_args()
    rows = read(arguments.file)
    kinds = [arguments.kind] if arguments.kind else ["tpu", "gpu"]
    rows = [row for row in rows if row.kind in kinds]
    families = {kind: [r for r in rows if r.kind == kind] for kind in kinds}
    outside = leave_out(families)
    fitted = {kind: Fit(family) for kind, family in families.items()}

    def figures_of(one: Recorded) -> dict[str, float]:
        return fitted[one.kind].figures(engine_of(one.row))

    for source in dict.fromkeys(one.row.source for one in rows):
        print(
            f"fitted {source}: {summary([error(r, figures_of(r)) for r in rows if r.row.source == source])}"
        )
    print(f"fitted, all: {summary([error(r, figures_of(r)) for r in rows])}")
    print(json.dumps({kind: one.figures(None) for kind, one in fitted.items()}, indent=1))
    for one in rows if arguments.rows else ():
        row = one.row
        what = f"{row.chip} {row.weight_dtype} tensor={row.tensor} batch={row.batch}"
        off = error(one, figures_of(one))
        print(f"{row.id} {row.source[:12]} {what} {row.prompt_len}+{row.output_len} {row.metric} {off:+.0%}")
    if arguments.write:
        for kind, one in fitted.items():
            write(kind, one.figures(None), len(families[kind]))
            counts = Counter(engine_of(row.row) for row in families[kind])
            for engine, count in counts.items():
                if engine:
                    write_engine(engine, kind, one.figures(engine), count)
    if arguments.write and not arguments.kind:
        write_outside(outside)


def read(path: Path) -> list[Recorded]:
    """The rows that can be expressed."""
    rows = []
    for row in read_rows(path):
        try:
            assert isinstance(row, InferenceRow)
            rows.append(record(row))
        except MeshwrightError as problem:
            print(f"{row.id}: {problem}")
    return rows


def leave_out(families: dict[str, list[Recorded]]) -> list[tuple[Recorded, float]]:
    """Prints the errors of each source with the figures that the others give.

    Returns the logarithm of predicted over measured seconds of every row.
    """
    found: list[tuple[Recorded, float]] = []
    for family in families.values():
        for source in dict.fromkeys(r.row.source for r in family):
            without = Fit([one for one in family if one.row.source != source])
            own = [one for one in family if one.row.source == source]
            outside = [(one, log_error(one, without.figures(engine_of(one.row)))) for one in own]
            found += outside
            print(f"left out {source}: {summary([in_unit(*pair) for pair in outside])}", flush=True)
    print(f"left out, all: {summary([in_unit(*pair) for pair in found])}", flush=True)
    return found


def write_outside(outside: Sequence[tuple[Recorded, float]]) -> None:
    """validate/serving_out_of_sample.csv, which `mw validate` reads."""
    lines = ["id,value,log_error", *(f"{one.row.id},{one.row.value!r},{off:.4g}" for one, off in outside)]
    (Path(static_batches.__file__).parent / OF_SERVING).write_text("\n".join(lines) + "\n")


def write_engine(engine: str, kind: str, figures: dict[str, float], num_rows: int) -> None:
    """The table of a kind of chips in an engine's file, in place of the one that it has."""
    known = [name for name in ENGINES.names if engine in (name, *ENGINES[name].also)]
    path = Path(engines.__file__).parent / f"{known[0] if known else engine}.toml"
    text = path.read_text() if known else f'name = "{engine}"\nabout = "{engine}"\n'
    head, _, sources = text.partition("\n[sources]\n")
    head = re.sub(rf"\n\[{kind}\]\n([^\[]+\n)*", "", head)
    kept = [line for line in sources.splitlines() if not line.startswith(f"{kind} = ")]
    lines = [f"{_toml_key(name)} = {figures[name]:.3g}" for name in OF_ENGINES if name in NAMES[kind]]
    source = f"benchmarks/fit_inference.py on {num_rows} published rows of this engine, together with others"
    table = ["", f"[{kind}]", *lines, "", "[sources]", *kept, f'{kind} = "{source}"']
    path.write_text(head.rstrip("\n") + "\n" + "\n".join(table) + "\n")


def _toml_key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def write(kind: str, figures: dict[str, float], num_rows: int) -> None:
    """The [inference] table of all chips of a kind, in place of the one that shares/KIND.toml has."""
    source = f"benchmarks/fit_inference.py on {num_rows} published rows of all {kind.upper()}s"
    single = {key: value for key, value in figures.items() if "." not in key and key in NAMES[kind]}
    matmul = {key.partition(".")[2]: value for key, value in figures.items() if "." in key}
    sources = dict.fromkeys((*single, "matmul"), source)
    tables = {"inference": single, "inference.matmul": matmul, "inference.sources": sources}
    replace_tables(Path(catalog.__file__).parent / f"shares/{kind}.toml", "inference", tables)


if __name__ == "__main__":
    main()
