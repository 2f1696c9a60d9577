"""Predictions of published load tests: a closed loop of requests to a serving engine, simulated.

A row has the model, the machine, the engine, the number types and the degrees of its pools:

    together    one pool: `tensor` and `data` of attention, `expert_tensor` and `expert` of experts
    apart       a pool of prefill workers and a pool of decode workers, each with these degrees

and the means of two figures: time to first token and time per output token after the first. The mean time of
a whole request follows from them: ttft + (output tokens - 1) tpot.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, gcd

import numpy as np

from meshwright.dtypes import NUMBER_TYPES, dtype_bytes, named, number_type, types_for
from meshwright.engines.serving_engine import ENGINES, ServingEngine
from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware import catalog
from meshwright.hardware.chip import Switch
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.load.engine_server import EngineServer, transfer_seconds_of
from meshwright.load.simulator import Planned, simulate_server
from meshwright.load.traffic import Chat, Load, Turn
from meshwright.models.config import ModelConfig
from meshwright.models.presets import PRESETS, load_model
from meshwright.plan.serve.with_engine import engine_tables_dtype, on_engine
from meshwright.plan.spread import ONE_POOL, POOLS_APART, Spread, serving_spread
from meshwright.validate.load_test_recipes import Recipe, one_pool_drafts, recipes_of
from meshwright.validate.load_test_row import FIGURES, MAX_BATCH, SHORTEST_DRAWN, LoadTestRow, WorkerDegrees
from meshwright.validate.load_test_settings import (
    SPLIT_WORKERS,
    decode_slots,
    expected_gain,
    is_unstated,
    splits_heads,
    streamed_tokens,
    tokens_of_step,
)
from meshwright.validate.parallel_rows import results_of
from meshwright.validate.published import UnreadRow
from meshwright.validate.quantized_file import wide_weights
from meshwright.validate.score import grouped
from meshwright.validate.static_batches import dtype_of_source

# Requests of a load test for each concurrent one (InferenceX).
_NUM_WAVES = 10
# Simulated waves of requests: the first, which begins at once, some that represent the middle ones,
# and the last, which ends with fewer and fewer sequences.
_SIMULATED_WAVES = 3
_LEAST_REQUESTS, _MOST_REQUESTS = 24, 2048
# Groups of devices of a pool are simulated one for several beyond this number of concurrent requests.
_MOST_CONCURRENT = 512
# Share of its time that a pool of prefill computes, if it is large enough for its pool of decode.
_BUSY = 0.8
# Bits of weights that checkpoints of mixtures of experts have for all of their products.
_LEAST_FOR_ALL = 8
# Figures of FIGURES; `LoadTestRow.with_request` adds the time of a request to them.
_MEANS = ("ttft_seconds", "tpot_seconds")
# Several processes are faster than one from this number of rows on.
_LEAST_FOR_PROCESSES = 100


@dataclass(frozen=True)
class LoadTestPrediction:
    """A row with its predicted seconds by the names of FIGURES, or the reason that it is skipped."""

    row: LoadTestRow | UnreadRow
    predicted: dict[str, float] | None = None
    skipped: str | None = None
    layout: str | None = None

    def error(self, name: str) -> float | None:
        """predicted / published - 1 of a figure; None if the row does not have it."""
        if self.predicted is None or isinstance(self.row, UnreadRow) or name not in self.row.figures:
            return None
        return self.predicted[name] / self.row.figures[name] - 1

    def to_dict(self) -> dict[str, object]:
        """The keys of a row of load tests in docs/reference/json.md."""
        names = FIGURES if self.predicted else ()
        return {
            "id": self.row.id,
            "source": self.row.source,
            "layout": self.layout,
            "skipped": self.skipped,
            "published": None if isinstance(self.row, UnreadRow) else self.row.figures,
            "predicted": self.predicted,
            "errors": {name: self.error(name) for name in names},
            "range": {name: list(self.spread(name).interval((self.predicted or {})[name])) for name in names},
        }

    def spread(self, name: str) -> Spread:
        """The spread of a figure of a predicted row."""
        row = self.row
        assert isinstance(row, LoadTestRow)
        return serving_spread(name, *spread_group(row))


def spread_group(row: LoadTestRow) -> tuple[str, str, str, bool]:
    """Pools, engine, chip, and whether there are experts, as `serving_spread` has them."""
    chip = row.hardware.partition(":")[0]
    pools = ONE_POOL if row.mode == "together" else POOLS_APART
    return pools, ENGINES.root(row.engine), chip, _named_model(row).moe is not None


def predict_load_tests(
    rows: Sequence[LoadTestRow | UnreadRow],
    on_progress: Callable[[float], None] | None = None,
    *,
    in_processes: bool = False,
) -> list[LoadTestPrediction]:
    """The predictions of all rows, in their order. in_processes: as for `predict`."""
    tests = [row for row in rows if isinstance(row, LoadTestRow)]
    # Rows of a group share prices.
    groups = grouped(tests, lambda row: (row.engine, row.model, row.hardware, row.weight_dtype, row.degrees))
    parts = sorted(groups.values(), key=len, reverse=True)
    predictions: dict[int, LoadTestPrediction] = {}  # by the row's id: rows may be equal but for their line
    results = results_of(predict_load_test, parts, in_processes=in_processes, least_rows=_LEAST_FOR_PROCESSES)
    for part, made in zip(parts, results, strict=True):
        predictions.update(zip(map(id, part), made, strict=True))
        if on_progress:
            on_progress(len(predictions) / len(tests))
    return [
        LoadTestPrediction(row, skipped=row.reason) if isinstance(row, UnreadRow) else predictions[id(row)]
        for row in rows
    ]


def predict_load_test(row: LoadTestRow) -> LoadTestPrediction:
    """The prediction of one row: the geometric mean over the settings that it may have had."""
    try:
        cases = load_test_cases(row)
        each = [case.figures() for case in cases]
    except MeshwrightError as error:
        return LoadTestPrediction(row, skipped=row.why_skipped(error))
    predicted = (
        each[0] if len(each) == 1 else row.with_request(*(_geometric_mean(each, name) for name in _MEANS))
    )
    return LoadTestPrediction(
        row, predicted, layout=" | ".join(str(server.layout) for server in cases[0].servers)
    )


def _geometric_mean(predictions: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.exp(np.mean(np.log([figures[name] for figures in predictions]))))


@dataclass(frozen=True)
class LoadTestCase:
    """The planner's input for a row: servers and workers of its pools, prefill before decode.

    slots: requests that all decode workers hold at once; None if not stated.
    """

    row: LoadTestRow
    servers: tuple[EngineServer, ...]
    workers: tuple[int, ...]
    concurrency: int
    slots: int | None = None

    @property
    def fits(self) -> bool:
        """Whether each worker has memory for its weights and a request."""
        context = self.row.prompt_len + self.row.output_len + 1
        return all(server.num_positions(context) >= context for server in self.servers)

    def figures(self) -> dict[str, float]:
        """Predicted seconds by the names of FIGURES."""
        row = self.row
        turns = self._turns()
        load = Load([Chat(0.0, (turn,)) for turn in turns], self.scaled_concurrency)
        answers, _ = simulate_server(self.planned, load)
        weights = _weights(len(answers), self.scaled_concurrency)
        first = np.array([answer.first_sent(pools_apart=row.mode == "apart") for answer in answers])
        last = np.array([answer.piece_seconds[-1] for answer in answers])
        start = np.array([answer.start_seconds for answer in answers])
        tokens = np.array([answer.num_tokens for answer in answers])
        each = (last - first) / np.maximum(tokens - 1, 1)
        tpot = float(np.average(each, weights=weights))
        ttft = float(np.average(first - start, weights=weights)) + self.servers[0].engine.request_seconds
        waited = streamed_tokens(row) - 1
        # The first message holds several tokens, and the last one ends as before.
        ttft += waited * tpot
        tpot *= max(0.0, 1 - waited / max(1.0, row.output_tokens - 1))
        return row.with_request(ttft, tpot)

    @cached_property
    def scale(self) -> int:
        """Groups of devices, or workers, for each simulated group."""
        if self.concurrency <= _MOST_CONCURRENT:
            return 1
        numbers = [w * s.data for w, s in zip(self.workers, self.servers, strict=True)]
        most, wanted = gcd(*numbers), -(-self.concurrency // _MOST_CONCURRENT)
        return min((n for n in range(1, most + 1) if most % n == 0 and n >= wanted), default=most)

    @property
    def scaled_concurrency(self) -> int:
        return max(1, self.concurrency // self.scale)

    def _turns(self) -> list[Turn]:
        row, limit = self.row, self.scaled_concurrency
        count = max(_SIMULATED_WAVES * limit, min(_LEAST_REQUESTS, _NUM_WAVES * limit))
        count = min(count, max(limit, _MOST_REQUESTS))
        if not row.draws_lengths:
            return [Turn(row.prompt_len, max(1, row.output_len))] * count
        rng = np.random.default_rng(0)
        prompts, outputs = (
            rng.integers(int(SHORTEST_DRAWN * length), length + 1, count).tolist()
            for length in (row.prompt_len, row.output_len)
        )
        return [Turn(*pair) for pair in zip(prompts, outputs, strict=True)]

    @property
    def planned(self) -> Planned:
        row = self.row
        context = row.prompt_len + row.output_len + 1
        scaled = [self._scaled(place) for place in range(len(self.servers))]
        if row.mode == "together":
            return _planned(*scaled[0], context, self.scaled_concurrency)
        (prefill, prefill_workers), (decode, workers) = scaled
        limit = self.scaled_concurrency
        # Prompts wait outside of the engine until one is computed.
        before = _planned(prefill, prefill_workers, row.prompt_len + 2, limit)
        groups = self.workers[1] * self.servers[1].data
        slots = self.slots or decode_slots(row, self.concurrency, groups, splits=self.servers[1].data == 1)
        slots = min(slots, self.concurrency)
        after = _planned(replace(decode, receives=True), workers, context, max(1, slots // self.scale))
        seconds = transfer_seconds_of(decode.config, decode.layout, decode.hardware, context)
        return replace(
            after,
            prefill=before,
            prefill_replicas=prefill_workers,
            transfer_seconds=seconds,
            in_turn=decode.engine.routes_in_turn,
        )

    def _scaled(self, place: int) -> tuple[EngineServer, int]:
        """The server and number of workers that are simulated, `scale` times fewer."""
        server, workers, scale = self.servers[place], self.workers[place], self.scale
        by_workers = gcd(workers, scale)
        return replace(server, stands_for=scale // by_workers), workers // by_workers


def _planned(server: EngineServer, workers: int, context: int, concurrency: int) -> Planned:
    limits = server.limits(context, -(-concurrency // workers))
    return Planned(limits, server.steps(limits), policy=server.policy, prefix_cache=False, replicas=workers)


def _weights(count: int, concurrency: int) -> np.ndarray:
    """Requests of the load test for each simulated request."""
    waves = count / concurrency
    weights = np.ones(count)
    if waves < _NUM_WAVES and count > 2 * concurrency:
        weights[concurrency : count - concurrency] = (_NUM_WAVES - 2) / (waves - 2)
    return weights


def load_test_cases(row: LoadTestRow) -> list[LoadTestCase]:
    """A case for each of the settings that a row may have had. Raises MeshwrightError as `load_test_case`."""
    config = model_of_load_test(row)
    engine = ENGINES[ENGINES[row.engine].apart or row.engine]
    cases = [_with_recipe(row, config, engine, recipe) for recipe in recipes_of(row, config.name)]
    return [case for case in cases if case.fits] or [load_test_case(row)]


def _with_recipe(
    row: LoadTestRow, config: ModelConfig, engine: ServingEngine, recipe: Recipe
) -> LoadTestCase:
    pools = (recipe.prefill, recipe.decode)
    before, after = (_server(row, config, engine, pool.degrees) for pool in pools)
    after = replace(after, drafts=recipe.drafts, gain=tokens_of_step(recipe.drafts))
    workers = tuple(pool.workers for pool in pools)
    return LoadTestCase(row, (before, after), workers, row.concurrency or 1, recipe.slots)


def load_test_case(row: LoadTestRow) -> LoadTestCase:
    """The case of a row. Raises MeshwrightError if the row cannot be expressed."""
    engine, config = ENGINES[row.engine], model_of_load_test(row)
    if row.mode == "apart" and engine.apart:
        engine = ENGINES[engine.apart]
    pools = row.pools()
    concurrency = row.concurrency
    if concurrency is None and row.decode_batch:
        workers, decode = pools[-1]
        concurrency = row.decode_batch * workers * decode.data
    if concurrency is None:
        raise PlanError("concurrency is empty, and no decode_batch says how many requests run at once")
    if concurrency == MAX_BATCH:
        concurrency = _most_at_once(row, _server(row, config, engine, pools[-1][1]), pools[-1][0])
    if is_unstated(row, config):
        return _unstated(row, config, engine, concurrency)
    drafts = one_pool_drafts(row, config.name)
    servers = tuple(
        replace(_server(row, config, engine, degrees), drafts=drafts, gain=tokens_of_step(drafts))
        for _, degrees in pools
    )
    servers = (*servers[:-1], _holding(row, servers[-1], config, *pools[-1], concurrency))
    workers = tuple(workers for workers, _ in pools)
    if row.mode == "apart" and row.prefill_workers is None:
        workers = (max(1, ceil(_balanced(row, servers, concurrency))), *workers[1:])
    return LoadTestCase(row, servers, workers, concurrency)


def _most_at_once(row: LoadTestRow, server: EngineServer, workers: int) -> int:
    """Requests that all workers take at once: the engine's limit, or the most that the memory holds."""
    context = row.prompt_len + row.output_len
    each = min(server.engine.max_sequences, server.num_positions(context) // context)
    if each < 1:
        raise PlanError(
            f"{server.config.name}: the memory does not hold one request of {context:,} positions"
        )
    return workers * server.data * each


def _unstated(row: LoadTestRow, config: ModelConfig, engine: ServingEngine, concurrency: int) -> LoadTestCase:
    """The case of pools apart if the row leaves out their workers, as `load_test_settings` has them."""
    (_, prefill), (_, decode) = row.pools()
    before = _server(row, config, engine, _with_sequences(prefill))
    splits = splits_heads(row, concurrency, decode)
    after = _server(row, config, engine, decode if splits else _with_sequences(decode))
    after = replace(after, gain=expected_gain(row, config))
    servers = (before, _holding(row, after, config, 1, decode, concurrency))
    if splits:
        return LoadTestCase(row, servers, (1, min(SPLIT_WORKERS, concurrency)), concurrency)
    prefills = max(1, ceil(_balanced(row, servers, concurrency)))
    return LoadTestCase(row, servers, (prefills, 1), concurrency)


def _with_sequences(degrees: WorkerDegrees) -> WorkerDegrees:
    """These devices, each with sequences of its own, and experts over all of them."""
    chips = degrees.chips
    return WorkerDegrees(1, chips, 1, chips)


def _holding(
    row: LoadTestRow,
    server: EngineServer,
    config: ModelConfig,
    workers: int,
    degrees: WorkerDegrees,
    concurrency: int,
) -> EngineServer:
    """`server`, or one whose devices have sequences of their own if only that holds all requests at once.

    Devices that split heads each keep all latents. Sources count the devices of both layouts as `tensor`.
    """
    if config.mla is None or degrees.tensor == 1:
        return server
    positions = concurrency / workers * (row.prompt_len + row.output_len / 2)
    if server.num_positions(row.prompt_len + row.output_len) * degrees.data >= positions:
        return server
    other = _server(row, config, server.engine, _with_sequences(degrees))
    other = replace(other, drafts=server.drafts, gain=server.gain)
    holds_one = other.num_positions(row.prompt_len + row.output_len) > row.prompt_len + row.output_len
    return other if holds_one else server


def _balanced(row: LoadTestRow, servers: Sequence[EngineServer], concurrency: int) -> float:
    """Prefill workers that one decode worker with `concurrency` requests keeps busy.

    Pools are sized so that decode workers are full.
    """
    prefill, decode = servers
    limits = decode.limits(row.prompt_len + row.output_len + 1, concurrency)
    running = min(concurrency, limits.num_slots)
    context = row.prompt_len + row.output_len / 2
    step = replace(decode, receives=True).steps(limits).seconds(running, context, (), 0)
    alone = prefill.limits(row.prompt_len + 2, 1)
    prompts = [(row.prompt_len, row.prompt_len)] * prefill.data
    prompt = prefill.steps(alone).seconds(0, 0.0, prompts, 0) / prefill.data
    return running / (row.output_tokens * step) * prompt / _BUSY


def model_of_load_test(row: LoadTestRow) -> ModelConfig:
    """The model that `model` or `hf_model` names. Raises ModelError for an unknown model."""
    config = _named_model(row)
    longest = row.prompt_len + row.output_len + 1
    return config if longest <= config.max_seq_len else replace(config, max_seq_len=longest)


def _named_model(row: LoadTestRow) -> ModelConfig:
    return _model_of(tuple(_names(row)))


@lru_cache(maxsize=256)
def _model_of(names: tuple[str, ...]) -> ModelConfig:
    """The model of the first name that is a preset. Raises ModelError if none is."""
    return load_model(next((name for name in names if name in PRESETS), names[0]))


def _names(row: LoadTestRow) -> Iterator[str]:
    """The names of the row's model, and those without a number type or `instruct` at the end."""
    yield row.model.lower()
    name = (row.hf_model or "").rpartition("/")[2].lower()
    while name:
        yield name
        name, _, last = name.rpartition("-")
        if last != "instruct" and named(last) not in NUMBER_TYPES:
            return


def _server(
    row: LoadTestRow, config: ModelConfig, engine: ServingEngine, degrees: WorkerDegrees
) -> EngineServer:
    hardware = _machine(row, engine, degrees.chips)
    layout, config = _layout(row, config, hardware, degrees)
    return EngineServer(config, layout, hardware, engine)


@lru_cache(maxsize=256)
def _machine(row: LoadTestRow, engine: ServingEngine, chips: int) -> Hardware:
    name, network = row.hardware.partition(":")[0], catalog.load(row.hardware).chip.network
    domain = network.domain_size if isinstance(network, Switch) else chips
    size = f"1x{chips}" if chips <= domain else f"{-(-chips // domain)}x{domain}"
    return on_engine(catalog.load(f"{name}:{size}"), engine)


@lru_cache(maxsize=1024)
def _layout(
    row: LoadTestRow, config: ModelConfig, hardware: Hardware, degrees: WorkerDegrees
) -> tuple[Layout, ModelConfig]:
    """The layout of a worker, and the model with redundant experts if the experts do not divide."""
    tensor, data, expert = degrees.tensor, degrees.data, degrees.expert
    if config.num_heads % tensor:
        # Engines do not split heads unevenly: these ranks have sequences of their own (attention
        # data parallelism) and share the experts.
        tensor, data, expert = 1, degrees.chips, degrees.chips
    heads = config.num_kv_heads if config.mla is None else config.num_heads
    split = gcd(tensor, heads)
    if data > 1:  # devices with sequences of their own divide experts, not the rows of one
        expert = max(expert, degrees.expert_tensor)
    expert = 1 if config.moe is None else _expert_degree(expert, split, data)
    if config.moe is not None and config.moe.num_experts % expert:
        copies = -(-config.moe.num_experts // expert) * expert
        config = replace(
            config, moe=replace(config.moe, num_experts=copies, num_groups=1, groups_per_token=1)
        )
    weights, matmul = dtype_of_source(row.weight_dtype)
    # With narrow floating-point weights engines keep caches in 8 bits.
    is_narrow = number_type(weights).scales is not None and not number_type(weights).is_integer
    kv = types_for("cache", "serve")[0] if is_narrow else "bf16"
    experts, tables = None, engine_tables_dtype(weights, "bf16")
    if number_type(weights).bits < _LEAST_FOR_ALL and config.moe is not None:
        experts, wide = weights, wide_weights(config, weights)
        if wide is None:  # published mixtures without a record have only their experts in 4 bits
            weights, matmul, tables = "bf16", None, None
        else:
            config = replace(config, unquantised=wide)
    if matmul is not None and not _multiplies(hardware, matmul):
        matmul = None
    layout = Layout.of(
        tensor=split,
        kv_replicas=tensor // split,
        data=data,
        expert=expert,
        cache="copies",
        weights_dtype=weights,
        kv_dtype=kv,
        matmul_dtype=matmul,
        experts_dtype=experts,
        tables_dtype=tables,
    )
    check_fits(layout, config, padded=True)
    return layout, config


def _expert_degree(expert: int, tensor: int, data: int) -> int:
    """The nearest degree of expert parallelism that layouts have: 1, all data ranks, or all devices."""
    fits = (1, data, data * tensor)
    return min(fits, key=lambda degree: (abs(np.log(degree / expert)), -degree)) if expert > 1 else 1


def _multiplies(hardware: Hardware, dtype: str) -> bool:
    """Whether the chip multiplies numbers of this type; otherwise they are widened first."""
    return dtype in hardware.chip.flops_per_second or dtype_bytes(dtype) >= dtype_bytes("bf16")
