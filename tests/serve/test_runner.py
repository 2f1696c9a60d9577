"""The model behind the engine: token for token what transformers generates, alone and in company."""

import asyncio
import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from tests.nn import hf_models

from meshwright.errors import LayoutError, PlanError
from meshwright.layout import Layout
from meshwright.models.files import read_model
from meshwright.nn.mesh import device_mesh
from meshwright.nn.params import init_params
from meshwright.nn.weights import load_hf
from meshwright.serve.engine import Engine
from meshwright.serve.runner import JaxRunner, prefill_lengths
from meshwright.serve.sequence import Request, SamplingParams

CONTEXT, NUM_SLOTS = 40, 3
# As in tests/nn/test_weights.py, where its reason stands.
TOLERANCE = 2e-5
# A prompt that fills its padded length, one that passes it by a token, short ones, and one so long
# that little room is left.
PROMPT_LENGTHS = (1, 16, 5, 17, 32, 3, 9)
PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in PROMPT_LENGTHS]
NUM_TOKENS = 8


def layout(tensor: int) -> Layout:
    return Layout.of(tensor=tensor, weights_dtype="f32", compute_dtype="f32")


def make_runner(folder: Path, tensor: int) -> JaxRunner:
    config, mesh = read_model(folder), device_mesh(layout(tensor))
    params = load_hf(folder, config, layout(tensor), mesh)
    runner = JaxRunner(params, config, layout(tensor), mesh, num_slots=NUM_SLOTS, context=CONTEXT)
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model with grouped queries, tied embeddings and stretched rotations, and its folder."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, hf_models.save("stretched", folder)


@pytest.fixture(scope="module")
def answers(reference) -> list[list[int]]:
    """What transformers generates from each of PROMPTS.

    The runner-up must stay behind by more than rounding can mend, or equality would be luck.
    """
    _, model = reference
    answers = [hf_models.greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ranked = np.sort(hf_models.logits(model, [prompt + answer])[0, len(prompt) - 1 : -1])
        assert (ranked[:, -1] - ranked[:, -2]).min() > 10 * TOLERANCE
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


@pytest.fixture(scope="module", params=[1, 2, 4])
def runner(reference, request: pytest.FixtureRequest) -> JaxRunner:
    return make_runner(reference[0], request.param)


def generate_alone(runner: JaxRunner, slot: int, prompt: list[int]) -> list[int]:
    """The greedy answer in one slot, the others held by nobody."""
    answer = [int(np.argmax(runner.prefill(slot, prompt)))]
    tokens, positions = np.zeros((2, NUM_SLOTS), np.int32)
    while len(answer) < NUM_TOKENS:
        tokens[slot], positions[slot] = answer[-1], len(prompt) + len(answer) - 1
        answer.append(int(np.argmax(runner.generate(tokens, positions)[slot])))
    return answer


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        "gemma3",
        "deepseek_v2",
    ],
)
def test_other_families_token_by_token(kind: str, tmp_path: Path) -> None:
    """Prompts shorter and longer than the window of 7, from a cache of all positions."""
    model = hf_models.save(kind, tmp_path)
    runner = make_runner(tmp_path, tensor=2)
    for prompt in (PROMPTS[1], PROMPTS[5]):
        answer = hf_models.greedy(model, prompt, NUM_TOKENS)
        ranked = np.sort(hf_models.logits(model, [prompt + answer])[0, len(prompt) - 1 : -1])
        assert (ranked[:, -1] - ranked[:, -2]).min() > 10 * TOLERANCE
        assert generate_alone(runner, 1, prompt) == answer


def test_scores_are_the_log_probabilities_of_transformers(reference, runner: JaxRunner) -> None:
    """Of a prompt that fills a chunk of positions, one that passes it, and one of a single token."""
    prompts = [np.random.default_rng(length).integers(0, 64, length).tolist() for length in (16, 39, 1)]
    for prompt in prompts:
        found = runner.scores(prompt)
        logits = hf_models.logits(reference[1], [prompt])[0][:-1]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(
            found.logprobs, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=10 * TOLERANCE
        )
        np.testing.assert_allclose(
            found.top_logprobs, -np.sort(-expected, axis=-1)[:, :20], atol=10 * TOLERANCE
        )


def greedy(prompt: list[int], max_tokens: int = NUM_TOKENS) -> Request:
    return Request(tuple(prompt), max_tokens, SamplingParams(temperature=0.0), frozenset())


async def tokens_of(stream: Any) -> list[int]:
    return [event.token async for event in stream]


def test_a_request_alone_gets_the_tokens_of_transformers(runner, answers):
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert generate_alone(runner, number % NUM_SLOTS, prompt) == answer


def test_requests_that_enter_at_different_times_get_the_same_tokens_as_alone(runner, answers):
    """More requests than slots, so that each slot is used again; some come while others run."""

    async def main(engine: Engine) -> list[list[int]]:
        first = engine.submit(greedy(PROMPTS[0]))
        begun = [(await anext(first)).token, (await anext(first)).token]
        early = [engine.submit(greedy(prompt)) for prompt in PROMPTS[1:4]]
        begun.append((await anext(first)).token)
        late = [engine.submit(greedy(prompt)) for prompt in PROMPTS[4:]]
        rest = await asyncio.gather(*map(tokens_of, [first, *early, *late]))
        return [begun + rest[0], *rest[1:]]

    with Engine(runner) as engine:
        assert asyncio.run(main(engine)) == answers
        assert engine.stopped is None


