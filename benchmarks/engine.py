"""The engine beside itself: what a feature saves or costs, as ratios of runs that take turns in one process.

    python benchmarks/engine.py [--rows chat,slots] [--rounds 3] [-o FILE]

    chat         the time to the first token of a tenth turn, with cached prefixes over without; at most 1/3
    slots        a token of one stream in an engine of 16 slots over one in an engine of 1; at most 1.2
    capacity     a token of 16 streams of about 100 positions where slots hold 2,048 over where they hold 128
    tail         the 99th percentile of the time between tokens of 16 streams over its median; under 2
    modes        goodput of interleaved over batched at the same arrivals; at least 2
    host         the share of a step of 64 streams in which Python's threads compute; under 0.1
    http         64 streams over HTTP: seconds over those of the engine alone; under 1.05
    native       tokens per second with the C++ extension for CPUs and by XLA alone: of one stream, of 16 with
                 prompts of 16 to 128 tokens, and of a prompt of 512; bf16, int8, f32, and bf16 weights
                 widened for activations in f32
    invariant    the same with --batch-invariant and without it
    long_prompt  the worst gap between tokens of 4 streams of `mw serve` while a prompt of 30k tokens is
                 prefilled and one of 10 MB is refused, over the median gap before; under 4

The model has 134M parameters and random weights in bf16; of the last row it is small, in f32. What else the
machine does falls on both sides of a ratio, so the median over the rounds is recorded.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import tokenizers
from own_server import config_of, served, write_checkpoint
from tokenizers import models
from training import machine

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.params import init_params
from meshwright.nn.start.compiled_cache import keep_compiled
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.policy import Mode
from meshwright.serve.engine.request import Request, SamplingParams
from meshwright.serve.http.app import create_app
from meshwright.serve.http.server import bind, run_server
from meshwright.serve.text.tokenizer import Tokenizer

CONFIG = ModelConfig("llama-134m", 12, 768, 2048, 12, 12, 64, 32_000, 2048)
SMALL = ModelConfig("llama-5m", 4, 256, 704, 4, 4, 64, 8_000, 32_768)
GREEDY = SamplingParams(temperature=0.0)

Row = dict[str, float]


def some_tokens(count: int, seed: int = 0, vocab_size: int = SMALL.vocab_size) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, count).tolist())


def new_runner(
    num_slots: int,
    context: int,
    config: ModelConfig = CONFIG,
    dtype: str = "bf16",
    stored: dict[str, str] | None = None,
    how: dict[str, bool] | None = None,
) -> JaxRunner:
    """Compiled. stored: of the layout, how weights are stored, multiplied if not in `dtype`."""
    layout = Layout.of(weights_dtype=dtype, compute_dtype=dtype)
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(config, layout, mesh, 0)
    layout = layout.replace(**stored) if stored else layout
    runner = JaxRunner(params, config, layout, mesh, num_slots=num_slots, context=context, **(how or {}))
    runner.warm_up()
    return runner


async def times_of(engine: Engine, prompt: tuple[int, ...], num_tokens: int) -> list[float]:
    """When the tokens of an answer came, in seconds after the request."""
    started = time.perf_counter()
    with engine.submit(Request(prompt, num_tokens, GREEDY)) as stream:
        return [time.perf_counter() - started async for _ in stream]


async def streams(engine: Engine, num_streams: int, prompt: int, num_tokens: int) -> list[list[float]]:
    prompts = [some_tokens(prompt, seed) for seed in range(num_streams)]
    return await asyncio.gather(*(times_of(engine, one, num_tokens) for one in prompts))


def token_seconds(runner: JaxRunner, num_streams: int, prompt: int, num_tokens: int) -> float:
    """The median time between two tokens of equal streams."""
    with Engine(runner, prefix_cache=False) as engine:
        times = asyncio.run(streams(engine, num_streams, prompt, num_tokens))
    return float(np.median(np.diff([one[1:] for one in times])))


def paired(rounds: int, one: Callable[[], float], other: Callable[[], float], names: tuple[str, str]) -> Row:
    """Medians of both, and of their ratio, in turns, after a first round."""
    pairs = [(one(), other()) for _ in range(rounds + 1)][1:]
    ratio = statistics.median(a / b for a, b in pairs)
    both = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"ratio": ratio} | dict(zip(names, both, strict=True))


def chat(rounds: int) -> Row:
    runner, turns = new_runner(1, 640), 10

    def last_turn(*, prefix_cache: bool) -> float:
        async def converse(engine: Engine) -> float:
            first, said = 0.0, ()
            for turn in range(turns):
                said += some_tokens(48, turn)
                with engine.submit(Request(said, 8, GREEDY)) as stream:
                    started = time.perf_counter()
                    answer = [(event.token, time.perf_counter()) async for event in stream]
                first = answer[0][1] - started
                said += tuple(token for token, _ in answer)
            return first

        with Engine(runner, prefix_cache=prefix_cache) as engine:
            return asyncio.run(converse(engine))

    return paired(
        rounds,
        lambda: last_turn(prefix_cache=True),
        lambda: last_turn(prefix_cache=False),
        ("ttft_seconds", "ttft_seconds_without"),
    )


def slots(rounds: int) -> Row:
    names = "seconds_of_16_slots", "seconds_of_1_slot"
    return of_two_runners(rounds, new_runner(16, 256), new_runner(1, 256), (1, 64, 32), names)


def capacity(rounds: int) -> Row:
    names = "seconds_of_2048_positions", "seconds_of_128_positions"
    return of_two_runners(rounds, new_runner(16, 2048), new_runner(16, 128), (16, 80, 32), names)


def of_two_runners(
    rounds: int, one: JaxRunner, other: JaxRunner, load: tuple[int, int, int], names: tuple[str, str]
) -> Row:
    """The seconds of a token of one runner beside another's, under one load of `token_seconds`."""
    return paired(rounds, lambda: token_seconds(one, *load), lambda: token_seconds(other, *load), names)


