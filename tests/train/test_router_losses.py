"""The losses of routers: their gradients are one device's on every layout, and training lowers them."""

from dataclasses import replace

import pytest
from tests.nn.small_models import MIXTURE, TINY
from tests.train.one_device import TOKENS, assert_agrees, compiled_step
from tests.train.test_spmd_1f1b import MIXTURE as ALIKE

from meshwright.layout import Layout
from meshwright.models.config_tables import MoE

pytestmark = pytest.mark.sampled(4)

PLAIN = replace(TINY, name="plain mixture", moe=MoE(num_experts=8, experts_per_token=2, d_ff=16))
# Large, so that what is wrong with them is not lost in the gradients of the cross-entropy.
LOSSES = 1.0, 0.5


@pytest.mark.slow
def test_gradients_are_those_of_one_device() -> None:
    assert_agrees(PLAIN, "fsdp=2,data=2,expert=2,tensor=2,sequence_parallel=true,microbatches=2", LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "fsdp=2,data=2,expert=2,tensor=2,microbatches=2",
        "fsdp=8,expert=4,remat=full",
        "context=2,fsdp=2,tensor=2,expert=2",
        "data=4,tensor=2,zero=2,microbatches=4",
    ],
)
def test_with_other_routers_and_axes(text: str) -> None:
    assert_agrees(MIXTURE, text, LOSSES)


@pytest.mark.slow
def test_in_a_pipeline_of_lanes() -> None:
    text = "pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=lanes"
    assert_agrees(ALIKE, text, LOSSES)
    found, expected = (
        compiled_step(ALIKE, Layout.parse(one), LOSSES) for one in (text, "data=2,microbatches=2")
    )
    lanes, alone = (step.step(step.init(0), TOKENS)[1] for step in (found, expected))
    for name in ("loss", "balance_loss", "router_z_loss"):
        assert float(lanes[name]) == pytest.approx(float(alone[name]), rel=1e-5)


@pytest.mark.slow
def test_training_lowers_what_has_a_weight_and_reports_it() -> None:
    step = compiled_step(PLAIN, Layout.of(data=2), LOSSES)
    state, first = step.step(step.init(0), TOKENS)
    for _ in range(8):
        state, last = step.step(state, TOKENS)
    assert 0.9 < float(first["balance_loss"]) < 4
    for name in ("balance_loss", "router_z_loss"):
        assert float(last[name]) < float(first[name])
    validated = float(step.evaluate(step.init(0), TOKENS))
    assert float(first["loss"]) == pytest.approx(validated, rel=1e-5)  # the cross-entropy alone
    assert compiled_step(PLAIN, Layout.of(data=2)).router_weights is None
