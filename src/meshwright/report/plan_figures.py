"""The figures of a plan."""

from meshwright.plan.study.pipelines import shown_microbatches, timelines
from meshwright.plan.study.priced_plan import PricedPlan
from meshwright.report.bars_view import memory_panel, step_panel
from meshwright.report.candidates_view import candidates_figure
from meshwright.report.figure import Figure, Frame
from meshwright.report.pipeline_view import pipeline_caption, pipeline_panel
from meshwright.report.roofline_view import roofline_figure
from meshwright.report.scaling_view import scaling_figure
from meshwright.report.timeline_view import timeline_figure


def plan_figures(priced: PricedPlan) -> list[Figure]:
    """Every figure of a plan, in the order of a page."""
    plan, chosen = priced.plan, priced.chosen
    figures = [
        candidates_figure(priced.search.candidates, chosen, priced.usual),
        Figure.of(
            "step",
            "Where the step goes",
            "The best layouts, each bar one step. Under a bar, the communication that runs beneath it.",
            step_panel(priced.top, chosen),
        ),
        Figure.of(
            "memory",
            "What fills a chip",
            "Bytes on one chip at the peak of the step, by cause.",
            memory_panel(priced.top, chosen),
        ),
        timeline_figure(chosen),
    ]
    if plan.layout.pipe > 1:
        figures.append(_pipeline_figure(priced))
    if any(one.points for one in priced.sweeps):
        figures.append(scaling_figure(priced.sweeps, priced.hardware))
    return [*figures, roofline_figure(chosen)]


def _pipeline_figure(priced: PricedPlan) -> Figure:
    """The schedules that exist for the stages of the plan; its own is the first."""
    plan, layout = priced.plan, priced.plan.layout
    found = timelines(plan.model, plan.workload, priced.chosen)
    frames = [
        Frame(f"{name}: {pipeline_caption(timeline)}", (pipeline_panel(timeline),))
        for name, timeline in found.items()
    ]
    shown = shown_microbatches(layout.pipe, layout.microbatches)
    caption = (
        f"One row for each of the {layout.pipe} stages, one block per pass of a microbatch; where the row is "
        "bare, "
        f"the stage idles. The plan runs {layout.schedule.pipeline}; the slider shows the other schedules."
    )
    if shown < layout.microbatches:
        caption += (
            f" Only {shown} of {layout.microbatches:,} microbatches are simulated here, so the bubble looks "
            "larger."
        )
    return Figure("pipeline", "The pipeline", caption, tuple(frames), slider="schedule")
