from meshwright.models.families.family import Family, Key
from meshwright.models.families.gemma_keys import GEMMA_2_KEYS, GEMMA_2_SETS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS

FAMILY = Family(
    "gemma3",
    "Gemma 3 (text)",
    ("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    wrappers=("gemma3",),
    keys=GEMMA_2_KEYS
    | {
        # Files of the larger models leave out the defaults of their class.
        "num_attention_heads": Key("num_heads", 8),
        "num_key_value_heads": Key("num_kv_heads", 4),
        "vocab_size": Key("vocab_size", 262_208),
        "max_position_embeddings": Key("max_seq_len", 131_072),
        "attn_logit_softcapping": Key("attention_softcap"),
        "final_logit_softcapping": Key("logit_softcap"),
    },
    sets=GEMMA_2_SETS | {"qk_norm": True},
    groups=(
        LocalLayers(
            window=4096, global_every=6, pattern=("sliding_window_pattern", "_sliding_window_pattern")
        ),
        Rope(theta=1e6, local_theta=1e4),
    ),
    tensors=LLAMA_TENSORS | POST_NORMS,
)
