"""Rows of the audit's matrix over releases of JAX: results/observatory.json, and compare-releases.md.

    python benchmarks/observatory.py --folder ~/releases             # twelve rows, the three newest releases
    python benchmarks/observatory.py --folder ~/releases --only 8b   # rows with this text, printed only
    python benchmarks/observatory.py --folder ~/releases --releases 0.10.2 0.10.2+libtpu==0.0.52
    python benchmarks/observatory.py --table                         # only write the page

A release is a version of jax (`0.12`: its newest patch) with the compilers of its `jax[tpu,cuda12]`, or with
other pins after a plus sign. uv makes an environment for each (5 GB; equal packages are shared).
One compile after another; each row is kept in the folder under a hash of the row, the versions and our
source, so an interrupted run goes on.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.audit_matrix import CASES, Case, grouped  # noqa: E402

from meshwright.audit.compile.cache import source_key  # noqa: E402
from meshwright.audit.plan_audit import audit_plan  # noqa: E402
from meshwright.errors import MeshwrightError  # noqa: E402
from meshwright.files import write_whole  # noqa: E402
from meshwright.hardware.catalog import load  # noqa: E402
from meshwright.units import format_bytes, format_seconds  # noqa: E402

RESULTS, DOCUMENT = ROOT / "benchmarks/results/observatory.json", ROOT / "docs/how-to/compare-releases.md"
START, END = "<!-- releases -->", "<!-- end of releases -->"
NUM_RELEASES = 3
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
# Six rows of each compiler: data parallelism, FSDP, tensor parallelism, experts, slices and inference.
SAMPLE = (
    "llama-3.2-1b train v5e:4x4 data=16,zero=1",
    "llama-3.2-1b train v5e:4x4 fsdp=4,tensor=4,sequence_parallel=true,remat=matmuls",
    "llama-3.2-1b train 2*v5e:4x4 data=8,tensor=4",
    "qwen3-0.6b train v5e:2x4 fsdp=8",
    "mixtral-8x7b train v5p:2x2x2 fsdp=8,remat=full",
    "llama-3-8b generate v5e:4x4 data=4,tensor=4",
    "llama-3.2-1b train h100:1x8 data=8,zero=1",
    "llama-3.2-1b train h100:1x8 fsdp=2,pipe=4,microbatches=8,schedule=lanes",
    "llama-3-8b train h100:2x8 data=2,fsdp=4,tensor=2,remat=full",
    "mixtral-8x7b train h100:1x8 fsdp=8,expert=8,remat=full",
    "gemma-3-1b train h100:1x8 fsdp=8,remat=full",
    "llama-3-8b generate h100:1x8 tensor=8",
)
# Changes below these shares are not listed. The time of a compile depends on the machine's other work.
STEP, MEMORY, PROGRAM, COMPILE = 0.01, 0.01, 0.1, 1.0
COMPILE_SECONDS = 20.0


@dataclass(frozen=True)
class Release:
    """An environment. name: as the user gave it. versions: of PACKAGES."""

    name: str
    python: Path
    versions: dict[str, str]


def environment(folder: Path, name: str, python: str) -> Release:
    """The environment of a release, made by uv if the folder has none."""
    place = folder / "environments" / re.sub(r"[^\w.+=-]", "-", name)
    listed = place / "versions.json"
    if not listed.exists():
        version, *pins = name.split("+")
        wanted = f"jax[tpu,cuda12]=={version}" + (".*" if version.count(".") == 1 else "")
        say(f"making {place} with {wanted} {' '.join(pins)}")
        uv("venv", "--quiet", "--clear", "--python", python, place)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(pins))
            file.flush()
            override = ("--override", file.name) if pins else ()
            # Not the repository's own environment: its lock pins one release.
            uv(
                "pip",
                "install",
                "--quiet",
                "--python",
                place / "bin/python",
                *override,
                f"{ROOT}[run]",
                wanted,
            )
        frozen = uv("pip", "freeze", "--python", place / "bin/python")
        pairs = dict(line.split("==") for line in frozen.splitlines() if "==" in line)
        write_whole(listed, json.dumps({package: pairs[package] for package in PACKAGES}))
    return Release(name, place / "bin/python", json.loads(listed.read_text()))


def newest(python: str) -> list[str]:
    """The newest patch of each of the newest minor versions of jax that meshwright supports, oldest first."""
    supported = re.search(r'"jax(>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert supported, "pyproject.toml has the versions of jax"
    version = re.search(r"\d+\.\d+", python)
    found: list[str] = []
    bound = supported[1]
    while len(found) < NUM_RELEASES:
        with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
            file.write(f"jax{bound}\n")
            file.flush()
            given = ("--python-version", version[0]) if version else ()
            try:
                text = uv("pip", "compile", "--quiet", "--no-deps", "--no-annotate", *given, file.name)
            except SystemExit:
                break  # none is older
        (name,) = re.findall(r"^jax==(\S+)", text, re.MULTILINE)
        found.append(name)
        lowest = supported[1].split(",")[0]
        bound = f"{lowest},<{'.'.join(name.split('.')[:2])}"
    return found[::-1]


def uv(*words: object) -> str:
    """The output of uv. Ends the program if it fails."""
    if not shutil.which("uv"):
        sys.exit("the observatory needs uv on PATH: pip install uv")
    ran = subprocess.run(["uv", *map(str, words)], capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"uv {' '.join(map(str, words))}: {ran.stderr.strip()}")
    return ran.stdout


def chosen(only: str | None) -> list[Case]:
    """The sample, or the row with a text, or all rows of the matrix that have it in theirs."""
    if only is None:
        return [case for case in CASES if case.text in SAMPLE]
    whole = [case for case in CASES if case.text == only]
    return whole or [case for case in CASES if only in case.text]


def measured(case: Case) -> dict:
    """The figures of a row in this environment; only `error` if it does not compile."""
    try:
        document = audit_plan(case.plan, load(case.hardware).chip.kind, use_cache=False)
    except MeshwrightError as error:
        return {"error": str(error)}
    rows = [row for row in document["rows"] if row["emitted"]]
    exposed = [row["emitted"]["exposed_seconds"] for row in rows]
    return {
        "verdict": document["verdict"],
        "findings": [
            f"{one['tensor']} {one['direction']}: {one['what']}".strip() for one in document["findings"]
        ],
        "collectives": [
            {"tensor": row["tensor"], "direction": row["direction"]}
            | {key: row["emitted"][key] for key in ("op", "axes", "bytes", "count")}
            for row in rows
        ],
        "sent_bytes": document["sent"]["compiled"],
        "exposed_seconds": None if None in exposed else sum(exposed),
        "step_seconds": document["step_seconds"]["scheduled"],
        "memory_bytes": document["memory"]["compiled"],
        "program_bytes": document["program"]["bytes"],
        "compile_seconds": document["compile_seconds"],
    }


def row(folder: Path, case: Case, release: Release, *, again: bool) -> dict:
    """The figures of a row with a release, from the folder or compiled in the release's environment."""
    key = source_key({"case": asdict(case), "versions": release.versions})
    kept = folder / "rows" / f"{key}.json"
    if again or not kept.exists():
        say(f"jax {release.versions['jax']}: compiling {case.text}")
        ran = subprocess.run(
            [release.python, __file__, "--row", str(CASES.index(case))],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = ran.stdout.strip().splitlines()
        figures = json.loads(lines[-1]) if not ran.returncode and lines else None
        if figures is None:  # not kept: another run tries again
            why = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
            return {"row": case.text, "release": release.name, "versions": release.versions, "error": why}
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps(figures))
    named = {"row": case.text, "release": release.name, "versions": release.versions}
    return named | json.loads(kept.read_text())


