"""Keys that the generations of Gemma share."""

from typing import Any

from meshwright.models.families.family import Key, Rule, fixed, ignored
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS, QUERY_SCALAR

GEMMA_SETS: dict[str, Any] = {"norm_offset": True, "scale_embedding": True}
GEMMA_KEYS: dict[str, Rule] = (
    LLAMA_KEYS
    | fixed(attention_bias=False)
    | ignored("how transformers runs it", "cache_implementation")
    | ignored("of encoders", "use_bidirectional_attention")
    | {
        "head_dim": Key("d_head", 256),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "hidden_activation": Key("activation", "gelu_pytorch_tanh", also=("hidden_act",), form=ACTIVATION),
    }
    | ignored("hidden_activation counts", "hidden_act")
)
GEMMA_2_KEYS: dict[str, Rule] = GEMMA_KEYS | {
    "query_pre_attn_scalar": Key("query_scale", 256, form=QUERY_SCALAR),
    "attn_logit_softcapping": Key("attention_softcap", 50.0, null_is_none=True),
    "final_logit_softcapping": Key("logit_softcap", 30.0, null_is_none=True),
}
GEMMA_2_SETS = GEMMA_SETS | {"post_norms": True}
