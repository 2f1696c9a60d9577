"""Plans of post-training: the parts of a step by hand, and what must hold of every form."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.cost.weights_move import weights_move
from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.load.simulator import Planned, simulate_server
from meshwright.load.traffic import Chat, Load
from meshwright.models.count import kv_bytes_per_token
from meshwright.plan.serve.steps import StepSeconds
from meshwright.plan.train import price
from meshwright.post_training import two_phases as step_module
from meshwright.post_training.rollout_pool import best_rollouts, generators, server_ends
from meshwright.post_training.two_phases import (
    Question,
    apart,
    best_trainer,
    crossing_layout,
    crossover,
    idle_share,
    least_training_seconds,
    score_seconds,
    together,
    workload_of,
)
from meshwright.post_training.work import PostTraining
from meshwright.serve.engine.limits import Limits

WORK = PostTraining(prompts=32, prompt_tokens=256, output_tokens=512, samples=4)
CONFIG, MACHINE = mw.model("llama-3-8b"), catalog.load("h100:2x8")
ASKED = Question(CONFIG, MACHINE, WORK, "bf16", ("bf16",))


@pytest.fixture(scope="module")
def steps() -> list:
    found = list(together(ASKED))
    return [*found, *apart(ASKED, found[0])]


def test_lengths_have_their_mean_and_are_cut() -> None:
    work = replace(WORK, prompts=2000, spread=1.0)
    answers = [turn.output_tokens for turn in work.turns]
    assert len(answers) == 8000 and max(answers) == work.longest_answer == 2048
    assert sum(answers) / len(answers) == pytest.approx(512, rel=0.1)  # the cut takes a part of the mean
    exact = replace(WORK, spread=0.0)
    assert exact.num_tokens == 32 * 4 * (256 + 512) and exact.num_updates == 1
    assert replace(exact, train_tokens=exact.num_tokens // 4).num_updates == 4


def test_one_simulated_server_has_the_longest_rollout() -> None:
    shares = WORK.shares(8, 3)
    assert len(shares) == 3 and sum(map(len, WORK.shares(8, 8))) == WORK.num_rollouts
    longest = max(turn.output_tokens for turn in WORK.turns)
    assert max(turn.output_tokens for share in shares for turn in share) == longest


def test_a_step_is_its_phases(steps: list) -> None:
    assert {step.form for step in steps} == {"together, kept", "together, offloaded", "apart"}
    for step in steps:
        assert 0 <= step.idle_share < 1
        ends = [phase.start_seconds + phase.seconds for phase in step.phases]
        assert max(ends) == pytest.approx(step.seconds)
        if not step.staleness:  # one phase after another
            assert sum(phase.seconds for phase in step.phases) == pytest.approx(step.seconds)
        for needed in step.needed_bytes.values():
            assert needed <= MACHINE.chip.program_bytes
        assert step.num_chips == 16 and step.price == pytest.approx(10.8 * 16 * step.seconds / 3600)


def test_states_wait_in_the_host_or_take_memory(steps: list) -> None:
    kept, offloaded = (next(s for s in steps if s.form.endswith(word)) for word in ("kept", "offloaded"))
    states = kept.trainer.memory.weights + kept.trainer.memory.optimizer
    assert kept.needed_bytes["roll out"] - kept.rollouts.needed_bytes == states
    assert kept.resident_bytes - kept.rollouts.weights_bytes == states
    cache = kept.rollouts.needed_bytes - kept.rollouts.weights_bytes
    tokens = kept.rollouts.generator.slots * (256 + 512)
    chips = kept.rollouts.generator.machine.num_chips
    assert cache == pytest.approx(kv_bytes_per_token(CONFIG) * tokens / chips, rel=0.05)
    swaps = [phase.seconds for phase in offloaded.phases if "host" in phase.what]
    assert swaps == pytest.approx([states / MACHINE.chip.host_link_bytes_per_second] * 2)


def test_idle_chips_of_two_pools_by_hand(steps: list) -> None:
    step = next(step for step in steps if step.form == "apart")
    by_what = {phase.what: phase for phase in step.phases}
    trains, rolls = step.trainer.hardware.num_chips, step.rollouts.generator.num_chips
    busy = trains * (by_what["score"].seconds + by_what["train"].seconds)
    busy += rolls * step.rollouts.seconds * (1 - step.rollouts.idle_share)
    busy += 16 * by_what["move weights"].seconds
    assert step.idle_share == pytest.approx(1 - busy / (16 * step.seconds))


def test_pools_wait_for_the_slower() -> None:
    """4 chips wait for 3 of 10 seconds, and 2 for none; all move weights for 2."""
    share = idle_share({"train": 4, "roll out": 2}, {"train": 7.0, "roll out": 10.0}, 2.0)
    assert share == pytest.approx(4 * 3 / (6 * 12))
    share = idle_share({"train": 4, "roll out": 2}, {"train": 7.0, "roll out": 10.0}, 2.0, messages=1.0)
    assert share == pytest.approx((4 * 4 + 2 * 1) / (6 * 13))


def test_rollouts_of_a_sequence_attend_within_themselves() -> None:
    """Training takes as long as with sequences of the mean length of a rollout, weighted by tokens."""
    workload = workload_of(ASKED)
    lengths = [turn.prompt_tokens + turn.output_tokens for turn in WORK.turns]
    mean = sum(length * length for length in lengths) / sum(lengths)
    assert workload.document_tokens == round(mean) and mean < workload.seq_len
    layout = Layout.of(fsdp=8, tensor=2)
    packed, whole = (
        price(CONFIG, MACHINE, Workload(64, 8192, document_tokens=document), layout).step_seconds
        for document in (2048, None)
    )
    short = price(CONFIG, MACHINE, Workload(256, 2048), layout).step_seconds
    assert packed < whole and packed == pytest.approx(short, rel=0.02)


def test_longer_rollouts_take_longer(steps: list) -> None:
    rows = crossover(ASKED, steps[0], steps[-1], (0.5, 1.0, 2.0))
    for form in (steps[0].form, steps[-1].form):
        seconds = [row[form] for row in rows]
        assert seconds == sorted(seconds)
    assert rows[1][steps[0].form] == pytest.approx(steps[0].seconds)


def test_a_judge_and_a_reference_take_time() -> None:
    [generator, *_] = generators(CONFIG, MACHINE, WORK, 0.0, "bf16")
    without = score_seconds(replace(ASKED, reference=False), generator)
    assert score_seconds(ASKED, generator) == pytest.approx(2 * without)
    judged = replace(ASKED, judge=mw.model("llama-3-70b"))
    assert score_seconds(judged, generator) > 3 * score_seconds(ASKED, generator)


def test_less_memory_means_fewer_sequences_or_no_server() -> None:
    free = best_rollouts(CONFIG, MACHINE, WORK, 0.0, "bf16").generator
    held = best_rollouts(CONFIG, MACHINE, WORK, 60e9, "bf16").generator
    assert held.slots / held.machine.num_chips <= free.slots / free.machine.num_chips
    with pytest.raises(PlanError, match=r"no server fits h100:2x8 with 81\.1 GB a chip taken"):
        generators(CONFIG, MACHINE, WORK, 81.1e9, "bf16")


def test_a_cut_below_the_mean_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="--most-output-tokens 100 is below the mean of 512"):
        replace(WORK, most_output_tokens=100)


def test_pools_that_cannot_be_faster_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower bound above the best step leaves out the search of a trainer, and a true bound is lower."""
    searched: list[int] = []

    def counted(question: Question, machine: Hardware) -> tuple:
        searched.append(machine.num_chips)
        return best_trainer(question, machine)

    asked = replace(ASKED, machine=catalog.load("h100:4x8"))
    monkeypatch.setattr(step_module, "best_trainer", counted)
    fastest = list(apart(asked, None))[-1]
    assert least_training_seconds(asked, fastest.trainer.hardware) < fastest.trainer.step_seconds
    assert searched[0] == 16 and len(searched) > 1
    searched.clear()
    monkeypatch.setattr(step_module, "least_training_seconds", lambda asked, machine: 1e9)
    assert len(list(apart(asked, None))) == 1 and searched == [16]


