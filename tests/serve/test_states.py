"""Serving of layers with a state: token for token as a forward pass of the whole text and as transformers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn import hf_models
from tests.nn.small_models import (
    COMPRESSED,
    CONVOLUTION,
    DELTA,
    DELTA_BY_ELEMENT,
    LINEAR_UNIT,
    MAMBA,
    SELECTIVE,
    SPARSE,
    SPARSE_BLOCKS,
    TINY,
)
from tests.serve.answers import CONTEXT, NUM_TOKENS, PAGE, PROMPTS, generate, greedy, layout

from meshwright.cost.record_inference import cache_bytes
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.moves.attention import token_sharding
from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.count import state_arrays
from meshwright.models.model_files import read_model
from meshwright.nn.files.weights import load_hf
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import init_params
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.device_mesh import device_mesh, named_sharding
from meshwright.plan.serve.requests import Requests
from meshwright.platforms import CPU
from meshwright.serve.device.runner import JaxRunner, check_serves
from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.pages import NO_PAGE, Move
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.sequence import TokenSequence
from meshwright.serve.engine.speculate import Drafter, Payoff

HYBRID = replace(DELTA, num_layers=2)
# With as many heads of keys as devices of `tensor` that do not share them.
FEW_KEYS = replace(HYBRID, num_kv_heads=2)
WHOLE = Layout.of(weights_dtype="f32", compute_dtype="f32")


def runner_of(config: ModelConfig, params: Any, split: Layout, **options: Any) -> JaxRunner:
    """Chunks of two blocks, so that a prompt takes several rows of a step, and several steps."""
    options = {"num_slots": 2, "chunk": 16, "block": 8} | options
    runner = JaxRunner(params, config, split, device_mesh(split), context=CONTEXT, page_size=PAGE, **options)
    runner.warm_up(only_greedy=True)
    return runner


def assert_greedy(config: ModelConfig, answers: list[list[int]], prompts: list[list[int]]) -> None:
    """Every token of the answers is the likeliest after a forward pass of the text before it."""
    mesh, ops = device_mesh(WHOLE), JaxOps(config, WHOLE)
    params = init_params(config, WHOLE, mesh, seed=0)
    rows = np.zeros((len(prompts), CONTEXT), np.int32)
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    positions = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), rows.shape)
    placed = named_sharding(token_sharding(WHOLE, "tokens"), mesh)

    def forward(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return transformer.logits(config, ops, params, tokens, Places(positions))[0]

    with jax.set_mesh(mesh):
        inputs = [jax.device_put(np.ascontiguousarray(x), placed) for x in (rows, positions)]
        logits = np.asarray(jax.jit(forward)(params, *inputs))
    for of_text, prompt, answer in zip(logits, prompts, answers, strict=True):
        before = of_text[len(prompt) - 1 :][: len(answer)]
        ranked = np.sort(before)
        assert (ranked[:, -1] - ranked[:, -2]).min() > 1e-4, "equal tokens would be luck"
        assert before.argmax(-1).tolist() == answer


def restarts_of(runner: JaxRunner) -> list[int]:
    """A list that grows with every work that begins at position 0."""
    starts, run = list[int](), runner.run

    def counted(batch: Batch) -> Any:
        starts.extend(work.slot for work in batch.works if work.start == 0)
        return run(batch)

    runner.run = counted
    return starts


@pytest.mark.parametrize(
    ("config", "split"),
    [
        pytest.param(HYBRID, layout(1), marks=pytest.mark.slow),
        pytest.param(HYBRID, layout(2), marks=pytest.mark.slow),
        pytest.param(HYBRID, layout(2).replace(cache="batch"), marks=pytest.mark.slow),
        pytest.param(MAMBA, layout(2).replace(data=2), marks=pytest.mark.slow),
        pytest.param(CONVOLUTION, layout(2).replace(fsdp=2), marks=pytest.mark.slow),
        pytest.param(COMPRESSED, layout(1).replace(kv_replicas=2), marks=pytest.mark.slow),
    ],
    ids=["delta", "delta-tensor", "delta-cache-batch", "mamba-data", "convolution-fsdp", "compressed"],
)
def test_prompts_in_chunks_and_preempted_sequences(config: ModelConfig, split: Layout) -> None:
    """A cache of one context and a page: a sequence loses its pages and its state, and is computed again."""
    params, replicas = init_params(config, split, device_mesh(split), seed=0), num_replicas(split, config)
    runner = runner_of(config, params, split, num_slots=2 * replicas, num_pages=6 * replicas)
    starts = restarts_of(runner)
    prompts = [PROMPTS[4], PROMPTS[3], *PROMPTS] * replicas
    answers = generate(runner, *map(greedy, prompts))
    assert len(starts) > len(prompts)
    assert_greedy(config, answers, prompts)


@pytest.mark.parametrize(
    ("config", "split"),
    [
        pytest.param(HYBRID, layout(2).replace(context=2), marks=pytest.mark.slow),
        pytest.param(DELTA_BY_ELEMENT, layout(2).replace(context=2), marks=pytest.mark.slow),
        pytest.param(
            FEW_KEYS, layout(2).replace(context=2, kv_replicas=2, cache="batch"), marks=pytest.mark.slow
        ),
        pytest.param(MAMBA, layout(1).replace(context=2, data=2), marks=pytest.mark.slow),
        pytest.param(CONVOLUTION, layout(2).replace(context=2), marks=pytest.mark.slow),
        pytest.param(SELECTIVE, layout(2).replace(context=2), marks=pytest.mark.slow),
        pytest.param(LINEAR_UNIT, layout(1).replace(context=2), marks=pytest.mark.slow),
    ],
    ids=[
        "delta",
        "delta-by-element",
        "delta-cache-batch",
        "mamba",
        "convolution",
        "selective",
        "linear-unit",
    ],
)
def test_prompts_whose_positions_are_split(config: ModelConfig, split: Layout) -> None:
    """Pieces of a prompt on several devices; the states after it, and prefixes of it, are kept by one."""
    params = init_params(config, split, device_mesh(split), seed=0)
    replicas = num_replicas(split.at("generate"), config)
    options = {"num_slots": 2 * replicas, "chunk": None, "block": CONTEXT // 2, "keeps_states": True}
    runner = runner_of(config, params, split, **options)
    fresh, run = list[int](), runner.run

    def noted(batch: Batch) -> Any:
        fresh.append(runner._shapes.of(batch).fresh)
        return run(batch)

    runner.run = noted
    prompts = [*PROMPTS, [*PROMPTS[3], 5, 6]]

    async def one_by_one(engine: Engine) -> list[list[int]]:
        return [[event.token async for event in engine.submit(greedy(prompt))] for prompt in prompts]

    with Engine(runner) as engine:
        assert_greedy(config, asyncio.run(one_by_one(engine)), prompts)
    assert any(fresh), "no prompt was split"
    assert_greedy(config, generate(runner, *map(greedy, prompts)), prompts)  # together, with other steps


@pytest.mark.slow
@pytest.mark.parametrize("config", [SPARSE, SPARSE_BLOCKS], ids=lambda config: config.name)
def test_indexers_of_prompts_whose_positions_are_split(config: ModelConfig) -> None:
    """Queries on several devices choose among the keys of all of them, which one device keeps."""
    split = layout(2).replace(context=2)
    params = init_params(config, split, device_mesh(split), seed=0)
    options = {"num_slots": 4, "chunk": None, "block": CONTEXT // 2}
    runner = runner_of(config, params, split, **options)
    answers = [generate(runner, greedy(prompt))[0] for prompt in PROMPTS]
    assert_greedy(config, answers, PROMPTS)
    assert generate(runner, *map(greedy, PROMPTS)) == answers


@pytest.mark.slow
@pytest.mark.parametrize("config", [SPARSE, SPARSE_BLOCKS], ids=lambda config: config.name)
def test_indexers_after_cached_prefixes_and_wrong_drafts(config: ModelConfig) -> None:
    """Keys of an index are in the pages of a prefix, and those of wrong drafts are written over."""
    split = layout(2)
    params = init_params(config, split, device_mesh(split), seed=0)
    runner = runner_of(config, params, split, num_slots=2, num_drafts=3)
    starts, shared = restarts_of(runner), [7, 3, 5, 1, 2, 8, 6, 4] * 2
    prompts = [[*shared, 4, 2, 9], [*shared, 4, 2, 9], [*shared, 6], [*shared, 4, 2, 9, *range(10, 20)]]

    async def one_by_one(engine: Engine) -> list[list[int]]:
        return [[event.token async for event in engine.submit(greedy(prompt))] for prompt in prompts]

    with Engine(runner) as engine:
        answers = asyncio.run(one_by_one(engine))
    assert len(starts) == 1, "only the first prompt has no cached prefix"
    assert_greedy(config, answers, prompts)
    drafter = _Drafts({tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}, 3)
    assert generate(runner, *map(greedy, prompts), drafter=drafter) == answers
    assert set(drafter.num_right) >= {0, 1, 2}


KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "nemotron_h", "nemotron_h_latent")
KINDS += ("bamba", "kimi_linear", "falcon_h1", "falcon_mamba", "jamba", "minimax", "mamba2")
KINDS += ("recurrent_gemma", "deepseek_v4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_families_token_by_token(kind: str, tmp_path: Path) -> None:
    """As transformers generates, under tensor, with several rows of a prompt in a step."""
    model = hf_models.save(kind, tmp_path)
    config = read_model(tmp_path)
    split = layout(1).replace(kv_replicas=2) if config.compressed else layout(2)
    split = split.replace(expert=2) if config.moe and not config.compressed else split
    runner = runner_of(config, load_hf(tmp_path, config, as_read(split), device_mesh(split)), split)
    answers = [hf_models.greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert generate(runner, *map(greedy, PROMPTS)) == answers


@pytest.mark.parametrize(
    ("config", "split"),
    [
        (HYBRID, layout(2)),
        pytest.param(MAMBA, layout(2).replace(data=2), marks=pytest.mark.slow),
        pytest.param(CONVOLUTION, layout(1), marks=pytest.mark.slow),
        pytest.param(COMPRESSED, layout(1), marks=pytest.mark.slow),
    ],
    ids=["delta", "mamba-data", "convolution", "compressed"],
)
def test_cached_prefixes_with_their_states(config: ModelConfig, split: Layout) -> None:
    """Later prompts start from the states after the last page of a prompt, or after pages that two share."""
    params, replicas = init_params(config, split, device_mesh(split), seed=0), num_replicas(split, config)
    runner = runner_of(config, params, split, num_slots=2 * replicas, keeps_states=True)
    starts, run = list[int](), runner.run

    def noted(batch: Batch) -> Any:
        starts.extend(work.start for work in batch.works if work.restored != NO_PAGE)
        return run(batch)

    runner.run = noted
    shared = [7, 3, 5, 1, 2, 8, 6, 4] * 2
    longer, other = [*shared, 4, 2, 9, *range(10, 20)], [*shared[:PAGE], *range(20, 35)]
    prompts = [[*shared, 4, 2, 9], [*shared, 4, 2, 9], [*shared, 6], longer, longer, other, [*other[:-9], 5]]
    prompts = [prompt for prompt in prompts for _ in range(replicas)]

    async def one_by_one(engine: Engine) -> list[list[int]]:
        return [[event.token async for event in engine.submit(greedy(prompt))] for prompt in prompts]

    with Engine(runner) as engine:
        answers = asyncio.run(one_by_one(engine))
    assert_greedy(config, answers, prompts)
    if replicas == 1:
        assert starts == [2 * PAGE] * 3 + [3 * PAGE, PAGE]


class _Drafts(Drafter):
    """Drafts of known answers: in turn the first, the second, the third or none of them is wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], count: int) -> None:
        super().__init__(Payoff(count, lambda _: 0.0))
        self._answers, self._count = answers, count
        self.num_right = list[int]()

    def draft(self, sequence: TokenSequence) -> list[int]:
        answer = self._answers[tuple(sequence.request.prompt)]
        start = sequence.num_generated
        drafts = answer[start : start + self._count]
        wrong = len(self.num_right) % (self._count + 1)
        return [token if i != wrong else (token + 1) % 64 for i, token in enumerate(drafts)]

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.num_right.append(num_accepted)


