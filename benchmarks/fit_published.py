"""Fits what steps reach of the chips' ratings, the `[step]` tables of the catalog, on published rows.

    python benchmarks/fit_published.py published/training.csv > benchmarks/results/fit_published.json
    ... --loso         besides, every source predicted with figures fitted on the other sources
    ... --write        writes the tables into src/meshwright/hardware/catalog/*.toml

Every family of chips has the same few physical figures. A figure of a family is that of its kind (GPU
or TPU) plus a deviation, both in logits (seconds: in logarithms), with a prior on each: what a family's
own rows do not tell it takes from the others. Minimised by least squares over rows of

    soft_l1(log(predicted / published) / SCALE)  +  priors

Layouts are chosen by memory alone, so they are recorded once and priced again for each set of figures.
Nothing looks at ids, sources, models' names or notes. Needs scipy, which JAX brings.
"""

# pyright: reportArgumentType=false
import argparse
import json
import math
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from meshwright.cost.step import StepPricer
from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.hardware.chip import StepEfficiency
from meshwright.plan.space import record
from meshwright.plan.validate.choice import Mix, mixes
from meshwright.plan.validate.published import MEMORY, STEP, PublishedRow, read_rows
from meshwright.plan.validate.reproduce import Case, reproduce
from meshwright.plan.validate.score import TRUST, quantile

CATALOG = Path(__file__).parent.parent / "src/meshwright/hardware/catalog"
# The chips of one design; every other chip is a family of its own.
FAMILIES = {
    "a100": ("a100-80gb", "a100-40gb"),
    "h100": ("h100", "h200", "h800", "h100-pcie"),
    "blackwell": ("b200", "b300", "gb200-nvl72", "gb300-nvl72"),
}
# Figure: (guess, sigma of a kind's value about it, sigma of a family's about its kind's).
_SHARED = {
    "matmul.bf16": (0.70, 0.7, 0.25),
    "experts": (0.70, 0.7, 0.1),
    "attention": (0.45, 0.3, 0.3),
    "memory": (0.80, 0.5, 0.2),
    "elementwise": (0.50, 0.7, 0.3),
    "overlap": (0.80, 0.7, 0.3),
    "waiting": (0.80, 0.7, 0.2),
}
FIGURES = {
    "gpu": _SHARED
    | {
        "matmul.f16": (0.65, 0.7, 0.5),
        "matmul.fp8": (0.65, 0.3, 0.3),
        "matmul.fp4": (0.55, 0.7, 0.5),
        "links.nvlink": (0.80, 0.7, 0.3),
        "links.network": (0.80, 0.7, 0.3),
        "kernel_seconds": (1e-5, 0.7, 0.3),
        "launch_seconds": (2e-3, 0.7, 0.3),
    },
    "tpu": _SHARED
    | {
        # XLA's large products alone reach 85 to 95% of a TPU's peak, in traces of any generation.
        "matmul.bf16": (0.88, 0.3, 0.25),
        "links.ici": (0.85, 0.7, 0.3),
        "links.dcn": (0.60, 0.7, 0.3),
        "kernel_seconds": (2e-6, 0.7, 0.3),
    },
}
SCALE = 0.08  # residuals below about this count squared, those above by their size
_STEP_SIZE = 1e-3


def family_of(chip: str) -> str:
    """The family that a chip belongs to."""
    return next((name for name, chips in FAMILIES.items() if chip in chips), chip)


def _free(name: str, value: float) -> float:
    """A figure on an axis without bounds."""
    return math.log(value) if name.endswith("_seconds") else math.log(value / (1 - value))


def _figure(name: str, value: float) -> float:
    return math.exp(value) if name.endswith("_seconds") else 1 / (1 + math.exp(-value))


@dataclass
class Row:
    """A published row whose layouts are recorded."""

    published: PublishedRow
    case: Case
    parts: list[tuple[Mix, list[tuple]]]

    @classmethod
    def of(cls, published: PublishedRow) -> "Row":
        case = reproduce(published)
        parts = []
        for mix in mixes(case):
            recorded = []
            for share, layout in mix.parts:
                sequences = case.workload.num_sequences / layout.microbatches
                graph = record(case.config, case.hardware, layout, sequences, case.workload.seq_len)
                recorded.append((share, layout, graph))
            parts.append((mix, recorded))
        return cls(published, case, parts)

    @property
    def family(self) -> str:
        return family_of(self.published.chip)

    def log_error(self, step: StepEfficiency) -> float:
        """log(predicted step time / published)."""
        hardware = self.case.hardware
        hardware = replace(hardware, chip=replace(hardware.chip, step=step))
        seconds = min(
            sum(
                share * StepPricer(graph, layout, hardware).cost().seconds
                for share, layout, graph in recorded
            )
            for _, recorded in self.parts
        )
        return math.log(seconds / self.published.seconds())

    def error(self, log_error: float) -> float:
        """Of the figure in the row's unit."""
        return math.expm1(log_error if self.published.metric == STEP else -log_error)


