"""Tiny models that transformers itself makes, and what they answer in float32 on torch.

Importing this skips the module that does, where torch or transformers is missing.
"""

from pathlib import Path
from typing import Any

import pytest

WHY = "the reference is Hugging Face's own model on torch"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    # Ten times the usual, so that the most likely token leads and attention is not uniform.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LOCAL = {"sliding_window": 7}
ALTERNATING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
# Of other families than LLaMA: transformers' class, and what differs from SHAPE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    "local": ("Mistral", LOCAL),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        LOCAL
        | {
            "num_hidden_layers": 5,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        LOCAL
        | {
            "num_hidden_layers": 5,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 9,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", {"head_dim": 4, "pad_token_id": None}),
    "partial": ("Phi3", LOCAL | {"head_dim": 4, "partial_rotary_factor": 0.5, "pad_token_id": None}),
    "gpt2": (
        "GPT2",
        {
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 8,
            "n_inner": 48,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MLA = {
    "head_dim": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
}
FAMILIES |= {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", _MOE | {"num_experts": 8, "norm_topk_prob": False}),
    # Dense and expert layers alternate.
    "alternating": (
        "Qwen3Moe",
        _MOE | {"num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        _MOE
        | _MLA
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _MOE
        | _MLA
        | {
            "q_lora_rank": 16,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    # Each third layer sees all, without rotary positions; each second one has experts.
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 6,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.7,
            "rope_parameters": LLAMA3_ROPE,
            "pad_token_id": None,
        },
    ),
    # Heads that are no power of two have slopes of two kinds.
    "mpt": ("Mpt", {"d_model": 48, "n_heads": 12, "n_layers": 3, "max_seq_len": 64}),
    "bloom": ("Bloom", {"hidden_size": 48, "n_head": 12, "n_layer": 3, "seq_length": 64}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 50.0}}),
    "yarn": ("Llama", {"rope_parameters": _YARN}),
    # TOKENS are longer than the original length of the one, and shorter than that of the other.
    "longrope": (
        "Phi3",
        {
            "head_dim": 4,
            "pad_token_id": None,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 8,
        },
    ),
    "short_longrope": (
        "Phi3",
        {
            "head_dim": 4,
            "pad_token_id": None,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 48,
        },
    ),
}
MODELS = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "stretched": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 8},
    "mistral": {"sliding_window": None},
}


def make(kind: str, **more: Any) -> Any:
    """The model of this kind, with random weights; those of norms and biases too: ones hide mistakes.

    more: keys of its config besides.
    """
    family, changes = FAMILIES.get(kind) or ("Mistral" if kind == "mistral" else "Llama", MODELS[kind])
    own_names = family in ("GPT2", "Mpt", "Bloom")
    shape = {k: v for k, v in SHAPE.items() if not own_names or k in ("vocab_size", "initializer_range")}
    config = getattr(transformers, f"{family}Config")(**shape | changes | more)
    torch.manual_seed(7)
    # Only the eager form of attention applies soft caps.
    model = _class(family)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.uniform_(-0.5, 0.5)
            elif "experts." in name or ".gate.weight" in name or ".router.weight" in name:
                parameter.normal_(std=config.initializer_range)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    return model


def _class(family: str) -> Any:
    named = {
        "Gemma3Text": "Gemma3ForCausalLM",
        "GPT2": "GPT2LMHeadModel",
        "Llama4Text": "Llama4ForCausalLM",
    }
    return getattr(transformers, named.get(family, f"{family}ForCausalLM"))


def load(folder: Path) -> Any:
    """The model that transformers finds in `folder`."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def save(kind: str, folder: Path, **more: Any) -> Any:
    """The model, written to `folder` as transformers does."""
    model = make(kind, **more)
    model.save_pretrained(folder)
    return model


def logits(model: Any, tokens: list[list[int]]) -> Any:
    """f32[B, T, V] as numpy."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model's own `generate` appends to the prompt, in which token 0 is no padding."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        answer = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return answer[0, len(prompt) :].tolist()
