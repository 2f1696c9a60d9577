"""Load tests on a clock that prices move on: by hand, by queueing theory, and by what each mode promises."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.cost.serving_step import pass_cost
from meshwright.errors import DataError, RequestError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.load.padded import PaddedSteps
from meshwright.load.settings import Traffic
from meshwright.load.simulator import Planned, StepPrices, simulate_server
from meshwright.load.traffic import Chat, Load, Turn, poisson
from meshwright.models.layer_kinds import Window
from meshwright.models.presets import load_model
from meshwright.plan.serve.steps import StepSeconds, end_of_one
from meshwright.platforms import CPU
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.device.shapes import Shape, Shapes
from meshwright.serve.engine.batch import Batch, SequenceWork
from meshwright.serve.engine.limits import IdleSeconds, Limits
from meshwright.serve.engine.prefill_budget import MAX_SLOWDOWN
from meshwright.serve.engine.shared_tokens import SharedTokens


class Fixed(StepPrices):
    """A second for a step, and another for every 64 prompt tokens in it."""

    def seconds(self, num_sequences, mean_context, chunks, num_drafts) -> float:
        return 1.0 + sum(tokens for tokens, _ in chunks) / 64


class Grows(StepPrices):
    """Seconds that tell steps with other sequences, contexts or chunks apart."""

    def seconds(self, num_sequences, mean_context, chunks, num_drafts) -> float:
        prompts = sum(tokens / 50 + ends / 3000 for tokens, ends in chunks)
        return 0.1 + num_sequences / 70 + mean_context / 900 + prompts


def _gaps(answer) -> np.ndarray:
    """Seconds between the pieces of an answer."""
    return np.diff(answer.piece_seconds)


def planned(**more) -> Planned:
    return Planned(Limits.of(4, 2048), Fixed(), **more)


def loaded(*chats: Chat, concurrency: int | None = None, prefix_tokens: int = 0) -> Load:
    return Load(chats, concurrency, prefix_tokens)


def one(prompt: int, output: int, arrival: float = 0.0) -> Chat:
    return Chat(arrival, (Turn(prompt, output),))


def test_one_request_takes_its_steps():
    [answer], used = simulate_server(planned(), loaded(one(64, 5)))
    assert answer.ttft_seconds == 2.0  # 1 + 64 / 64
    assert _gaps(answer).tolist() == [1.0] * 4
    assert answer.end_seconds == used.busy_seconds == 6.0
    assert used.steps == 5 and answer.num_tokens == 5


def test_prompts_under_way_count_for_the_worker_that_answers():
    """Four requests at once are shared out over workers of two slots while another worker prefills them."""
    limits = replace(Limits.of(2, 2048), num_pages=64)
    server = Planned(limits, Fixed(), replicas=2, prefill_replicas=1, prefill=planned())
    answers, _ = simulate_server(server, loaded(*(one(64, 40) for _ in range(4))))
    assert max(_gaps(answer).max() for answer in answers) < 10
    for answer in answers:
        assert answer.first_sent(pools_apart=False) == answer.piece_seconds[0]
        assert answer.first_sent(pools_apart=True) == answer.piece_seconds[1]


def test_hosts_that_are_the_devices_take_time_for_requests_and_tokens():
    """Rows that nobody holds send no token, and a request waits before it is queued."""
    limits = Limits.of(4, 2048)
    steps = PaddedSteps(Fixed(), limits, has_kernels=False, host_step_seconds=0.125, host_token_seconds=0.25)
    assert steps.seconds(3, 100.0, [], 0) == 1.875
    assert steps.idle_seconds == PaddedSteps(Fixed(), limits, has_kernels=False).idle_seconds
    server = Planned(limits, steps, request_seconds=0.5)
    [answer], used = simulate_server(server, loaded(one(64, 5)))
    assert answer.ttft_seconds == 2.625
    assert _gaps(answer).tolist() == [1.375] * 4
    assert answer.end_seconds == used.busy_seconds + 0.5


def test_rows_that_are_passed_over_take_their_share():
    """Three of four slots and 48 tokens of a prompt, in blocks of 16."""
    padded = Limits.of(4, 2048, block=16)
    exact = replace(padded, multiplies_padding=False)
    whole = PaddedSteps(Grows(), padded, has_kernels=False).seconds(3, 100.0, [(48, 48)], 0)
    assert whole == pytest.approx(Grows().seconds(4, 75.0, [(64, end_of_one(64, [(48, 48)]))], 0))
    held = PaddedSteps(Grows(), exact, has_kernels=False).seconds(3, 100.0, [(48, 48)], 0)
    assert held == Grows().seconds(3, 100.0, [(48, 48)], 0) < whole
    some = PaddedSteps(Grows(), exact, has_kernels=False, padding=0.25)
    assert some.seconds(3, 100.0, [(48, 48)], 0) == pytest.approx(held + 0.25 * (whole - held))


def test_a_host_takes_requests_in_one_by_one_and_from_the_step_beside():
    """The second is taken in beside the step of the first: twice as long on half of a core, which that loses.

    The first is queued at 0.5 s, the second at 1.5. The step of the first prompt takes 2 s and 0.5 more; the
    next one, scheduled when that began, has the first alone, and the one behind it the second's prompt.
    """
    first, second = one(64, 5), one(64, 1)
    answers, used = simulate_server(planned(request_seconds=0.5), loaded(first, second))
    assert [answer.ttft_seconds for answer in answers] == [3.0, 6.0]
    assert used.steps == 5 and used.busy_seconds == answers[0].end_seconds - 0.5 == 7.5


def test_long_prompts_are_prefilled_in_chunks():
    [answer], used = simulate_server(planned(), loaded(one(1100, 1)))
    assert used.steps == 3  # 512 + 512 + 76
    assert answer.ttft_seconds == pytest.approx(3 + 1100 / 64)


def test_a_queue_is_as_long_as_theory_says():
    """Pollaczek and Khinchine: of constant service s and load r the mean wait is s r / (2 (1 - r))."""
    load_share, service = 0.7, 1 + 1 / 64
    arrivals = poisson(load_share / service, 1, seed=3)
    chats = [one(1, 1, next(arrivals)) for _ in range(20_000)]
    answers, _ = simulate_server(Planned(Limits.of(1, 64), Fixed()), loaded(*chats))
    waits = np.array([answer.ttft_seconds or 0.0 for answer in answers]) - service
    assert waits.mean() == pytest.approx(service * load_share / (2 * (1 - load_share)), rel=0.1)


def test_batches_wait_for_their_slowest():
    chats = [one(64, 2 + 30 * (number % 4 == 0), 0.1 * number) for number in range(32)]
    interleaved, _ = simulate_server(planned(), loaded(*chats))
    batched, _ = simulate_server(planned(mode="batched"), loaded(*chats))
    ends = [max(answer.end_seconds for answer in answers) for answers in (interleaved, batched)]
    assert [a.num_tokens for a in interleaved] == [a.num_tokens for a in batched]
    assert ends[1] > 1.5 * ends[0]


def test_prompts_are_paced_beside_those_that_generate():
    """So that a step takes at most MAX_SLOWDOWN times one without: of `Fixed` 96 tokens, 1 + 96 / 64 seconds.

    Where padding is multiplied the nearest program has 8 blocks, not 6: 1 + 128 / 64 seconds.
    """
    chats, padded = [*[one(2, 100)] * 3, one(1800, 1, 5.0)], Limits.of(4, 2048, block=16)
    idle = IdleSeconds(((1, 1.0), (2, 1.0), (4, 1.0)), 1 / 64)
    exact = replace(padded, multiplies_padding=False)
    for limits, known, longest in (padded, None, 9.0), (padded, idle, 3.0), (exact, idle, MAX_SLOWDOWN):
        answers, _ = simulate_server(Planned(limits, Fixed(), idle=known), loaded(*chats))
        assert max(gap for answer in answers[:3] for gap in _gaps(answer)) == pytest.approx(longest)


def test_turns_find_the_pages_of_those_before():
    chat = Chat(0.0, (Turn(600, 8),) * 3)
    cached, used = simulate_server(planned(), loaded(chat))
    anew, _ = simulate_server(planned(prefix_cache=False), loaded(chat))
    assert used.cached_tokens > 0.4 * used.prompt_tokens  # 2 of 6 turns' worth, in whole pages
    assert (cached[-1].ttft_seconds or 0) < 0.5 * (anew[-1].ttft_seconds or 0)
    assert cached[0].ttft_seconds == anew[0].ttft_seconds


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_drafts_yield_what_their_acceptance_says(acceptance: float):
    """A step yields 1 + a + a^2 + a^3 tokens of three drafts (Leviathan et al., 2023)."""
    _, used = simulate_server(planned(num_drafts=3, acceptance=acceptance), loaded(*[one(2, 1500)] * 4))
    assert used.steps == pytest.approx(1500 / sum(acceptance**power for power in range(4)), rel=0.1)


def test_replicas_that_prefill_keep_prompts_out_of_answers():
    chats = [one(512, 20, 3.0 * number) for number in range(12)]
    together, _ = simulate_server(planned(), loaded(*chats))
    apart, used = simulate_server(planned(prefill_replicas=1, transfer_seconds=0.001), loaded(*chats))
    assert [answer.num_tokens for answer in apart] == [20] * 12
    # A replica that answers computes what a page has no room for: a token or two, never a prompt.
    assert max(gap for a in apart for gap in _gaps(a)[1:]) < 1.2
    assert max(gap for a in together for gap in _gaps(a)[1:]) > 5
    assert all(_gaps(a)[0] >= 0.512 for a in apart)
    assert used.preempted == 0


def test_replicas_share_the_load():
    chats = [one(64, 50)] * 16
    alone, _ = simulate_server(planned(), loaded(*chats))
    shared, _ = simulate_server(planned(replicas=4), loaded(*chats))
    ratio = max(a.end_seconds for a in alone) / max(a.end_seconds for a in shared)
    assert ratio > 3.5


def test_no_more_are_under_way_than_the_loop_allows():
    answers, _ = simulate_server(planned(), loaded(*[one(64, 10)] * 6, concurrency=2))
    starts = sorted(answer.start_seconds for answer in answers)
    ends = sorted(answer.end_seconds for answer in answers)
    assert starts[:2] == [0.0, 0.0] and all(start in ends for start in starts[2:])


def test_a_closed_loop_begins_chats_until_its_time_is_over():
    """Answers take 2 s and 9 s; in 100 s two chats at once repeat the two drawn ones."""
    load = Load([one(64, 10), one(64, 10)], 2, until_seconds=100.0)
    answers, _ = simulate_server(planned(), load)
    starts = [answer.start_seconds for answer in answers]
    assert len(answers) > 10 and max(starts) < 100 <= max(answer.end_seconds for answer in answers)
    assert all(sum(a.start_seconds <= at < a.end_seconds for a in answers) == 2 for at in starts)


def test_a_rate_for_a_time_has_its_number_of_requests():
    chats = Traffic(rate=50.0, duration=40.0).chats()
    assert abs(len(chats) - 2000) < 5 * 2000**0.5
    assert 39 < max(chat.arrival_seconds for chat in chats) < 40
    with pytest.raises(DataError, match="no request arrives in that time"):
        Traffic(rate=1e-6, duration=1.0).chats()
    for endless in (Traffic(rate=1.0, duration=float("inf")), Traffic(requests=10**17)):
        with pytest.raises(DataError, match=r"more than 10,000,000 requests"):
            endless.chats()


def test_what_the_context_cannot_hold_is_refused():
    with pytest.raises(RequestError, match=r"2,000 tokens and an answer of 100 make 2,100.*holds 2,048"):
        simulate_server(planned(), loaded(one(2000, 100)))


def traffic(seed: int) -> Load:
    """Chats of one to three turns of all lengths, which come in bursts."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(random.choice([0.5, 4.0]), 24))
    chats = [
        Chat(float(time), tuple(Turn(*map(int, random.integers(1, 90, 2))) for _ in range(turns)))
        for time, turns in zip(times, random.integers(1, 4, len(times)), strict=True)
    ]
    concurrency = [None, 6][seed % 2]
    return Load(chats, concurrency, int(random.choice([0, 100])))


