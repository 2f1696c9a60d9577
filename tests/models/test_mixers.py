"""Mixers with a state: layers in any order, their states, and their FLOPs by hand."""

from dataclasses import replace

import pytest

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.count import (
    forward_flops,
    kv_bytes_per_token,
    kv_cache_bytes,
    layer_kinds,
    mixer_state_bytes,
)
from meshwright.models.mixers import GatedDelta, StateSpace
from meshwright.models.parameters import parameters
from meshwright.models.presets import PRESETS

HYBRID = ModelConfig(
    "hybrid",
    num_layers=6,
    d_model=32,
    d_ff=64,
    num_heads=4,
    num_kv_heads=2,
    d_head=8,
    vocab_size=64,
    max_seq_len=64,
    delta=GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6),
    mixers=("state", "state", "attention"),
)


def test_states_do_not_grow_with_the_length() -> None:
    """Of Qwen3-Next a layer has 32 heads of 128 x 128 in float32, and 3 inputs of 8192 channels in bf16."""
    config = PRESETS["qwen3-next-80b-a3b"]
    assert mixer_state_bytes(config) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    short, long = (layer_kinds(config, length) for length in (4096, 262_144))
    assert [kind.state_bytes for kind in short] == [kind.state_bytes for kind in long]
    assert kv_cache_bytes(config, 262_144) == 64 * kv_cache_bytes(config, 4096)
    assert kv_bytes_per_token(config) == 12 * 2 * 2 * 256 * 2


def test_flops_of_a_recurrence_are_those_of_its_chunks() -> None:
    """4 C s for each key head, 2 C p + 6 s p for each value head and token; scores only in attention."""
    of_a_layer = 2 * 4 * 64 * 8 + 4 * (2 * 64 * 6 + 6 * 8 * 6)
    of_attention = 2 * (64 / 2) * 4 * (8 + 8)
    assert forward_flops(HYBRID, 64).scores == 4 * of_a_layer + 2 * of_attention


def test_bytes_between_kernels_are_those_of_a_chunk_s_products() -> None:
    """Of Mamba-2 with C positions: C . B of the group, scores by values, and the state read and written.

    Each product reads its operands and writes its result in float32.
    """
    mixer, c, s, p, heads = StateSpace(num_heads=3, head_dim=6, state_dim=8), 64, 8, 6, 3
    of_group = c * s + s * c + c * c
    of_head = (c * c + c * p + c * p) + (c * s + s * p + c * p) + (s * c + c * p + s * p)
    assert mixer.chunk_bytes(32, c) == 4 * (of_group + heads * of_head) / c


def test_layers_are_numbered_by_cache_and_state() -> None:
    layers = HYBRID.layers
    assert [layer.kind.stack for layer in layers] == ["state_layers", "state_layers", "layers"] * 2
    assert [layer.cache for layer in layers] == [-1, -1, 0, -1, -1, 1]
    assert [layer.state for layer in layers] == [0, 1, -1, 2, 3, -1]
    assert {path for path in parameters(HYBRID) if path.endswith("/wq")} == {"layers/wq"}


def test_blocks_have_one_half_of_a_layer() -> None:
    config = replace(HYBRID, mixers=("state", "none", "attention"), feed_forwards=("none", "dense", "none"))
    stacks = {path.partition("/")[0] for path in parameters(config) if "/" in path}
    assert stacks == {"state_blocks", "dense_blocks", "attention_blocks"}
    assert "dense_blocks/attention_norm" not in parameters(config)
    assert "state_blocks/mlp_norm" not in parameters(config)


def test_lists_repeat_over_the_layers() -> None:
    whole = replace(HYBRID, mixers=("state", "state", "attention") * 2)
    assert whole == HYBRID
    assert len(replace(HYBRID, num_layers=8).layers) == 8


def test_heads_of_one_group_have_no_letter_for_it() -> None:
    """B and C are then whole on every device, and heads are split."""
    params = StateSpace(num_heads=8, head_dim=4, state_dim=16, num_groups=1).params()
    assert params["state_x"].letters == "Dup" and params["state_b"].letters == "Ds"
    params = StateSpace(num_heads=8, head_dim=4, state_dim=16, num_groups=2).params()
    assert params["state_x"].letters == "Dgup" and params["state_b"].letters == "Dgs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("state", "conv")}, "mixers has 'conv'; fits: attention, state, both, none"),
        ({"mixers": None}, "mixers = None with delta; fits: a table"),
        ({"delta": None}, "with no state; fits: a table delta or"),
        ({"feed_forwards": ("experts",)}, "feed_forwards has 'experts' without a table moe"),
        (
            {"mixers": ("state", "none"), "feed_forwards": ("dense", "none")},
            "layer 1 has neither a mixer nor a feed-forward",
        ),
    ],
)
def test_parts_that_contradict_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(HYBRID, **changes)
