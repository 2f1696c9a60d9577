from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import MAMBA_KEYS, StateLayers, mamba_tensors
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, PROJECTIONS, feed_forward, norms

BAMBA_TENSORS = (
    LLAMA_TENSORS
    | norms("mlp_norm", f"{LAYER}.pre_ff_layernorm")
    | norms("final_norm", "model.final_layernorm")
    | feed_forward("w", f"{LAYER}.feed_forward", "F", PROJECTIONS)
    | mamba_tensors(f"{LAYER}.mamba")
)
FAMILY = Family(
    "bamba",
    "Bamba",
    ("BambaForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EPS_1E_5
    | MAMBA_KEYS
    | {"mlp_bias": Key("mlp_bias", False)}
    | ignored(
        "how transformers runs it",
        "mamba_chunk_size", "mamba_expand", "num_logits_to_keep", "time_step_limit", "z_loss_coefficient",
        "time_step_min", "time_step_max", "time_step_floor",
    )
    | ignored("its class turns half of each head", "partial_rotary_factor", "attn_rotary_emb"),
    groups=(
        StateLayers(key="layers_block_type", numbers="attn_layer_indices"),
        Rope(share=0.5),
    ),
    tensors=BAMBA_TENSORS,
)  # fmt: skip
