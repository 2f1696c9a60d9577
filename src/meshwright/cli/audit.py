"""mw audit: a comparison of the compiled program with the plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.api.inputs import Train
from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, note, progress, refuse_with, show
from meshwright.cli.extras import require
from meshwright.errors import AuditError, PlanError
from meshwright.files import check_writable, write_whole
from meshwright.hardware import catalog
from meshwright.layout.layout_checks import layout_for
from meshwright.models.presets import load_model
from meshwright.options import option
from meshwright.plan_file import Plan, load_plan
from meshwright.units import parse_count, parse_length

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DIFFERS = 1


@command(app)
def audit(
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="A plan.toml, or a function of a script, train.py:step, with its arguments in step_args; "
            "without it, give --model and the other options."
        ),
    ] = None,
    target: str | None = option(
        None, help="tpu, gpu or cpu.", unset="the hardware's if installed, otherwise cpu"
    ),
    model: str | None = option(None, help="A preset, config.json, checkpoint folder or TOML."),
    hardware: str | None = option(None, help="cpu:8, v5e:4x4, a machine's .toml, ..."),
    batch_tokens: int | None = option(None, parser=parse_count, help="Tokens of one step."),
    seq_len: int | None = option(None, parser=parse_length, help="Tokens of one sequence."),
    layout: str | None = option(None, help="data=2,fsdp=2,tensor=2,remat=full"),
    phase: str | None = option(
        None,
        flag="--phase --step",
        help="train, prefill or generate.",
        unset="the plan's, both of a server's; otherwise train",
    ),
    hlo: Path | None = option(None, help="Audit the optimised HLO of any program instead of a plan."),
    mesh: str | None = option(None, help="With --hlo: the mesh's axes, data=2,tensor=4."),
    numerics: bool = option(True, help="Also compare the numbers of a tiny twin with plain formulas."),
    search: float = option(
        30.0, least=0, help="For a script: seconds to compile it with other shardings, 0 for none."
    ),
    no_cache: bool = option(False, help="Compile again even if the cache has the program."),
    against: Path | None = option(None, help="Show what changed since this audit, written by -o."),
    output: Path | None = option(
        None, flag="-o --output", help="Write the JSON here too; for a script, a page if it ends in .html."
    ),
    as_json: bool = JSON,
) -> None:
    """Compile a plan's step and compare its collectives, FLOPs and memory with the plan.

    The compiler is the plan's TPU's or GPU's if it is installed (the [tpu] or [cuda12] extra), otherwise
    XLA's for CPU on virtual devices. No chip need be attached, and no weights are allocated. A tiny twin of
    the plan runs on virtual CPU devices, and its numbers are compared with plain formulas. Exits 1 if they
    differ, and states the cost of each difference and what to change.

    \b
    mw audit runs/demo/plan.toml
    mw audit plan.toml --target tpu
    mw audit plan.toml --phase generate
    mw audit plan.toml --against before.json
    mw audit --model tiny --hardware cpu:8 --batch-tokens 1024 --seq-len 64 --layout fsdp=4,tensor=2
    mw audit train.py:step --hardware v5p:4x4x4 -o step.html
    mw audit --hlo step.after_optimizations.txt --hardware v5p:4x4x4 --mesh data=16,tensor=4
    """
    if output:
        check_writable(output)
    before = _read(against) if against else None
    from meshwright.audit.script import is_script

    of_step = {"--batch-tokens": batch_tokens, "--seq-len": seq_len, "--layout": layout}
    only_of_plans = {"--model": model, **of_step, "--phase": phase, "--no-numerics": not numerics}
    if plan and is_script(str(plan)):
        refuse_with({**only_of_plans, "--hlo": hlo, "--mesh": mesh}, f"{plan} is a function of a script")
        _finish(_of_script(str(plan), hardware, target, search), output, before, as_json=as_json)
        return
    if hlo:
        given = {"PLAN": plan, **only_of_plans, "--target": target}
        _finish(_of_program(hlo, hardware, mesh, given), output, before, as_json=as_json)
        return
    if mesh:
        raise PlanError("--mesh needs --hlo; the mesh of a plan is in its layout")
    require("run")
    from meshwright.audit.plan_audit import audit_phases, audit_plan

    options = {"--model": model, "--hardware": hardware, **of_step}
    asked = _from_options(options, phase or "train") if plan is None else _from_file(plan, options, phase)
    with progress() as update:
        document = (audit_plan if phase else audit_phases)(
            asked, target, lambda what: update(what, None), use_cache=not no_cache, numerics=numerics
        )
    _finish(document, output, before, as_json=as_json)


def _finish(document: dict, output: Path | None, before: dict | None, *, as_json: bool) -> None:
    """Write and show an audit, or its changes from an earlier one. Exits 1 if it differs from its plan."""
    if before is not None:
        from meshwright.audit.checks import changes

        document = document | {"changes": changes(before, document)}
    if output:
        _write(output, document)
    if as_json:
        emit(document)
    elif before is not None:
        show("\n".join(document["changes"]))
    elif "planned" in document:
        from meshwright.report.terminal.audits import audit_table

        show(audit_table(document))
    else:
        from meshwright.report.terminal.audits import program_table

        show(program_table(document), *(f"{line[:1].upper()}{line[1:]}." for line in document["notes"]))
    if document["verdict"] != "match":
        raise typer.Exit(_DIFFERS)


def _of_script(function: str, hardware: str | None, target: str | None, search_seconds: float) -> dict:
    """The audit of a script's function, with its seconds by source line and a patch.

    hardware: gives the number of virtual CPU devices, so that the script has its mesh without chips. target:
    the kind of the hardware's chips, to compile for them; "cpu" for virtual CPU devices. Without a target,
    an abstract mesh is compiled by the chips' compiler if it is installed, and all else for CPUs. Raises
    PlanError for another kind.
    """
    require("run")
    if hardware and (":" in hardware or hardware.endswith(".toml")):
        machine = catalog.load(hardware)
        kind, number = machine.chip.kind, machine.num_chips
    else:  # the mesh gives the number of chips, once the script has made it
        kind, number = catalog.chip_of(hardware).kind if hardware else None, 8
    if target not in (None, "cpu", kind):
        chips = f"--hardware {hardware} has a {kind}" if hardware else "give --hardware, such as v5p:4x4x4"
        raise PlanError(f"--target {target} compiles for the hardware's chips; {chips}")
    if hardware and target != "tpu":
        from meshwright.nn.start.devices import num_virtual_devices, split_host

        if not num_virtual_devices():
            split_host(number)
    from meshwright.audit.alternatives import CHEAPER
    from meshwright.audit.compile.targets import is_installed
    from meshwright.audit.foreign import audit_compiled, has_abstract_mesh
    from meshwright.audit.script import load_step, patch, seconds_by_line

    step, args, mesh = load_step(function)
    # Without --target, an abstract mesh is compiled for the hardware's chips if their compiler is there.
    has_own = target is None and kind is not None and is_installed(kind)
    ahead_of_time = target not in (None, "cpu") or (has_own and has_abstract_mesh(args))
    document = audit_compiled(
        step, args, {}, hardware, ahead_of_time=ahead_of_time, search_seconds=search_seconds
    )
    # A cheaper sharding saves some of the seconds of the other findings, so they are not added.
    costs = [(finding["kind"], finding["seconds"] or 0.0) for finding in document["warnings"]]
    saved_by_sharding = sum(cost for name, cost in costs if name == CHEAPER)
    cost_of_others = sum(cost for name, cost in costs if name != CHEAPER)
    return {
        **document,
        "script": function,
        "lines": seconds_by_line(document),
        "patch": patch(document, Path(function.rpartition(":")[0]), mesh),
        "extra_seconds": max(saved_by_sharding, cost_of_others) if document["hardware"] else None,
    }


def _of_program(file: Path, hardware: str | None, mesh: str | None, given: dict[str, object]) -> dict:
    """The audit of a program's text. Raises PlanError for an option that describes a plan."""
    from meshwright.audit.foreign import audit_file

    refuse_with(given, "--hlo audits a program in place of a plan")
    return audit_file(file, hardware, mesh)