def pages(num_pages: int | None = None) -> Limits:
    return Limits.of(6, 1024, page_size=16, num_pages=num_pages, block=16)


# Of steps that take `Grows` seconds: there is room for a block or two beside those that generate.
IDLE = IdleSeconds(((1, 0.11), (2, 0.13), (4, 0.16), (6, 0.19)), 1 / 50 + 1 / 3000)


@dataclass(frozen=True)
class Shared:
    """Makes the policy of another engine, with 48 prompt tokens in a step."""

    separate_prompts: bool

    def __call__(self, limits: Limits) -> SharedTokens:
        return SharedTokens(
            48,
            limits.num_replicas,
            cuts_prompts=True,
            counts_generated=False,
            separate_prompts=self.separate_prompts,
        )


def test_sequences_wait_while_prompts_that_came_later_are_computed():
    """SGLang's scheduler: a step has prompts or sequences that generate."""
    server = Planned(Limits.of(4, 2048), Fixed(), policy=Shared(separate_prompts=True))
    first, second = simulate_server(server, loaded(one(48, 5), one(96, 3, 2.0)))[0]
    # The first prompt takes 1.75 s. The second arrives in the next step; one more is scheduled already.
    assert first.piece_seconds.tolist() == [1.75, 2.75, 3.75, 8.25, 9.25]
    assert second.piece_seconds.tolist() == [7.25, 8.25, 9.25]


