"""The figures of a plan that is priced again, or only of its JSON."""

from meshwright.plan.study.pipelines import shown_microbatches, timelines
from meshwright.plan.study.priced_plan import PricedPlan
from meshwright.report.draw.figure import Figure, Frame
from meshwright.report.pictures.bars import (
    Bar,
    Mark,
    memory_bars,
    memory_pieces,
    share_pieces,
    stacked,
    step_bars,
)
from meshwright.report.pictures.candidates import candidates_figure
from meshwright.report.pictures.roofline_plot import roofline_figure
from meshwright.report.pictures.schedule_chart import pipeline_caption, pipeline_panel
from meshwright.report.pictures.step_timeline import timeline_figure
from meshwright.report.pictures.strategy_curves import strategies_figure
from meshwright.report.plan_table import shown_candidates
from meshwright.report.run_documents import JsonDocument, layout_text, winner
from meshwright.report.text import bytes_text, seconds_text
from meshwright.units import format_bytes


def plan_figures(priced: PricedPlan) -> list[Figure]:
    """Every figure of a plan, in the order of a page."""
    chosen, top = priced.chosen, priced.top
    step = "The best layouts, each bar one step. The thin bar is communication that overlaps with compute."
    figures = [
        candidates_figure(priced.search.candidates, chosen, priced.usual),
        Figure.of("step", "Time of a step", step, step_bars(top, chosen)),
        Figure.of(
            "memory",
            "Memory of a chip",
            "Bytes on one chip at the peak of the step.",
            memory_bars(top, chosen),
        ),
        timeline_figure(chosen),
    ]
    if priced.plan.layout.pipe > 1:
        figures.append(_pipeline_figure(priced))
    if any(sweep.points for sweep in priced.sweeps):
        figures.append(strategies_figure(priced.sweeps, priced.hardware))
    return [*figures, roofline_figure(chosen)]


def _pipeline_figure(priced: PricedPlan) -> Figure:
    """The schedules that the stages of the plan can run, its own first."""
    plan, layout = priced.plan, priced.plan.layout
    frames = [
        Frame(f"{name}: {pipeline_caption(timeline)}", (pipeline_panel(timeline),))
        for name, timeline in timelines(plan.model, plan.workload, priced.chosen).items()
    ]
    caption = (
        f"One row for each of the {layout.pipe} stages, one block per pass of a microbatch; a stage idles "
        f"while its row is bare. The plan runs {layout.schedule.pipeline}; the slider shows the others."
    )
    microbatches = layout.schedule.microbatches
    if (shown := shown_microbatches(layout.pipe, microbatches)) < microbatches:
        caption += f" Only {shown} of {microbatches:,} microbatches are simulated: the bubble looks larger."
    return Figure("pipeline", "The pipeline", caption, tuple(frames), slider="schedule")


def document_figures(plan: JsonDocument) -> list[Figure]:
    """The figures of a plan's JSON: the step of each candidate by operation, and the chosen memory."""
    shown, best = shown_candidates(plan), winner(plan) or {}
    steps = [{item["name"]: item["seconds"] for item in one.get("breakdown") or []} for one in shown]
    totals: dict[str, float] = {}
    for name, seconds in (item for step in steps for item in step.items()):
        totals[name] = totals.get(name, 0) + seconds
    order = sorted((name for name in totals if totals[name] > 0), key=lambda name: -totals[name])
    rows = [
        Bar(
            layout_text(candidate.get("layout", "")),
            "",
            share_pieces(step, order, candidate.get("step_seconds") or 0),
            seconds_text(candidate.get("step_seconds")),
            candidate == best,
        )
        for candidate, step in zip(shown, steps, strict=True)
    ]
    figures = []
    if order:
        caption = "A bar is one step; its parts are the shares of operations, which may overlap."
        figures.append(Figure.of("step", "Time of a step", caption, stacked(rows, "step time")))
    causes = best.get("bytes_per_chip")
    if isinstance(causes, dict) and (pieces := memory_pieces(causes)):
        capacity = (plan.get("hardware") or {}).get("hbm_bytes")
        total = causes.get("total", sum(piece.value for piece in pieces))
        row = Bar(layout_text(best.get("layout", "")), "", pieces, bytes_text(total), bold=True)
        marks: list[Mark] = [(capacity, f"{format_bytes(capacity)} of memory")] if capacity else []
        panel = stacked([row], "memory of one chip", most=1.02 * max(capacity or 0, total), marks=marks)
        figures.append(Figure.of("memory", "Memory of a chip", "Bytes of the chosen layout by cause.", panel))
    return figures
