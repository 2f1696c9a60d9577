from meshwright.models.families.family import Family
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, activation
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, norms

FAMILY = Family(
    "bitnet",
    "BitNet b1.58",
    ("BitNetForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS | activation("relu2"),
    sets={"inner_norms": True},
    groups=(Rope(theta=500_000.0),),
    tensors=LLAMA_TENSORS
    | norms("attention_inner_norm", f"{LAYER}.self_attn.attn_sub_norm", "NH")
    | norms("mlp_inner_norm", f"{LAYER}.mlp.ffn_sub_norm", "F"),
    releases=release(
        "Ma et al. 2025, https://arxiv.org/abs/2504.12285; config.json of microsoft/bitnet-b1.58-2B-4T",
        {
            "bitnet-b1.58-2b": preset(
                "L=30, D=2560, F=6912, N=20, K=5, V=128_256",
                "2.4B",
                max_seq_len=4096,
                rope_theta=500_000.0,
                activation="relu2",
                tied_embeddings=True,
            )
        },
    ),
)
