"""mw reshard: what moving a model's weights from one layout to another takes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import CHANGES, JSON, emit, load_hardware, load_model_with, show, waiting
from meshwright.cli.extras import require
from meshwright.cost.weights_move import WeightsMove, weights_move
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes import DATA
from meshwright.layout.layout_checks import layout_for
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.nn.start.devices import use_devices_of
from meshwright.options import option
from meshwright.plan_file import PLAN_FILE, Plan, load_plan
from meshwright.report.moves import moves_table
from meshwright.report.text import seconds_text
from meshwright.units import format_bytes

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def reshard(
    before: Annotated[str, typer.Argument(help="The layout of today: a plan.toml, a run, or fsdp=64.")],
    after: Annotated[str, typer.Argument(help="The layout to move to: a plan.toml, or data=8,tensor=8.")],
    model: str | None = option(None, help="A preset, a config.json, a folder or a TOML.", unset="the plan's"),
    hardware: str | None = option(None, help="The machine of both layouts.", unset="the larger plan's"),
    changes: str | None = CHANGES,
    output: Path | None = option(
        None, flag="--out", help="Move the run's checkpoint, and write it as a run that goes on there."
    ),
    audit: bool = option(False, help="Compile the move and compare the emitted bytes with the planned ones."),
    target: str | None = option(None, help="The compiler of --audit: cpu, tpu, gpu.", unset="cpu"),
    run: bool = option(False, help="Run every move on virtual devices and compare with the derived bytes."),
    as_json: bool = JSON,
) -> None:
    """Derive and price the collectives that move a model's weights from one layout to another.

    Exits 1 if a move that is run emits other collectives or gives another array, or if the compiled program
    sends bytes that differ by more than 2%.

    \b
    mw reshard fsdp=64 data=8,tensor=8 --model qwen3-32b --hardware h100:8x8
    mw reshard train.toml serve.toml
    mw reshard runs/demo other.toml --out runs/moved
    """
    plans = [_plan(one) for one in (before, after)]
    if output is not None:
        _check_moves(before, plans[1], output)
    config = _model(model, changes, plans)
    machine = _machine(hardware, plans)
    dtype = machine.chip.platform.dtype
    layouts = [
        _of_machine(plan, machine) if plan else layout_for(config, text, weights_dtype=dtype)
        for plan, text in zip(plans, (before, after), strict=True)
    ]
    move = weights_move(config, layouts[0], layouts[1], machine)
    document = reshard_document(config, machine, layouts, move)
    if run:
        require("run")
        with waiting("running the moves on virtual devices"):
            document["ran"] = _run(config, move)
    if audit:
        require("run")
        document["audit"] = _audit(config, layouts, machine, target or "cpu")
    if output is not None:
        require("run")
        document["moved"] = _move(Path(before), plans, output)
    if as_json:
        emit(document)
    else:
        from meshwright.report.terminal.tables import rich_table  # only now, since importing rich takes time

        table = rich_table(moves_table("", document["moves"]))
        show(*_lines(document), table, *_ran_lines(document))
    ran = [*document.get("ran", []), *([document["audit"]] if audit else [])]
    if any(one["differs"] for one in ran):
        raise typer.Exit(1)


def _plan(written: str) -> Plan | None:
    """The plan of a file or of a run's folder; None for a layout."""
    if written.endswith(".toml"):
        return load_plan(Path(written))
    return load_plan(Path(written) / PLAN_FILE) if (Path(written) / PLAN_FILE).is_file() else None


