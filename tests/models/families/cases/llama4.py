from typing import Any

from tests.models.families.case import LLAMA3_ROPE, Tiny

# What both of Llama 4 say of their language model.
_LLAMA_4 = {
    "_attn_implementation_autoset": True,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "bos_token_id": 200000,
    "cache_implementation": "hybrid",
    "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 202048,
}

HUB: dict[str, dict[str, Any]] = {
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": _LLAMA_4
        | {
            "interleave_moe_layer_step": 1,
            "max_position_embeddings": 10485760,
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "use_qk_norm": True,
        },
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    },
    "llama-4-maverick": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": _LLAMA_4
        | {
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "num_local_experts": 128,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    },
}
TINY = {
    # Each third layer sees all, without rotary positions; each second one has experts.
    "llama4": Tiny(
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
        written="Llama4ForCausalLM",
        split="daily",
        model="Llama4ForCausalLM",
    ),
}
