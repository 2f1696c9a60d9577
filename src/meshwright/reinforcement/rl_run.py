"""Reinforcement learning from a plan, after JAX has its devices.

run/rl.json              its settings, in addition to settings.json
run/plan.generate.toml   the plan of a server that rolls out, if one was given
run/data/                prompts and tokenizer
"""

from dataclasses import replace
from pathlib import Path

import jax

from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.nn.policy_loss import ClippedPolicyLoss
from meshwright.plan_file import Plan, load_plan, save_plan
from meshwright.progress import Progress
from meshwright.reinforcement.apart import Apart
from meshwright.reinforcement.learner import RlStep
from meshwright.reinforcement.prompts import prepare_prompts
from meshwright.reinforcement.rewards import FunctionReward, JudgeReward, Reward
from meshwright.reinforcement.rollouts import Generator
from meshwright.reinforcement.settings import RlSettings, save_rl_settings
from meshwright.reinforcement.together import Together
from meshwright.train.job import TrainingJob
from meshwright.train.run import TrainingResult, given_tokenizer, learned, optimizer_config
from meshwright.train.settings import num_steps
from meshwright.train.step import CompiledStep

GENERATE_PLAN = "plan.generate.toml"
# Sequences of a replica at most, without a plan.
_MOST_SLOTS = 64


def carry_out_rl(job: TrainingJob, settings: RlSettings, report: Progress) -> TrainingResult:
    """Learn, and leave a folder that can be served and resumed."""
    plan = job.plan
    if jax.process_count() > 1:
        raise PlanError(f"--rl runs in one process, and there are {jax.process_count()}")
    reward = _reward(settings)
    prompts = prepare_prompts(
        str(job.settings.data),
        job.run / "data",
        vocab_size=plan.model.vocab_size,
        seq_len=plan.workload.seq_len,
        output_tokens=settings.output_tokens,
        tokenizer=given_tokenizer(job.settings),
    )
    epoch = max(1, len(prompts.prompts) // settings.prompts)
    last_step = num_steps(job.settings, epoch)
    schedule_steps = job.settings.schedule_steps or last_step
    trained = replace(job.settings, steps=last_step, schedule_steps=schedule_steps)
    high = settings.clip if settings.clip_high is None else settings.clip_high
    learner = CompiledStep(
        plan.model,
        plan.layout,
        plan.workload,
        optimizer_config(replace(trained, schedule_steps=schedule_steps * settings.updates)),
        chip_flops_per_second=catalog.load(plan.hardware).chip.flops(plan.layout.precision.compute_dtype),
        options=plan.compiler,
        start_from=Path(trained.from_) if trained.from_ else None,
        masked=True,
        objective=ClippedPolicyLoss(settings.clip, high, settings.kl),
    )
    server = _generate_plan(job, settings)
    report("starting the engine", None)
    generator = _generator(plan, server, settings, learner)
    tokenizer = replace(prompts.tokenizer, eos_ids=prompts.tokenizer.eos_ids or {prompts.end_of_text_id})
    try:
        step = RlStep(learner, generator, tokenizer, reward, settings, seed=trained.seed, num_steps=last_step)

        def describe() -> None:
            save_rl_settings(settings, job.run)
            if server is not None:
                save_plan(server, job.run / GENERATE_PLAN)

        return learned(
            job, trained, step, prompts, report, log_every=1, finds_spikes=False, on_begin=describe
        )
    finally:
        generator.close()


def _reward(settings: RlSettings) -> Reward:
    if settings.reward is not None:
        return FunctionReward(settings.reward)
    assert settings.judge is not None, "the settings have one of both"
    return JudgeReward(settings.judge, Path(settings.judge_template) if settings.judge_template else None)


def _generate_plan(job: TrainingJob, settings: RlSettings) -> Plan | None:
    """The plan of a server that rolls out: the run's, or the given one."""
    stored = job.run / GENERATE_PLAN
    path = stored if job.resume else Path(settings.generate_plan) if settings.generate_plan else None
    if path is None or not (path.is_file() or settings.generate_plan):
        return None
    made = load_plan(path)
    if made.model != job.plan.model:
        raise PlanError(f"{path}: is of {made.model.name}, and the trainer's plan of {job.plan.model.name}")
    return made


def _generator(plan: Plan, server: Plan | None, settings: RlSettings, learner: CompiledStep) -> Generator:
    hardware = server.hardware if server is not None and settings.apart else plan.hardware
    num_devices = catalog.load(hardware).num_chips if settings.apart else learner.mesh.size
    layout, slots = _served(plan, server, num_devices, settings)
    sizes = {"num_slots": slots, "context": plan.workload.seq_len}
    if settings.apart:
        return Apart(plan.model, plan.layout, learner.mesh, layout, (plan.hardware, hardware), **sizes)
    machine = catalog.load(plan.hardware)
    return Together(plan.model, plan.layout, learner.mesh, layout, machine, **sizes)


def _served(plan: Plan, server: Plan | None, num_devices: int, settings: RlSettings) -> tuple[Layout, int]:
    """The layout of all servers as one, with replicas as data ranks, and its sequences."""
    if server is None:
        precision = plan.layout.precision
        single = Layout.of(
            data=1, weights_dtype=precision.weights_dtype, compute_dtype=precision.compute_dtype
        )
        slots = min(_MOST_SLOTS, -(-settings.num_rollouts // num_devices))
    else:
        single, slots = server.layout.at("generate"), server.workload.num_sequences
    replicas, rest = divmod(num_devices, single.mesh.num_devices)
    if rest or not replicas:
        raise PlanError(
            f"--generate-plan: the layout {single} has {single.mesh.num_devices} devices, which do not "
            f"divide the {num_devices} that roll out"
        )
    return single.replace(data=single.data * replicas), slots * replicas