INT8 = {"weights_dtype": "int8", "matmul_dtype": "int8"}
F32 = {"weights_dtype": "f32", "compute_dtype": "f32"}
WIDENED = {"compute_dtype": "f32"}


def native(rounds: int) -> Row:
    dtypes = {"bf16": None, "int8": INT8, "f32": F32, "widened": WIDENED}
    return speeds(rounds, dtypes, "with_native", ("_by_xla", ""))


def invariant(rounds: int) -> Row:
    return speeds(rounds, {"bf16": None, "int8": INT8}, "batch_invariant", ("_otherwise", ""))


def speeds(rounds: int, dtypes: dict[str, dict[str, str] | None], option: str, names: tuple[str, str]) -> Row:
    """Tokens per second under each load with and without this option of the runner, and the ratio.

    names: what stands behind the figures without it, and with it.
    """
    prompts = [some_tokens(int(n), i) for i, n in enumerate(np.random.default_rng(0).integers(16, 129, 16))]
    found: Row = {}
    for dtype, stored in dtypes.items():
        made = ({option: is_on} for is_on in (True, False))
        runners = [new_runner(16, 640, stored=stored, how=how) for how in made]
        for name in ("stream", "ragged", "prefill"):
            turns = [[tokens_per_second(one, name, prompts) for one in runners] for _ in range(rounds + 1)][
                1:
            ]
            columns = zip(reversed(names), zip(*turns, strict=True), strict=True)
            found |= {f"{dtype}_{name}{whose}": statistics.median(own) for whose, own in columns}
            found[f"{dtype}_{name}_ratio"] = statistics.median(turn[0] / turn[1] for turn in turns)
            print(found, flush=True)
    return found


def tokens_per_second(
    one: JaxRunner, load: str, ragged: list[tuple[int, ...]], num_tokens: int = 48
) -> float:
    """New tokens, first ones included, or of `prefill` the prompt's, a second from request to the last."""
    long = some_tokens(512)
    prompts = {"stream": ragged[:1], "ragged": ragged, "prefill": [long]}[load]
    asked = 1 if load == "prefill" else num_tokens
    count = len(long) if load == "prefill" else len(prompts) * asked

    async def answered(engine: Engine) -> list[list[float]]:
        return await asyncio.gather(*(times_of(engine, prompt, asked) for prompt in prompts))

    with Engine(one, prefix_cache=False) as engine:
        return count / max(times[-1] for times in asyncio.run(answered(engine)))


def tail(rounds: int) -> Row:
    runner = new_runner(16, 256)

    def gaps() -> np.ndarray:
        with Engine(runner, prefix_cache=False) as engine:
            return np.diff(asyncio.run(streams(engine, 16, 64, 96))).ravel()

    found = [gaps() for _ in range(rounds + 1)][1:]
    return {
        "ratio": statistics.median(float(np.quantile(one, 0.99) / np.median(one)) for one in found),
        "p99_seconds": statistics.median(float(np.quantile(one, 0.99)) for one in found),
        "median_seconds": statistics.median(float(np.median(one)) for one in found),
    }


