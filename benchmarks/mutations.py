"""Steps broken on purpose, and which of them the audit notices: results/mutations.json.

The rate is written into read-an-audit.md, too.

    python benchmarks/mutations.py                  # compile what the JSON lacks, for virtual CPU devices
    python benchmarks/mutations.py --seconds 500    # as many as that takes; the next run goes on
    python benchmarks/mutations.py --again gather   # anew the kinds that have this in their names
    python benchmarks/mutations.py --table          # only write the line in read-an-audit.md

The ways to break a step are those of `tests/audit/mutations.py`: of training on four layouts, of serving on
three.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from tests.audit.mutations import CASES, LAYOUTS, SERVING_LAYOUTS, broken, plan_of, unbroken  # noqa: E402

from meshwright.audit.compile.compile import CompiledProgram  # noqa: E402
from meshwright.audit.compile.target import Target  # noqa: E402
from meshwright.audit.plan_audit import judged  # noqa: E402
from meshwright.files import write_whole  # noqa: E402

RESULTS, DOCUMENT = ROOT / "benchmarks/results/mutations.json", ROOT / "docs/how-to/read-an-audit.md"
START, END = "<!-- mutations -->", "<!-- end of mutations -->"
UNBROKEN = "unbroken"


def cases() -> Iterator[tuple[str, str]]:
    """Kind and layout of every program, the unbroken ones first."""
    yield from ((UNBROKEN, layout) for layout in (*LAYOUTS, *SERVING_LAYOUTS))
    yield from CASES


def judgement(kind: str, layout: str, program: CompiledProgram | None) -> dict:
    """What the audit says of one program; the verdict is None where the kind does not apply to the layout."""
    if program is None:
        return {"kind": kind, "layout": layout, "verdict": None, "said": ""}
    found = judged(plan_of(layout), Target("cpu"), program)
    said = [one["what"] for one in found["findings"]] + found["not_understood"]
    return {"kind": kind, "layout": layout, "verdict": found["verdict"], "said": said[0] if said else ""}


def run(again: str | None, seconds: float) -> None:
    """Every case that the JSON lacks, each written when it is there, until the time is up."""
    known = {(one["kind"], one["layout"]): one for one in _read()["cases"]}
    began = time.monotonic()
    for kind, layout in cases():
        if (kind, layout) in known and not (again and again in kind):
            continue
        if time.monotonic() - began > seconds:
            return
        program = unbroken(layout) if kind == UNBROKEN else broken(kind, layout)
        known[kind, layout] = judgement(kind, layout, program)
        write([known[case] for case in cases() if case in known])
        print(kind, layout, known[kind, layout]["verdict"], file=sys.stderr, flush=True)


def write(found: list[dict]) -> None:
    environment = {
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "platform": f"{platform.system()} {platform.machine()}",
    }
    write_whole(RESULTS, json.dumps({"environment": environment, "cases": found}, indent=1) + "\n")


def _read() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": []}


def sentence(found: list[dict]) -> str:
    """The rate, and what was missed."""
    whole = Counter(one["verdict"] for one in found if one["kind"] == UNBROKEN)
    programs = [one for one in found if one["kind"] != UNBROKEN and one["verdict"]]
    missed = [one for one in programs if one["verdict"] != "differs"]
    kinds, asked = {_way(one["kind"], one["layout"]) for one in programs}, {_way(*case) for case in CASES}
    flagged = len(programs) - len(missed)
    text = (
        f"Of {len(asked)} ways {len(kinds)} were compiled, as {len(programs)} programs: {flagged} are "
        f"flagged. Of {whole.total()} unbroken steps {whole['match']} match."
    )
    names = "; ".join(f"{one['kind']} (`{one['layout']}`)" for one in missed)
    return f"{text} Missed: {names}." if missed else text


def _way(kind: str, layout: str) -> tuple[str, bool]:
    """What tells a way to break a step: training and serving have some of one name."""
    return kind, layout in LAYOUTS


def write_line() -> None:
    """The sentence between its marks in the document."""
    found = _read()
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    version = f"jax {found['environment']['jax']}"
    write_whole(DOCUMENT, f"{before}{START}\n{sentence(found['cases'])} ({version})\n{END}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--again", metavar="TEXT", help="compile anew kinds that have this in their names")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no program after this time"
    )
    parser.add_argument("--table", action="store_true", help="only write docs/how-to/read-an-audit.md")
    asked = parser.parse_args()
    if not asked.table:
        run(asked.again, asked.seconds)
    write_line()
