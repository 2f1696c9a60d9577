"""A run's checkpoint moved to another layout, as a run that goes on there."""

import shutil
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import CheckpointError, PlanError
from meshwright.files import parse_json, read_text
from meshwright.hardware import catalog
from meshwright.nn.files import checkpoint, checkpoint_files
from meshwright.nn.params import abstract_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import PLAN_FILE, Plan, load_plan, save_plan
from meshwright.reinforcement.learner import RlState
from meshwright.reinforcement.settings import RL_SETTINGS
from meshwright.reinforcement.weights_mover import WeightsMover
from meshwright.train.run import optimizer_config
from meshwright.train.settings import load_settings
from meshwright.train.stage_step import training_step


def check_moves(run: Path, after: Plan, output: Path) -> Plan:
    """The plan of the run. Raises an error if its checkpoint cannot go on under `after` in `output`."""
    before = load_plan(run / PLAN_FILE)
    if not checkpoint_files.checkpoint_steps(run / checkpoint_files.CHECKPOINTS):
        raise CheckpointError(f"run {run}: has no checkpoint")
    if output.exists() and any(output.iterdir()):
        raise CheckpointError(f"--out {output}: holds files already; name another folder")
    if before.model != after.model:
        first, second = asdict(before.model), asdict(after.model)
        compared = (field.name for field in fields(before.model) if field.compare)
        name = next(name for name in compared if first[name] != second[name])
        raise PlanError(
            f"run {run}: trains a model with {name} = {first[name]!s:.60}, and the plan's has "
            f"{second[name]!s:.60}; fits: a plan with --model {run}"
        )
    if after.workload.phase != "train" or after.workload.seq_len != before.workload.seq_len:
        raise PlanError(
            f"run {run}: trains rows of T = {before.workload.seq_len}; fits: a plan of mw plan train with "
            f"--seq-len {before.workload.seq_len}"
        )
    first, second = before.layout.precision, after.layout.precision
    for name in ("weights_dtype", "optimizer_dtype", "optimizer", "master_weights"):
        if getattr(first, name) != getattr(second, name):
            raise PlanError(
                f"run {run}: has {name} = {getattr(first, name)} and the plan {getattr(second, name)}; a "
                f"checkpoint moves as it is; fits: {name}={getattr(first, name)}"
            )
    return before


def move_run(run: Path, after: Plan, output: Path) -> dict[str, Any]:
    """Write the last sound checkpoint of `run` to `output`, moved to the layout of `after`; its figures.

    Weights move by the planned collectives if both layouts have the same devices; otherwise, like the
    optimizer's state, they are read onto their new shards. JAX has the devices. Raises CheckpointError.
    """
    before, checkpoints = load_plan(run / PLAN_FILE), run / checkpoint_files.CHECKPOINTS
    settings = load_settings(run)
    if settings is None:
        raise CheckpointError(f"run {run}: has no settings.json; name the folder of a run of mw train")
    machine = catalog.load(after.hardware)
    step = training_step(
        after.model,
        after.layout,
        after.workload,
        optimizer_config(settings),
        chip_flops_per_second=machine.chip.flops(after.layout.precision.compute_dtype),
    )
    abstract = step.abstract_state()
    if _keeps_weights_behind(run):
        abstract = RlState(abstract.params, abstract.opt_state, abstract.num_updates, abstract.params)
    state, position, number = checkpoint.restore(checkpoints, abstract)
    seconds = None
    same_devices = before.layout.mesh.num_devices == after.layout.mesh.num_devices
    if same_devices and not (before.layout.stage_programs or after.layout.stage_programs):
        mesh = device_mesh(before.layout)
        params = checkpoint.restore_params(
            checkpoints, abstract_params(before.model, before.layout, mesh), number
        )
        mover = WeightsMover(before.model, before.layout, after.layout, mesh, machine)
        mover(params)  # compiles
        started = time.perf_counter()
        moved = jax.block_until_ready(mover(params))
        seconds = time.perf_counter() - started
        where = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
        state = replace(state, params=jax.device_put(moved, where))
    output.mkdir(parents=True, exist_ok=True)
    _copy(run, output)
    save_plan(after, output / PLAN_FILE)
    saver = checkpoint.Saver(output / checkpoint_files.CHECKPOINTS, keep=1)
    saver.save(number, state, position)
    saver.close()
    return {"run": str(output), "step": number, "move_seconds": seconds}


def _keeps_weights_behind(run: Path) -> bool:
    path = run / RL_SETTINGS
    return path.is_file() and bool(parse_json(read_text(path, CheckpointError)).get("staleness"))


def _copy(run: Path, output: Path) -> None:
    """Copy the files of a run except its plan and checkpoints."""
    for path in run.iterdir():
        if path.name in (PLAN_FILE, "plan.json", checkpoint_files.CHECKPOINTS) or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, output / path.name)
        else:
            shutil.copyfile(path, output / path.name)
