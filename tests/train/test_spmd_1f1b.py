"""A pipeline of lanes: its loss and every gradient are those of one device, alone and with every other axis.

Values are float32, where a layout changes nothing but the order of sums (tests/train/test_accumulation.py).
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tests.nn.small_models import (
    ALIBI,
    CHUNKED,
    DELTA,
    GPT,
    LATENT,
    LOCAL,
    OSS,
    SHARED,
    SHARED_BY_FOUR,
    TIED,
    TINY,
)
from tests.train.one_device import NO_LOSSES, OF_STATES, TOKENS, assert_agrees, compiled_step

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.runnable import check_runs, why_not
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE

pytestmark = pytest.mark.sampled(4)

DEEP = replace(TINY, num_layers=4)
EXPERTS = MoE(num_experts=8, experts_per_token=2, d_ff=16, router_bias=True, expert_bias=True)
MIXTURE = replace(OSS, moe=EXPERTS)
CHOSEN_BY_BIAS = replace(
    MIXTURE, name="chosen_by_bias", moe=replace(EXPERTS, score="sigmoid", choice_bias=True)
)


def test_loss_and_gradients_are_those_of_one_device() -> None:
    assert_agrees(TINY, "pipe=2,data=2,tensor=2,microbatches=4,schedule=lanes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "pipe=4,fsdp=2,microbatches=4,remat=full",
        "pipe=4,data=2,microbatches=2",
        "pipe=2,data=4,zero=1,microbatches=4,remat=matmuls",
        "pipe=2,data=4,zero=2,microbatches=4",
        "pipe=2,fsdp=2,tensor=2,microbatches=2,sequence_parallel=true",
        "pipe=2,data=2,context=2,microbatches=2,context_method=ring,remat=full",
        "pipe=2,fsdp=2,context=2,microbatches=2",
    ],
)
def test_with_every_other_axis(text: str) -> None:
    assert_agrees(DEEP, f"{text},schedule=lanes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [TIED, LOCAL, GPT, LATENT, ALIBI, replace(CHUNKED, moe=None, global_every=3, nope_every=3)],
    ids=lambda config: config.name,
)
def test_other_families(config: ModelConfig) -> None:
    """A table that both ends read, windows that differ from stage to stage, positions, latent attention."""
    assert_agrees(replace(config, num_layers=4), "pipe=2,fsdp=2,tensor=2,microbatches=2,schedule=lanes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (SHARED, "pipe=2,data=2,tensor=2,microbatches=4"),
        (SHARED_BY_FOUR, "pipe=2,data=2,fsdp=2,microbatches=2,remat=full"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_layers_that_share_keys_and_values(config: ModelConfig, text: str) -> None:
    assert_agrees(config, f"{text},schedule=lanes")


@pytest.mark.slow
def test_layers_with_a_state() -> None:
    text = "pipe=2,data=2,tensor=2,microbatches=4,schedule=lanes"
    assert_agrees(replace(DELTA, num_layers=4), text, tolerance=OF_STATES)


@pytest.mark.slow
def test_stages_may_have_layers_of_different_kinds() -> None:
    assert_agrees(replace(LOCAL, num_layers=4), "pipe=4,data=2,microbatches=2,schedule=lanes,remat=full")


@pytest.mark.slow
def test_a_tied_tables_gradients_are_added_before_they_are_scattered() -> None:
    assert_agrees(replace(TIED, num_layers=4), "pipe=2,data=4,zero=2,microbatches=4,schedule=lanes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (MIXTURE, "fsdp=4,expert=4"),
        (MIXTURE, "fsdp=4,expert=2"),
        (CHOSEN_BY_BIAS, "data=2,fsdp=2"),
        (MIXTURE, "fsdp=4,expert=4,expert_nodes=2,dispatch=once"),
        (OSS, "fsdp=4,expert=2"),
    ],
    ids=["over all", "over some", "chosen by bias", "over nodes", "each second layer"],
)
def test_experts(config: ModelConfig, text: str) -> None:
    """With a row for each of a token's experts; where a bias chooses them, which no gradient reaches."""
    assert_agrees(config, f"pipe=2,{text},microbatches=2,schedule=lanes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(LOCAL, num_layers=4), "pipe=4,data=2,microbatches=2,remat=full"),
        (replace(GPT, num_layers=4), "pipe=2,fsdp=2,tensor=2,microbatches=4"),
        (DEEP, "pipe=2,data=2,context=2,microbatches=4,context_method=ring"),
        (MIXTURE, "pipe=2,fsdp=4,expert=2,microbatches=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_masked_rows(config: ModelConfig, text: str) -> None:
    """Each stage is at another microbatch, whose documents begin elsewhere."""
    losses = (0.1, 0.01) if config.moe else NO_LOSSES
    assert_agrees(config, f"{text},schedule=lanes", losses, masked=True)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("pipe=2,data=2,microbatches=4,offload=true", marks=pytest.mark.slow),
        # Fewer microbatches than the ring has slots.
        pytest.param("pipe=4,fsdp=2,microbatches=2,offload=true,remat=full", marks=pytest.mark.slow),
    ],
)
def test_what_is_offloaded_comes_back(text: str) -> None:
    assert_agrees(DEEP, f"{text},schedule=lanes")


