"""Every preset's forward pass, recorded one operation after another, does the FLOPs that are counted."""

from collections import defaultdict

import pytest

from meshwright.cost.graph import Graph
from meshwright.cost.record import record_loss
from meshwright.cost.recorder import PassShape
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import component, forward_flops
from meshwright.models.presets import PRESETS


def _recorded(config: ModelConfig, seq_len: int, num_sequences: int = 1) -> Graph:
    return record_loss(config, Layout.of(), PassShape(num_sequences, seq_len, seq_len))


def _flops_by_part(graph: Graph) -> dict[str, float]:
    """Forward FLOPs of matmuls, by the component of their weight, and of scores."""
    found: dict[str, float] = defaultdict(float)
    for segment, node in graph.nodes():
        flops = segment.count * sum(work.flops for work in node.forward)
        if node.kind == "attention":
            found["scores"] += flops
        elif flops:
            found[component(node.name)] += flops
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_closed_forms_equal_what_is_recorded(name: str) -> None:
    config = PRESETS[name]
    seq_len = min(6000, config.max_seq_len)
    found, expected = _flops_by_part(_recorded(config, seq_len)), forward_flops(config, seq_len)
    for part in ("mlp", "attention", "scores", "vocab", "router"):
        assert found[part] == pytest.approx(seq_len * getattr(expected, part), rel=1e-12), part
    assert sum(found.values()) == pytest.approx(seq_len * expected.total, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-2-13b", "gpt-3-175b", "mixtral-8x7b"])
def test_training_takes_three_forwards(name: str) -> None:
    """18BTDF gated, 12BTDF not, k times that through experts; 12BTD(N + K)H; 12BT^2NH, halved by the mask."""
    config, seq_len, batch = PRESETS[name], 2048, 4
    graph = _recorded(config, seq_len, batch)
    tokens, layers = batch * seq_len, config.num_layers
    per_mlp = 18 if config.gated else 12
    used = config.moe.experts_per_token if config.moe else 1
    found = {part: 3 * flops for part, flops in _flops_by_part(graph).items()}
    assert found["mlp"] == layers * used * per_mlp * tokens * config.d_model * config.d_ff
    heads = (config.num_heads + config.num_kv_heads) * config.d_head
    assert found["attention"] == layers * 12 * tokens * config.d_model * heads
    scores = layers * 12 * batch * seq_len**2 * config.num_heads * config.d_head / 2
    assert found["scores"] == scores
