from meshwright.models.families.cohere import COHERE_KEYS, COHERE_SETS, COHERE_TENSORS, SHARED
from meshwright.models.families.family import Family, ignored
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "cohere2",
    "Command R7B, Command A",
    ("Cohere2ForCausalLM",),
    keys=COHERE_KEYS
    | ignored("how transformers runs it", "cache_implementation", "order_of_interleaved_layers")
    | ignored("as its class computes it", "position_embedding_type", "rotary_pct", "use_qk_norm")
    | ignored("as its class computes it", "use_embedding_sharing", "use_gated_activation")
    | ignored("as its class computes it", "use_parallel_block", "use_parallel_embedding", "layer_switch"),
    sets=COHERE_SETS,
    groups=(
        LocalLayers(
            window=4096,
            global_every=4,
            pattern=("sliding_window_pattern", "_sliding_window_pattern"),
            unturned=True,
        ),
        Rope(),
    ),
    tensors=COHERE_TENSORS,
    releases=release(
        "config.json of CohereForAI/c4ai-command-r7b-12-2024, c4ai-command-a-03-2025",
        {
            "command-r7b": preset(
                "L=32, D=4096, F=14_336, N=32", 8_028_033_024, max_seq_len=132_096, logit_scale=0.25
            ),
            "command-a": preset(
                "L=64, D=12_288, F=36_864, N=96", 111_057_580_032, max_seq_len=131_072, logit_scale=0.25
            ),
        },
        shared=SHARED
        | {
            "num_kv_heads": 8,
            "rope_theta": 50_000.0,
            "sliding_window": 4096,
            "global_every": 4,
            "nope_every": 4,
        },
    ),
)