@pytest.mark.parametrize(
    ("config", "split"),
    [
        (HYBRID, layout(2)),
        (HYBRID, layout(2).replace(cache="batch")),
        (MAMBA, layout(2).replace(data=2)),
        (CONVOLUTION, layout(1)),
        (SELECTIVE, layout(2)),
        (LINEAR_UNIT, layout(2)),
        (COMPRESSED, layout(1)),
    ],
    ids=["delta", "delta-cache-batch", "mamba-data", "convolution", "selective", "linear_unit", "compressed"],
)
@pytest.mark.slow
def test_states_after_wrong_drafts(config: ModelConfig, split: Layout) -> None:
    """The next step starts from the states after the last right draft, also after a cached prefix."""
    params, replicas = init_params(config, split, device_mesh(split), seed=0), num_replicas(split, config)
    runner = runner_of(config, params, split, num_slots=2 * replicas, num_drafts=3, keeps_states=True)
    prompts = [[*PROMPTS[1], *PROMPTS[2]], [*PROMPTS[1], *PROMPTS[2]], *PROMPTS]
    requests = [greedy(prompt) for prompt in prompts]
    answers = generate(runner, *requests)
    assert_greedy(config, answers, prompts)
    drafter = _Drafts({tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}, 3)
    assert generate(runner, *requests, drafter=drafter) == answers
    assert set(drafter.num_right) >= {0, 1, 2}