@dataclass(frozen=True)
class Balanced:
    """The policy of TensorRT-LLM, whose replicas compute prompts together."""

    balance_steps: int

    def __call__(self, limits: Limits) -> SharedTokens:
        return SharedTokens(
            64,
            limits.num_replicas,
            cuts_prompts=False,
            counts_generated=False,
            balance_steps=self.balance_steps,
        )


@pytest.mark.parametrize(("steps", "first"), [(0, 10.0), (4, 13.0), (100, 19.0)])
def test_prompts_wait_until_each_replica_can_start_one(steps: int, first: float):
    """Two replicas of two slots; a third prompt is alone until the fourth arrives, or four steps are over."""
    limits = replace(Limits.of(2, 2048), num_slots=4, num_replicas=2)
    server = Planned(limits, Fixed(), policy=Balanced(steps), prefix_cache=False)
    load_test = loaded(one(64, 40), one(64, 40), one(64, 3, 6.5), one(64, 3, 14.5))
    answers, _ = simulate_server(server, load_test)
    assert [answer.piece_seconds[0] for answer in answers[:2]] == [2.0, 5.0]
    assert answers[2].piece_seconds[0] == first


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mode": "batched"},
        {"prefix_cache": False},
        {"limits": pages(64)},
        {"limits": replace(pages(90), window=Window(40), num_window_pages=60)},
        {"limits": replace(pages(90), window=Window(40, chunked=True), num_window_pages=60)},
        {"replicas": 3},
        {"prefill_replicas": 1, "replicas": 2, "transfer_seconds": 0.01},
        {"idle": IDLE},
        {"idle": IDLE, "limits": pages(64)},
        {"policy": Shared(separate_prompts=False)},
        {"policy": Shared(separate_prompts=True)},
        {"policy": Shared(separate_prompts=True), "limits": pages(90)},
    ],
    ids=str,
)
def test_sequences_counted_together_take_what_they_take_step_by_step(more: dict, seed: int):
    """To the last bit, with pages that run out, windows that move on and prompts that begin alike."""
    server = replace(Planned(pages(), Grows()), **more)
    together, used = simulate_server(server, traffic(seed))
    apart, used_apart = simulate_server(replace(server, counted=False), traffic(seed))
    assert used == used_apart
    for one, other in zip(together, apart, strict=True):
        assert (one.start_seconds, one.end_seconds) == (other.start_seconds, other.end_seconds)
        assert one.piece_seconds.tolist() == other.piece_seconds.tolist()
        assert one.num_tokens == other.num_tokens == len(one.piece_seconds)


