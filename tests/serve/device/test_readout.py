"""Embeddings of a served model: the last hidden states of transformers, in any company and layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.nn import hf_models
from tests.serve.answers import CONTEXT, PROMPTS, events_of, greedy
from tests.serve.device.test_runner import make_runner

from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.request import Request

pytestmark = pytest.mark.sampled(5)

# Float32 sums in another order.
TOLERANCE = 1e-4
# With a token more than whole chunks, and as long as the context.
LONG = [*PROMPTS, np.random.default_rng(8).integers(0, 64, CONTEXT).tolist()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("hf")
    return folder, hf_models.save("stretched", folder)


@pytest.fixture(scope="module")
def expected(reference) -> list[np.ndarray]:
    return [hidden_state(reference[1], prompt) for prompt in LONG]


def hidden_state(model: Any, prompt: list[int]) -> np.ndarray:
    """The last hidden state after the final norm, L2-normalised."""
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    return hidden / np.linalg.norm(hidden)


def embeddings(runner: JaxRunner, prompts: list[list[int]], *others: Request, **how: Any) -> list[np.ndarray]:
    requests = [Request(tuple(prompt), 0, embeds=True) for prompt in prompts]
    found = []
    for [event] in events_of(runner, *requests, *others, **how)[: len(requests)]:
        assert event.embedding is not None and event.finish_reason == "length"
        found.append(event.embedding)
    return found


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (1, {"data": 2}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"data": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"kv_replicas": 2, "cache": "batch"}, marks=pytest.mark.slow),
        pytest.param(2, {"context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_embeddings_are_the_hidden_states_of_transformers(reference, expected, tensor: int, words: dict):
    """In chunks, alone and with prompts, answers and scores; and again, with cached prefixes."""
    runner = make_runner(reference[0], tensor, num_slots=4, **words)
    runner.prepare_reads()
    scored = Request(tuple(PROMPTS[3]), 0, scores_prompt=True)
    for _ in range(2):
        for found in (
            embeddings(runner, LONG),
            embeddings(runner, LONG, scored, *map(greedy, PROMPTS)),
            [embeddings(runner, [prompt])[0] for prompt in LONG[:2]],
        ):
            for mine, theirs in zip(found, expected, strict=False):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mixtral", "deepseek_v2"])
def test_embeddings_of_other_families(kind: str, tmp_path: Path) -> None:
    model = hf_models.save(kind, tmp_path)
    prompts = [PROMPTS[1], PROMPTS[5]]
    for mine, prompt in zip(embeddings(make_runner(tmp_path, 2), prompts), prompts, strict=True):
        np.testing.assert_allclose(mine, hidden_state(model, prompt), rtol=0, atol=TOLERANCE)