@pytest.mark.slow
def test_the_split_of_the_chips_is_the_best_of_all(steps: list) -> None:
    """By every split of 4 nodes, one after another."""
    asked = replace(ASKED, machine=catalog.load("h100:4x8"))
    every = []
    for number in (8, 16, 24):
        pools = step_module._pools_of(asked, number)
        every.append(step_module._at_once(pools, best_trainer(asked, pools.trains)).seconds)
    near = next(together(asked))
    assert list(apart(asked, near))[-1].seconds == min(every)


def test_a_pool_of_any_size_receives_weights() -> None:
    """96 chips do not divide a model dimension of 5,120: three copies over 32 chips do."""
    model, pool = mw.model("qwen3-32b"), catalog.load("h100:12x8")
    crossing = crossing_layout(model, 96)
    assert (crossing.degree("data"), crossing.degree("fsdp")) == (3, 32)
    move = weights_move(model, crossing, Layout.of(data=24, tensor=4), pool)
    assert move.seconds > 0


def test_the_size_of_pages_changes_no_rollouts() -> None:
    [generator, *_] = generators(CONFIG, MACHINE, WORK, 0.0, "bf16")
    [first, *others] = server_ends(CONFIG, generator, WORK)
    limits = Limits.of_layout(CONFIG, generator.layout, MACHINE.chip.platform, generator.slots, WORK.context)
    prices = StepSeconds(CONFIG, generator.layout, generator.machine, limits.max_step_tokens(0), WORK.context)
    chats = [Chat(0.0, (turn,)) for turn in WORK.shares(generator.replicas, 1)[0]]
    answers, _ = simulate_server(Planned(limits, prices, prefix_cache=False), Load(chats, None))
    assert first == max(answer.end_seconds for answer in answers)
    assert server_ends(CONFIG, generator, WORK, within=first) == ()
    assert others
