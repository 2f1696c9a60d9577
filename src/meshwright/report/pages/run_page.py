"""One HTML file of a run: the plan, its figures, the run, the audit of the program.

The file holds its own styles, scripts and drawings; it opens without a network and loads nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.layout.workload import Workload
from meshwright.plan.study.priced_plan import PricedPlan
from meshwright.plan_file import PLAN_FILE, load_plan
from meshwright.progress import Progress
from meshwright.report import audit_tables as audits
from meshwright.report.answer import answer_of_audit, answer_of_plan
from meshwright.report.cards import cards, run_facts
from meshwright.report.draw.figure import Figure
from meshwright.report.pictures.block_maps import Grid
from meshwright.report.pictures.layer import layer_figure
from meshwright.report.pictures.mesh_arrays import axis_colour, drawings, mesh_of, mesh_panel, notation_html
from meshwright.report.pictures.plan_figures import document_figures, plan_figures
from meshwright.report.pictures.run_charts import run_figures
from meshwright.report.plan_table import candidates_table, explanation
from meshwright.report.run_documents import JsonDocument, Run, read_run, serving_plan
from meshwright.report.table import Table
from meshwright.report.templating import render
from meshwright.report.text import ABSENT

# Makes the document of a plan that has none next to it: the JSON of `mw plan train`.
Describe = Callable[[PricedPlan], JsonDocument]


@dataclass(frozen=True)
class Report:
    """The contents of a page: the documents and, if there is a plan, its figures.

    workload: of one step of the figures. missing: the reason if a plan could not be priced again.
    """

    run: Run
    figures: tuple[Figure, ...] = ()
    workload: Workload | None = None
    missing: str = ""


def read_report(path: Path, describe: Describe | None = None, on_progress: Progress | None = None) -> Report:
    """The documents of a run folder or of a single plan, and the plan's figures.

    Raises PlanError if there is neither a plan nor metrics, DataError for a file that is not JSON.
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
    """The page of a run folder or of a single plan: a section for each document."""
    return report_html(read_report(path, describe))


def read_plan(path: Path, on_progress: Progress | None = None) -> PricedPlan:
    """The plan of a run folder or a plan.toml, with its machine."""
    plan = load_plan(path / PLAN_FILE if path.is_dir() else path.with_suffix(".toml"))
    if plan.workload.phase != "train":
        raise serving_plan(path)
    return PricedPlan.of(plan, on_progress)


def report_html(report: Report) -> str:
    """The page of the documents and figures."""
    run, plan, workload = report.run, report.run.plan or {}, report.workload
    mesh = mesh_of(plan)
    model, machine = (plan.get("model") or {}).get("name"), (plan.get("hardware") or {}).get("spec")
    lead = (
        f"Priced for {workload.num_sequences:,} sequences of {workload.seq_len:,} tokens per step. "
        if workload
        else ""
    )
    sections = {
        "answer": ("Answer", plan.get("verdict") or run.audit),
        "plan": ("Plan", plan.get("candidates")),
        "figures": ("Figures", report.figures),
        "run": ("Run", run.metrics),
        "audit": ("Audit", run.audit),
        "completion": ("Completion", run.completion),
        "mesh": ("Mesh", mesh),
        "fine-print": ("Fine print", plan.get("assumptions") or run.plan_text or plan.get("environment")),
    }
    return render(
        "run.html.jinja",
        title=f"{model} on {machine}" if model and machine else run.path.resolve().name,
        written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
        cards=cards(run),
        contents=[(anchor, words) for anchor, (words, content) in sections.items() if content],
        plan=plan,
        answer=answer_of_plan(plan) + answer_of_audit(run.audit or {}),
        plan_text=run.plan_text,
        candidates=candidates_table(plan),
        explanation=explanation(plan),
        figures=report.figures,
        figures_lead=lead,
        document_figures=() if report.figures else document_figures(plan),
        missing_figures=report.missing,
        run_facts=run_facts(run),
        run_figures=run_figures(run) if run.metrics else (),
        audit=run.audit,
        audits=audits,
        audit_tables=_audit_tables(run.audit) if run.audit else (),
        layer=layer_figure(run.audit) if run.audit else None,
        completion=run.completion,
        mesh=mesh,
        grid=Grid(mesh) if mesh else None,
        mesh_svg=mesh_panel(mesh).svg(f"mesh of {mesh.num_devices} devices: {mesh.sizes}") if mesh else "",
        arrays={kind: drawings(plan, mesh, kind) for kind in ("weights", "activations")} if mesh else {},
        axis_colour=axis_colour,
        notation=partial(notation_html, mesh=mesh),
        absent=ABSENT,
    )


def _audit_tables(audit: JsonDocument) -> list[Table]:
    makers = (audits.memory_table, audits.buffers_table, audits.overlap_table, audits.collectives_table)
    parts = [make(audit) for make in makers]
    return [table for table in parts if isinstance(table, Table) and table.rows]
