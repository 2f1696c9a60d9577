"""Measured seconds of the training steps that `mw train` runs, next to the planned seconds."""

from collections.abc import Sequence

import numpy as np

from meshwright.bench.all_devices import local_hardware
from meshwright.bench.timing import Listener, Prepared, TimedCall, Timing, run_prepared, tell
from meshwright.bench.train_step import TIMED_OPTIMIZER, repeated_step
from meshwright.hardware import catalog
from meshwright.plan.train import price
from meshwright.plan_file import Plan
from meshwright.train.stage_step import training_step


def bench_training(plans: Sequence[Plan], progress: Listener = None) -> dict:
    """Seconds of the training step of each plan: `{"hardware", "results"}`.

    The steps run in turns, each with its own random weights and tokens. A result has model, layout,
    compute_dtype, num_sequences, seq_len, seconds (the median), predicted_seconds (the planned step),
    ratio (measured over predicted), spread and tokens_per_second. plans: all for the same hardware. Raises
    DeviceError if JAX does not have its devices.
    """
    hardware = local_hardware(plans[0].hardware)
    programs = []
    for plan in plans:
        tell(progress, f"compiling {plan.layout}")
        programs.append(_call(plan))

    def results(timings: Sequence[Timing]) -> list[dict]:
        return [_result(plan, timing) for plan, timing in zip(plans, timings, strict=True)]

    return {"hardware": hardware.spec, "results": run_prepared(Prepared(programs, results))}


def _call(plan: Plan) -> TimedCall:
    """A function that runs one training step of a plan. The step is compiled at the first call."""
    workload = plan.workload
    dtype = plan.layout.precision.compute_dtype
    step = training_step(
        plan.model,
        plan.layout,
        workload,
        TIMED_OPTIMIZER,
        options=plan.compiler,
        chip_flops_per_second=catalog.load(plan.hardware).chip.flops(dtype),
    )
    shape = (workload.num_sequences, workload.seq_len + 1)
    rows = np.random.default_rng(0).integers(0, plan.model.vocab_size, shape, np.int32)
    return repeated_step(step.step, step.init(0), rows)


def _result(plan: Plan, timing: Timing) -> dict:
    hardware = catalog.load(plan.hardware)
    predicted = price(plan.model, hardware, plan.workload, plan.layout).step_seconds
    return {
        "model": plan.model.name,
        "layout": str(plan.layout),
        "compute_dtype": plan.layout.precision.compute_dtype,
        "num_sequences": plan.workload.num_sequences,
        "seq_len": plan.workload.seq_len,
        "seconds": timing.seconds,
        "predicted_seconds": predicted,
        "ratio": timing.seconds / predicted,
        "spread": timing.spread,
        "tokens_per_second": plan.workload.num_tokens / timing.seconds,
    }
