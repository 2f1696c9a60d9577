from meshwright.models.families.cohere import COHERE_KEYS, COHERE_SETS, COHERE_TENSORS
from meshwright.models.families.family import Family, ignored
from meshwright.models.families.layers import LocalLayers
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
)
