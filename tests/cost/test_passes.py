"""What a piece of work takes on a chip: its rates by kind, dtype and shape."""

from dataclasses import replace

import pytest

from meshwright.cost.graph import Transfer, Work
from meshwright.cost.passes import Dtypes, SegmentPass, compute_seconds
from meshwright.cost.timed_passes import TimedPass
from meshwright.hardware.catalog import chip
from meshwright.programs.efficiency import StepEfficiency

BF16 = Dtypes("bf16", "bf16")


def test_a_head_fills_a_part_of_the_matrix_units() -> None:
    """Of 256 x 256 (v6e) a head of 128 fills half, one of 256 all; of 128 x 128 (v5e) either all."""

    def seconds(name: str, head: int) -> float:
        work = Work(flops=1e12, shape=(4096, head, 2048))
        return compute_seconds(work, "attention", BF16, chip(name).ideal()) * chip(name).flops("bf16") / 1e12

    assert [seconds("v6e", head) for head in (64, 128, 256, 512)] == pytest.approx([4, 2, 1, 1])
    assert [seconds("v5e", head) for head in (64, 128, 256)] == pytest.approx([2, 1, 1])
    assert seconds("h100", 64) == pytest.approx(1)


def test_products_of_several_experts_reach_less() -> None:
    step = StepEfficiency(matmul={"bf16": 0.8}, experts=0.5)
    machine = replace(chip("h100"), step=step)
    whole = Work(flops=1e12, shape=(4096, 4096, 4096))
    one, several = (
        compute_seconds(replace(whole, routed=it), "matmul", BF16, machine) for it in (False, True)
    )
    assert one == pytest.approx(1e12 / (0.8 * machine.flops("bf16")))
    assert several == pytest.approx(one / 0.5)


@pytest.mark.parametrize(("looped", "hidden"), [(0.0, 0.8), (0.75, 0.2), (1.0, 0.0)])
def test_loops_over_blocks_hide_no_collectives(looped: float, hidden: float) -> None:
    """A second of compute and one of transfers: 0.8 of the time outside of loops is hidden."""
    machine = replace(chip("h100"), step=StepEfficiency(overlap=0.8))
    of_pass = SegmentPass("forward", (), BF16, machine, 1.0, 0.0, 0.0, 0.0, looped, ())
    gather = Transfer("weights", "all_gather", ("fsdp",), "w", 1, "bf16", critical=False)
    timed = TimedPass(of_pass, [(gather, 1.0)], machine)
    assert timed.seconds == pytest.approx(2 - hidden)
    assert timed.exposed(gather) == pytest.approx(1 - hidden)
    assert timed.room == pytest.approx(0.0)  # none of the compute is left to hide transfers once per step
