"""Expert parallelism: devices have different experts of a mixture, and tokens travel to them."""

from collections.abc import Iterable, Iterator, MutableMapping
from math import gcd, prod
from typing import Any

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import EVERYWHERE, Ask, Axis, Composition, FormWord, ShortForm
from meshwright.layout.rules import AxisTable, Rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.array import dividing_degrees
from meshwright.notation.mesh import Mesh
from meshwright.units import divisors

# Axes that E takes in addition to data ranks, in the order of attempts; folded groups take the most that
# fit.
_WIDER: tuple[tuple[str, ...], ...] = ((), ("tensor",), ("context",), ("tensor", "context"))
_FOLDED = (_WIDER[3], *_WIDER[1:3], ())
_LARGEST = 5  # degrees that a search tries, above 1


class Expert(Axis):
    """E_expert, an axis cut out of the data ranks: out of `fsdp`, or out of `data` if fsdp is 1.

    If an expert group has more devices than there are data ranks, E takes `tensor` or `context` too, or both.
    fold: it takes them first, so that a group is near and its experts are whole (Megatron-Core's parallel
    folding, Liu et al., 2025, with --expert-tensor-parallel-size 1).
    """

    def place(self, form: ShortForm, sizes: MutableMapping[str, int]) -> None:
        owner, cut = expert_owner(form)
        sizes["expert"] = cut // form["expert_nodes"]
        sizes[owner] //= cut

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "BC", "expert")
        tables.add(EVERYWHERE, "E", "expert")
        for axis in tables.form["experts_over"]:
            tables.add(EVERYWHERE, "E", axis)

    def read(self, rules: Rules, form: ShortForm, mesh: Mesh) -> dict[str, object]:
        cut = form["expert"] * form["expert_nodes"]
        sharding = rules.updated.axes_of("D")
        # Experts cut out of the ranks that shard states shard them too.
        is_sharing = not {"expert", "expert_nodes"}.isdisjoint(sharding)
        owner = "fsdp" if is_sharing and "data" not in sharding else "data"
        over = tuple(axis for axis in _FOLDED[0] if axis in rules.stored.axes_of("E"))
        expert = cut * prod(form[axis] for axis in over)
        words: dict[str, object] = {"expert": expert, owner: form[owner] * cut}
        if expert > 1 and experts_over({**form, **words}) != over:
            words["fold"] = True
        return words

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """The degrees, with rows that travel, and grouped if a token then goes no farther.

        A grouped token goes to all devices of a group, others to the devices of k experts. Beyond k devices
        grouping is tried only if a condition names it.
        """
        moe = ask.config.moe
        num_experts = moe.num_experts if moe else 1
        degrees = divisors(num_experts) if form["tensor2"] == 1 else [1]
        for expert in dict.fromkeys([degrees[0], *degrees[-_LARGEST:]]):
            if cut := _cut(expert, form, _WIDER[:2]):
                for nodes in _nodes(*cut, form, ask):
                    yield {"expert": expert, "expert_nodes": nodes}
                far = moe and expert > moe.experts_per_token
                if expert > 1 and (not far or "grouped" in ask.conditions):
                    yield {"expert": expert, "expert_nodes": 1, "grouped": True}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Experts over no devices, over the replicas, or over all devices."""
        yield {}
        if ask.config.moe is not None and ask.workload.phase == "generate":
            for expert in dict.fromkeys((form["data"], form["data"] * form["tensor"])):
                if expert > 1 and ask.config.moe.num_experts % expert == 0:
                    yield {"expert": expert}

    def free_words(self, form: ShortForm, config: ModelConfig, schedule: Schedule) -> dict[str, Any]:
        owner, cut = expert_owner(form)
        wider = {owner: 2 * cut}
        is_free = cut > 1 and sums_as_matrices(config) and form[owner] == cut
        return wider if is_free and expert_owner({**form, **wider}) == (owner, cut) else {}

    def fit(self, config: ModelConfig, mesh: Mesh, table: AxisTable, schedule: Schedule) -> None:
        check_num_experts(config, mesh.size(table.axes_of("E")))

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        owner = "fsdp" if form["fsdp"] > 1 else "data"
        travel = (
            "each of them all-gathers the tokens of the group, and the outputs of the experts are "
            "reduce-scattered back"
            if schedule.grouped
            else "an all-to-all sends tokens to their experts, another one back"
        )
        if (nodes := form["expert_nodes"]) > 1 and schedule.dispatch == "once":
            travel = (
                f"a token is sent to each of the {nodes} nodes where it has experts once, and from there to "
                "their chips; results are summed on the node before they return"
            )
        return (
            f"the experts are divided over {form['expert']} chips; {travel}. The expert axis is part of the "
            f"{owner} axis"
        )

    def serving_words(self, config: ModelConfig, form: ShortForm) -> str:
        return f"Experts are split over {form['expert']} devices, and tokens travel to them."


class ExpertNodes(Axis):
    """E_expert_nodes, an axis cut out of `expert`: the nodes of the devices of an expert group.

    Under `dispatch=once` a token crosses it once for all of its experts on a node.
    """

    def place(self, form: ShortForm, sizes: MutableMapping[str, int]) -> None:
        _, cut = expert_owner(form)
        if cut % form["expert_nodes"]:
            fits = ", ".join(map(str, dividing_degrees(cut, cut)))
            raise LayoutError(
                f"layout: expert_nodes = {form['expert_nodes']} does not divide the {cut} devices of an "
                f"expert group; fits: expert_nodes in {{{fits}}}"
            )
        sizes["expert_nodes"] = form["expert_nodes"]

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "BC", "expert_nodes")
        tables.add(EVERYWHERE, "E", "expert_nodes")

    def fit(self, config: ModelConfig, mesh: Mesh, table: AxisTable, schedule: Schedule) -> None:
        if (nodes := mesh.sizes.get("expert_nodes", 1)) > 1 and schedule.dispatch != "once":
            raise LayoutError(
                f"layout: expert_nodes = {nodes}, but dispatch = {schedule.dispatch} sends a row across "
                "nodes for each expert; fits: dispatch = once"
            )

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        return (
            f"the chips of an expert group are on {form['expert_nodes']} nodes. The expert_nodes "
            "axis is part of the expert axis"
        )


def _nodes(owner: str, cut: int, form: ShortForm, ask: Ask) -> list[int]:
    """Numbers of nodes to try: the nodes of `cut` devices, or any number if conditions name it.

    The list is empty if no token crosses to another node, and [1] if nodes need no names.
    """
    if not ask.node:
        return [1]
    if "expert_nodes" in ask.conditions:
        return divisors(cut)[1:]
    apart = form["context"] * form["tensor2"] * form["tensor"] * form["kv_replicas"]
    if form["inner"]:
        apart *= form["fsdp"] // (cut if owner == "fsdp" else 1)
    num_nodes = cut // gcd(cut, max(1, ask.node // apart))
    return [num_nodes] if num_nodes > 1 else []


def check_num_experts(config: ModelConfig, degree: int) -> None:
    """Raise LayoutError if the experts of `config` do not divide over `degree` devices."""
    num_experts = config.moe.num_experts if config.moe else 1
    if num_experts == 1 and degree > 1:
        raise LayoutError(f"{config.name} has no experts (E) for expert = {degree}; fits: expert in {{1}}")
    if num_experts % degree:
        fits = ", ".join(map(str, dividing_degrees(num_experts, num_experts)))
        raise LayoutError(
            f"{config.name}: {num_experts} experts (E) do not divide over expert = {degree}; "
            f"fits: expert in {{{fits}}}"
        )


def sums_as_matrices(config: ModelConfig) -> bool:
    """Whether all gradients of experts are sums of matrices, for any number of data ranks.

    False with biases: several data ranks sum their gradients separately from the matrices' gradients.
    """
    return config.moe is not None and not config.moe.expert_bias


def expert_cut(form: ShortForm, expert: int) -> tuple[str, int] | None:
    """(data axis that gives the devices of `expert` shards, number of them); None if neither divides."""
    return _cut(expert, form, _orders(form))


def expert_owner(form: ShortForm) -> tuple[str, int]:
    """(data axis that gives the experts' devices, number of them)."""
    cut = expert_cut(form, form["expert"])
    assert cut is not None, "`expand` refuses degrees of experts that no data axis divides"
    return cut


def experts_over(form: ShortForm) -> tuple[str, ...]:
    """The axes that E takes in addition to axes cut out of the data ranks."""
    _, cut = expert_owner(form)
    return next(axes for axes in _orders(form) if cut * prod(form[axis] for axis in axes) == form["expert"])


def _orders(form: ShortForm) -> tuple[tuple[str, ...], ...]:
    return _FOLDED if form["fold"] else _WIDER


def _cut(expert: int, form: ShortForm, wider: Iterable[tuple[str, ...]]) -> tuple[str, int] | None:
    for over in (prod(form[axis] for axis in axes) for axes in wider):
        for owner in ("fsdp", "data"):
            if expert % over == 0 and form[owner] % (expert // over) == 0:
                return owner, expert // over
    return None


_ALSO = ("ep", "experts", "expert_parallel", "expert_model_parallel_size")
_FOLD = FormWord((False, True), ("expert",))
EXPERT = Expert("expert", turn=7, options={"fold": _FOLD}, needs=("data",), also=_ALSO)
EXPERT_NODES = ExpertNodes("expert_nodes", turn=8, needs=("data", "expert"))
