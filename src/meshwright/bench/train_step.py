"""The effective memory bandwidth of training, from the time of a small training step.

XLA on CPU runs each reduction, exponential and transposed copy as a separate program, which the core limits
and not the memory. On one machine softmax, norm and SwiGLU reached between a third and all of the
streaming rate, and copies that transpose a fused gradient a tenth. A single stream does not show the rate of
this mixture. So a step is timed, and the bandwidth is fitted so that the cost model's price of the float32
step, with measured FLOPs and collectives, equals its time. step.memory_by_dtype has the shares of other
dtypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from meshwright.bench.regression import rate_of_time
from meshwright.bench.timing import Listener, Prepared, TimedCall, Timing, tell
from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_cost import StepPricer
from meshwright.dtypes import COMPUTED
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

_SEQUENCES_PER_DEVICE = 2
# Of steps that are timed. Any schedule will do: a step's time does not depend on it.
TIMED_OPTIMIZER = OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=0, total_steps=1000)


def sample_model() -> ModelConfig:
    """Two layers of a few million parameters: enough for every kind of operation, quick to compile."""
    return ModelConfig(
        name="calibration",
        num_layers=2,
        d_model=256,
        d_ff=768,
        num_heads=8,
        num_kv_heads=4,
        d_head=32,
        vocab_size=2048,
        max_seq_len=256,
    )


@dataclass(frozen=True)
class MeasuredStep:
    """The time of a data-parallel step of `config` on all devices."""

    config: ModelConfig
    layout: Layout
    workload: Workload
    timing: Timing

    def price(self, hardware: Hardware) -> float:
        """The cost model's seconds of this step."""
        shape = PassShape.of_microbatch(self.workload, self.layout)
        graph = record_training(self.config, hardware, self.layout, shape)
        return StepPricer(graph, self.layout, hardware).cost().seconds


def prepare(num_devices: int, progress: Listener, config: ModelConfig) -> Prepared[MeasuredStep]:
    """The step of `config` in every dtype."""
    workload = Workload(_SEQUENCES_PER_DEVICE * num_devices, config.max_seq_len)
    layouts = [Layout.of(data=num_devices, weights_dtype="f32", compute_dtype=dtype) for dtype in COMPUTED]
    programs: list[TimedCall] = []
    for layout in layouts:
        tell(progress, f"compiling a training step in {layout.precision.compute_dtype}")
        programs.append(step_program(config, layout, workload))
    return Prepared(
        programs,
        lambda timings: [
            MeasuredStep(config, layout, workload, timing)
            for layout, timing in zip(layouts, timings, strict=True)
        ],
    )


def step_program(config: ModelConfig, layout: Layout, workload: Workload) -> TimedCall:
    """The compiled training step of a model, as a call to be timed."""
    step = CompiledStep(config, layout, workload, TIMED_OPTIMIZER, chip_flops_per_second=1.0)
    abstract, rows = step.abstract_state(), step.abstract_tokens()
    with jax.set_mesh(step.mesh):
        compiled = step.jitted.lower(abstract, rows).compile()
    return repeated_step(compiled, jax.tree.map(_zeros, abstract), _zeros(rows))


def repeated_step(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, rows: Any) -> TimedCall:
    """A call that runs `step` on the same rows, each time from the state that it returned last."""

    def run() -> object:
        nonlocal state  # the step takes the old state's memory
        state, metrics = step(state, rows)
        return jax.block_until_ready((state, metrics))

    return run


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    # The time of a step does not depend on the values, and zeros need no program to compute them.
    assert leaf.sharding is not None
    local = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: local)


def with_effective_memory(measured: Sequence[MeasuredStep], hardware: Hardware) -> Hardware:
    """`hardware` with the memory bandwidth of the float32 step, and shares for the other dtypes.

    hardware: with all other figures measured, and the streaming rate as its bandwidth, which is the maximum
    of the fit. A step that is faster than its price at that rate has that rate.
    """
    rates = {step.layout.precision.compute_dtype: _fit(step, hardware) for step in measured}
    base = rates["f32"]
    shares = {dtype: min(1.0, rate / base) for dtype, rate in rates.items() if dtype != "f32"}
    efficiency = replace(hardware.chip.step, memory_by_dtype=shares)
    chip = replace(hardware.chip, hbm_bytes_per_second=base, step=efficiency)
    return replace(hardware, chip=chip)


def _fit(measured: MeasuredStep, hardware: Hardware) -> float:
    """The bandwidth whose price equals the measured time."""

    def price(bandwidth: float) -> float:
        return measured.price(replace(hardware, chip=replace(hardware.chip, hbm_bytes_per_second=bandwidth)))

    return rate_of_time(price, measured.timing.seconds, hardware.chip.hbm_bytes_per_second, 1e-3)