class Counts(Grows):
    """Counts the blocks that are priced."""

    num_blocks = 0

    def generating(self, num_sequences, mean_contexts) -> np.ndarray:
        self.num_blocks += 1
        return super().generating(num_sequences, mean_contexts)


@pytest.mark.parametrize("more", [{"replicas": 4}, {"replicas": 4, "prefill_replicas": 2}], ids=str)
def test_steps_of_other_replicas_do_not_cut_a_block(more: dict):
    """Blocks are few for each request, and not one for each of its 500 tokens."""
    prices = Counts()
    chats = [one(30 + number, 500) for number in range(40)]
    server = Planned(Limits.of(4, 2048), prices, prefix_cache=False, **more)
    _, used = simulate_server(server, loaded(*chats, concurrency=10))
    assert used.steps > 4000
    assert prices.num_blocks < 12 * len(chats)


def test_pages_that_nobody_would_find_are_not_kept():
    """What is decided from the traffic changes nothing but the time that it takes."""
    chats = [one(90, 40, 3.0 * number) for number in range(40)]
    prefixes, _ = simulate_server(planned(), loaded(*chats, prefix_tokens=64))
    alone, used = simulate_server(planned(), loaded(*[one(154, 40, c.arrival_seconds) for c in chats]))
    assert used.cached_tokens == 0
    assert prefixes[-1].end_seconds < alone[-1].end_seconds
    scarce = Limits.of(4, 2048, num_pages=32)
    _, used = simulate_server(Planned(scarce, Fixed()), loaded(*[one(700, 500)] * 8))
    assert used.preempted and used.cached_tokens  # those that lost their pages find those of their prompts