class Model:
    """The figures of all families as one vector: those of a kind, then each family's deviations."""

    def __init__(self, families: Mapping[str, str]) -> None:
        self.kinds = dict(families)
        self.places: dict[tuple[str, str], int] = {}
        start, sigma = [], []
        for kind in sorted(set(families.values())):
            for name, (guess, _, _) in FIGURES[kind].items():
                self.places[kind, name] = len(start)
                start.append(_free(name, guess))
                sigma.append(FIGURES[kind][name][1])
        for family, kind in families.items():
            for name, (_, _, spread) in FIGURES[kind].items():
                self.places[family, name] = len(start)
                start.append(0.0)
                sigma.append(spread)
        self.start, self.sigma = np.array(start), np.array(sigma)

    def figures(self, x: np.ndarray, family: str) -> dict[str, float]:
        kind = self.kinds[family]
        return {
            name: _figure(name, x[self.places[kind, name]] + x[self.places[family, name]])
            for name in FIGURES[kind]
        }

    def step(self, x: np.ndarray, family: str) -> StepEfficiency:
        return step_of(self.figures(x, family))

    def fit(self, rows: Sequence[Row], start: np.ndarray | None = None, steps: int = 25) -> np.ndarray:
        """The vector that predicts the rows best."""
        count, size = len(rows), len(self.start)

        def residuals(x: np.ndarray) -> np.ndarray:
            return np.concatenate([self.log_errors(rows, x) / SCALE, (x - self.start) / self.sigma])

        def jacobian(x: np.ndarray) -> np.ndarray:
            matrix = np.zeros((count + size, size))
            base = self.log_errors(rows, x)
            for family, kind in self.kinds.items():
                own = [place for place, row in enumerate(rows) if row.family == family]
                for name in FIGURES[kind] if own else ():
                    moved = x.copy()
                    moved[self.places[family, name]] += _STEP_SIZE
                    step = self.step(moved, family)
                    for place in own:
                        slope = (rows[place].log_error(step) - base[place]) / _STEP_SIZE / SCALE
                        matrix[place, self.places[family, name]] = slope
                        matrix[place, self.places[kind, name]] = slope
            matrix[range(count, count + size), range(size)] = 1 / self.sigma
            return matrix

        start = self.start if start is None else start
        return least_squares(residuals, start, jacobian, loss="soft_l1", max_nfev=steps).x

    def log_errors(self, rows: Sequence[Row], x: np.ndarray) -> np.ndarray:
        steps = {family: self.step(x, family) for family in self.kinds}
        return np.array([row.log_error(steps[row.family]) for row in rows])


def step_of(figures: Mapping[str, float]) -> StepEfficiency:
    """The efficiency that figures named as in TOML describe."""

    def table(prefix: str) -> dict[str, float]:
        return {n.removeprefix(prefix): v for n, v in figures.items() if n.startswith(prefix)}

    single = {name: value for name, value in figures.items() if "." not in name}
    return StepEfficiency(matmul=table("matmul."), links=table("links."), **single)


def read(path: Path) -> list[Row]:
    """The rows of step times that can be expressed."""
    rows = []
    for published in read_rows(path):
        if not isinstance(published, PublishedRow) or published.metric == MEMORY:
            continue
        try:
            rows.append(Row.of(published))
        except MeshwrightError as error:
            print(f"{published.id}: {error}", file=sys.stderr)
    return rows


def summary(errors: Iterable[float]) -> dict[str, float | int | None]:
    found = sorted(map(abs, errors))
    return {"rows": len(found), "median": quantile(found, 0.5), "p90": quantile(found, 0.9)}


def beside_the_first(rows: Sequence[Row], log_errors: Sequence[float]) -> list[tuple[Row, float, float]]:
    """(row, its log error, that of the first row of its source, chip and dtype), without the first rows."""
    first: dict[tuple, float] = {}
    found = []
    for row, log_error in zip(rows, log_errors, strict=True):
        key = (row.published.source, row.published.chip, row.published.dtype)
        if key in first:
            found.append((row, log_error, first[key]))
        first.setdefault(key, log_error)
    return found


def anchored(rows: Sequence[Row], log_errors: Sequence[float], trust: float = TRUST) -> list[float]:
    """Errors once the first row of each source, chip and dtype has set a factor."""
    return [row.error(own - trust * first) for row, own, first in beside_the_first(rows, log_errors)]


def trusted(rows: Sequence[Row], log_errors: Sequence[float]) -> float:
    """The share of the first row's error that brings the others nearest: least absolute deviations."""
    pairs = beside_the_first(rows, log_errors)
    shares = [step / 20 for step in range(21)]
    return min(shares, key=lambda share: sum(abs(own - share * first) for _, own, first in pairs))


