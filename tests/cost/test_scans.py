"""The work of recurrences in XLA's loops over chunks of positions."""

from dataclasses import replace

import pytest
from tests.cost.recorded import SMALL

from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.mixers import StateSpace


def test_scans_run_the_kernels_of_each_chunk() -> None:
    """Of 256 positions of two sequences: four chunks, whose kernels run one after another.

    Their arrays cross memory between them. One kernel of other software keeps these on chip.
    """
    state_space = StateSpace(num_heads=4, head_dim=8, state_dim=8)
    config = replace(SMALL, num_layers=1, state_space=state_space, mixers=("state",), max_seq_len=256)
    machine, layout = load("h100:1x8"), Layout.of(data=8)
    ours, theirs = (
        next(
            node
            for _, node in record_training(config, one, layout, PassShape(16, 256, 256)).nodes()
            if node.name == "state_space"
        )
        for one in (machine, machine.running("megatron-lm"))
    )
    loops, tokens = state_space.loops(), 2 * 256
    for mine, other, in_loop in (
        (ours.forward, theirs.forward, loops.forward),
        (ours.backward, theirs.backward, loops.backward),
    ):
        assert (mine[0].kernels, other[0].kernels) == (4 * in_loop.kernels, 1)
        through = in_loop.passes * state_space.chunk_bytes(SMALL.d_model) * tokens
        assert mine[0].hbm_bytes - other[0].hbm_bytes == pytest.approx(through)
        assert mine[0].flops == other[0].flops
