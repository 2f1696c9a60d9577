"""The layout that `mw plan train` puts first, compiled: does it fit, and take as long as planned?

    python benchmarks/first_choices.py --only h100   # cases with this in their text ([cuda12]; TPUs [tpu])
    python benchmarks/first_choices.py --only v5     # adds these to results/first_choices.json

The audit matrix compiles layouts that were chosen by hand. A search prefers layouts whose prices are too low,
so its first choices find what the matrix does not. One compile after another, each a half to ten minutes.
"""

import argparse
import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.files import write_whole

RESULTS = Path(__file__).parent / "results/first_choices.json"
PACKAGES = ("jax", "libtpu", "jax-cuda12-plugin")
# (model, hardware, tokens a step, tokens a sequence)
CASES = (
    ("llama-3-8b", "v5p:4x4x4", "1Mi", "4k"),
    ("llama-3-8b", "v5e:8x8", "512Ki", "4k"),
    ("llama-3-8b", "v5p:2x2x2", "128Ki", "8k"),
    ("llama-3-70b", "v6e:16x16", "2Mi", "8k"),
    ("llama-2-70b", "v5p:16x16x16", "4M", "4k"),
    ("llama-2-13b", "v5p:16x16x16", "3M", "2k"),
    ("gemma-2-27b", "v5e:16x16", "1Mi", "8k"),
    ("gpt-3-175b", "v5p:8x16x16", "4Mi", "2k"),
    ("mixtral-8x7b", "v5p:4x4x8", "2Mi", "4k"),
    ("qwen3-30b-a3b", "v6e:8x16", "2Mi", "4k"),
    ("llama-3-8b", "h100:8", "512Ki", "4k"),
    ("llama-3-70b", "h100:16x8", "2Mi", "8k"),
    ("mixtral-8x7b", "h100:8x8", "2Mi", "4k"),
    ("qwen3-30b-a3b", "h100:4x8", "1Mi", "4k"),
    ("deepseek-v2-lite", "h100:2x8", "1Mi", "4k"),
    ("llama-3.1-405b", "h100:64x8", "4Mi", "8k"),
    ("gemma-2-27b", "a100-80gb:4x8", "512Ki", "4k"),
    ("llama-3-8b", "a100-40gb:2x8", "256Ki", "4k"),
    ("gpt-3-175b", "a100-80gb:32x8", "2Mi", "2k"),
    ("llama-2-13b", "b200:8", "1Mi", "4k"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases with this in their text")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {row["case"]: row for row in known}
    for case in CASES:
        text = " ".join(case)
        if asked.only in text:
            rows[text] = {"case": text, **_row(*case), "versions": _versions()}
            print(json.dumps(rows[text]), flush=True)
            _write([rows[name] for name in map(" ".join, CASES) if name in rows])


def _row(model: str, hardware: str, tokens: str, seq_len: str) -> dict[str, Any]:
    best = mw.plan(model, hardware, mw.Train(tokens, seq_len)).best
    started, usable = time.perf_counter(), best.hardware.chip.program_bytes
    row: dict[str, Any] = {"layout": str(best.layout), "planned_bytes": best.bytes_per_chip["total"]}
    try:
        audit = best.audit(best.hardware.chip.kind, numerics=False)
    except MeshwrightError as error:
        return {**row, "fits": False, "verdict": None, "error": str(error)}
    memory, seconds = audit["memory"], audit["step_seconds"]
    return {
        **row,
        "fits": memory["compiled"] <= usable,
        "verdict": audit["verdict"],
        "bytes_ratio": memory["compiled"] / memory["planned"],
        "planned_seconds": seconds["planned"],
        "seconds_ratio": seconds["scheduled"] / seconds["planned"] if seconds["scheduled"] else None,
        "wall_seconds": round(time.perf_counter() - started, 1),
    }


def _versions() -> dict[str, str]:
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    return {package: installed[package] for package in PACKAGES if package in installed}


def _write(rows: list[dict[str, Any]]) -> None:
    ratios = sorted(row["seconds_ratio"] for row in rows if row.get("seconds_ratio"))
    document = {
        "benchmark": "first_choices",
        "machine": platform.platform(),
        "fit": sum(row["fits"] for row in rows),
        "of": len(rows),
        "median_seconds_ratio": ratios[len(ratios) // 2] if ratios else None,
        "rows": rows,
    }
    write_whole(RESULTS, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