CONFIG, LAYOUT = load_model("llama-3-8b"), Layout.of(tensor=4, compute_dtype="bf16")
MACHINE = load("h100:1x4")


@pytest.fixture(scope="module")
def steps() -> StepSeconds:
    return StepSeconds(CONFIG, LAYOUT, MACHINE, 512 + 64, 4096)


@pytest.mark.parametrize(("num_sequences", "context"), [(1, 4096), (64, 1024), (32, 64)])
def test_seconds_of_a_generate_step(steps: StepSeconds, num_sequences: int, context: int):
    cost, _ = pass_cost(CONFIG, LAYOUT.at("generate"), MACHINE, num_sequences, 1, context)
    assert steps.seconds(num_sequences, context, []) == pytest.approx(cost.seconds, rel=0.01)


def test_seconds_of_a_prompt(steps: StepSeconds):
    """It gathers blocks of its pages up to its end."""
    cost, _ = pass_cost(CONFIG, LAYOUT.at("prefill"), MACHINE, 1, 256, 1024)
    assert steps.seconds(0, 0, [(256, 1024)]) == pytest.approx(cost.seconds, rel=0.01)


def test_a_short_prompt_is_not_priced_as_a_long_one():
    """A block of 16 tokens on a CPU, whose products take the time of their rows."""
    machine, layout = load("cpu:1"), Layout.of(weights_dtype="f32", compute_dtype="f32")
    short = StepSeconds(load_model("demo"), layout, machine, 512 + 8, 512).seconds(0, 0, [(16, 16)])
    cost, _ = pass_cost(load_model("demo"), layout.at("prefill"), machine, 1, 16, 16)
    assert short == pytest.approx(cost.seconds, rel=0.05)


@pytest.mark.parametrize("ends", [(512, 512), (512, 128)])
def test_several_prompts_meet_the_keys_of_each(ends: tuple[int, int]):
    """64 tokens of each, on a CPU; 128 behind the longer one would meet many more."""
    machine, layout = load("cpu:1"), Layout.of(weights_dtype="f32", compute_dtype="f32")
    found = StepSeconds(CONFIG, layout, machine, 512, 512).seconds(0, 0, [(64, end) for end in ends])
    both = [pass_cost(CONFIG, layout.at("prefill"), machine, 2, 64, end)[0].seconds for end in ends]
    assert found == pytest.approx(sum(both) / 2, rel=0.03)


def test_prompts_and_answers_together_read_the_weights_once(steps: StepSeconds):
    apart = steps.seconds(32, 1024, []) + steps.seconds(0, 0, [(256, 1024)])
    together = steps.seconds(32, 1024, [(256, 1024)])
    assert steps.seconds(0, 0, [(256, 1024)]) < together < apart