def by(rows: Sequence[Row], errors: Sequence[float], key: Callable[[Row], str]) -> dict[str, dict]:
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        groups.setdefault(key(row), []).append(error)
    return {name: summary(found) | {"mean": statistics.mean(found)} for name, found in groups.items()}


def leave_one_source_out(model: Model, rows: Sequence[Row], start: np.ndarray) -> list[float]:
    """The log error of every row with figures fitted on the other sources."""
    log_errors = [0.0] * len(rows)
    for source in dict.fromkeys(row.published.source for row in rows):
        others = [row for row in rows if row.published.source != source]
        x = model.fit(others, start, steps=8)
        for place, row in enumerate(rows):
            if row.published.source == source:
                log_errors[place] = row.log_error(model.step(x, row.family))
        print(f"without {source}: fitted", file=sys.stderr)
    return log_errors


def toml_lines(figures: Mapping[str, float], num_rows: int, kind: str) -> list[str]:
    """The `[step]` table of a chip."""

    def line(name: str) -> str:
        return f"{name.rpartition('.')[2]} = {float(f'{figures[name]:.3g}')}"

    lines = ["[step]", *(line(name) for name in figures if "." not in name)]
    for prefix in ("matmul", "links"):
        lines += ["", f"[step.{prefix}]", *(line(name) for name in figures if name.startswith(f"{prefix}."))]
    own = f"{num_rows} published rows of this family" if num_rows else "the published rows of other families"
    note = f"benchmarks/fit_published.py on {own}, shrunk towards those of all {kind.upper()}s"
    keys = dict.fromkeys(name.partition(".")[0] for name in figures)
    return [*lines, "", "[step.sources]", *(f'{key} = "{note}"' for key in keys)]


def write_catalog(model: Model, x: np.ndarray, rows: Sequence[Row]) -> None:
    """Replaces the `[step]` tables of the catalog, which stand before `[sources]`."""
    for file in sorted(CATALOG.glob("*.toml")):
        chip = catalog.chip(file.stem)
        family = family_of(chip.name)
        if chip.kind not in FIGURES:
            continue
        known = family if family in model.kinds else None
        figures = model.figures(x, known) if known else _of_kind(model, x, chip.kind)
        count = sum(row.family == family for row in rows)
        names = {name: value for name, value in figures.items() if _applies(name, chip.flops_per_second)}
        table = "\n".join(toml_lines(names, count, chip.kind))
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"\[step\]\n.*?(?=^\[sources\])", "", text, flags=re.DOTALL | re.MULTILINE)
        head, sources, tail = text.partition("[sources]\n")
        file.write_text(f"{head}{table}\n\n{sources}{tail}", encoding="utf-8")


def _of_kind(model: Model, x: np.ndarray, kind: str) -> dict[str, float]:
    return {name: _figure(name, x[model.places[kind, name]]) for name in FIGURES[kind]}


def _applies(name: str, flops_per_second: Mapping[str, float]) -> bool:
    return not name.startswith("matmul.") or name.removeprefix("matmul.") in flops_per_second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--loso", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--start", type=Path, help="A former result, to start from.")
    parser.add_argument("--steps", type=int, default=25, help="Of the fit, at most.")
    options = parser.parse_args()
    rows = read(options.file)
    model = Model({row.family: row.case.hardware.chip.kind for row in rows})
    start = None
    if options.start and options.start.exists():
        start = np.array(json.loads(options.start.read_text())["vector"])
        start = start if len(start) == len(model.start) else None
    x = model.fit(rows, start, steps=options.steps)
    log_errors = model.log_errors(rows, x)
    errors = [row.error(e) for row, e in zip(rows, log_errors, strict=True)]
    document = {
        "benchmark": "fit_published",
        "command": f"python benchmarks/fit_published.py {options.file.name}" + " --loso" * options.loso,
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "cpu": platform.machine()},
        "free": summary(errors),
        "anchored": summary(anchored(rows, log_errors)),
        "figures": {family: model.figures(x, family) for family in model.kinds},
        "kinds": {kind: _of_kind(model, x, kind) for kind in sorted(set(model.kinds.values()))},
        "sources": by(
            rows, errors, lambda row: f"{row.published.source}, {row.published.chip}, {row.published.dtype}"
        ),
        "rows": {row.published.id: round(e, 4) for row, e in zip(rows, errors, strict=True)},
        "vector": [round(float(v), 6) for v in x],
    }
    if options.loso:
        log_without = leave_one_source_out(model, rows, x)
        without = [row.error(e) for row, e in zip(rows, log_without, strict=True)]
        document["leave_one_source_out"] = {
            **summary(without),
            "anchored": summary(anchored(rows, log_without)),
            "trust": trusted(rows, log_without),
            "sources": by(rows, without, lambda row: row.published.source),
            "rows": {row.published.id: round(e, 4) for row, e in zip(rows, without, strict=True)},
        }
    if options.write:
        write_catalog(model, x, rows)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
