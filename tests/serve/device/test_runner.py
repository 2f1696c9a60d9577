"""The model behind the engine: token for token what transformers generates, alone and in company."""

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.nn import hf_models
from tests.serve.answers import (
    CONTEXT,
    NUM_SLOTS,
    NUM_TOKENS,
    PAGE,
    PROMPTS,
    events_of,
    generate,
    greedy,
    layout,
)

from meshwright.errors import LayoutError, PlanError
from meshwright.layout import Layout
from meshwright.models.layer_kinds import Window
from meshwright.models.model_files import read_model
from meshwright.nn import layer_weights
from meshwright.nn.files.weights import load_hf
from meshwright.nn.params import init_params
from meshwright.nn.products.quantised import Quantised, as_read, widened
from meshwright.nn.products.stored_products import Joined
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.platforms import CPU
from meshwright.serve.device import shapes
from meshwright.serve.device.programs import InferencePrograms
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import EngineError, Event, Request, SamplingParams

pytestmark = pytest.mark.sampled(5)

# As in tests/nn/files/test_weights.py, where its reason stands.
TOLERANCE = 2e-5


def make_runner(
    folder: Path,
    tensor: int,
    num_slots: int = NUM_SLOTS,
    *,
    first_device: int = 0,
    shares_pages: bool = False,
    host_bytes: int = 0,
    with_native: bool = True,
    **words: object,
) -> JaxRunner:
    split = layout(tensor).replace(**words)
    config, mesh = read_model(folder), device_mesh(split, jax.devices()[first_device:])
    params = load_hf(folder, config, as_read(split), mesh)
    runner = JaxRunner(
        params,
        config,
        split,
        mesh,
        num_slots=num_slots,
        context=CONTEXT,
        page_size=PAGE,
        chunk=None if split.rules.prompt_axes else 8,
        block=8,
        shares_pages=shares_pages,
        host_bytes=host_bytes,
        with_native=with_native,
    )
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model with grouped queries, tied embeddings and stretched rotations, and its folder."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, hf_models.save("stretched", folder)


def answers_of(model: Any, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    """What transformers generates from each of the prompts.

    The runner-up must stay behind by more than rounding can mend, or equality would be luck.
    """
    answers = [hf_models.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        ranked = np.sort(hf_models.logits(model, [prompt + answer])[0, len(prompt) - 1 : -1])
        assert (ranked[:, -1] - ranked[:, -2]).min() > 10 * TOLERANCE
    return answers


@pytest.fixture(scope="module")
def answers(reference) -> list[list[int]]:
    answers = answers_of(reference[1])
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def runner(reference, request: pytest.FixtureRequest) -> JaxRunner:
    return make_runner(reference[0], request.param)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", marks=pytest.mark.slow),
        pytest.param("deepseek_v32", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa_shared", marks=pytest.mark.slow),
        pytest.param("minimax_m3", marks=pytest.mark.slow),
        pytest.param("llama4", marks=pytest.mark.slow),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "bloom",
                "olmo3",
                "cohere2",
                "afmoe",
                "qwen2_moe",
                "apertus",
                "phi",
                "falcon-grouped",
            )
        ),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("granitemoe", "bitnet", "opt", "hunyuan_v1_dense", "minimax_m2", "ministral3")
        ),
    ],
)
def test_other_families_token_by_token(kind: str, tmp_path: Path) -> None:
    """Prompts shorter and longer than the window of 7; latents, which have no heads, split by sequences."""
    model = hf_models.save(kind, tmp_path)
    prompts = [PROMPTS[1], PROMPTS[5]]
    runner = make_runner(tmp_path, tensor=2, num_slots=1)
    if kind == "deepseek_v2":
        runner = make_runner(tmp_path, tensor=2, num_slots=2, cache="batch")
    assert generate(runner, *map(greedy, prompts)) == answers_of(model, prompts)


