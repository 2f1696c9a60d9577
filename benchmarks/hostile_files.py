"""Ends of hostile files and command lines: how many, how many badly, and seconds of the slowest.

    python benchmarks/hostile_files.py --files 2000 --lines 3000 -o benchmarks/results/hostile_files.json

Files are configurations, plans, documents, hardware, programs, headers of weights, and tokenizers, each
with a few changes; each must end well or in one line, within 10 s and 1 GB
(`tests/security/test_file_fuzz.py`). Command lines are right ones with a few changes
(`tests/security/test_command_line.py`).
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
FILES = "tests/security/test_file_fuzz.py"
KINDS = 8  # of files


def ends(durations: list[float], num_bad: int) -> dict[str, object]:
    """The figures of files or command lines that have ended after these seconds."""
    return {
        "number": len(durations),
        "ended_badly": num_bad,
        "p99_seconds": round(quantiles(durations, n=100)[98], 3),
        "most_seconds": round(max(durations), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    os.environ["FUZZ_EXAMPLES"] = str(-(-given.files // KINDS))
    import pytest
    from tests.security import test_command_line as lines

    os.chdir(ROOT)
    # First the lines: the tests change the environment of this process.
    with tempfile.TemporaryDirectory() as folder:
        faults = lines.run_lines(Path(folder), given.seed, given.lines)
    command_lines = ends(lines.durations, len(faults))
    lines.durations.clear()
    options = ["-q", "-p", "no:cacheprovider", f"--hypothesis-seed={given.seed}"]
    exit_code = int(pytest.main([*options, FILES]))
    files = ends(lines.durations, int(exit_code != 0))  # a test ends with its first fault
    document = {
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "seed": given.seed,
        "files": files,
        "command_lines": command_lines,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if given.output is not None:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