def _from_file(plan: Path, options: dict[str, Any], phase: str | None) -> Plan:
    """The plan of a file, in a phase. Raises PlanError for an option that describes another."""
    refuse_with(options, f"{plan} already gives these", otherwise=", or edit the plan")
    loaded = load_plan(plan)
    return replace(loaded, workload=replace(loaded.workload, phase=phase)) if phase else loaded


def _from_options(options: dict[str, Any], phase: str) -> Plan:
    """The plan of the options. Raises PlanError with the missing options."""
    if missing := [name for name, value in options.items() if value is None]:
        raise PlanError(f"name a plan.toml, or give {', '.join(missing)}")
    model, hardware, batch_tokens, seq_len, layout = options.values()
    config = load_model(model)
    dtype = catalog.load(hardware).chip.platform.dtype
    return Plan(
        model=config,
        hardware=hardware,
        workload=replace(Train(batch_tokens, seq_len).workload(config), phase=phase),
        layout=layout_for(config, layout, weights_dtype=dtype, compute_dtype=dtype),
    )


def _read(path: Path) -> dict:
    """An audit's document. Raises AuditError if the file is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AuditError(f"{path}: is not an audit written by mw audit -o: {error}") from error
    if not isinstance(document, dict) or "emitted" not in document:
        raise AuditError(f"{path}: is not an audit written by mw audit -o")
    return document


def _write(path: Path, document: dict) -> None:
    if path.suffix == ".html" and "script" in document:
        from meshwright.report.pages.script_audit import script_html

        write_whole(path, script_html(document))
    else:
        write_whole(path, json.dumps(document, indent=1))
    note(f"wrote {path}")