@pytest.mark.parametrize(
    ("kind", "window"),
    [("local", Window(7)), pytest.param("llama4", Window(8, chunked=True), marks=pytest.mark.slow)],
)
def test_layers_with_a_window_keep_its_positions_alone(kind: str, window: Window, tmp_path: Path) -> None:
    """Sequences of up to six pages, with at most two and a chunk's of the window's, and known beginnings."""
    model = hf_models.save(kind, tmp_path)
    begin = np.random.default_rng(5).integers(0, 64, 20).tolist()
    prompts = [begin + [number] * number for number in range(1, 7)]
    runner = make_runner(tmp_path, tensor=1)
    assert runner.limits.window == window and runner.limits.num_window_pages < runner.limits.num_pages
    sizes = {pool.shape[0] for pool in runner._programs.cache.pools()["k"]}
    whole = {runner.limits.num_pages} if kind == "llama4" else set()  # where some layers see all
    assert sizes == {runner.limits.num_window_pages} | whole
    assert generate(runner, *map(greedy, prompts)) == answers_of(model, prompts)


def test_scores_are_the_log_probabilities_of_transformers(reference, runner: JaxRunner) -> None:
    """Of a prompt that fills a chunk of positions, one that passes it, and one of a single token."""
    prompts = [np.random.default_rng(length).integers(0, 64, length).tolist() for length in (16, 39, 1)]
    for prompt in prompts:
        asked = Request(tuple(prompt), 0, SamplingParams(0.0, top_logprobs=20), scores_prompt=True)
        [[event]] = events_of(runner, asked)
        assert event.score is None and [one.token for one in event.prompt] == prompt[1:]
        logits = hf_models.logits(reference[1], [prompt])[0][:-1]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found = [one.logprob for one in event.prompt]
        np.testing.assert_allclose(
            found, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=10 * TOLERANCE
        )
        top = [[logprob for _, logprob in one.top] for one in event.prompt]
        likeliest = -np.sort(-expected, axis=-1)[:, :20].reshape(len(prompt) - 1, 20)
        np.testing.assert_allclose(np.reshape(top, likeliest.shape), likeliest, atol=10 * TOLERANCE)


def test_requests_alone_get_the_tokens_of_transformers(runner, answers):
    assert [generate(runner, greedy(prompt))[0] for prompt in PROMPTS[:4]] == answers[:4]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_xla_alone_gets_the_same_tokens(reference, answers, tensor):
    """Where the C++ extension runs, the other tests are of it."""
    runner = make_runner(reference[0], tensor, with_native=False)
    assert generate(runner, *map(greedy, PROMPTS)) == answers


