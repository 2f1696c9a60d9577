"""The compiled schedule's price of published steps of JAX programs, next to the measured and the planned one.

    python benchmarks/scheduled.py published/training.csv   # writes results/scheduled.json and the table

ROWS are published steps that meshwright can run as published, with float32 weights and products in bfloat16
or fp8, and that fit into the chips as compiled. If a chip's compiler ([tpu], [cuda12]) is not installed, its
rows in the results are kept. For TPUs, `share_without` is `compiled_schedule.TPU_SHARE` fitted without the
rows of that chip. For GPUs nothing is fitted, and a row is priced with the network that its source states.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.planned_program import planned_step
from meshwright.audit.compile.targets import choose_target, is_installed
from meshwright.audit.facts.compiled_schedule import TPU_SHARE
from meshwright.audit.plan_audit import scheduled_seconds
from meshwright.files import write_whole
from meshwright.layout import Layout
from meshwright.plan_file import Plan
from meshwright.validate.published import PublishedRow, read_rows
from meshwright.validate.reproduce import reproduce

ROOT = Path(__file__).parents[1]
RESULTS, DOCUMENT = ROOT / "benchmarks/results/scheduled.json", ROOT / "docs/how-to/read-an-audit.md"
START, END = "<!-- scheduled -->", "<!-- end of scheduled -->"
ROWS = {
    "tpu": ("T0467", "T0469", "T0533"),
    "gpu": (
        "T0464", "T0513", "T0515", "T0517", "T0460", "T0462", "T0458", "T0466", "T0454", "T0456",
    ),
}  # fmt: skip
PACKAGES = ("jax", "libtpu", "jax-cuda12-plugin")
# Our remat policies for a row that states none, and for one with `selective`.
_REMAT = {"": "none", "selective": "matmuls"}
# Policies of the programs that rows ran, where the table states none: of google/paxml,
# contrib/gpu/scripts_gpu/configs.py, GPT5B has SAVE_DOT_WITH_NO_BATCH_DIM and GPT175B saves nothing.
_OF_PROGRAM = {"T0460": "matmuls", "T0462": "matmuls", "T0458": "full"}


def priced(row: PublishedRow, platform: str) -> dict[str, Any]:
    """A row of the results: seconds of a step as measured, as planned, and by its compiled schedule."""
    case = reproduce(row)
    remat = _OF_PROGRAM.get(row.id) or _REMAT.get(row.remat or "", row.remat)
    words = f"data={row.data},fsdp={row.fsdp},tensor={row.tensor},remat={remat},weights_dtype=f32"
    words += ",matmul_dtype=fp8" if row.dtype == "fp8" else ""
    plan = Plan(case.config, case.hardware.spec, case.workload, Layout.parse(words))
    target = choose_target(plan.hardware, plan.layout, platform)
    compiled = compile_plan(plan, target)
    is_seconds = row.metric == "step_seconds"
    per_chip = case.workload.num_tokens / plan.layout.mesh.num_devices
    return {
        "id": row.id,
        "chip": case.hardware.chip.name,
        "devices": plan.layout.mesh.num_devices,
        "layout": str(plan.layout),
        "measured": row.value if is_seconds else per_chip / row.value,
        "planned": planned_step(plan, case.hardware).seconds,
        "scheduled": scheduled_seconds(plan, target, compiled, case.hardware),
    }


def scored(found: list[dict]) -> list[dict]:
    """Add the errors to each row, and for TPUs the share fitted to the rows of other chips."""
    of_tpus = [one for one in found if one["id"] in ROWS["tpu"]]
    for one in found:
        one |= {f"{name}_error": one[name] / one["measured"] - 1 for name in ("planned", "scheduled")}
        others = [o["measured"] / (o["scheduled"] / TPU_SHARE) for o in of_tpus if o["chip"] != one["chip"]]
        one["share_without"] = median(others) if one in of_tpus else None
        left_out = one["scheduled"] / TPU_SHARE * one["share_without"] if one in of_tpus else one["scheduled"]
        one["left_out_error"] = left_out / one["measured"] - 1
    return found


def table(found: list[dict]) -> str:
    lines = [
        "| row | chip | measured | planned | scheduled | left out |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        seconds = [f"{one[name]:.3g} s ({one[f'{name}_error']:+.1%})" for name in ("planned", "scheduled")]
        cells = one["id"], f"{one['devices']} {one['chip']}", f"{one['measured']:.3g} s", *seconds
        lines.append(f"| {' | '.join(cells)} | {one['left_out_error']:+.1%} |")
    return "\n".join(lines)


def main(file: Path) -> None:
    rows = {row.id: row for row in read_rows(file) if isinstance(row, PublishedRow)}
    before = json.loads(RESULTS.read_text())
    known = {one["id"]: one for one in before["rows"]}
    for platform, names in ROWS.items():
        for name in names if is_installed(platform) else ():
            known[name] = priced(rows[name], platform)
            print(name, known[name], file=sys.stderr, flush=True)
    found = scored([known[name] for names in ROWS.values() for name in names if name in known])
    versions = before["versions"] | {name: version for name in PACKAGES if (version := _version(name))}
    write_whole(RESULTS, json.dumps({"versions": versions, "rows": found}, indent=1) + "\n")
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = text.index(START), text.index(END)
    write_whole(DOCUMENT, f"{text[:begin]}{START}\n{table(found)}\n{text[end:]}")


def _version(name: str) -> str | None:
    """The version of a package; None if it is not installed here."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