def modes(rounds: int) -> Row:
    """Poisson arrivals at the rate at which interleaved answers what comes all at once."""
    runner, random = new_runner(8, 512, SMALL, "f32"), np.random.default_rng(0)
    lengths = [
        (int(random.integers(32, 257)), int(n)) for n in np.clip(random.lognormal(3.2, 0.8, 96), 4, 200)
    ]

    async def load(engine: Engine, arrivals: np.ndarray) -> list[list[float]]:
        async def one(number: int) -> list[float]:
            await asyncio.sleep(arrivals[number])
            prompt, num_tokens = lengths[number]
            return await times_of(engine, some_tokens(prompt, number), num_tokens)

        return await asyncio.gather(*map(one, range(len(lengths))))

    def served(mode: Mode, arrivals: np.ndarray) -> tuple[list[list[float]], float]:
        with Engine(runner, mode=mode, prefix_cache=False) as engine:
            started = time.perf_counter()
            return asyncio.run(load(engine, arrivals)), time.perf_counter() - started

    _, seconds = min(
        (served("interleaved", np.zeros(len(lengths))) for _ in range(2)), key=lambda one: one[1]
    )
    arrivals = np.cumsum(random.exponential(seconds / len(lengths), len(lengths)))
    with Engine(runner, prefix_cache=False) as engine:
        alone = asyncio.run(times_of(engine, some_tokens(144), 32))
    ttft, tpot = 10 * alone[0], 4 * float(np.median(np.diff(alone)))

    def goodput(mode: Mode) -> float:
        times, seconds = served(mode, arrivals)
        good = [one for one in times if one[0] <= ttft and np.mean(np.diff(one)) <= tpot]
        return max(len(good), 1) / seconds

    names = ("interleaved_requests_per_second", "batched_requests_per_second")
    found = paired(rounds, lambda: goodput("interleaved"), lambda: goodput("batched"), names)
    return found | {"ttft_target_seconds": ttft, "tpot_target_seconds": tpot}


def host(rounds: int) -> Row:
    runner, num_streams = new_runner(64, 128), 64
    used: dict[int, float] = {}
    reads = runner.run

    def run_timed(batch: Any) -> Any:
        used[threading.get_ident()] = time.thread_time()
        return reads(batch)

    runner.run = run_timed

    def both() -> tuple[float, float]:
        """Seconds of Python's two threads, and of the wall, of the steps that generate."""

        async def timed(engine: Engine) -> tuple[float, float]:
            task = asyncio.create_task(streams(engine, num_streams, 32, 48))
            while engine.metrics.generated_tokens._value.get() < 8 * num_streams:
                await asyncio.sleep(0.005)
            before, wall, own = dict(used), time.perf_counter(), time.thread_time()
            await task
            wall, own = time.perf_counter() - wall, time.thread_time() - own
            return own + sum(used[thread] - before.get(thread, 0.0) for thread in used), wall

        used.clear()
        with Engine(runner, prefix_cache=False) as engine:
            return asyncio.run(timed(engine))

    pairs = [both() for _ in range(rounds + 1)][1:]
    return {
        "ratio": statistics.median(own / wall for own, wall in pairs),
        "python_seconds": statistics.median(own for own, _ in pairs),
        "seconds": statistics.median(wall for _, wall in pairs),
    }


def word_tokenizer(vocab_size: int) -> Tokenizer:
    words = {f"w{number}": number for number in range(vocab_size)}
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0")))


# A client in a process of its own that does nothing but read, and that cheaply, since it shares the cores
# with the server: what it is sent in, and how long that takes. Streams of asyncio take twice the CPU, 50 us
# a token.
_CLIENT = """
import json, selectors, socket, sys, time
def opened(host, port, body):
    connection = socket.create_connection((host, port))
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    connection.sendall("\\r\\n".join([*lines, "", ""]).encode() + body)
    return connection
host, port, bodies = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
ready, texts, started = selectors.EpollSelector(), {}, time.perf_counter()
for connection in [opened(host, port, body.encode()) for body in bodies]:
    ready.register(connection, selectors.EVENT_READ)
    texts[connection] = []
left = len(texts)
while left:
    for key, _ in ready.select():
        part = key.fileobj.recv(1 << 16)
        texts[key.fileobj].append(part)
        if not part:
            ready.unregister(key.fileobj)
            left -= 1
print(time.perf_counter() - started)
for parts in texts.values():
    text = b"".join(parts)
    assert b" 200 " in text[:20] and b"[DONE]" in text, text[:500]
"""


