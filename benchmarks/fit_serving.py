"""Fits the figures of serving engines (`engines/*.toml`) to load tests of one pool.

    python benchmarks/fit_serving.py serving.csv --every 6

Each engine's figures start from those of all GPUs, with a prior as wide as _PRIOR in log-odds of shares
and in logarithms of seconds. Two Gauss-Newton steps follow, on log errors of the time per token and of
the time to first token; a row counts a fifth, since rows of a panel err together. Prints the figures,
the errors of the fitted rows, and those of rows in between, which are not fitted.

    python benchmarks/fit_serving.py serving.csv --errors

writes the errors of today's figures to plan/load_test_errors.csv, from which ranges are made.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost.serving_step import Passes
from meshwright.engines.serving_engine import ENGINES
from meshwright.load import engine_server
from meshwright.plan import spread
from meshwright.plan.serve import engine_steps
from meshwright.validate import load_tests
from meshwright.validate.load_test_row import LoadTestRow
from meshwright.validate.published import read_rows

_SHARES = {
    "memory": 0.8,
    "cache": 0.84,
    "matmul.bf16": 0.7,
    "matmul.fp8": 0.62,
    "matmul.fp4": 0.5,
    "experts": 0.7,
    "attention": 0.42,
    "elementwise": 0.74,
}
_SECONDS = {
    "kernel_seconds": 1.9e-6,
    "direct_seconds": 5e-6,
    "request_seconds": 0.02,
    "prompt_layer_seconds": 1.5e-4,
    "launch_seconds": 3e-4,
}
_OF_ENGINE = ("direct_seconds", "request_seconds", "prompt_layer_seconds")
_NAMES = (*_SHARES, *_SECONDS)
_FITTED = ("vllm", "sglang", "tensorrt-llm")
_PRIOR, _STEP, _MOST = 0.5, 0.3, 0.8
# Of a row: the weight and the scale of the log error of each figure.
_FIGURES = (("tpot_seconds", 1.0, 0.12), ("ttft_seconds", 0.6, 0.3))
_TOGETHER = 0.2


def _value(name: str, x: float) -> float:
    return 1 / (1 + exp(-x)) if name in _SHARES else exp(x)


def _start() -> np.ndarray:
    return np.array([*(log(v / (1 - v)) for v in _SHARES.values()), *map(log, _SECONDS.values())])


def _set(figures: dict[str, np.ndarray], known: dict[str, Any]) -> None:
    """Replace the records of the engines, and forget prices."""
    for engine, x in figures.items():
        values = {name: _value(name, place) for name, place in zip(_NAMES, x, strict=True)}
        own = {name: values.pop(name) for name in _OF_ENGINE}
        gpu = {**known[engine].gpu, **values, "collective_seconds": 1e-6}
        ENGINES._read[engine] = replace(known[engine], gpu=gpu, **own)
        for other in known[engine].also:
            ENGINES._read[other] = replace(ENGINES._read[engine], name=other, also=())
    for cached in (load_tests._machine, load_tests._layout, engine_server._table):
        cached.cache_clear()


def _errors(rows: Sequence[LoadTestRow]) -> np.ndarray:
    found = []
    for row in rows:
        predicted = load_tests.predict_load_test(row).predicted
        found.append([log(predicted[n] / row.figures[n]) if predicted else np.nan for n, _, _ in _FIGURES])
    return np.array(found)


def _stepped(x: np.ndarray, errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """The figures after a Gauss-Newton step with Huber weights and the prior."""
    precision = np.eye(len(_NAMES)) / _PRIOR**2
    matrix, right = precision.copy(), precision @ (_start() - x)
    for error, slope in zip(errors, slopes, strict=True):
        for place, (_, weight, scale) in enumerate(_FIGURES):
            each = _TOGETHER * weight / scale**2 / max(1, abs(error[place]) / (1.5 * scale))
            matrix += each * np.outer(slope[place], slope[place])
            right -= each * slope[place] * error[place]
    return x + np.clip(np.linalg.solve(matrix, right), -_MOST, _MOST)


def _show(what: str, rows: Sequence[LoadTestRow], errors: np.ndarray) -> None:
    engines = np.array([next(e for e in _FITTED if row.engine in (e, *ENGINES[e].also)) for row in rows])
    for engine in ("all", *_FITTED):
        chosen = (engines == engine) | (engine == "all")
        sizes = np.abs(np.expm1(errors[chosen & ~np.isnan(errors).any(axis=1)]))
        if len(sizes):
            median, p90 = np.median(sizes, axis=0), np.quantile(sizes, 0.9, axis=0)
            print(
                f"{what} {engine}: {len(sizes)} rows, tpot {median[0]:.1%} {p90[0]:.1%}, "
                f"ttft {median[1]:.1%} {p90[1]:.1%}"
            )


def write_errors(tests: Sequence[LoadTestRow], path: Path) -> None:
    """Write log(predicted / measured) of all rows: a line each."""
    names = [name for name, _, _ in _FIGURES] + ["e2e_seconds"]
    lines = [",".join(["id", "source", "kind", "software", "chip", "experts", *names])]
    for prediction in load_tests.predict_load_tests(tests, in_processes=True):
        row, errors = prediction.row, [prediction.error(name) for name in names]
        if isinstance(row, LoadTestRow) and None not in errors:
            pools, engine, chip, experts = load_tests.spread_group(row)
            source = f"{engine} {row.model} {row.system} {row.weight_dtype} {pools}"
            logs = [f"{log(1 + (error or 0.0)):.3f}" for error in errors]
            lines.append(",".join([row.id, source, pools, engine, chip, str(int(experts)), *logs]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Fit, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--errors", action="store_true")
    options = parser.parse_args()
    tests = [row for row in read_rows(options.table) if isinstance(row, LoadTestRow)]
    if options.errors:
        write_errors(tests, Path(spread.__file__).with_name("load_test_errors.csv"))
        return
    tests = [row for row in tests if row.mode == "together" and row.concurrency]
    tests.sort(key=lambda row: (row.engine, row.model, row.hardware, row.weight_dtype, str(row.degrees)))
    fitted = tests[:: options.every]
    passes: dict[tuple, Passes] = {}

    def kept(config: Any, layout: Any, batches: Any, queries: int, context: int, hardware: Any) -> Passes:
        key = (config, layout, tuple(np.asarray(batches).tolist()), queries, context)
        if key not in passes:  # a recorded pass does not depend on the figures
            passes[key] = Passes(config, layout, batches, queries, context, hardware)
        return passes[key]

    engine_steps.Passes = kept
    known = {engine: ENGINES[engine] for engine in _FITTED}
    names = {row.engine: next(e for e in _FITTED if row.engine in (e, *known[e].also)) for row in tests}
    figures = {engine: _start() for engine in _FITTED}
    for _ in range(2):
        _set(figures, known)
        errors = _errors(fitted)
        _show("fitted", fitted, errors)
        slopes = np.zeros((len(fitted), len(_FIGURES), len(_NAMES)))
        for place in range(len(_NAMES)):
            _set(
                {engine: x + _STEP * (np.arange(len(_NAMES)) == place) for engine, x in figures.items()},
                known,
            )
            slopes[:, :, place] = (_errors(fitted) - errors) / _STEP
        usable = ~np.isnan(errors).any(axis=1) & ~np.isnan(slopes).any(axis=(1, 2))
        for engine in _FITTED:
            own = usable & np.array([names[row.engine] == engine for row in fitted])
            figures[engine] = _stepped(figures[engine], errors[own], slopes[own])
    _set(figures, known)
    for engine, x in figures.items():
        print(
            engine, {name: float(f"{_value(name, place):.3g}") for name, place in zip(_NAMES, x, strict=True)}
        )
    _show("fitted", fitted, _errors(fitted))
    others = tests[options.every // 2 :: options.every]
    _show("others", others, _errors(others))


if __name__ == "__main__":
    main()