def _of_machine(plan: Plan, machine: Hardware) -> Layout:
    """The layout of a plan on the whole machine.

    The plan of a server is for the chips of one replica; the machine has the most replicas that fit.
    """
    layout, chips = plan.layout, plan.layout.mesh.num_devices
    if plan.workload.phase == "train" or machine.num_chips % chips:
        return layout
    return layout.replace(data=layout.degree(DATA.name) * (machine.num_chips // chips))


def _check_moves(run: str, after: Plan | None, output: Path) -> None:
    if after is None or not (Path(run) / PLAN_FILE).is_file():
        lacks = f"{run} has no {PLAN_FILE}" if after else "the layout to move to is not a plan"
        raise PlanError(f"--out moves a run, and {lacks}; mw reshard runs/demo plan.toml --out runs/moved")
    require("run")
    use_devices_of(catalog.load(after.hardware))
    from meshwright.reinforcement.checkpoint_move import check_moves

    check_moves(Path(run), after, output)


def _move(run: Path, plans: list[Plan | None], output: Path) -> dict[str, Any]:
    from meshwright.reinforcement.checkpoint_move import move_run

    after = plans[1]
    assert after is not None, "_check_moves refuses a move without a plan"
    with waiting("moving the checkpoint"):
        return move_run(run, after, output)


def _audit(config: ModelConfig, layouts: list[Layout], machine: Hardware, target: str) -> dict[str, Any]:
    from meshwright.audit.compile.targets import choose_target
    from meshwright.audit.moved_weights import ReshardJob, audit_reshard

    chosen = choose_target(machine.spec, layouts[0], target)
    with waiting(f"compiling the move with {chosen.title}"):
        return audit_reshard(ReshardJob(config, layouts[0], layouts[1], machine.spec), chosen)


def _model(model: str | None, changes: str | None, plans: list[Plan | None]) -> ModelConfig:
    known = [plan.model for plan in plans if plan]
    if model is None and not known:
        raise PlanError("two layouts without a plan need --model qwen3-32b and --hardware h100:8x8")
    config = load_model_with(model, changes) if model else known[0]
    if other := next((one for one in known if one != config and not model), None):
        raise PlanError(f"the plans are of {config.name} and of {other.name}; name the model with --model")
    return config


def _machine(hardware: str | None, plans: list[Plan | None]) -> Hardware:
    known = [plan.hardware for plan in plans if plan]
    if hardware is None and not known:
        raise PlanError("two layouts without a plan need --hardware h100:8x8")
    if hardware:
        return load_hardware(hardware)
    return max((load_hardware(spec) for spec in known), key=lambda machine: machine.num_chips)


def reshard_document(
    config: ModelConfig, machine: Hardware, layouts: list[Layout], move: WeightsMove
) -> dict[str, Any]:
    """The document of `mw reshard`."""
    peak_bytes = {
        f"{'in place' if in_place else 'both copies'}, {'by layer' if by_layer else 'whole stacks'}": round(
            move.peak_bytes(in_place=in_place, by_layer=by_layer)
        )
        for in_place in (True, False)
        for by_layer in (True, False)
    }
    return {
        "model": config.name,
        "hardware": machine.spec,
        "before": str(layouts[0]),
        "after": str(layouts[1]),
        "dtype": move.dtype,
        "mesh": dict(move.shared.mesh.sizes),
        "axes": {
            "before": {axis: list(parts) for axis, parts in move.shared.before.items()},
            "after": {axis: list(parts) for axis, parts in move.shared.after.items()},
        },
        "seconds": move.seconds,
        "sent_bytes": round(move.sent_bytes),
        "bytes_before": round(move.bytes_before),
        "bytes_after": round(move.bytes_after),
        "peak_bytes": peak_bytes,
        "moves": move.rows(),
    }


def _lines(document: dict[str, Any]) -> list[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in document["mesh"].items())
    axes = "; ".join(
        f"{axis} {side} is {' x '.join(parts)}"
        for side in ("before", "after")
        for axis, parts in document["axes"][side].items()
        if parts != [axis]
    )
    peaks = "; ".join(f"{way}: {format_bytes(size)}" for way, size in document["peak_bytes"].items())
    return [
        f"{document['model']} on {document['hardware']}: {document['before']} -> {document['after']}, "
        f"weights travel in {document['dtype']}",
        f"mesh of both: {mesh}{f' ({axes})' if axes else ''}",
        f"{seconds_text(document['seconds'])}; each chip sends {format_bytes(document['sent_bytes'])} and "
        f"has {format_bytes(document['bytes_before'])} of weights before, "
        f"{format_bytes(document['bytes_after'])} after",
        f"most weights on a chip during the move: {peaks}",
    ]


def _run(config: ModelConfig, move: WeightsMove) -> list[dict[str, Any]]:
    """The result of each move that communicates, run on virtual devices."""
    from meshwright.audit.shard.on_devices import MAX_DEVICES, run_reshard

    if (number := move.shared.mesh.num_devices) > MAX_DEVICES:
        raise PlanError(f"--run has {MAX_DEVICES} virtual devices at most, and the layouts {number}")
    use_devices_of(catalog.load(f"cpu:{number}"))
    sizes, ran = dict(dimensions(config)), []
    for moved in move.moves:
        if moved.reshard.steps:
            result = run_reshard(moved.reshard.steps, move.shared.mesh, sizes, "f32")
            differs = result["max_abs_error"] != 0 or any(p["status"] == "differs" for p in result["pairs"])
            ran.append({"parameter": moved.path, "differs": differs, **result})
    return ran


def _ran_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    if moved := document.get("moved"):
        time = f" in {seconds_text(moved['move_seconds'])}" if moved["move_seconds"] else ""
        lines.append(f"\nstep {moved['step']} moved{time}; go on with mw train --run {moved['run']} --resume")
    if audited := document.get("audit"):
        lines.append(f"\n{audited['compiler']}: a device sends, planned and emitted")
        rows = [*audited["operations"], {"op": "all", **audited}]
        for row in rows:
            planned, emitted = (format_bytes(row[f"{side}_bytes"]) for side in ("planned", "emitted"))
            lines.append(f"  {row['op']:<12} {planned:>8} {emitted:>8}")
    if "ran" not in document:
        return lines
    wrong = [one["parameter"] for one in document["ran"] if one["differs"]]
    verdict = f"differ: {', '.join(wrong)}" if wrong else "emit the derived collectives and give equal arrays"
    return [*lines, f"\nrun on virtual devices: {len(document['ran'])} moves {verdict}"]
