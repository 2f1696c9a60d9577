"""The rows of experts that a plan has room for are those that the program has room for, under any layout."""

import random
from dataclasses import replace
from typing import Any

import jax
import pytest
from tests.audit.test_searched import searched
from tests.nn.small_models import MIXTURE
from tests.train.test_spmd_1f1b import MIXTURE as ALIKE

from meshwright.cost.ops.symbolic import SymbolicOps
from meshwright.cost.recorder import Lowering, PassShape
from meshwright.layout import Layout
from meshwright.layout.moves.experts import row_routing
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.experts.dropless import choices_of, gathered_gates
from meshwright.nn.experts.node_dispatch import crossings_of, gates_at_nodes
from meshwright.nn.start.device_mesh import device_mesh, named_sharding
from meshwright.platforms import CPU

WORK = Workload(64, 64)


def _without_capacity(config: ModelConfig) -> list[Layout]:
    """Layouts that the search asks for and that run, in an order of their own."""
    layouts = [one for one in searched(config, WORK) if one.schedule.capacity is None]
    return random.Random(7).sample(layouts, len(layouts))


@pytest.mark.parametrize(
    "staged", [pytest.param(False, id=""), pytest.param(True, id="lanes", marks=pytest.mark.slow)]
)
def test_a_round_has_the_room_that_is_planned(staged: bool) -> None:
    # A search of lanes finds no model with dense layers before experts, nor of few experts.
    config = ALIKE if staged else MIXTURE
    moe = replace(config.moe, num_experts=32) if config.moe else None
    assert moe is not None
    config = replace(config, moe=moe)
    layouts = [one for one in _without_capacity(config) if one.spmd_stages == staged][:24]
    several_rounds = 0
    for layout in layouts:
        planned, run = _planned_and_run(config, layout)
        assert run == planned, layout
        several_rounds += run[1].passes > 1
    assert len(layouts) > 8 and (several_rounds == 0 if staged else several_rounds > 0)


@pytest.mark.parametrize(
    ("text", "several_rounds"),
    [
        ("fsdp=8,expert=4,expert_nodes=2", False),
        ("data=8,expert=8,expert_nodes=8", True),
        ("fsdp=4,expert=2,expert_nodes=2,tensor=2,sequence_parallel=true", False),
        ("data=8,expert=8,expert_nodes=4,microbatches=2", True),
    ],
)
def test_what_crosses_to_nodes_has_the_room_that_is_planned(text: str, several_rounds: bool) -> None:
    layout = Layout.parse(f"{text},dispatch=once")
    planned, run = _planned_and_run(MIXTURE, layout)
    assert run == planned and (run[0].passes > 1) == several_rounds


def _planned_and_run(config: ModelConfig, layout: Layout) -> tuple[Any, Any]:
    """The rooms of what crosses to nodes, and of the rows of experts: as planned, and of the program."""
    assert config.moe is not None
    moe, sequences = config.moe, WORK.num_sequences // layout.schedule.microbatches
    shape = PassShape(sequences, WORK.seq_len, WORK.seq_len)
    planned = SymbolicOps(
        config, layout, shape, Lowering(flash_attention=False, static_blocks=CPU.expert_blocks)
    )
    mesh, run = device_mesh(layout), []
    lies = named_sharding(layout.activation("gates", "BTE"), mesh)
    gates = jax.ShapeDtypeStruct((sequences, WORK.seq_len, moe.num_experts), "float32", sharding=lies)

    def rows(gates: jax.Array) -> jax.Array:
        routing, room = row_routing(layout), None
        gates = gathered_gates(gates, layout, routing.to_nodes)
        if routing.nodes:
            crossings = crossings_of(gates, layout, moe, "kept")
            room = crossings.crossing
            came, _ = gates_at_nodes(gates, crossings, 0, layout)
            gates = gathered_gates(came, layout, routing.of_node)
        choices = choices_of(gates, layout, moe, "kept", room)
        run.extend((room, choices.blocks))
        return choices.num_passes

    with jax.set_mesh(mesh):
        jax.eval_shape(rows, gates)
    return (planned.expert_rows.crossing, planned.expert_rows.blocks), tuple(run)
