"""Fully sharded data parallelism, and ZeRO's lesser stages.

Source: Rajbhandari et al., "ZeRO" (2020): stage 1 shards the optimizer, 2 the gradients too, 3 the weights.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import Ask, Axis, Composition, FormWord, ShortForm
from meshwright.layout.rules import Rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.mesh import Mesh
from meshwright.units import divisors

# D, or the rank of latents: a weight that projects latents up has no D.
_SHARED_LETTERS = "DQR"
# D may be padded to a multiple of the shards by at most this share.
MOST_PADDING = 0.1
# A search tries only the largest degrees that pad D, this number of them: near smaller ones are degrees that
# divide D.
_NUM_PADDED = 2
_ZERO_TABLES = {0: "", 1: "updated", 2: "updated gradients", 3: "updated gradients stored"}


class Fsdp(Axis):
    """Data ranks shard arrays of the stage `zero` along D or the rank of latents.

    zero_context: ranks of `context` shard them too. inner=fsdp: data ranks are neighbours in the mesh, in
    place of the devices of `tensor`, `context` or `expert`. Each host of GPUs then gathers only a share of
    the weights; otherwise it gathers all of them.
    """

    def check(self, form: ShortForm) -> None:
        zero = form["zero"]
        if zero == 3 and form["fsdp"] == 1 and form["data"] > 1:
            raise LayoutError(
                f"layout: zero = 3 shards the weights; write fsdp={form['data']} for data={form['data']}"
            )
        if zero == 0 and form["fsdp"] > 1:
            raise LayoutError(
                f"layout: zero = 0 shards nothing; write data={form['fsdp']} for fsdp={form['fsdp']}"
            )

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "BC", "fsdp")
        for axis in shared_axes(tables.form):
            tables.add(_ZERO_TABLES[zero_stage(tables.form)], _SHARED_LETTERS, axis)

    def read(self, rules: Rules, form: ShortForm, mesh: Mesh) -> dict[str, object]:
        words: dict[str, object] = {}
        if rules.zero_stage != zero_stage(form):
            words["zero"] = rules.zero_stage
        if "context" in rules.updated.axes_of("D"):
            words["zero_context"] = True
        if [*mesh.sizes][-1:] == ["fsdp"]:
            words["inner"] = "fsdp"
        return words

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """FSDP over every degree that divides D, and two that pad it; ZeRO 1 and 2 over all data ranks.

        Each of them also over the ranks of `context`, if there are several. `inner` is tried only if a
        condition names it: prices are not fitted to any published run with it.
        """
        ranks, context, d_model = ask.chips, form["context"], ask.config.d_model
        yield {"fsdp": 1}
        forms: list[dict[str, Any]] = []
        if ranks > 1:
            wide = [degree for degree in divisors(ranks)[1:] if _padding(d_model, degree) <= MOST_PADDING]
            exact = [degree for degree in wide if d_model % degree == 0]
            padded = [degree for degree in wide if degree > max(exact, default=1)]
            forms += [{"fsdp": degree} for degree in (*exact, *padded[-_NUM_PADDED:])]
            forms += [{"fsdp": 1, "zero": zero} for zero in (1, 2) if d_model % ranks == 0]
            yield from forms
        elif context > 1:  # one data rank shards only over the pieces of its sequences
            forms += [{"fsdp": 1, "zero": zero} for zero in (1, 2, 3)]
        if "inner" in ask.conditions and context * form["tensor"] * form["kv_replicas"] > 1:
            forms += [words | {"inner": "fsdp"} for words in forms if words["fsdp"] > 1]
            yield from (words for words in forms if "inner" in words)
        for words in forms:
            shards = context * (words["fsdp"] if words["fsdp"] > 1 else ranks)
            if context > 1 and _padding(d_model, shards) <= MOST_PADDING:
                yield words | {"zero_context": True}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Whole weights; in prefill also weights that are sharded over the pieces of a prompt."""
        yield {}
        if ask.workload.phase == "prefill":
            yield {"zero": 3, "zero_context": True}

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        if zero_stage(form) == 3:
            where = ", neighbours in the mesh" if form["inner"] else ""
            return (
                f"every weight is split into {form['fsdp']} shards, on chips{where} that take different "
                "sequences. A layer's weights are all-gathered before they are used, forward and backward, "
                "and their gradients are reduce-scattered"
            )
        gradients = "gradients and " if zero_stage(form) == 2 else ""
        return (
            f"{form['fsdp']} groups of chips take different sequences; each keeps a shard of {gradients}the "
            f"optimizer's state (ZeRO-{zero_stage(form)})"
        )


def zero_stage(form: ShortForm) -> int:
    """The stage `zero`, by default 3 if fsdp is above 1, otherwise 0."""
    return (3 if form["fsdp"] > 1 else 0) if form["zero"] is None else form["zero"]


def shared_axes(form: ShortForm) -> tuple[str, ...]:
    """The mesh axes that shard the arrays of the ZeRO stage."""
    shared = "fsdp" if form["fsdp"] > 1 else "data"
    with_expert = ("expert_nodes", "expert") if form["expert"] > 1 and form["expert_owner"] == shared else ()
    return (shared, *with_expert, *(("context",) if form["zero_context"] else ()))


def _padding(size: int, shards: int) -> float:
    """Padding of `size` to a multiple of `shards`, as a share of `size`.

    >>> _padding(8192, 256), _padding(8192, 1792)
    (0.0, 0.09375)
    """
    return -size % shards / size


_ZERO = FormWord((None, 0, 1, 2, 3), ("data", "fsdp", "context"))
_OPTIONS = {
    "zero": _ZERO,
    "zero_context": FormWord((False, True), ("context",)),
    "inner": FormWord((None, "fsdp"), ("tensor", "context", "expert", "kv_replicas")),
}
_ALSO = ("zero3", "fsdp2", "dp_shard", "data_parallel_shard_degree")
FSDP = Fsdp("fsdp", turn=5, options=_OPTIONS, always=True, is_ranks=True, also=_ALSO)
