"""One HTML file that tells a run: what was planned, what ran, what the compiler made of it.

The file holds its own styles, scripts and drawings; it opens without a network and loads nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright import __version__
from meshwright.errors import MeshwrightError
from meshwright.layout.workload import Workload
from meshwright.notation.mesh import Mesh
from meshwright.plan.study.priced_plan import PricedPlan
from meshwright.plan_file import PLAN_FILE, load_plan
from meshwright.progress import Progress
from meshwright.report import audit_view, mesh_view, plan_view, summary, templating
from meshwright.report.audit_graph import layer_svg
from meshwright.report.charts import libraries, script_json
from meshwright.report.drawing import Grid, axis_class, mesh_svg
from meshwright.report.figure import Figure
from meshwright.report.figures import ABSENT
from meshwright.report.plan_figures import plan_figures
from meshwright.report.plots import loss_chart, step_time_chart
from meshwright.report.run_files import JsonDocument, Run, read_run, serving_plan, step_seconds_of_plan
from meshwright.units import format_bytes, format_number_of, format_seconds

# Makes the document of a plan that has none beside it: what `mw plan train --json` prints.
Describe = Callable[[PricedPlan], JsonDocument]


@dataclass(frozen=True)
class Report:
    """What a page shows: the documents and, where there is a plan, its figures.

    workload: what a step of the figures takes. missing: why there are none, though there is a plan.
    """

    run: Run
    figures: tuple[Figure, ...] = ()
    workload: Workload | None = None
    missing: str = ""


def read_report(path: Path, describe: Describe | None = None, on_progress: Progress | None = None) -> Report:
    """The documents of a run folder (or of a lone plan), and the figures of its plan priced anew.

    Raises PlanError where there is neither a plan nor metrics, DataError for a file that is not JSON.
    """
    run = read_run(path)
    if run.plan_text is None:
        return Report(run)
    try:
        priced = read_plan(path, on_progress)
        figures = tuple(plan_figures(priced))
    except MeshwrightError as error:
        if run.plan is None and not run.metrics:
            raise
        return Report(run, missing=str(error))
    if run.plan is None and describe:
        run = replace(run, plan=describe(priced))
    return Report(run, figures, priced.plan.workload)


def build_report(path: Path, describe: Describe | None = None) -> str:
    """The report of a run folder (or of a lone plan) as HTML: a section for each document that is there."""
    return render(read_report(path, describe))


def read_plan(path: Path, on_progress: Progress | None = None) -> PricedPlan:
    """The plan that a run folder or a plan.toml holds, on its machine."""
    plan = load_plan(path / PLAN_FILE if path.is_dir() else path.with_suffix(".toml"))
    if plan.workload.phase != "train":
        raise serving_plan(path)
    return PricedPlan.of(plan, on_progress)


def render(report: Report) -> str:
    """The page of these documents and figures."""
    run = report.run
    environment = templating.environment()
    mesh = mesh_view.mesh_of(run.plan) if run.plan else None
    environment.filters |= {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "code_spans": _code_spans,
        "notation": partial(mesh_view.notation_html, mesh=mesh),
        "number_of": format_number_of,
        "subscripts": partial(mesh_view.subscripts, mesh=mesh),
    }
    return environment.get_template("report.html.jinja").render(
        title=_title(run),
        version=__version__,
        written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
        cards=summary.cards(run),
        contents=_contents(report),
        plan=_plan_context(run.plan),
        plan_text=run.plan_text,
        figures=report.figures,
        figures_workload=_workload_text(report.workload),
        missing_figures=report.missing,
        training=_training_context(run),
        audit=_audit_context(run.audit),
        completion=run.completion,
        environment=(run.plan or {}).get("environment") or {},
        libraries=libraries() if run.metrics else None,
    )


def _contents(report: Report) -> list[tuple[str, str]]:
    """(anchor, words) of each section that the page has."""
    run = report.run
    plan = run.plan or {}
    sections = (
        ("plan", "Plan", plan.get("candidates")),
        ("figures", "Figures", report.figures),
        ("run", "Run", run.metrics),
        ("audit", "Audit", run.audit),
        ("completion", "Completion", run.completion),
        ("mesh", "Mesh", plan and mesh_view.mesh_of(plan)),
        ("fine-print", "Fine print", plan.get("assumptions") or run.plan_text or plan.get("environment")),
    )
    return [(anchor, words) for anchor, words, there in sections if there]


def _workload_text(workload: Workload | None) -> str:
    return f"{workload.num_sequences:,} sequences of {workload.seq_len:,} tokens" if workload else ""


def _title(run: Run) -> str:
    plan = run.plan or {}
    model, hardware = (plan.get("model") or {}).get("name"), (plan.get("hardware") or {}).get("spec")
    return f"{model} on {hardware}" if model and hardware else run.path.resolve().name


def _plan_context(plan: JsonDocument | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    mesh = mesh_view.mesh_of(plan)
    colours = plan_view.breakdown_colours(plan)
    return {
        "mesh": _mesh_context(plan, mesh) if mesh else None,
        "candidates": plan_view.candidate_rows(plan),
        "num_candidates": len(plan.get("candidates") or []),
        "search": plan.get("search") or {},
        "legend": plan_view.breakdown_legend(colours),
        "memory": plan_view.memory_segments(plan),
        "memory_total": plan_view.chosen_memory(plan),
        "memory_capacity": plan_view.memory_capacity(plan),
        "explanation": plan_view.explanation(plan),
        "assumptions": [str(line) for line in plan.get("assumptions") or []],
        "workload": plan.get("workload") or {},
    }


def _mesh_context(plan: JsonDocument, mesh: Mesh) -> dict[str, Any]:
    return {
        "svg": mesh_svg(mesh),
        "broad": Grid(mesh).is_broad,
        "note": mesh_view.shown_note(mesh),
        "axes": [(axis, size, axis_class(mesh, axis)) for axis, size in mesh.sizes.items()],
        "num_devices": mesh.num_devices,
        "groups": [
            (kind, [(mesh_view.notation_html(d.text, mesh), d) for d in mesh_view.drawings(plan, mesh, kind)])
            for kind in ("weights", "activations")
        ],
    }


def _training_context(run: Run) -> dict[str, Any] | None:
    if not run.metrics:
        return None
    entropy = (run.corpus or {}).get("unigram_entropy")
    return {
        "facts": summary.run_facts(run),
        "figures": {
            "loss": script_json(loss_chart(run.metrics, entropy)),
            "step-time": script_json(step_time_chart(run.metrics, step_seconds_of_plan(run))),
        },
        "comparison": summary.step_comparison(run),
    }


def _audit_context(audit: JsonDocument | None) -> dict[str, Any] | None:
    if audit is None:
        return None
    rows = audit_view.rows(audit)
    return {
        "verdict": str(audit.get("verdict", ABSENT)),
        "tone": audit_view.STATUS_TONE.get(str(audit.get("verdict")), "warn"),
        "target": audit.get("target"),
        "compile_seconds": audit.get("compile_seconds"),
        "counts": audit_view.status_counts(audit),
        "totals": audit_view.totals(audit),
        "rows": rows,
        "notes": audit_view.notes(rows),
        "graph": layer_svg(audit),
        "memory": audit_view.memory_rows(audit),
        "beside": audit_view.beside(audit),
        "peak": audit_view.largest_buffers(audit),
        "remarks": audit_view.remarks(audit),
    }


def _code_spans(text: str) -> Markup:
    """Text with `this` as code."""
    pieces = [Markup("<code>{}</code>").format(p) if n % 2 else p for n, p in enumerate(text.split("`"))]
    return Markup().join(pieces)
