"""The rows of experts that a plan has room for are those that the program has room for, under any layout."""

import random
from dataclasses import replace

import jax
import pytest
from tests.audit.test_searched import searched
from tests.nn.test_layouts import MIXTURE
from tests.train.test_lanes import MIXTURE as ALIKE

from meshwright.cost.lowering import Lowering
from meshwright.cost.ops import SymbolicOps
from meshwright.cost.recorder import Shape
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.mesh import device_mesh, named_sharding
from meshwright.nn.routes import choices_of, met_gates

WORK = Workload(64, 64)


def _without_capacity(config: ModelConfig) -> list[Layout]:
    """Layouts that the search asks for and that run, in an order of their own."""
    layouts = [one for one in searched(config, WORK) if one.schedule.capacity is None]
    return random.Random(7).sample(layouts, len(layouts))


@pytest.mark.parametrize("staged", [False, True], ids=["", "lanes"])
def test_a_round_has_the_room_that_is_planned(staged: bool) -> None:
    # A search of lanes finds no model with dense layers before experts, nor of few experts.
    config = ALIKE if staged else MIXTURE
    moe = replace(config.moe, num_experts=32) if config.moe else None
    assert moe is not None
    config = replace(config, moe=moe)
    layouts = [one for one in _without_capacity(config) if one.stages_alike == staged][:24]
    several_rounds = 0
    for layout in layouts:
        sequences = WORK.num_sequences // layout.microbatches
        shape = Shape(sequences, WORK.seq_len, WORK.seq_len)
        planned = SymbolicOps(config, layout, shape, Lowering(flash_attention=False, static_on="cpu")).blocks
        mesh = device_mesh(layout)
        lies = named_sharding(layout.activation("gates", "BTE"), mesh)
        gates = jax.ShapeDtypeStruct((sequences, WORK.seq_len, moe.num_experts), "float32", sharding=lies)
        run = []

        def rows(gates: jax.Array, layout: Layout = layout, run: list = run) -> jax.Array:
            run.append(choices_of(met_gates(gates, layout, layout.routing), layout, moe, "kept"))
            return run[0].num_rounds

        with jax.set_mesh(mesh):
            jax.eval_shape(rows, gates)
        assert run[0].blocks == planned, layout
        several_rounds += run[0].blocks.rounds > 1
    assert len(layouts) > 8 and (several_rounds == 0 if staged else several_rounds > 0)