def test_short_sequences_do_not_pay_for_the_context(reference, answers, monkeypatch):
    """As where attention reads whole tables: the tables of short sequences are short."""
    monkeypatch.setattr(InferencePrograms, "reads_whole_tables", lambda *_: True)
    monkeypatch.setattr(shapes, "table_widths", lambda max_pages: [2])
    runner, used, shape_of = make_runner(reference[0], 1), set(), shapes.Shapes.of
    monkeypatch.setattr(
        shapes.Shapes, "of", lambda self, batch: used.add(found := shape_of(self, batch)) or found
    )
    assert generate(runner, greedy(PROMPTS[0])) == answers[:1]
    assert {shape.pages for shape in used if not shape.blocks} == {2}
    assert generate(runner, *map(greedy, PROMPTS)) == answers
    assert {(shape.generate, shape.pages) for shape in used if not shape.blocks} >= {(1, 2), (2, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_joined_weights_generate_the_same_tokens(reference, monkeypatch, dtype):
    """Also as on GPUs, where a step samples only as its rows need, and has its inputs in one array."""
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=1, top_logprobs=2)
    asked = [greedy(PROMPTS[0]), Request(tuple(PROMPTS[1]), NUM_TOKENS, drawn)]
    monkeypatch.setattr(layer_weights, "platform_of", lambda _: dataclasses.replace(CPU, joins_weights=False))
    wanted = events_of(make_runner(reference[0], 1, with_native=False, weights_dtype=dtype), *asked)
    monkeypatch.setattr(layer_weights, "platform_of", lambda _: CPU)
    monkeypatch.setattr(InferencePrograms, "has_choice_by_needs", True)
    monkeypatch.setattr(InferencePrograms, "joins_inputs", True)
    runner = make_runner(reference[0], 1, with_native=False, weights_dtype=dtype)
    first: Any = runner._params["layers"][0]
    assert isinstance(first["wq"], Joined) and isinstance(first["w_gate"], Joined)
    found = events_of(runner, *asked)
    for ours, theirs in zip(found, wanted, strict=True):
        assert [event.token for event in ours] == [event.token for event in theirs]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
            assert one.score and other.score and len(one.score.top) == len(other.score.top)


@pytest.mark.slow  # test_programs has the same cache, step by step
def test_a_cache_split_by_sequences_gets_the_same_tokens(reference, answers):
    """Queries of eight devices go to the cache of a sequence and values come back; alone, and in company."""
    runner = make_runner(reference[0], 4, kv_replicas=2, cache="batch")
    pool: Any = runner._cache.pools["k"][0]
    assert pool.sharding.spec == P("kv_replicas", "tensor", None, None)
    assert (runner.limits.num_replicas, runner.limits.num_pages) == (2, CONTEXT // PAGE)
    assert generate(runner, *map(greedy, PROMPTS)) == answers
    assert [generate(runner, greedy(prompt))[0] for prompt in PROMPTS[:2]] == answers[:2]


def test_replicas_share_the_requests(reference, answers):
    """Two devices with their own slots and pages; nothing of one's prompts is known to the other."""
    runner = make_runner(reference[0], 1, data=2)
    assert generate(runner, *map(greedy, PROMPTS)) == answers
    scored = Request(tuple(PROMPTS[1]), 1, SamplingParams(temperature=0.0), scores_prompt=True)
    [[event]] = events_of(runner, scored)
    expected = hf_models.logits(reference[1], [PROMPTS[1]])[0][:-1]
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    found = [one.logprob for one in event.prompt]
    np.testing.assert_allclose(found, expected[np.arange(15), PROMPTS[1][1:]], atol=10 * TOLERANCE)


@pytest.mark.slow  # test_programs prefills by position, step by step
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (2, {"context": 2}),
        (1, {"context": 2}),
        (1, {"context": 4}),
        (2, {"context": 2, "context_method": "ring"}),
        (1, {"context": 2, "context_method": "ulysses"}),
        (1, {"context": 2, "data": 2}),
        (1, {"context": 2, "fsdp": 2}),
    ],
    ids=str,
)
def test_devices_prefill_a_prompt_together(reference, answers, tensor: int, words: dict[str, Any]) -> None:
    """Each has some of its positions; one at a time, and in company, where each prefills its own."""
    runner = make_runner(reference[0], tensor, num_slots=8, **words)
    ran: list[Batch] = []
    run = runner.run
    runner.run = lambda batch: ran.append(batch) or run(batch)
    assert [generate(runner, greedy(prompt))[0] for prompt in PROMPTS] == answers
    assert [runner._shapes.of(batch).fresh > 0 for batch in ran if batch.works[0].is_prompt] == [True] * 6
    assert generate(runner, *map(greedy, PROMPTS)) == answers


@pytest.mark.slow
@pytest.mark.parametrize("words", [{"tensor": 1}, {"tensor": 2}, {"tensor": 2, "kv_dtype": "int8"}])
def test_prefill_and_generation_on_their_own_devices(reference, answers, words):
    """Greedy tokens are those of one engine; cached pages of a prompt are copied once."""
    tensor = words["tensor"]
    generator, prefill = (
        make_runner(reference[0], first_device=first, shares_pages=True, **words) for first in (0, tensor)
    )
    expected = answers
    if "kv_dtype" in words:  # narrow caches round, so that one engine's tokens are the measure
        expected = generate(generator, *map(greedy, PROMPTS))
    for _ in range(2):
        found = generate(prefill, *map(greedy, PROMPTS), generator=Engine(generator))
        assert found == expected


