"""Expert parallelism: the experts of a mixture are shared out, and tokens travel to them."""

from collections.abc import Iterator, MutableMapping
from math import gcd

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import Ask, Axis, Composition, ShortForm, divisors
from meshwright.layout.rules import Table
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.array import dividing_degrees
from meshwright.notation.mesh import Mesh


class Expert(Axis):
    """E_expert, an axis cut out of the data ranks: of `fsdp`, or of `data` where fsdp is 1.

    Where an expert group has more devices than there are data ranks, E takes `tensor` too.
    """

    def place(self, form: ShortForm, sizes: MutableMapping[str, int]) -> None:
        home, cut = expert_home(form)
        sizes["expert"] = cut // form["expert_nodes"]
        sizes[home] //= cut

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "BC", "expert")
        tables.add("stored used gradients updated activations", "E", "expert")
        if tables.form["expert_over_tensor"]:
            tables.add("stored used gradients updated activations", "E", "tensor")

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        """The degrees, with rows that travel, and grouped where a token then goes no farther.

        Grouped it goes to all devices of a group, else to those of k experts. Past k devices that is tried
        only where a condition names it.
        """
        moe = ask.config.moe
        num_experts = moe.num_experts if moe else 1
        tried = [1] if form["tensor2"] > 1 else _usual(divisors(num_experts))
        for expert in tried:
            if found := _home(expert, form):
                for nodes in _nodes(*found, form, ask):
                    yield {"expert": expert, "expert_nodes": nodes}
                far = moe and expert > moe.experts_per_token
                if expert > 1 and (not far or "grouped" in ask.conditions):
                    yield {"expert": expert, "expert_nodes": 1, "grouped": True}

    def fit(self, config: ModelConfig, mesh: Mesh, table: Table, schedule: Schedule) -> None:
        num_experts = config.moe.num_experts if config.moe else 1
        over = mesh.size(table.axes_of("E"))
        if num_experts == 1 and over > 1:
            raise LayoutError(f"{config.name} has no experts (E) for expert = {over}; fits: expert in {{1}}")
        if num_experts % over:
            fits = ", ".join(map(str, dividing_degrees(num_experts, num_experts)))
            raise LayoutError(
                f"{config.name}: {num_experts} experts (E) do not divide over expert = {over}; "
                f"fits: expert in {{{fits}}}"
            )

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        home = "fsdp" if form["fsdp"] > 1 else "data"
        travel = (
            "each of them all-gathers the tokens of the group, and the outputs of the experts are "
            "reduce-scattered back"
            if schedule.grouped
            else "an all-to-all sends tokens to their experts, another one back"
        )
        if (nodes := form["expert_nodes"]) > 1 and schedule.dispatch == "once":
            travel = (
                f"a token is sent to each of the {nodes} nodes where it has experts once, "
                "and from there to their chips; results are summed on the node before they return"
            )
        return (
            f"the experts are divided over {form['expert']} chips; {travel}. The expert axis is "
            f"part of the {home} axis"
        )


class ExpertNodes(Axis):
    """E_expert_nodes, an axis cut out of `expert`: the nodes over which the devices of its groups lie.

    Under `dispatch=once` a token crosses it once for all of its experts on a node.
    """

    def place(self, form: ShortForm, sizes: MutableMapping[str, int]) -> None:
        _, cut = expert_home(form)
        if cut % form["expert_nodes"]:
            fits = ", ".join(map(str, dividing_degrees(cut, cut)))
            raise LayoutError(
                f"layout: expert_nodes = {form['expert_nodes']} does not divide the {cut} devices of an "
                f"expert group; fits: expert_nodes in {{{fits}}}"
            )
        sizes["expert_nodes"] = form["expert_nodes"]

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "BC", "expert_nodes")
        tables.add("stored used gradients updated activations", "E", "expert_nodes")

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        return (
            f"the chips of an expert group lie on {form['expert_nodes']} nodes. The expert_nodes "
            "axis is part of the expert axis"
        )


def _nodes(home: str, cut: int, form: ShortForm, ask: Ask) -> list[int]:
    """How many nodes a search tries: those on which `cut` devices of a group lie, as inner axes put them
    apart, or every number where a condition names them.

    None where no token crosses to another, and 1 where that was not asked.
    """
    if not ask.node:
        return [1]
    if "expert_nodes" in ask.conditions:
        return divisors(cut)[1:]
    apart = form["context"] * form["tensor2"] * form["tensor"] * form["kv_replicas"]
    if form["inner"]:
        apart *= form["fsdp"] // (cut if home == "fsdp" else 1)
    num_nodes = cut // gcd(cut, max(1, ask.node // apart))
    return [num_nodes] if num_nodes > 1 else []


def expert_home(form: ShortForm) -> tuple[str, int]:
    """(the axis that the experts' devices are cut out of, how many of it).

    Raises LayoutError where no data axis divides over them.
    """
    found = _home(form["expert"], form)
    if found is None:
        ranks = form["data"] * form["fsdp"]
        fits = ", ".join(map(str, dividing_degrees(ranks, ranks)))
        raise LayoutError(
            f"layout: expert = {form['expert']} does not divide the data ranks data·fsdp = {form['data']}·"
            f"{form['fsdp']} = {ranks}; fits: expert in {{{fits}}}"
        )
    return found


def _home(expert: int, form: ShortForm) -> tuple[str, int] | None:
    for cut in (expert, expert // form["tensor"] if expert % form["tensor"] == 0 else 0):
        for home in ("fsdp", "data"):
            if cut and form[home] % cut == 0:
                return home, cut
    return None


def _usual(degrees: list[int]) -> list[int]:
    """The first and the five largest of ascending degrees, which are those that people use.

    >>> _usual([1, 2, 4, 8, 16, 32, 64, 128])
    [1, 8, 16, 32, 64, 128]
    """
    return list(dict.fromkeys([degrees[0], *degrees[-5:]]))


EXPERT = Expert("expert")
EXPERT_NODES = ExpertNodes("expert_nodes")
