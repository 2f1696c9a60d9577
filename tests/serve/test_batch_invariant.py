"""`batch_invariant`: log-probabilities bit for bit, alone, in company, in parts, behind cached pages."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from tests.nn.small_models import ALIBI, GPT, LATENT, LOCAL, MIXTURE, TINY
from tests.serve.replicas.processes import save_checkpoint

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.params import init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Request, SamplingParams

pytestmark = pytest.mark.sampled(4)

NUM_TOKENS = 6
# With the answer up to the context of 64: of one token, whole blocks and pages, and a token more.
LENGTHS = (1, 16, 5, 17, 40, 3, 48, 15, 57)
PROMPTS = [tuple(np.random.default_rng(i).integers(0, 64, n).tolist()) for i, n in enumerate(LENGTHS)]
Answer = list[tuple[int, float]]


def _runner(config: ModelConfig, dtype: str, *, chunk: int = 32, **how: Any) -> JaxRunner:
    stored = {"weights_dtype": dtype, "matmul_dtype": dtype} if dtype in ("int8", "fp8") else {}
    layout = Layout.of(weights_dtype="bf16" if stored else dtype, compute_dtype="bf16" if stored else dtype)
    mesh = device_mesh(layout, jax.devices()[:1])
    params = init_params(config, layout, mesh, 0)
    sizes = {"num_slots": 5, "context": 64, "page_size": 16, "chunk": chunk}
    runner = JaxRunner(params, config, layout.replace(**stored), mesh, **sizes, batch_invariant=True, **how)
    runner.warm_up()
    return runner


def _answers(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    async def one(prompt: tuple[int, ...]) -> Answer:
        asked = Request(prompt, NUM_TOKENS, SamplingParams(temperature=0.0))
        with engine.submit(asked) as stream:
            return [(event.token, event.logprob) async for event in stream]

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*map(one, prompts))

    return asyncio.run(all_of_them())


def _scores(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    """The log-probabilities of the prompts' own tokens."""

    async def one(prompt: tuple[int, ...]) -> Answer:
        with engine.submit(Request(prompt, 0, scores_prompt=True)) as stream:
            [event] = [event async for event in stream]
            return [(score.token, score.logprob) for score in event.prompt]

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*map(one, prompts))

    return asyncio.run(all_of_them())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dtype", "with_native"),
    [
        (TINY, "bf16", True),
        (TINY, "f32", False),
        (TINY, "bf16", False),
        (TINY, "int8", True),
        (TINY, "int8", False),
        (TINY, "fp8", True),
        (LOCAL, "f32", True),
        (LOCAL, "bf16", False),
        (GPT, "f32", True),
        (LATENT, "f32", True),
        (ALIBI, "bf16", True),
    ],
)
def test_results_do_not_depend_on_what_else_runs(
    config: ModelConfig, dtype: str, *, with_native: bool
) -> None:
    whole = _runner(config, dtype, with_native=with_native)
    with Engine(whole, prefix_cache=False) as engine:
        alone = [_answers(engine, [prompt])[0] for prompt in PROMPTS]
        assert _answers(engine, PROMPTS) == alone
        assert _answers(engine, PROMPTS[3:6]) == alone[3:6]
        scored = [_scores(engine, [prompt])[0] for prompt in PROMPTS]
        assert _scores(engine, PROMPTS) == scored
    with Engine(_runner(config, dtype, chunk=16, with_native=with_native)) as engine:
        assert _answers(engine, PROMPTS) == alone
        assert _answers(engine, PROMPTS[::-1]) == alone[::-1]  # behind cached pages
        assert _scores(engine, PROMPTS) == scored


def test_what_cannot_be_is_refused() -> None:
    for config, words, said in (
        (MIXTURE, {}, "mixture: results cannot be batch-invariant with 8 experts"),
        (TINY, {"tensor": 2}, "where 2 devices add up"),
    ):
        layout = Layout.of(**words, weights_dtype="f32", compute_dtype="f32")
        with pytest.raises(PlanError, match=said):
            JaxRunner({}, config, layout, device_mesh(layout), num_slots=2, context=8, batch_invariant=True)


@pytest.mark.slow
def test_a_server_answers_the_same_alone_and_in_company(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "small")
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", "--checkpoint", str(folder)]
    options = ["--batch-invariant", "--slots", "8", "--chunk", "32", "--port", "0", "--json", "--strict"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["address"]
            common = {"model": "small", "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}

            def asked(length: int) -> Any:
                body = common | {"prompt": [(7 * i + length) % 256 for i in range(length)]}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
                return answer["choices"][0]["logprobs"]

            lengths = [1, 40, 17, 64, 90, 5, 33, 16]
            alone = [asked(length) for length in lengths]
            assert all(any(one["token_logprobs"]) for one in alone)
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(asked, lengths)) == alone
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0
