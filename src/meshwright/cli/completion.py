"""The demo's request to `mw serve` in another process, by openai's client."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from urllib.request import urlopen

import typer

from meshwright.cli.console import note
from meshwright.errors import DeviceError

PROMPT, MAX_TOKENS, TEMPERATURE, SEED = "Once upon a time", 160, 0.5, 7
_START_SECONDS, _STOP_SECONDS = 180, 30


def complete(run: Path) -> dict:
    """The completion of the prompt by the model in `run`: prompt, text, model, ttft_seconds, tpot_seconds.

    Raises DeviceError if the server does not answer.
    """
    with _server(run) as (address, model):
        with urlopen(f"{address}/health", timeout=_STOP_SECONDS) as answer:
            note(f"      {address}/health {json.load(answer)['status']}")
        document = _ask(address, model)
    text = (PROMPT + document["text"]).splitlines()
    note("\n".join(f"      | {line}" for line in text))
    return document


def _ask(address: str, model: str) -> dict:
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    started = time.perf_counter()
    stream = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=MAX_TOKENS,
        temperature=TEMPERATURE,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces: list[str] = []
    first, num_tokens = 0.0, 0
    for chunk in stream:
        if chunk.choices:
            first = first or time.perf_counter()
            pieces.append(chunk.choices[0].text)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    ended = time.perf_counter()
    return {
        "prompt": PROMPT,
        "text": "".join(pieces),
        "model": model,
        "ttft_seconds": first - started,
        "tpot_seconds": (ended - first) / (num_tokens - 1) if num_tokens > 1 else None,
    }


@contextmanager
def _server(run: Path) -> Iterator[tuple[str, str]]:
    """(address, model's name) of a server on a free port, which is stopped at the end."""
    arguments = ["serve", "--checkpoint", str(run), "--port", "0", "--slots", "4"]
    note(f"      $ mw {' '.join(arguments)}")
    command = [sys.executable, "-m", "meshwright.cli.main", *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        give_up = Timer(_START_SECONDS, process.kill)
        give_up.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            give_up.cancel()
            if not line:
                _ended(process.wait())
            ready = json.loads(line)
            yield ready["address"], ready["model"]
        finally:
            give_up.cancel()
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _ended(code: int) -> None:
    """Raise the exit code of a server that never answered; its message is on stderr."""
    if code > 0:
        raise typer.Exit(code)
    raise DeviceError(f"mw serve did not answer within {_START_SECONDS} s")
