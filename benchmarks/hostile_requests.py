"""Delay of /health and memory of a server under each hostile request of `tests/security/hostile.py`.

    python benchmarks/hostile_requests.py -o benchmarks/results/hostile_requests.json

A server with two workers, a model worked by hand, and one client that asks /health without pause.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.security.hostile import COUNTS, GRAMMARS  # noqa: E402
from tests.security.server import Served, served  # noqa: E402
from tests.security.test_requests import longest_wait  # noqa: E402


def measured(server: Served, name: str, body: tuple[str, bytes]) -> dict[str, object]:
    """The figures of one request."""
    before, began = server.resident_bytes, time.perf_counter()
    slowest, response = longest_wait(server, body)
    return {
        "request": name,
        "body_bytes": len(body[1]),
        "status": response.status_code,
        "answer_seconds": round(time.perf_counter() - began, 3),
        "health_seconds": round(slowest, 4),
        "more_memory_bytes": server.resident_bytes - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    with served() as server:
        server.complete()
        before = server.resident_bytes
        idle = max(server.health_seconds() for _ in range(50))
        rows = [measured(server, name, body) for name, body in (GRAMMARS | COUNTS).items()]
        kept = server.resident_bytes - before
    document = {
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "idle_health_seconds": round(idle, 4),
        "kept_memory_bytes": kept,
        "requests": rows,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