def changes(before: dict, after: dict) -> list[str]:
    """The differences between a row's figures of two releases, in words."""
    if "error" in before or "error" in after:
        if before.get("error") == after.get("error"):
            return []
        return [f"does not compile: {after['error']}" if "error" in after else "compiles again"]
    found = []
    if before["verdict"] != after["verdict"]:
        found.append(f"the verdict is {after['verdict']}, before {before['verdict']}")
    found += grouped(list(_changed_collectives(before["collectives"], after["collectives"])))
    found += [f"new finding: {one}" for one in after["findings"] if one not in before["findings"]]
    found += [f"no longer found: {one}" for one in before["findings"] if one not in after["findings"]]
    for name, key, least, written in (
        ("step", "step_seconds", STEP, format_seconds),
        ("peak memory", "memory_bytes", MEMORY, format_bytes),
        ("program", "program_bytes", PROGRAM, format_bytes),
        ("compile", "compile_seconds", COMPILE, format_seconds),
    ):
        old, new = before[key], after[key]
        if not old or not new or abs(new / old - 1) < least:
            continue
        if key == "compile_seconds" and abs(new - old) < COMPILE_SECONDS:
            continue
        found.append(f"{name} {written(new)}, before {written(old)} ({new / old - 1:+.1%})")
    old, new, step = before["exposed_seconds"], after["exposed_seconds"], after["step_seconds"]
    if old is not None and new is not None and step and abs(new - old) > STEP * step:
        found.append(f"exposed communication {format_seconds(new)}, before {format_seconds(old)}")
    return found