def http(rounds: int) -> Row:
    runner, num_streams, num_tokens = new_runner(64, 128), 64, 48
    prompts = [some_tokens(32, seed) for seed in range(num_streams)]
    common = {"model": "m", "max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    bodies = json.dumps([json.dumps({**common, "prompt": list(prompt)}) for prompt in prompts])

    def alone() -> float:
        started = time.perf_counter()
        asyncio.run(streams(own, num_streams, 32, num_tokens))
        return time.perf_counter() - started

    # Both live as long, since an engine learns how many prompt tokens fit into a step.
    with Engine(runner, prefix_cache=False) as served, Engine(runner, prefix_cache=False) as own:
        listener: socket.socket = bind("127.0.0.1", 0)
        app, ready = create_app(served, word_tokenizer(CONFIG.vocab_size), "m"), threading.Event()
        threading.Thread(target=run_server, args=(app, listener, lambda _: ready.set()), daemon=True).start()
        ready.wait()
        where = [str(one) for one in listener.getsockname()[:2]]

        def over_http() -> float:
            command = [sys.executable, "-c", _CLIENT, *where]
            done = subprocess.run(command, input=bodies, capture_output=True, text=True, check=True)
            return float(done.stdout)

        return paired(rounds, over_http, alone, ("seconds", "seconds_of_the_engine"))


def long_prompt(rounds: int) -> Row:
    """A server of its own process; its clients are threads of this one."""
    body = {"model": "small", "temperature": 0, "ignore_eos": True, "stream": True}
    found: list[tuple[float, float, float, float]] = []

    def times(url: str, prompt: tuple[int, ...], num_tokens: int, until: threading.Event) -> list[float]:
        """When the chunks of an answer came; it is left once `until` is set."""
        came: list[float] = []
        asked = body | {"prompt": list(prompt), "max_tokens": num_tokens}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=3600) as response:
            for line in response.iter_lines():
                if until.is_set():
                    break
                if line.startswith("data: {"):
                    came.append(time.perf_counter())
        return came

    def gaps(url: str) -> tuple[float, float, float, float]:
        """(the worst, the median while the prompt is prefilled, the median before, the prompt's seconds)."""
        with ThreadPoolExecutor(5) as pool:
            done = threading.Event()
            streams = [pool.submit(times, url, some_tokens(32, seed), 30_000, done) for seed in range(4)]
            time.sleep(5)
            began = time.perf_counter()
            prompt = pool.submit(times, url, some_tokens(30_000), 1, threading.Event())
            refused = httpx.post(
                f"{url}/v1/completions", json=body | {"prompt": "w1 " * 3_500_000}, timeout=60
            )
            assert refused.status_code == 400, refused.text
            ended = prompt.result()[0]
            done.set()
            pairs = [pair for stream in streams for pair in pairwise(stream.result())]
        during = [b - a for a, b in pairs if b >= began and a <= ended]
        before = [b - a for a, b in pairs if began - 3 < b < began]
        return max(during), statistics.median(during), statistics.median(before), ended - began

    config = config_of("15M") | {
        "hidden_size": SMALL.d_model,
        "intermediate_size": SMALL.d_ff,
        "num_hidden_layers": SMALL.num_layers,
        "num_attention_heads": SMALL.num_heads,
        "num_key_value_heads": SMALL.num_kv_heads,
        "vocab_size": SMALL.vocab_size,
        "max_position_embeddings": SMALL.max_seq_len,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "small")
        folder.mkdir()
        write_checkpoint(folder, config)
        words = ("--context", SMALL.max_seq_len, "--dtype", "f32", "--no-prefix-cache")
        with served(folder, *words, "--cache-tokens", 120_000) as url:
            found = [gaps(url) for _ in range(rounds)]
    return {
        "ratio": statistics.median(one[0] / one[2] for one in found),
        "ratio_to_steps_meanwhile": statistics.median(one[0] / one[1] for one in found),
        "worst_seconds": statistics.median(one[0] for one in found),
        "median_seconds": statistics.median(one[1] for one in found),
        "median_seconds_without": statistics.median(one[2] for one in found),
        "prompt_seconds": statistics.median(one[3] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows: dict[str, Callable[[int], Row]] = {
        "chat": chat,
        "slots": slots,
        "capacity": capacity,
        "tail": tail,
        "modes": modes,
        "host": host,
        "http": http,
        "native": native,
        "invariant": invariant,
        "long_prompt": long_prompt,
    }
    parser.add_argument("--rows", default=",".join(rows))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    keep_compiled()
    document: dict[str, Any] = {"commands": {}, "results": {}}
    if asked.output and asked.output.exists():  # with rows that are not asked for now, and notes of them
        document |= json.loads(asked.output.read_text(encoding="utf-8"))
    command = f"python benchmarks/engine.py --rows {asked.rows} --rounds {asked.rounds}"
    document |= {"benchmark": "engine", "machine": machine()}
    for name in asked.rows.split(","):
        document["commands"][name], document["results"][name] = command, rows[name](asked.rounds)
        print(name, document["results"][name], flush=True)
        if asked.output:
            asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