async def tokens_of(stream: Any) -> list[int]:
    return [event.token async for event in stream]


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
    found = generate(runner, *[greedy(*both) for both in zip(PROMPTS, lengths, strict=True)])
    assert found == [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


def test_a_batch_at_a_time_gets_the_same_tokens(runner, answers):
    assert generate(runner, *map(greedy, PROMPTS), mode="batched") == answers


def test_pages_that_run_out_are_computed_again(runner, answers, monkeypatch):
    """Two sequences of up to five pages each in a cache of six."""
    monkeypatch.setattr(runner, "limits", dataclasses.replace(runner.limits, num_pages=6))
    assert generate(runner, *map(greedy, PROMPTS)) == answers
    assert generate(runner, *map(greedy, PROMPTS), prefix_cache=False) == answers


@pytest.mark.slow
@pytest.mark.parametrize("words", [{}, {"data": 2, "kv_dtype": "int8"}])
def test_pages_that_run_out_wait_in_the_hosts_memory(reference, answers, monkeypatch, words):
    """As above on each replica, where preempted sequences get back what they had."""
    num_slots = NUM_SLOTS * words.get("data", 1)
    runner = make_runner(reference[0], 1, num_slots, host_bytes=10**6, **words)
    expected = generate(runner, *map(greedy, PROMPTS)) if words else answers
    monkeypatch.setattr(runner, "limits", dataclasses.replace(runner.limits, num_pages=6))
    for _ in range(2):  # the second time all prompts are known
        assert generate(runner, *map(greedy, PROMPTS)) == expected


def test_a_host_cache_holds_a_page(reference):
    config, mesh = dataclasses.replace(read_model(reference[0]), name="tiny"), device_mesh(layout(1))
    with pytest.raises(PlanError) as error:
        JaxRunner({}, config, layout(1), mesh, num_slots=1, context=8, page_size=8, host_bytes=100)
    assert str(error.value) == (
        "a host cache of 100 bytes holds no page of 8 positions; fits: 4,608 bytes or more"
    )


def test_a_conversation_finds_its_pages_again(reference, runner):
    """Three turns, each of which goes on from the answer before; a page that was found is not computed."""
    turns, prompt = [], PROMPTS[3]
    with Engine(runner) as engine:
        for _ in range(3):
            [answer] = [asyncio.run(_ask(engine, greedy(prompt, 5)))]
            turns.append((prompt, answer))
            prompt = [*prompt, *answer, 7]
        assert engine._occupancy().cached_pages >= len(prompt) // PAGE - 1
    for prompt, answer in turns:
        assert hf_models.greedy(reference[1], prompt, 5) == answer


async def _events(engine: Engine, request: Request) -> list[Event]:
    return [event async for event in engine.submit(request)]


async def _ask(engine: Engine, request: Request) -> list[int]:
    return await tokens_of(engine.submit(request))


def test_the_logprob_after_a_prompt_of_any_length_is_that_of_transformers(reference, runner):
    tokens = np.random.default_rng(0).integers(0, 64, CONTEXT).tolist()
    logits = hf_models.logits(reference[1], [tokens])[0].astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).max(-1)
    lengths = (1, 2, 7, 8, 9, 15, 16, 17, 33, CONTEXT - 2, CONTEXT - 1)
    found = events_of(runner, *[greedy(tokens[:length], 1) for length in lengths])
    logprobs = [events[0].logprob for events in found]
    np.testing.assert_allclose(logprobs, expected[np.array(lengths) - 1], rtol=0, atol=TOLERANCE)


def test_the_last_position_of_the_context_is_reached(reference, runner):
    prompt = np.random.default_rng(1).integers(0, 64, CONTEXT - 3).tolist()
    assert generate(runner, greedy(prompt, 3)) == [hf_models.greedy(reference[1], prompt, 3)]


