"""Comparison of a layout's loss and gradients with one device's, on a tiny model.

The model has the features of the planned one (norms, positions, heads per KV head, windows, biases, experts,
latents) and small dimensions. The layout keeps its options; each of its degrees above one becomes two.
Numbers are float32, in which a layout changes only the order of sums. It runs on virtual CPU devices in a
separate process, since their number is fixed when JAX starts.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from meshwright.audit.compile.compile import error_line
from meshwright.errors import AuditError, LayoutError
from meshwright.layout import Layout
from meshwright.layout.axes import DEGREES, EXPERT, EXPERT_NODES, FSDP
from meshwright.layout.fit import check_fits
from meshwright.layout.workload import Workload
from meshwright.models.config import MLA, ModelConfig, MoE, RopeScaling
from meshwright.models.mixers import MIXERS, StateMixer
from meshwright.plan_file import PLAN_FILE, Plan, load_plan, save_plan

# Relative to a tensor's largest entry. Sums of some hundred terms differ by about ten roundings of 1.2e-7.
_TOLERANCE = 1e-5
# Gradients below this share of the largest tensor's are rounding: the bias of keys has no gradient.
_NEGLIGIBLE = 1e-6
_SHRUNK = (*DEGREES, "interleave", "microbatches")
_SEQ_LEN, _VOCAB, _D_HEAD, _ROPE_DIM, _LOCAL = 16, 64, 8, 4, 5
_MOST_SECONDS = 300


def check_numerics(plan: Plan) -> dict[str, Any]:
    """loss and gradients[] under the plan's layout and on one device, their differences, and `agrees`.

    difference: relative to the tensor's largest entry; None if a number is not finite. Raises AuditError if
    the small model does not run under the layout.
    """
    small = tiny_plan(plan)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count="
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags}{small.layout.mesh.num_devices}",
    }
    with tempfile.TemporaryDirectory(prefix="meshwright-numerics-") as folder:
        save_plan(small, Path(folder) / PLAN_FILE)
        command = [sys.executable, "-m", "meshwright.audit.numerics", folder]
        try:
            ran = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise AuditError(f"{small.layout}: the tiny model ran for over {_MOST_SECONDS} s") from None
        if ran.returncode:
            why = error_line(ran.stderr, ran.returncode)
            raise AuditError(f"{small.layout}: the tiny model does not run: {why}")
        return json.loads(ran.stdout.splitlines()[-1])


def tiny_plan(plan: Plan) -> Plan:
    """The plan with a model, a batch and degrees that a laptop runs in seconds."""
    degrees = {name: min(2, plan.layout.word(name)) for name in _SHRUNK}
    if plan.layout.degree(EXPERT_NODES.name) > 1:  # two nodes of two devices each
        degrees |= {FSDP.name: 4, EXPERT.name: 4}
    layout = plan.layout.replace(
        **degrees,
        weights_dtype="f32",
        compute_dtype="f32",
        gradients_dtype=None,
    )
    model = tiny_model(plan.model)
    if layout.pipe > 1:
        layout, model = _of_stages(plan, layout, model)
    ranks = layout.data * layout.fsdp * layout.schedule.microbatches
    return Plan(model, "cpu:1", Workload(2 * ranks, _SEQ_LEN), layout)


def _of_stages(plan: Plan, layout: Layout, model: ModelConfig) -> tuple[Layout, ModelConfig]:
    """The fewest microbatches and layers that the schedule and all stages accept.

    Both unchanged if no numbers up to the plan's do; the step then raises the reason.
    """
    for microbatches in range(layout.schedule.microbatches, plan.layout.schedule.microbatches + 1):
        for num_layers in range(model.num_layers, plan.model.num_layers + 1):
            candidate = layout.replace(microbatches=microbatches), replace(model, num_layers=num_layers)
            with suppress(LayoutError):
                check_fits(candidate[0], candidate[1])
                return candidate
    return layout, model


def tiny_model(config: ModelConfig) -> ModelConfig:
    """A model with the features of `config` and small dimensions."""
    num_kv_heads = min(4, config.num_kv_heads)
    num_heads = num_kv_heads * min(2, config.num_heads // config.num_kv_heads)
    mla = config.mla and MLA(
        kv_rank=16,
        nope_dim=_D_HEAD - _ROPE_DIM,
        rope_dim=_ROPE_DIM,
        value_dim=_D_HEAD,
        q_rank=config.mla.q_rank and 12,
    )
    rotary_dim = config.rotary_dim and _D_HEAD // 2
    return replace(
        config,
        num_layers=_fewest_layers(config),
        d_model=32,
        d_ff=64,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_head=_D_HEAD,
        rotary_dim=rotary_dim,
        vocab_size=_VOCAB,
        max_seq_len=4 * _SEQ_LEN,
        sliding_window=config.sliding_window and _LOCAL,
        attention_chunk=config.attention_chunk and _LOCAL,
        temperature_floor=config.temperature_floor and _LOCAL,
        moe=config.moe and _tiny_experts(config.moe),
        mla=mla,
        **_tiny_mixer(config),
        rope_scaling=config.rope_scaling
        and _first_factors(config.rope_scaling, (rotary_dim or (_ROPE_DIM if mla else _D_HEAD)) // 2),
    )


def _fewest_layers(config: ModelConfig) -> int:
    """Number of the model's first layers that include every kind."""
    of_experts = min(1, config.moe.num_dense_layers) + 2 * config.moe.every if config.moe else 2
    each = config.layers_per_cache
    periods = (config.global_every + 1, config.nope_every + 1, 2 * each if each > 1 else 2)
    fewest = max(of_experts, *periods, _first_of_all_kinds(config) if config.mixers else 1)
    return min(config.num_layers, -(-fewest // each) * each)


def _first_of_all_kinds(config: ModelConfig) -> int:
    """The fewest first layers with every kind of mixer and feed-forward."""
    kinds = {layer.kind for layer in config.layers}
    found: set[object] = set()
    for number, layer in enumerate(config.layers, 1):
        found.add(layer.kind)
        if found == kinds:
            return number
    return config.num_layers


def _tiny_mixer(config: ModelConfig) -> dict[str, StateMixer]:
    """The field of a model's mixer with a state, with few heads of few dimensions."""
    mixer = config.state_mixer
    if mixer is None:
        return {}
    few = {"num_key_heads": 2, "num_value_heads": 4, "num_heads": 4, "num_groups": 2}
    few |= dict.fromkeys(("key_dim", "value_dim", "head_dim", "state_dim", "rank"), 8)
    sizes = {one.name: few[one.name] for one in fields(mixer) if one.name in few}
    kept = {name: min(size, getattr(mixer, name)) for name, size in sizes.items() if getattr(mixer, name)}
    return {name: replace(mixer, **kept) for name in MIXERS if getattr(config, name) is mixer}


def _tiny_experts(moe: MoE) -> MoE:
    """At most eight experts, in groups of at least two, after at most one dense layer."""
    return replace(
        moe,
        num_experts=min(8, moe.num_experts),
        experts_per_token=min(2, moe.experts_per_token),
        d_ff=16,
        d_ff_shared=moe.d_ff_shared and 16,
        num_dense_layers=min(1, moe.num_dense_layers),
        num_groups=min(4, moe.num_groups),
        groups_per_token=min(2, moe.groups_per_token),
    )


def _first_factors(scaling: RopeScaling, num_pairs: int) -> RopeScaling:
    """LongRoPE's first `num_pairs` factors, of the pairs that turn fastest."""
    return replace(
        scaling,
        short_factor=scaling.short_factor and scaling.short_factor[:num_pairs],
        long_factor=scaling.long_factor and scaling.long_factor[:num_pairs],
    )


def numerics_report(
    loss: float, gradients: Mapping[str, Any], loss_alone: float, gradients_alone: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of two runs: arrays by path, under the layout and on one device."""
    import numpy as np

    largest = max(float(np.abs(one).max()) for one in gradients_alone.values())
    rows = []
    for path, alone in gradients_alone.items():
        scale = max(float(np.abs(alone).max()), _NEGLIGIBLE * largest)
        rows.append({"tensor": path, "difference": _finite(np.abs(gradients[path] - alone).max() / scale)})
    difference = _finite(abs(loss - loss_alone) / abs(loss_alone))
    worst = max(rows, key=lambda row: _or_infinite(row["difference"]))
    return {
        "agrees": max(map(_or_infinite, (difference, worst["difference"]))) <= _TOLERANCE,
        "tolerance": _TOLERANCE,
        "loss": {"layout": _finite(loss), "one_device": _finite(loss_alone), "difference": difference},
        "gradients": rows,
        "worst": worst,
    }


def _finite(value: float) -> float | None:
    """A number for JSON; None for inf and nan."""
    return float(value) if isfinite(value) else None


def _or_infinite(value: float | None) -> float:
    return inf if value is None else value


def _compare_here(folder: Path) -> dict[str, Any]:
    """Both runs, one after the other, in this process."""
    plan = load_plan(folder / PLAN_FILE)
    one_device = Layout.of(weights_dtype="f32", compute_dtype="f32")
    report = numerics_report(*_run(plan, plan.layout), *_run(plan, one_device))
    return {"layout": str(plan.layout), "devices": plan.layout.mesh.num_devices, **report}


def _run(plan: Plan, layout: Layout) -> tuple[float, dict[str, Any]]:
    """Loss and gradients, by path, of the same parameters and tokens."""
    import jax
    import numpy as np

    from meshwright.nn.params import init_params
    from meshwright.nn.start.device_mesh import device_mesh
    from meshwright.train.optimizers import OptimizerConfig
    from meshwright.train.stage_step import training_step

    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
    step = training_step(plan.model, layout, plan.workload, optimizer, chip_flops_per_second=1.0)
    one_device = Layout.of(weights_dtype="f32", compute_dtype="f32")
    params = init_params(plan.model, one_device, device_mesh(one_device), seed=0)
    whole = jax.tree.map(np.asarray, params)
    shape = (plan.workload.num_sequences, plan.workload.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, plan.model.vocab_size, shape, dtype=np.int32)
    loss, gradients = step.whole_gradients(whole, tokens)
    return loss, {path: np.asarray(array, np.float32) for path, array in gradients.items()}


if __name__ == "__main__":
    print(json.dumps(_compare_here(Path(sys.argv[1]))))
