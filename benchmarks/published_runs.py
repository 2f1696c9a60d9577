"""Write plan/published_runs.csv, the runs that plans are compared with, from published/training.csv.

python -m benchmarks.published_runs
"""

import csv
from pathlib import Path

from meshwright.plan.evidence import COLUMNS

HERE = Path(__file__).parent
TABLE = HERE / "published" / "training.csv"
WRITTEN = HERE.parent / "src/meshwright/plan/published_runs.csv"
_KEY = (
    "source", "model", "hardware", "seq_len", "global_batch_sequences", "data", "fsdp", "tensor", "pipe",
    "context", "expert",
)  # fmt: skip


def text() -> str:
    """The table: a line for each published run whose step time is known, once for each layout."""
    lines, known = [",".join(COLUMNS)], set()
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in _KEY)
            if row["metric"] == "memory_bytes_per_chip" or key in known:
                continue
            known.add(key)
            lines.append(",".join(_quoted(cell) for cell in _cells(row)))
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, str]) -> list[str]:
    chip = row["hardware"].split("*")[-1].split(":")[0]
    tokens = int(row["global_batch_sequences"]) * int(row["seq_len"])
    degrees = [row[name] or "1" for name in ("tensor", "pipe", "context", "expert")]
    parameters = f"{float(row['params_total'] or row['params_active'] or 0):.3g}"
    return [
        row["id"], row["source"], row["year"], row["model"], parameters, chip, row["chips"], row["seq_len"],
        str(tokens), *degrees, str(int(bool(row["experts"]))), row["software"],
    ]  # fmt: skip


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if "," in cell or '"' in cell else cell


if __name__ == "__main__":
    WRITTEN.write_text(text(), encoding="utf-8")