def test_answers_of_different_lengths_leave_their_neighbours_alone(runner, answers):
    lengths = (1, 8, 3, 6, 8, 2, 5)
    requests = [greedy(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)]

    async def main(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*[tokens_of(engine.submit(request)) for request in requests])

    with Engine(runner) as engine:
        found = asyncio.run(main(engine))
    assert found == [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


def test_logits_after_a_prompt_of_any_length_equal_transformers(reference, runner):
    tokens = np.random.default_rng(0).integers(0, 64, CONTEXT).tolist()
    expected = hf_models.logits(reference[1], [tokens])[0]
    for length in (1, 2, 15, 16, 17, 31, 32, 33, CONTEXT - 1, CONTEXT):
        found = runner.prefill(1, tokens[:length])
        assert (found.shape, found.dtype) == ((64,), np.float32)
        np.testing.assert_allclose(found, expected[length - 1], rtol=0, atol=TOLERANCE)


def test_the_last_position_of_the_context_is_reached(reference, runner):
    tokens = np.random.default_rng(1).integers(0, 64, CONTEXT).tolist()
    runner.prefill(2, tokens[:-1])
    last, positions = np.zeros((2, NUM_SLOTS), np.int32)
    last[2], positions[2] = tokens[-1], CONTEXT - 1
    found = runner.generate(last, positions)
    assert (found.shape, found.dtype) == ((NUM_SLOTS, 64), np.float32)
    expected = hf_models.logits(reference[1], [tokens])[0, -1]
    np.testing.assert_allclose(found[2], expected, rtol=0, atol=TOLERANCE)


def test_nothing_compiles_after_the_warm_up(runner):
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in range(1, CONTEXT + 1):
            runner.prefill(length % NUM_SLOTS, [1] * length)
            runner.generate(np.ones(NUM_SLOTS, np.int32), np.full(NUM_SLOTS, length - 1, np.int32))
        assert compiled == []
        jax.jit(lambda x: x + len(compiled))(np.float32(1))
        assert compiled  # the listener hears a compilation
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_cache_is_split_by_kv_heads_and_held_once(runner):
    cache = runner._cache["k"]
    tensor = "tensor" if runner._layout.tensor > 1 else None
    assert cache.shape == (3, NUM_SLOTS, CONTEXT, 4, 6)
    assert cache.sharding.spec == P(None, None, None, tensor, None)
    memory = runner._generate_program.memory_analysis()
    cache_bytes = 2 * cache.addressable_data(0).nbytes
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


def test_a_runner_answers_only_after_its_warm_up(reference):
    config, mesh = read_model(reference[0]), device_mesh(layout(1))
    runner = JaxRunner({}, config, layout(1), mesh, num_slots=1, context=8)
    with pytest.raises(AssertionError, match=r"warm_up\(\) comes first"):
        runner.prefill(0, [1])


def test_bfloat16_serves_from_a_cache_of_its_own_type(reference):
    config = dataclasses.replace(read_model(reference[0]), num_layers=1)
    narrow = Layout.of(tensor=2)
    mesh = device_mesh(narrow)
    runner = JaxRunner(init_params(config, narrow, mesh, 0), config, narrow, mesh, num_slots=1, context=8)
    runner.warm_up()
    once = runner.prefill(0, [1, 2, 3])
    runner.prefill(0, [1, 2])
    [again] = runner.generate(np.array([3], np.int32), np.array([2], np.int32))
    assert (runner._cache["v"].dtype, once.dtype) == (jax.numpy.bfloat16, np.float32)
    # Eight bits of mantissa: logits of up to 4 are rounded by 2**-7, a few times over. Another token
    # before the last moves them by 1.
    np.testing.assert_allclose(again, once, rtol=0, atol=0.06)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data=2,tensor=2",
            "layout data=2,tensor=2,remat=none: serving splits over tensor alone; leave out data = 2",
        ),
        (
            "fsdp=2,tensor=2,sequence_parallel=true",
            "layout fsdp=2,tensor=2,sequence_parallel=true,remat=none: serving splits over tensor alone;"
            " leave out fsdp = 2, sequence_parallel",
        ),
        (
            "tensor=8",
            "wk[L, D, K_tensor, H]: 4 KV heads (K) do not divide over tensor = 8;"
            " fits: tensor in {1, 2, 4}, or replicate: wk[L, D, K, H]",
        ),
    ],
)
def test_a_layout_that_cannot_serve_is_refused(reference, text, message):
    split = Layout.parse(text)
    with pytest.raises(LayoutError) as error:
        JaxRunner({}, read_model(reference[0]), split, device_mesh(split), num_slots=1, context=8)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("num_slots", "context", "message"),
    [
        (1, 65, "tiny: a context of 65 tokens is longer than the model's 64; fits: up to 64"),
        (0, 64, "tiny: 0 slots can serve no request; fits: 1 or more"),
    ],
)
def test_sizes_that_serve_nobody_are_refused(reference, num_slots, context, message):
    config = dataclasses.replace(read_model(reference[0]), name="tiny")
    with pytest.raises(PlanError) as error:
        JaxRunner({}, config, layout(1), device_mesh(layout(1)), num_slots=num_slots, context=context)
    assert str(error.value) == message


@given(st.integers(1, 100_000))
def test_prefill_lengths_reach_the_context_and_waste_less_than_half(context):
    lengths = prefill_lengths(context)
    assert lengths[-1] == context
    assert lengths == sorted(set(lengths))
    assert all(longer <= 2 * shorter for shorter, longer in pairwise(lengths))
    assert lengths[0] <= 16
