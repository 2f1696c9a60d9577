from meshwright.models.families.family import DraftNames, Family, fixed, ignored
from meshwright.models.families.keys import LLAMA_KEYS, MTP, NO_LOCAL_LAYERS
from meshwright.models.families.releases import Release, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import HERMES

_SHARED = {"max_seq_len": 131_072, "norm_eps": 1e-6, "rope_theta": 1e6}

FAMILY = Family(
    "qwen2",
    "Qwen 2, 2.5",
    ("Qwen2ForCausalLM", "MiMoForCausalLM"),
    model_types=("qwen2", "mimo", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    wrappers=("qwen2_vl", "qwen2_5_vl", "got_ocr2", "dots_ocr"),
    keys=LLAMA_KEYS
    | NO_LOCAL_LAYERS
    | fixed(attention_bias=True)
    | ignored("of models that also see", "use_mrope")
    | MTP,
    sets={"qkv_bias": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    more_layers=True,
    # MiMo's.
    drafts=DraftNames(
        "model.mtp_layers.{}",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        counted_apart=True,
        hidden_first=True,
    ),
    tool_calls=HERMES,
    releases=(
        Release(
            "Yang et al. 2024, https://arxiv.org/abs/2407.10671; config.json of Qwen/Qwen2-*",
            {
                "qwen2-0.5b": preset(
                    "L=24, D=896, F=4864, N=14, K=2, V=151_936", 494_032_768, tied_embeddings=True
                ),
                "qwen2-1.5b": preset(
                    "L=28, D=1536, F=8960, N=12, K=2, V=151_936", 1_543_714_304, tied_embeddings=True
                ),
                "qwen2-7b": preset("L=28, D=3584, F=18_944, N=28, K=4, V=152_064", 7_615_616_512),
                "qwen2-72b": preset(
                    "L=80, D=8192, F=29_568, N=64, K=8, V=152_064", 72_706_203_648, norm_eps=1e-5
                ),
            },
            shared=_SHARED,
        ),
        Release(
            "Qwen 2024, https://arxiv.org/abs/2412.15115; config.json of Qwen/Qwen2.5-*",
            {
                "qwen2.5-0.5b": preset(
                    "L=24, D=896, F=4864, N=14, K=2, V=151_936",
                    494_032_768,
                    max_seq_len=32_768,
                    tied_embeddings=True,
                ),
                "qwen2.5-1.5b": preset(
                    "L=28, D=1536, F=8960, N=12, K=2, V=151_936", 1_543_714_304, tied_embeddings=True
                ),
                "qwen2.5-3b": preset(
                    "L=36, D=2048, F=11_008, N=16, K=2, V=151_936",
                    3_085_938_688,
                    max_seq_len=32_768,
                    tied_embeddings=True,
                ),
                "qwen2.5-7b": preset("L=28, D=3584, F=18_944, N=28, K=4, V=152_064", 7_615_616_512),
                "qwen2.5-14b": preset(
                    "L=48, D=5120, F=13_824, N=40, K=8, V=152_064", 14_770_033_664, norm_eps=1e-5
                ),
                "qwen2.5-32b": preset(
                    "L=64, D=5120, F=27_648, N=40, K=8, V=152_064", 32_763_876_352, norm_eps=1e-5
                ),
                "qwen2.5-72b": preset(
                    "L=80, D=8192, F=29_568, N=64, K=8, V=152_064", 72_706_203_648, norm_eps=1e-5
                ),
            },
            shared=_SHARED,
        ),
        Release(
            # tower_params: of the vision tower, which plans hold in memory.
            "Qwen Team 2025, https://arxiv.org/abs/2502.13923; config.json of Qwen/Qwen2.5-VL-*",
            {
                "qwen2.5-vl-7b": preset(
                    "L=28, D=3584, F=18_944, N=28, K=4, V=152_064", tower_params=676_550_144
                ),
                "qwen2.5-vl-72b": preset(
                    "L=80, D=8192, F=29_568, N=64, K=8, V=152_064", tower_params=704_573_696
                ),
            },
            shared=_SHARED | {"max_seq_len": 128_000, "norm_eps": 1e-6},
        ),
    ),
)