def test_nothing_compiles_after_the_warm_up(runner):
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        drawn = SamplingParams(temperature=1.0, top_p=0.5, top_k=3, seed=1)
        some = [Request(tuple([1] * n), 3, drawn) for n in range(1, CONTEXT - 3)]
        generate(runner, *some)
        generate(runner, greedy([1]), greedy([2, 3]))
        assert compiled == []
        jax.jit(lambda x: x + len(compiled))(np.float32(1))
        assert compiled  # the listener hears a compilation
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_logits_are_of_one_token_a_slot(runner):
    """Whoever ends a prompt has a slot, whose row generates nothing in that step."""
    mixed = [runner._step_of(shape) for shape in runner._steps if shape.blocks]
    assert {step.num_tokens for step in mixed} == {NUM_SLOTS + runner.limits.block}
    assert {(step.num_heads, step.num_logits) for step in mixed} == {(NUM_SLOTS, NUM_SLOTS)}


def test_the_cache_is_split_by_kv_heads_and_held_once(runner):
    pool = runner._cache.pools["k"][0]
    tensor = "tensor" if runner._mesh.size > 1 else None
    assert pool.shape == (NUM_SLOTS * CONTEXT // PAGE, 4, PAGE, 6)
    assert pool.sharding.spec == P(None, tensor, None, None)
    for program in runner._steps.values():
        memory = program.memory_analysis()
        cache_bytes = 2 * 3 * pool.addressable_data(0).nbytes
        assert memory.alias_size_in_bytes == cache_bytes
        # The cache is so small that a step's own tokens weigh as much.
        assert memory.temp_size_in_bytes < 2 * cache_bytes


def test_a_runner_answers_only_after_its_warm_up(reference):
    config, mesh = read_model(reference[0]), device_mesh(layout(1))
    runner = JaxRunner({}, config, layout(1), mesh, num_slots=1, context=8)
    with pytest.raises(AssertionError, match=r"warm_up\(\) comes first"):
        runner.run(Batch(()))


@pytest.mark.slow
def test_bfloat16_serves_what_it_was_given(reference):
    """One and two rows take another path of XLA's; a prompt as a whole and a token at a time agree."""
    config = dataclasses.replace(read_model(reference[0]), num_layers=1)
    narrow = layout(2, "bf16")
    mesh = device_mesh(narrow)
    params = init_params(config, narrow, mesh, 0)
    runner = JaxRunner(params, config, narrow, mesh, num_slots=2, context=8)
    runner.warm_up()
    [[one, two, three]] = events_of(runner, greedy([1, 2], 3))
    again = events_of(runner, greedy([1, 2, one.token], 1), greedy([1, 2, one.token, two.token], 1))
    # Eight bits of mantissa: logits of up to 4 are rounded by 2**-7, a few times over. Another token
    # before the last moves them by 1.
    for expected, [found] in zip((two, three), again, strict=True):
        assert found.token == expected.token
        assert found.logprob == pytest.approx(expected.logprob, abs=0.06)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int4", "int8", "fp8")],
)
def test_quantised_weights_answer_as_the_numbers_that_they_stand_for(reference, dtype):
    """Also where devices split what groups of int4 are along; as many groups are then of each."""
    narrow = make_runner(reference[0], 2, weights_dtype=dtype)
    # The numbers in their own order, not in panels.
    stored = make_runner(reference[0], 2, weights_dtype=dtype, with_native=False)
    plain = make_runner(reference[0], 2, with_native=False)
    with jax.set_mesh(plain._mesh):
        widen = partial(widened, dtype=np.float32)
        plain._params = jax.tree.map(widen, stored._params, is_leaf=lambda x: isinstance(x, Quantised))
    found, expected = (events_of(runner, *map(greedy, PROMPTS)) for runner in (narrow, plain))
    for one, other in zip(found, expected, strict=True):
        assert [event.token for event in one] == [event.token for event in other]
        assert [e.logprob for e in one] == pytest.approx([e.logprob for e in other], abs=10 * TOLERANCE)