def test_pages_of_a_prefix_are_not_kept_without_states() -> None:
    limits = Limits.of_layout(HYBRID, layout(1), CPU, 2, CONTEXT)
    assert limits.has_states and Replica(limits, 0, prefix_cache=True).prefixes is None
    limits = Limits.of_layout(TINY, layout(1), CPU, 2, CONTEXT)
    assert Replica(limits, 0, prefix_cache=True).prefixes is not None


@pytest.mark.parametrize(
    ("config", "split"),
    [
        pytest.param(HYBRID, layout(1), marks=pytest.mark.slow),
        pytest.param(MAMBA, layout(2).replace(data=2), marks=pytest.mark.slow),
        pytest.param(HYBRID, layout(2).replace(cache="batch"), marks=pytest.mark.slow),
    ],
    ids=["delta", "mamba-data", "delta-cache-batch"],
)
def test_states_wait_in_the_hosts_memory_with_their_pages(config: ModelConfig, split: Layout) -> None:
    """A cache of six pages a replica: a known prompt starts from states that come back with its pages."""
    params, replicas = init_params(config, split, device_mesh(split), seed=0), num_replicas(split, config)
    runner = runner_of(
        config,
        params,
        split,
        num_slots=2 * replicas,
        num_pages=6 * replicas,
        keeps_states=True,
        host_bytes=10**7,
    )
    assert runner.limits.num_host_snapshots > 2 * replicas
    moved, starts = Counter[tuple[bool, bool]](), list[int]()
    move, run = runner.move, runner.run

    def noted(moves: Sequence[Move]) -> None:
        moved.update((one.of_states, one.is_out) for one in moves)
        move(moves)

    def counted(batch: Batch) -> Any:
        starts.extend(work.start for work in batch.works if work.restored != NO_PAGE)
        return run(batch)

    runner.move, runner.run = noted, counted
    prompts = [prompt for prompt in PROMPTS for _ in range(replicas)]

    async def one_by_one(engine: Engine) -> list[list[int]]:
        return [
            [event.token async for event in engine.submit(greedy(prompt))]
            for _ in range(3)
            for prompt in prompts
        ]

    with Engine(runner) as engine:
        answers = asyncio.run(one_by_one(engine))
    assert_greedy(config, answers, prompts * 3)
    assert all(moved[of_states, is_out] for of_states in (False, True) for is_out in (False, True))
    if replicas == 1:  # the second and third time, each prompt of more than a page
        expected = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]
        assert starts[-2 * sum(map(bool, expected)) :] == 2 * [*filter(None, expected)]
    assert generate(runner, *map(greedy, prompts)) == answers[: len(prompts)]  # at once, with preemption


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tensor"),
    [(HYBRID, 1), (HYBRID, 2), (replace(MAMBA, max_seq_len=CONTEXT), 2), (CONVOLUTION, 1)],
    ids=["delta", "delta-tensor", "mamba", "convolution"],
)
def test_prefill_and_generation_on_separate_devices(config: ModelConfig, tensor: int) -> None:
    """States come with the pages: the generator begins after the last full page of each prompt."""
    runners = []
    for first in (0, tensor):
        split = layout(tensor)
        mesh = device_mesh(split, jax.devices()[first:])
        params = init_params(config, split, mesh, seed=0)
        options = {"num_slots": 2, "chunk": 16, "block": 8, "shares_pages": True, "keeps_states": True}
        runner = JaxRunner(params, config, split, mesh, context=CONTEXT, page_size=PAGE, **options)
        runner.warm_up(only_greedy=True)
        runners.append(runner)
    prefill, generator = runners
    starts, run = list[int](), generator.run

    def counted(batch: Batch) -> Any:
        starts.extend(work.start for work in batch.works)
        return run(batch)

    generator.run = counted
    answers = []
    for prompt in PROMPTS:
        starts.clear()
        answers += generate(prefill, greedy(prompt), generator=Engine(generator))
        assert starts[0] == (len(prompt) - 1) // PAGE * PAGE
    assert_greedy(config, answers, PROMPTS)
    assert generate(prefill, *map(greedy, PROMPTS), generator=Engine(generator)) == answers


