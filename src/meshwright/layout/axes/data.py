"""Data parallelism: groups of chips with the same weights take different sequences."""

from collections.abc import Iterator
from typing import Any

from meshwright.layout.axes.axis import Ask, Axis, Composition, ShortForm
from meshwright.layout.axes.expert import expert_owner, sums_as_matrices
from meshwright.layout.axes.fsdp import zero_stage
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig


class Data(Axis):
    """Activations are split B_data; weights are replicated, unless ZeRO shards them (fsdp.py)."""

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "BC", "data")

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        if ask.chips * form["fsdp"] <= ask.workload.num_sequences:
            yield {"data": ask.chips}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Replicas in generation; in prefill all chips work on one prompt."""
        if ask.workload.phase == "generate" or ask.chips == 1:
            yield {"data": ask.chips}

    def free_words(self, form: ShortForm, config: ModelConfig, schedule: Schedule) -> dict[str, Any]:
        is_apart = form["fsdp"] > 1 or zero_stage(form) == 0
        owner, cut = expert_owner(form)
        is_free = form["expert"] == 1 or (owner == "fsdp" and cut > 1 and sums_as_matrices(config))
        return {"data": max(2, form["data"])} if is_apart and is_free else {}

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        state = {
            1: "a shard of the optimizer's state",
            2: "a shard of the optimizer's state and of the gradients",
        }
        shared = state.get(zero_stage(form)) if form["fsdp"] == 1 else None
        text = (
            f"{form['data']:,} groups of chips hold the same weights and take different sequences; their "
            "gradients are summed after the backward pass"
        )
        return f"{text}, and each keeps {shared} (ZeRO-{zero_stage(form)})" if shared else text

    def serving_words(self, config: ModelConfig, form: ShortForm) -> str:
        return f"data = {form['data']} groups of chips hold the same weights and serve different requests."


DATA = Data("data", turn=6, always=True, is_ranks=True, also=("dp", "ddp", "data_parallel", "dp_replicate"))
