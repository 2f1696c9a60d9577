"""The figures of a plan: everything in them is priced anew by the planner from the plan's own words."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout.runnable import why_not
from meshwright.plan.candidate import Candidate
from meshwright.plan.given import NOT_SEARCHED, equal
from meshwright.plan.train import NUM_RANKED, Search, price, search, well_placed
from meshwright.plan_file import Plan
from meshwright.progress import Progress
from meshwright.report.bars_view import memory_panel, step_panel
from meshwright.report.candidates_view import candidates_figure
from meshwright.report.figure import Figure, Frame
from meshwright.report.pipeline_view import pipeline_caption, pipeline_panel
from meshwright.report.plan_data.pipelines import shown_microbatches, timelines
from meshwright.report.plan_data.scaling import (
    ScalingPoint,
    ScalingSweep,
    base_of,
    rank,
    scaling_sweep,
    shapes,
)
from meshwright.report.roofline_view import roofline_figure
from meshwright.report.scaling_view import scaling_figure
from meshwright.report.timeline_view import timeline_figure

_TOP = 8  # candidates side by side
_SEARCHED = 4  # layouts of a search that stand for it at other batches


@dataclass(frozen=True)
class PricedPlan:
    """A plan with all that its figures need: the layout that it chose, and the search about it.

    on_progress: told what is being priced and the share done.
    """

    plan: Plan
    hardware: Hardware
    on_progress: Progress = lambda what, share: None

    @cached_property
    def chosen(self) -> Candidate:
        """The plan's own layout, on the links with which its step is shortest."""
        plan = self.plan
        return well_placed(price(plan.model, self.hardware, plan.workload, plan.layout))

    @cached_property
    def search(self) -> Search:
        """What the planner finds for this model, machine and batch: at least the plan's own layout."""
        found = _search(self.plan, self.hardware, NUM_RANKED)
        return found or Search((self.chosen,), 1, 0.0, (), self.plan.workload)

    @property
    def found(self) -> Search:
        """The search as if it had chosen the plan's layout."""
        others = tuple(one for one in self.search.candidates if one.layout != self.plan.layout)
        return replace(self.search, candidates=(self.chosen, *others))

    @cached_property
    def top(self) -> list[Candidate]:
        """The best candidates, the plan's own among them."""
        best = [one for one in self.search.candidates if one.layout != self.plan.layout][: _TOP - 1]
        found = [*best, self.chosen]
        return sorted(found, key=rank)

    @cached_property
    def sweeps(self) -> list[ScalingSweep]:
        """Every strategy by batch, on this machine and its neighbours in size."""
        plan, found, machines = self.plan, [], shapes(self.hardware)
        for number, machine in enumerate(machines):
            self.on_progress(f"pricing {machine.spec}", number / len(machines))
            searched = self.search
            if machine is not self.hardware:
                searched = _search(plan, machine, _SEARCHED, self._unused)
            layouts = [one.layout for one in searched.candidates[:_SEARCHED]] if searched else []
            if machine is self.hardware:
                layouts.append(plan.layout)
            found.append(scaling_sweep(plan.model, machine, plan.workload, base_of(plan.layout), layouts))
        return [one for one in found if one.points or one.hardware is self.hardware]

    @property
    def _unused(self) -> dict[str, object]:
        """Axes that none of the best layouts uses: machines beside this one are searched without them."""
        axes = ("pipe", "expert", "context", "tensor2", "tensor")
        best = [*self.search.candidates[:NUM_RANKED], self.chosen]
        return {axis: 1 for axis in axes if all(one.layout.word(axis) == 1 for one in best)}

    @property
    def usual(self) -> list[ScalingPoint]:
        """The strategies at the plan's own batch on its own machine."""
        own = next(one for one in self.sweeps if one.hardware is self.hardware)
        return [p for p in own.points if p.num_sequences == self.plan.workload.num_sequences]


def price_plan(plan: Plan, on_progress: Progress | None = None) -> PricedPlan:
    """The plan with its machine. Raises HardwareError where that cannot be loaded."""
    hardware = catalog.load(plan.hardware)
    return PricedPlan(plan, hardware, on_progress) if on_progress else PricedPlan(plan, hardware)


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


def _search(
    plan: Plan, hardware: Hardware, num_ranked: int, given: Mapping[str, object] | None = None
) -> Search | None:
    """The search of `mw plan train` in the plan's dtypes; None where nothing divides.

    given: what every layout must have besides.
    """
    layout = plan.layout
    try:
        return search(
            plan.model,
            hardware,
            plan.workload,
            weights_dtype=layout.weights_dtype,
            compute_dtypes=(layout.compute_dtype,),
            given=equal({**{key: layout.word(key) for key in NOT_SEARCHED}, **(given or {})}),
            runnable=None if why_not(plan.model, layout, hardware=hardware) is None else False,
            batch_within=(0.0,),
            num_ranked=num_ranked,
        )
    except PlanError:
        return None
