from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "seed_oss",
    "Seed-OSS",
    ("SeedOssForCausalLM",),
    keys=LLAMA_KEYS
    | {
        "attention_bias": Key("qkv_bias", True),
        "attention_out_bias": Key("attention_out_bias", False),
        "mlp_bias": Key("mlp_bias", False),
        "head_dim": Key("d_head", 128),
    }
    | ignored("training only", "residual_dropout"),
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    releases=release(
        "config.json of ByteDance-Seed/Seed-OSS-36B-Base and Instruct",
        {"seed-oss-36b": preset("L=64, D=5120, F=27_648, N=80, K=8, H=128, V=155_136", 36_151_104_512)},
        shared={"max_seq_len": 524_288, "norm_eps": 1e-6, "rope_theta": 1e7, "qkv_bias": True},
    ),
)
