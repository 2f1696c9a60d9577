"""One step along time: nothing is lost, nothing overlaps, and what is exposed lies where the chip waits."""

from itertools import pairwise

import pytest

import meshwright as mw
from meshwright.plan.study.timeline import step_blocks

LAYOUTS = (
    "fsdp=16,tensor=4,sequence_parallel=true,remat=full",
    "data=64,zero=1,remat=matmuls",
    "pipe=4,data=4,tensor=4,microbatches=16,remat=full",
)


@pytest.fixture(params=LAYOUTS)
def candidate(request: pytest.FixtureRequest):
    return mw.price("llama-3-8b", "v5e:8x8", mw.Train("1Mi", "4k"), request.param).candidate


def test_the_chip_is_busy_waits_or_idles_for_the_whole_step(candidate):
    own = [block for block in step_blocks(candidate) if block.row == "chip"]
    assert own[0].start == 0 and own[-1].end == pytest.approx(candidate.step_seconds)
    assert all(before.end == pytest.approx(after.start) for before, after in pairwise(own))


def test_links_carry_every_collective_one_after_another(candidate):
    blocks = step_blocks(candidate)
    rows = {block.row for block in blocks} - {"chip"}
    assert rows == {"·".join(one.axes) for one in candidate.cost.collectives}
    for row in rows:
        own = sorted((block for block in blocks if block.row == row), key=lambda block: block.start)
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(own))
