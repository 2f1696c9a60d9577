from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.releases import by_letter, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen3",
    "Qwen 3",
    ("Qwen3ForCausalLM",),
    model_types=("qwen3", "qwen3_vl_text"),
    wrappers=("qwen3_vl",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | ignored("of models that also see", "use_mrope")
    | {"head_dim": Key("d_head", 128)},
    sets={"qk_norm": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    tool_calls=HERMES,
    releases=release(
        "Yang et al. 2025, https://arxiv.org/abs/2505.09388; config.json of Qwen/Qwen3-*",
        {
            "qwen3-0.6b": preset("L=28, D=1024, F=3072, N=16", 596_049_920, tied_embeddings=True),
            "qwen3-1.7b": preset("L=28, D=2048, F=6144, N=16", "1.7B", tied_embeddings=True),
            "qwen3-4b": preset("L=36, D=2560, F=9728, N=32", 4_022_468_096, tied_embeddings=True),
            "qwen3-8b": preset("L=36, D=4096, F=12_288, N=32", 8_190_735_360),
            "qwen3-14b": preset("L=40, D=5120, F=17_408, N=40", 14_768_307_200),
            "qwen3-32b": preset("L=64, D=5120, F=25_600, N=64", 32_762_123_264),
        },
        shared=by_letter("K=8, H=128, V=151_936")
        | {"max_seq_len": 40_960, "norm_eps": 1e-6, "rope_theta": 1e6},
    ),
)
