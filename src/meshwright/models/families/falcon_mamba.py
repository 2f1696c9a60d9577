from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, Release, ignored, published
from meshwright.models.families.mamba import BLOCK_KEYS, SELECTIVE_KEYS, read_blocks

FAMILY = Family(
    "falcon_mamba",
    "Falcon Mamba",
    ("FalconMambaForCausalLM",),
    keys=BLOCK_KEYS
    | {"tie_word_embeddings": Key("tied_embeddings", True)}
    | ignored("its norms have no weights", "mixer_rms_eps"),
    sets={"num_heads": 1},
    groups=(ByLayer(read_blocks, SELECTIVE_KEYS),),
    tensors={},
    is_written=False,
    releases=(
        Release(
            "TII 2024, https://arxiv.org/abs/2410.05355; config.json of tiiuae/falcon-mamba-7b",
            {
                "falcon-mamba-7b": published(
                    "7.3B",
                    num_hidden_layers=64,
                    hidden_size=4096,
                    intermediate_size=8192,
                    vocab_size=65_024,
                    tie_word_embeddings=False,
                )
            },
        ),
    ),
)