def test_idle_seconds_are_those_that_the_runner_measures(steps: StepSeconds):
    limits = Limits.of(12, 1024)
    runner: Any = SimpleNamespace(
        limits=limits,
        _seconds={Shape(generate=n): steps.seconds(n, 0.0, []) for n in (1, 2, 4, 8, 12)},
        _idle_seconds=lambda shape, works: steps.seconds(shape.generate, *Batch(tuple(works)).figures[1:]),
    )
    idle = PaddedSteps(steps, limits, has_kernels=True).idle_seconds
    assert idle == JaxRunner._measured(runner)
    assert 0 < idle.prompt_token < idle.generate[0][1]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("has_kernels", [False, True])
def test_steps_are_filled_up_to_the_programs_that_the_server_has(seed: int, has_kernels: bool):
    """Rows and blocks are those of the shape that its runner takes for the same batch."""
    random = np.random.default_rng(seed)
    limits = Limits.of(int(random.integers(1, 12)), 1024, chunk=int(random.integers(1, 9)) * 64)
    shapes = Shapes(
        limits,
        num_drafts=0,
        has_fresh=has_kernels,
        num_sharing=1,
        reads_whole_tables=lambda num_queries: seed % 2 == 0,
    )
    num_blocks = int(random.integers(0, limits.chunk // limits.block + 1))
    num_others = int(random.integers(0 if num_blocks else 1, limits.num_slots + 1))
    works = [SequenceWork(None, 0, 300, [1], ()) for _ in range(num_others)]  # type: ignore[arg-type]
    start = int(random.choice([0, 64]))
    if num_blocks:
        count = num_blocks * limits.block - int(random.integers(0, 60))
        works.append(SequenceWork(None, 0, start, [1] * count, ()))  # type: ignore[arg-type]
    batch = Batch(tuple(works))
    shape = shapes.of(batch)
    rows, mean_context, chunks, _ = PaddedSteps(Fixed(), limits, has_kernels=has_kernels).filled_up(
        *batch.figures
    )
    assert rows == shape.generate
    assert sum(count for count, _ in chunks) == max(shape.blocks, shape.fresh) * limits.block
    assert rows * mean_context == pytest.approx(301 * num_others)


def test_prompts_that_are_filled_up_meet_their_own_keys():
    """A block that ends at position 1,024, beside blocks at the beginning of prompts."""
    steps = PaddedSteps(Fixed(), Limits.of(4, 2048), has_kernels=False)
    _, _, [(count, end)], _ = steps.filled_up(0, 0.0, [(64, 1024), (64, 64)], 0)
    assert count == 128
    assert count * (2 * end - count) == 64 * (2 * 1024 - 64) + 64 * 64
    _, _, [(filled, end)], _ = steps.filled_up(0, 0.0, [(64, 1024), (64, 64), (64, 64)], 0)
    assert filled == 256
    assert filled * (2 * end - filled) == pytest.approx(64 * (2 * 1024 - 64) + 2 * 64 * 64, abs=2 * filled)


@pytest.mark.parametrize(
    ("words", "replicas", "chunk", "block"),
    [({}, 1, 512, 16), ({"data": 2}, 2, 512, 16), ({"kv_replicas": 2, "cache": "batch"}, 2, 256, 16)],
)
def test_a_plan_has_the_slots_and_chunks_of_its_layout(
    words: dict[str, Any], replicas: int, chunk: int, block: int
):
    """The server and its simulation take them from here; kv_replicas=2 leaves sequences two caches."""
    limits = Limits.of_layout(load_model("demo"), Layout.of(**words), CPU, 8, 512)
    assert (limits.num_replicas, limits.slots_per_replica) == (replicas, 8 // replicas)
    assert (limits.chunk, limits.block) == (chunk, block)


def test_replicas_in_turn_leave_a_free_one_idle():
    """The third request follows a long one, while the other replica has already answered a short one."""
    chats = [one(64, 40), one(64, 4), one(64, 4, arrival=20.0)]
    waits = {}
    for in_turn in (False, True):
        server = replace(planned(in_turn=in_turn, replicas=2), limits=Limits.of(1, 2048))
        answers, _ = simulate_server(server, loaded(*chats))
        waits[in_turn] = answers[2].ttft_seconds
    assert waits[False] == 2 and waits[True] > 20
