"""Draft heads of published checkpoints: the names of DeepSeek-V3's, Qwen3-Next's and MiMo's tensors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshwright.errors import ModelError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.hf import from_hf, written_family
from meshwright.nn.files.hf_tensors import hf_tensors
from meshwright.nn.files.weights import has_draft_head, load_hf, save_hf
from meshwright.nn.params import flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
NORMS = ("input_layernorm", "post_attention_layernorm")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
BY_EXPERT = [f"mlp.experts.{number}.{name}" for number in range(4) for name in FEED_FORWARD]
# The model's sizes, the beginning of the names of the layer, and the names of the head's own tensors: of the
# norms of embedding and hidden state, of the projection, and of the norm of the result.
MIMO = SIZES | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
QWEN = SIZES | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
LATENT = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)
FILES = {
    "mimo": (
        MIMO,
        "model.mtp_layers.0",
        [f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm")],
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm",
        [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        + [f"mlp.{name}" for name in FEED_FORWARD],
        [f"self_attn.{name}_proj.bias" for name in "qkv"],
    ),
    "deepseek": (
        DEEPSEEK,
        "model.layers.3",
        ["model.layers.3.enorm", "model.layers.3.hnorm"],
        "model.layers.3.eh_proj",
        "model.layers.3.shared_head.norm",
        [f"self_attn.{name}" for name in LATENT]
        + ["mlp.gate", *BY_EXPERT, *(f"mlp.shared_experts.{name}" for name in FEED_FORWARD)],
        ["mlp.gate.e_score_correction_bias"],
    ),
    "qwen": (
        QWEN,
        "mtp.layers.0",
        ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"],
        "mtp.fc",
        "mtp.norm",
        [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
        + ["mlp.gate", *BY_EXPERT, "mlp.shared_expert_gate"]
        + [f"mlp.shared_expert.{name}" for name in FEED_FORWARD],
        [],
    ),
}


def _names(model: str) -> set[str]:
    _, layer, norms, proj, norm, weights, biases = FILES[model]
    of_layer = {f"{layer}.{name}.weight" for name in (*NORMS, *weights)} | {
        f"{layer}.{name}" for name in biases
    }
    return of_layer | {f"{name}.weight" for name in (*norms, proj, norm)}


def _head(sizes: dict[str, Any], name: str) -> tuple[ModelConfig, ModelConfig]:
    config = from_hf(sizes, name)
    return config, replace(config, draft_head="alone")


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.slow) if model == "qwen" else model for model in FILES]
)
def test_a_head_is_read_from_the_names_of_its_files(model: str, tmp_path: Path) -> None:
    sizes, layer, norms, proj, norm, *_ = FILES[model]
    config, head = _head(sizes, model)
    split = Layout.of(weights_dtype="f32")
    mesh = device_mesh(split)
    save_hf(init_params(config, split, mesh, 0), config, tmp_path)
    assert not has_draft_head(tmp_path, config)
    stored = load_file(tmp_path / "model.safetensors")
    # A layer of the head has the shapes of the model's last layer.
    last, random = f"model.layers.{sizes['num_hidden_layers'] - 1}.", np.random.default_rng(1)
    like = {name.removeprefix(last): x for name, x in stored.items() if name.startswith(last)}
    shapes = {f"{name}.weight": (32,) for name in (*norms, norm)} | {f"{proj}.weight": (32, 64)}
    shapes |= {f"{layer}.{name}": x.shape for name, x in like.items()}
    assert shapes.keys() == _names(model)
    more = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(stored | more, tmp_path / "model.safetensors", {"format": "pt"})
    assert has_draft_head(tmp_path, config)
    load_hf(tmp_path, config, split, mesh)  # without the head
    loaded = load_hf(tmp_path, head, split, mesh)
    np.testing.assert_array_equal(loaded["draft_embed_norm"], more[f"{norms[0]}.weight"])
    np.testing.assert_array_equal(loaded["draft_hidden_norm"], more[f"{norms[1]}.weight"])
    np.testing.assert_array_equal(loaded["draft_norm"], more[f"{norm}.weight"])
    # MiMo's files have the hidden state before the embedding.
    embedding, hidden = (slice(32, 64), slice(0, 32)) if model == "mimo" else (slice(0, 32), slice(32, 64))
    given = more[f"{proj}.weight"]
    np.testing.assert_array_equal(loaded["draft_in"][:32], given[:, embedding].T)
    np.testing.assert_array_equal(loaded["draft_in"][32:], given[:, hidden].T)
    np.testing.assert_array_equal(
        loaded["draft_layers"]["mlp_norm"][0], more[f"{layer}.post_attention_layernorm.weight"]
    )
    np.testing.assert_array_equal(loaded["embed"], stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("model", ["mimo", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_a_head_that_was_trained_is_written(model: str, tmp_path: Path) -> None:
    config, head = _head(FILES[model][0], model)
    split, joint = Layout.of(weights_dtype="f32"), replace(config, draft_head="joint")
    mesh = device_mesh(split)
    params = init_params(joint, split, mesh, 0)
    save_hf(params, joint, tmp_path)
    assert (
        has_draft_head(tmp_path, config) and _names(model) <= load_file(tmp_path / "model.safetensors").keys()
    )
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    of_head, flat = flatten(load_hf(tmp_path, head, split, mesh)), flatten(params)
    for path in of_head:
        np.testing.assert_array_equal(of_head[path], flat[path], err_msg=path)
    of_model = flatten(load_hf(tmp_path, config, split, mesh))
    assert all(np.array_equal(of_model[path], flat[path]) for path in of_model)


def test_a_family_without_published_heads_says_so() -> None:
    config, head = _head(SIZES | {"model_type": "llama"}, "plain")
    with pytest.raises(ModelError, match="have no draft head that is read here"):
        hf_tensors(head, written_family(config))