def test_the_ring_of_saved_activations_waits_on_the_host() -> None:
    """As the step is traced: XLA for CPU has one memory."""
    traced = {}
    for text in ("", ",offload=true"):
        step = compiled_step(DEEP, Layout.parse(f"pipe=2,microbatches=2,schedule=lanes{text}"))
        with jax.set_mesh(step.mesh):
            jaxpr = step.jitted.trace(step.abstract_state(), step.abstract_tokens()).jaxpr
        traced[text] = str(jaxpr).count("<host>")
    assert traced[""] == 0 and traced[",offload=true"] > 0


@pytest.mark.slow
def test_the_loss_alone_is_the_loss_of_the_step() -> None:
    step = compiled_step(DEEP, Layout.of(pipe=4, data=2, microbatches=4, schedule="lanes"))
    state = step.init(0)
    found = float(step.evaluate(state, TOKENS))
    assert float(step.step(state, TOKENS)[1]["loss"]) == pytest.approx(found, rel=1e-6)


def test_every_stage_has_its_layers_and_its_share_of_the_vocabulary() -> None:
    layout = Layout.of(pipe=2, tensor=2, fsdp=2, microbatches=2, schedule="lanes")
    assert str(layout.weight("wq", "LDNH")) == "wq[L_pipe, D_fsdp, N_tensor, H]"
    assert str(layout.weight("attention_norm", "LD")) == "attention_norm[L_pipe, D]"
    assert str(layout.weight("embed", "VD")) == "embed[V_{pipe,tensor}, D_fsdp]"
    assert layout.replace(schedule="1f1b").weight("wq", "LDNH").axes_of("L") == ()
    assert Layout.from_dict(layout.to_dict()) == layout and Layout.parse(str(layout)).mesh == layout.mesh


def test_what_no_program_of_lanes_runs_is_refused() -> None:
    lanes = Layout.of(pipe=2, microbatches=2, schedule="lanes")
    check_runs(lanes)
    assert (
        why_not(replace(DEEP, num_layers=3), lanes)
        == "attention_norm[L_pipe, D]: 3 layers (L) do not divide over pipe = 2"
    )
    with pytest.raises(LayoutError, match="microbatches = 1; fits: microbatches of 2 or more"):
        compiled_step(DEEP, lanes.replace(microbatches=1))
    check_fits(lanes, OSS)  # a dense layer and one of experts on both
    assert OSS.moe is not None
    first_dense = replace(OSS, moe=replace(OSS.moe, every=1, num_dense_layers=1))
    with pytest.raises(LayoutError, match="cuts oss into stages with unlike layers"):
        check_fits(lanes, first_dense)
    assert why_not(DEEP, lanes, "generate") == "pipe=2"
    with pytest.raises(
        LayoutError, match="a compiled step is one program, and the stages of schedule = 1f1b"
    ):
        compiled_step(DEEP, lanes.replace(schedule="1f1b"))


def test_stages_hold_their_own_rows_alone() -> None:
    step = compiled_step(DEEP, Layout.of(pipe=4, data=2, microbatches=4, schedule="lanes"))
    wq = step.abstract_state().params["layers"]["wq"]
    assert wq.sharding.shard_shape(wq.shape) == (1, 32, 8, 8)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.prod(leaf.shape) > 0, step.abstract_state().params))