_BY_POSITION = {"T": ["context"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "fsdp=2,tensor=2,sequence_parallel=true",
            "layout fsdp=2,tensor=2,sequence_parallel=true,remat=none: inference splits over data, fsdp, "
            "expert, context and tensor; leave out sequence_parallel=true",
        ),
        (
            "tensor=2,matmul_dtype=fp8,weights_dtype=int8",
            "layout tensor=2,remat=none: inference splits over data, fsdp, expert, context and tensor; leave "
            "out matmul_dtype=fp8 with weights_dtype=int8",
        ),
        (
            "tensor=8",
            "wk[L, D, K_tensor, H]: 4 KV heads (K) do not divide over tensor = 8;"
            " fits: tensor in {1, 2, 4}, or tensor=4,kv_replicas=2, or replicate: wk[L, D, K, H]",
        ),
        (
            {"mesh": {"context": 2}, "rules": {"activations": _BY_POSITION, "generate": _BY_POSITION}},
            "layout context=2,rules=own,remat=none: inference splits over data, fsdp, expert, context and "
            "tensor; leave out context of T in [layout.rules.generate], since a token has no positions to "
            "split",
        ),
    ],
)
def test_a_layout_that_cannot_serve_is_refused(reference, words, message):
    split = Layout.parse(words) if isinstance(words, str) else Layout.from_dict(words)
    with pytest.raises(LayoutError) as error:
        JaxRunner({}, read_model(reference[0]), split, device_mesh(split), num_slots=1, context=8)
    assert str(error.value) == message


def test_prompts_too_short_for_their_devices_are_refused(reference):
    split, config = Layout.of(context=3), dataclasses.replace(read_model(reference[0]), name="tiny")
    with pytest.raises(PlanError) as error:
        JaxRunner({}, config, split, device_mesh(split), num_slots=3, context=8)
    assert str(error.value) == (
        "tiny: prompts of a context of 8 tokens fill no block that divides over context = 3; fits: a context "
        "of 24 or more, or context = 1"
    )


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


def test_too_few_pages_for_one_sequence_are_refused(reference):
    config = dataclasses.replace(read_model(reference[0]), name="tiny")
    sizes: dict[str, Any] = {"num_slots": 1, "context": 64, "num_pages": 7, "page_size": 8}
    with pytest.raises(PlanError) as error:
        JaxRunner({}, config, layout(1), device_mesh(layout(1)), **sizes)
    assert str(error.value) == (
        "a cache of 7 pages of 8 positions is too small for a context of 64; "
        "fits: 8 pages or more, 64 positions"
    )


def test_a_strict_runner_compiles_nothing_more(reference):
    """Scores of prompts are there; what another thread compiles ends the service."""
    split = layout(1)
    config, mesh = read_model(reference[0]), device_mesh(split)
    # As prefill and generation on their own devices, the second is compiled after the first.
    runner, second = (
        JaxRunner(
            load_hf(reference[0], config, split, mesh),
            config,
            split,
            mesh,
            num_slots=num_slots,
            context=8,
            page_size=8,
            strict=True,
        )
        for num_slots in (1, 2)
    )
    runner.warm_up()
    second.warm_up()
    with Engine(runner) as engine:
        assert asyncio.run(_ask(engine, greedy([1, 2], 2))) == hf_models.greedy(reference[1], [1, 2], 2)
        scored = asyncio.run(_events(engine, Request((1, 2, 3), 0, scores_prompt=True)))
        assert len(scored[0].prompt) == 2
        jax.jit(lambda x: x + 3)(np.float32(1))
        with pytest.raises(EngineError, match="a program was compiled after the warm-up"):
            asyncio.run(_ask(engine, greedy([1, 2], 2)))