def test_results_that_do_not_depend_on_others_need_attention() -> None:
    with pytest.raises(PlanError, match="batch-invariant with the gated delta rule"):
        check_serves(HYBRID, layout(1), 2, CONTEXT, batch_invariant=True)


@pytest.mark.parametrize(
    "config",
    [HYBRID, MAMBA, CONVOLUTION, SELECTIVE, replace(LINEAR_UNIT, sliding_window=None)],
    ids=lambda config: config.name,
)
def test_plans_count_the_states_that_a_server_allocates(config: ModelConfig) -> None:
    """With snapshots of the prefix cache, states after drafts, and the entry of padding rows."""
    split, requests = layout(2).replace(data=2), Requests(CONTEXT - 8, 8, drafts=3, acceptance=0.5)
    mesh = device_mesh(split)
    options = {"num_slots": 4, "context": CONTEXT, "page_size": PAGE, "num_drafts": 3, "keeps_states": True}
    runner = JaxRunner({}, config, split, mesh, **options)
    [(num_entries, num_pages)] = {
        (leaf.shape[0], runner.limits.num_pages * runner.limits.num_replicas)
        for name, leaves in runner._programs.cache.pools().items()
        for leaf in leaves
        if name in state_arrays(config)
    }
    assert num_entries == requests.num_state_entries(4, 2, is_ours=True)
    assert num_pages * PAGE == 4 * CONTEXT
    allocated = sum(
        prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaves in runner._programs.cache.pools().values()
        for leaf in leaves
    )
    assert cache_bytes(config, split.at("generate"), 4, CONTEXT, num_entries) == allocated
