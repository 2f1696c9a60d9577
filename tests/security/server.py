"""A server as a process, with the workers of `mw serve` and a model worked by hand."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
from tests.serve.http.client import MODEL
from tests.serve.mock import MockRunner, byte_tokenizer, says

from meshwright.layout.page_sizes import DEFAULT_PAGE
from meshwright.models.chat import ChatTemplate
from meshwright.serve.engine.batch import SequenceWork, WorkOutput
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Scores, TokenScore
from meshwright.serve.http.app import create_app, reader_of
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.connections import Connections
from meshwright.serve.http.server import address, bind, run_server
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.workers.pool import WorkerPool

ROOT = Path(__file__).parents[2]
CONTEXT = 100_000


class Served:
    """A running server, its address, its address for probes, and the file of its log."""

    def __init__(self, process: subprocess.Popen[str], url: str, probes_url: str, log: IO[bytes]) -> None:
        self.process, self.url, self.probes_url, self._log = process, url, probes_url, log

    @property
    def log(self) -> str:
        """All that the server has written on stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, timeout=60, **options)

    def complete(self, **body: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 4} | body)

    def complete_as(self, key: str, headers: dict[str, str] | None = None) -> httpx.Response:
        """The answer to a completion with a key and further headers."""
        with_key = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        return self.post("/v1/completions", body, headers=with_key | (headers or {}))

    def health_seconds(self) -> float:
        began = time.perf_counter()
        assert httpx.get(self.url + "/health", timeout=60).status_code == 200
        return time.perf_counter() - began

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@contextmanager
def served(template: str | None = None, limits: dict[str, Any] | None = None) -> Iterator[Served]:
    """A server with a chat template and these `ClientLimits`, killed at the end."""
    settings = json.dumps({"template": template, "limits": limits or {}})
    command = [sys.executable, "-m", "tests.security.server", settings]
    # A pipe that is not read would stop a server with much to log.
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            url, probes_url = process.stdout.readline().split()
            yield Served(process, url, probes_url, log)
        finally:
            process.kill()


class QuickRunner(MockRunner):
    """A MockRunner that keeps no tokens: for long prompts, these take more memory than the server."""

    def _write(self, work: SequenceWork) -> None:
        pass

    def _logits(self, work: SequenceWork) -> list[np.ndarray]:
        prompt = list(work.sequence.request.prompt)
        num_answered = work.start + len(work.tokens) - len(prompt)
        behind = range(work.num_samples, 0, -1)
        return [self.logits(prompt, [0] * (num_answered - number + 1)) for number in behind]

    def _output(self, work: SequenceWork, tokens: list[TokenScore]) -> WorkOutput:
        if work.reads != "scores":
            return WorkOutput(tokens, embedding=np.eye(1, 3)[0] if work.reads else None)
        prompt, num_top = work.sequence.request.prompt, work.sequence.request.sampling.top_logprobs
        scored = np.array(prompt[work.start + 1 : work.start + 1 + len(work.tokens)], np.int32)
        shape = (len(scored), num_top)
        top = np.broadcast_to(np.arange(num_top), shape), np.full(shape, -1.0, np.float32)
        return WorkOutput(tokens, Scores(scored, np.full(len(scored), -1.0, np.float32), *top))


def _answer(prompt: list[int], tokens: list[int]) -> int:
    """One letter after another, slowly, to what says `forever`; `ok` to all other prompts."""
    if prompt != _FOREVER:
        return _OK(prompt, tokens)
    time.sleep(0.001)
    return _FOREVER[-1]


_OK, _FOREVER = says("ok"), list(byte_tokenizer().encode("forever"))


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    tokenizer = byte_tokenizer()
    if settings["template"] is not None:
        chat = ChatTemplate(settings["template"])
        tokenizer = Tokenizer(tokenizer.tokenizer, tokenizer.eos_ids, tokenizer.start_id, chat)
    given: dict[str, Any] = settings["limits"]
    keys: Any = frozenset(given.pop("api_keys", ()))
    limits = ClientLimits(api_keys=keys, **given)
    connections = Connections(
        limits.max_connections, limits.max_connections_per_address, limits.proxies, limits.stalled_seconds
    )
    runner = QuickRunner(_answer, num_slots=8, context=CONTEXT, page_size=DEFAULT_PAGE)
    with bind("127.0.0.1", 0) as listener, bind("127.0.0.1", 0) as probes, Engine(runner) as engine:
        parts = (engine, tokenizer, MODEL, limits)
        with WorkerPool(reader_of(*parts), 2) as workers:
            workers.check()
            app = create_app(*parts, calls=workers)
            run_server(
                app, listener, lambda url: print(url, address(probes), flush=True), connections, probes
            )
    print("closed", flush=True)


if __name__ == "__main__":
    main()
