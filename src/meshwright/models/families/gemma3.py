from meshwright.models.families.family import Family, Key
from meshwright.models.families.gemma_keys import GEMMA_2_KEYS, GEMMA_2_SETS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import Release, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS

_SHARED = {
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_theta_local": 1e4,
    "tied_embeddings": True,
    "activation": "gelu",
    "global_every": 6,
    "query_scale": 256**-0.5,
}

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
    releases=(
        Release(
            "Gemma Team 2025, https://arxiv.org/abs/2503.19786; config.json of google/gemma-3-1b-pt",
            {"gemma-3-1b": preset("L=26, D=1152, F=6912, N=4, K=1, H=256, V=262_144", 999_885_952)},
            shared=_SHARED | {"max_seq_len": 32_768, "sliding_window": 512},
        ),
        Release(
            # Without the vision tower, so their published counts are larger.
            "Gemma Team 2025, https://arxiv.org/abs/2503.19786; config.json of google/gemma-3-*-pt",
            {
                "gemma-3-4b": preset("L=34, D=2560, F=10_240, N=8, K=4, H=256"),
                "gemma-3-12b": preset("L=48, D=3840, F=15_360, N=16, K=8, H=256"),
                "gemma-3-27b": preset("L=62, D=5376, F=21_504, N=32, K=16, H=128", query_scale=168**-0.5),
            },
            shared=_SHARED
            | {
                "vocab_size": 262_208,
                "max_seq_len": 131_072,
                "rope_scaling": {"kind": "linear", "factor": 8.0},
                "sliding_window": 1024,
            },
        ),
        Release(
            "config.json of google/gemma-3-270m",
            {"gemma-3-270m": preset("L=18, D=640, F=2048, N=4, K=1, H=256, V=262_144", 268_098_176)},
            shared=_SHARED | {"max_seq_len": 32_768, "sliding_window": 512},
        ),
    ),
)