def _changed_collectives(before: Sequence[dict], after: Sequence[dict]) -> Iterator[str]:
    """A line for each tensor and pass whose collectives differ."""
    old, new = ({(one["tensor"], one["direction"]): one for one in rows} for rows in (before, after))
    for key in dict.fromkeys((*old, *new)):
        was, now = old.get(key), new.get(key)
        where = " ".join(filter(None, key))
        if was is None or now is None:
            one = now or was
            assert one, "a key of one of both"
            yield f"{where}: {'new' if now else 'no longer'} {_words(one)}"
        elif (was["op"], was["axes"]) != (now["op"], now["axes"]):
            yield f"{where}: {_words(now)}, before {_words(was)}"
        elif abs(now["bytes"] - was["bytes"]) > MEMORY * was["bytes"]:
            sizes = f"{format_bytes(now['bytes'])}, before {format_bytes(was['bytes'])}"
            yield f"{where}: {_words(now)} of {sizes}"


def _words(collective: dict) -> str:
    return f"{collective['op'].replace('_', '-')} over {', '.join(collective['axes']) or 'no axis'}"


def lines_of(rows: Sequence[dict]) -> list[str]:
    """Markdown: a line for each row and release, then the differences and how to reproduce each."""
    lines = [
        "| row | jax | compiler | verdict | sent | exposed | step | peak memory | program | compiled in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_row: dict[str, list[dict]] = {}
    for one in rows:
        by_row.setdefault(one["row"], []).append(one)
    for text, several in by_row.items():
        for number, one in enumerate(several):
            own = "jax-cuda12-plugin" if _is_gpu(text) else "libtpu"
            name = f"`{text.replace(',', ', ')}`" if not number else ""
            cells = [name, one["versions"]["jax"], f"{own} {one['versions'][own]}", *_cells(one)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Differences from the release before:", ""]
    listed = []
    for text, several in by_row.items():
        for before, after in pairwise(several):
            if found := changes(before, after):
                listed.append(f"- jax {after['versions']['jax']}, `{text}`: {'; '.join(found)}.")
                listed.append(f"  `{reproduced(text, before, after)}`")
    return [*lines, *(listed or ["none."])]


def reproduced(text: str, before: dict, after: dict) -> str:
    """The line that compiles a row with two releases."""
    releases = f"{before['release']} {after['release']}"
    return f"make observatory ARGS='--only \"{text}\" --releases {releases}'"


def _is_gpu(text: str) -> bool:
    (case,) = [case for case in CASES if case.text == text]
    return load(case.hardware).chip.kind == "gpu"


def _cells(one: dict) -> list[str]:
    if "error" in one:
        return [f"does not compile: {one['error']}", *["–"] * 6]
    figures = (
        ("sent_bytes", format_bytes),
        ("exposed_seconds", format_seconds),
        ("step_seconds", format_seconds),
        ("memory_bytes", format_bytes),
        ("program_bytes", format_bytes),
        ("compile_seconds", format_seconds),
    )
    return [one["verdict"], *("–" if one[key] is None else write(one[key]) for key, write in figures)]


def write_page() -> None:
    """The table between its marks in the document."""
    rows = json.loads(RESULTS.read_text())["rows"]
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    write_whole(DOCUMENT, "\n".join([before + START, *lines_of(rows), END]) + after)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="of environments and rows")
    parser.add_argument("--releases", metavar="JAX", nargs="+", help="the three newest by default")
    parser.add_argument(
        "--only", metavar="TEXT", help="rows of the whole matrix that have this in their text"
    )
    parser.add_argument("--python", default="3.12", help="a version or a path, for new environments")
    parser.add_argument("--again", action="store_true", help="compile again what the folder has")
    parser.add_argument("--table", action="store_true", help=f"only write {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row is not None:
        print(json.dumps(measured(CASES[asked.row])))
        return
    if asked.table:
        write_page()
        return
    if asked.folder is None:
        parser.error("--folder: name a folder for environments and rows")
    cases = chosen(asked.only)
    if not cases:
        parser.error(f"--only {asked.only!r}: no row of the matrix has this text")
    folder = asked.folder.expanduser().resolve()
    releases = [environment(folder, name, asked.python) for name in asked.releases or newest(asked.python)]
    rows: list[dict[str, Any]] = [
        row(folder, case, release, again=asked.again) for case in cases for release in releases
    ]
    print("\n".join(lines_of(rows)))
    if not asked.only:
        write_whole(RESULTS, json.dumps({"rows": rows}, indent=1) + "\n")
        write_page()


if __name__ == "__main__":
    main()
