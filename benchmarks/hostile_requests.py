"""Delay of /health and memory of a server under each hostile request of `tests/security/hostile.py`.

    python benchmarks/hostile_requests.py --generated 10000 -o benchmarks/results/hostile_requests.json

A server with two workers, a model worked by hand, and one client that asks /health without pause. Then the
asked number of generated requests: right ones with a few changes, as `make fuzz` makes them.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.security.hostile import COUNTS, GRAMMARS, VALUES  # noqa: E402
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


def generated(server: Served, number: int, seed: int) -> dict[str, object]:
    """The figures of generated requests, sent one after another while another client asks /health."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from tests.security.test_http_fuzz import REQUESTS

    seconds, statuses, failures, ends = list[float](), Counter[int](), list[str](), threading.Event()
    before, most = server.resident_bytes, 0

    def probe() -> None:
        with httpx.Client(timeout=60) as http:
            while not ends.is_set():
                began = time.perf_counter()
                if (answer := http.get(server.url + "/health")).is_error:
                    failures.append(f"/health: {answer.status_code} {answer.text}\n{server.log}")
                    return
                seconds.append(time.perf_counter() - began)
                time.sleep(0.01)

    @seeded(seed)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(request=REQUESTS)
    def send(request: tuple[str, str]) -> None:
        nonlocal most
        if failures:
            return
        path, body = request
        statuses[http.post(path, content=body.encode("utf-8", "surrogatepass")).status_code] += 1
        most = max(most, server.resident_bytes)

    probing = threading.Thread(target=probe)
    probing.start()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            send()
    finally:
        ends.set()
        probing.join()
        if failures:
            sys.exit(failures[0])
    return {
        "requests": statuses.total(),
        "answers": {str(status): count for status, count in sorted(statuses.items())},
        "same_process": server.process.poll() is None,
        "health_p99_seconds": round(quantiles(seconds, n=100)[98], 4),
        "health_most_seconds": round(max(seconds), 4),
        "most_more_memory_bytes": most - before,
        "kept_memory_bytes": server.resident_bytes - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--generated", type=int, default=0, help="number of generated requests")
    parser.add_argument("--seed", type=int, default=0, help="of the generated requests")
    arguments = parser.parse_args()
    output = arguments.output
    with served() as server:
        server.complete()
        before = server.resident_bytes
        idle = max(server.health_seconds() for _ in range(50))
        rows = [measured(server, name, body) for name, body in (GRAMMARS | VALUES | COUNTS).items()]
        kept = server.resident_bytes - before
        made = generated(server, arguments.generated, arguments.seed) if arguments.generated else None
    document = {
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "idle_health_seconds": round(idle, 4),
        "kept_memory_bytes": kept,
        "requests": rows,
        "generated": made,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
