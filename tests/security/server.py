"""A server as a process, with the workers of `mw serve` and a model worked by hand."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.serve.http.client import MODEL
from tests.serve.mock import MockRunner, byte_tokenizer, says

from meshwright.models.chat import ChatTemplate
from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app, reader_of
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.server import bind, run
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.workers.pool import WorkerPool

ROOT = Path(__file__).parents[2]
CONTEXT = 4096


class Served:
    """A running server and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, timeout=60, **options)

    def complete(self, **body: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 4} | body)

    def health_seconds(self) -> float:
        began = time.perf_counter()
        assert httpx.get(self.url + "/health", timeout=60).status_code == 200
        return time.perf_counter() - began

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@contextmanager
def served(template: str | None = None, limits: dict | None = None) -> Iterator[Served]:
    """A server with a chat template and these `ClientLimits`, killed at the end."""
    settings = json.dumps({"template": template, "limits": limits or {}})
    command = [sys.executable, "-m", "tests.security.server", settings]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield Served(process, process.stdout.readline().strip())
        finally:
            process.kill()


def main() -> None:
    settings = json.loads(sys.argv[1])
    tokenizer = byte_tokenizer()
    if settings["template"] is not None:
        chat = ChatTemplate(settings["template"])
        tokenizer = Tokenizer(tokenizer.tokenizer, tokenizer.eos_ids, tokenizer.start_id, chat)
    limits = ClientLimits(
        **{
            name: frozenset(value) if name == "api_keys" else value
            for name, value in settings["limits"].items()
        }
    )
    with (
        bind("127.0.0.1", 0) as listener,
        Engine(MockRunner(says("ok"), num_slots=8, context=CONTEXT)) as engine,
    ):
        parts = (engine, tokenizer, MODEL, limits)
        with WorkerPool(reader_of(*parts), 2) as workers:
            workers.check()
            app = create_app(*parts, calls=workers)
            run(app, listener, lambda url: print(url, flush=True))
    print("closed", flush=True)


if __name__ == "__main__":
    main()
