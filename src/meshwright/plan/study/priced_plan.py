"""A plan with everything that its figures show, priced again by the planner from the plan's own settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout.axes import CONTEXT, EXPERT, PIPE, TENSOR, TENSOR2
from meshwright.layout.runnable import why_not
from meshwright.plan.candidate import Candidate
from meshwright.plan.given import NOT_SEARCHED, equal
from meshwright.plan.study.scaling import (
    ScalingPoint,
    ScalingSweep,
    base_of,
    machine_sizes,
    rank,
    scaling_sweep,
)
from meshwright.plan.train import NUM_RANKED, Search, price, search, well_placed
from meshwright.plan_file import Plan
from meshwright.progress import Progress

_TOP = 8  # candidates that are compared
_SEARCHED = 4  # layouts of a search that are priced at other batch sizes
# Axes that smaller and larger machines are searched without, if the best layouts here do not use them.
_OPTIONAL_AXES = tuple(axis.name for axis in (PIPE, EXPERT, CONTEXT, TENSOR2, TENSOR))


@dataclass(frozen=True)
class PricedPlan:
    """A plan, its machine, its own layout priced, and the search around it.

    on_progress: called with the machine being priced and the share done.
    """

    plan: Plan
    hardware: Hardware
    on_progress: Progress = lambda what, share: None

    @classmethod
    def of(cls, plan: Plan, on_progress: Progress | None = None) -> "PricedPlan":
        """The plan with its machine. Raises HardwareError if the machine cannot be loaded."""
        hardware = catalog.load(plan.hardware)
        return cls(plan, hardware, on_progress) if on_progress else cls(plan, hardware)

    @cached_property
    def chosen(self) -> Candidate:
        """The plan's own layout, placed on the links that give the shortest step."""
        plan = self.plan
        return well_placed(price(plan.model, self.hardware, plan.workload, plan.layout))

    @cached_property
    def search(self) -> Search:
        """The search of this model, machine and batch; if nothing divides, the plan's own layout."""
        search = self._search(self.hardware, NUM_RANKED)
        return search or Search((self.chosen,), 1, 0.0, self.plan.model, self.plan.workload)

    @property
    def _others(self) -> list[Candidate]:
        return [one for one in self.search.candidates if one.layout != self.plan.layout]

    @property
    def as_chosen(self) -> Search:
        """The search as if it had chosen the plan's layout."""
        return replace(self.search, candidates=(self.chosen, *self._others))

    @cached_property
    def top(self) -> list[Candidate]:
        """The best candidates, including the plan's own."""
        return sorted([*self._others[: _TOP - 1], self.chosen], key=rank)

    @cached_property
    def sweeps(self) -> list[ScalingSweep]:
        """Every strategy by batch size, on this machine and on smaller and larger ones."""
        plan, candidates, machines = self.plan, [], machine_sizes(self.hardware)
        best = [*self.search.candidates, self.chosen]
        unused = [axis for axis in _OPTIONAL_AXES if all(one.layout.word(axis) == 1 for one in best)]
        for number, machine in enumerate(machines):
            self.on_progress(f"pricing {machine.spec}", number / len(machines))
            searched, layouts = self.search, [plan.layout]
            if machine is not self.hardware:
                searched, layouts = self._search(machine, _SEARCHED, dict.fromkeys(unused, 1)), []
            if searched:
                layouts = [one.layout for one in searched.candidates[:_SEARCHED]] + layouts
            candidates.append(
                scaling_sweep(plan.model, machine, plan.workload, base_of(plan.layout), layouts)
            )
        return [one for one in candidates if one.points or one.hardware is self.hardware]

    @property
    def usual(self) -> list[ScalingPoint]:
        """The strategies at the plan's own batch size on its own machine."""
        sweep = next(one for one in self.sweeps if one.hardware is self.hardware)
        return [p for p in sweep.points if p.num_sequences == self.plan.workload.num_sequences]

    def _search(
        self, hardware: Hardware, num_ranked: int, given: Mapping[str, object] | None = None
    ) -> Search | None:
        """The search of `mw plan train` in the plan's dtypes; None if no layout divides.

        given: axes with a fixed degree.
        """
        plan, layout = self.plan, self.plan.layout
        try:
            return search(
                plan.model,
                hardware,
                plan.workload,
                weights_dtype=layout.precision.weights_dtype,
                compute_dtypes=(layout.precision.compute_dtype,),
                given=equal({key: layout.word(key) for key in NOT_SEARCHED} | dict(given or {})),
                runnable=None if why_not(plan.model, layout, hardware=hardware) is None else False,
                batch_within=(0.0,),
                num_ranked=num_ranked,
            )
        except PlanError:
            return None
