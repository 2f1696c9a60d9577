from meshwright.models.families.family import Family, fixed, ignored
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import Release, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, QKV, fused

# Phi-3.5-mini's, for its 48 pairs.
_SHORT = (
    1.0,
    1.0199999809265137,
    1.0299999713897705,
    1.0299999713897705,
    1.0499999523162842,
    1.0499999523162842,
    1.0499999523162842,
    1.0499999523162842,
    1.0499999523162842,
    1.0699999332427979,
    1.0999999046325684,
    1.1099998950958252,
    1.1599998474121094,
    1.1599998474121094,
    1.1699998378753662,
    1.2899998426437378,
    1.339999794960022,
    1.679999828338623,
    1.7899998426437378,
    1.8199998140335083,
    1.8499997854232788,
    1.8799997568130493,
    1.9099997282028198,
    1.9399996995925903,
    1.9899996519088745,
    2.0199997425079346,
    2.0199997425079346,
    2.0199997425079346,
    2.0199997425079346,
    2.0199997425079346,
    2.0199997425079346,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0299997329711914,
    2.0799996852874756,
    2.0899996757507324,
    2.189999580383301,
    2.2199995517730713,
    2.5899994373321533,
    2.729999542236328,
    2.749999523162842,
    2.8399994373321533,
)
_LONG = (
    1.0800000429153442,
    1.1100000143051147,
    1.1399999856948853,
    1.340000033378601,
    1.5899999141693115,
    1.600000023841858,
    1.6200000047683716,
    2.620000123977661,
    3.2300000190734863,
    3.2300000190734863,
    4.789999961853027,
    7.400000095367432,
    7.700000286102295,
    9.09000015258789,
    12.199999809265137,
    17.670000076293945,
    24.46000099182129,
    28.57000160217285,
    30.420001983642578,
    30.840002059936523,
    32.590003967285156,
    32.93000411987305,
    42.320003509521484,
    44.96000289916992,
    50.340003967285156,
    50.45000457763672,
    57.55000305175781,
    57.93000411987305,
    58.21000289916992,
    60.1400032043457,
    62.61000442504883,
    62.62000274658203,
    62.71000289916992,
    63.1400032043457,
    63.1400032043457,
    63.77000427246094,
    63.93000411987305,
    63.96000289916992,
    63.970001220703125,
    64.02999877929688,
    64.06999969482422,
    64.08000183105469,
    64.12000274658203,
    64.41000366210938,
    64.4800033569336,
    64.51000213623047,
    64.52999877929688,
    64.83999633789062,
)

FAMILY = Family(
    "phi3",
    "Phi-3, 3.5, 4",
    ("Phi3ForCausalLM",),
    model_types=("phi3", "phi4_multimodal"),
    wrappers=("phi3_v",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | fixed(attention_bias=False)
    | ignored("training only", "resid_pdrop", "embd_pdrop"),
    groups=(LocalLayers(), Rope(share=1.0)),
    tensors=LLAMA_TENSORS
    | fused(("wq", "wk", "wv"), f"{LAYER}.self_attn.qkv_proj", QKV)
    | fused(("w_gate", "w_in"), f"{LAYER}.mlp.gate_up_proj", ("F", "F")),
    releases=(
        Release(
            # phi-3-mini and phi-3-medium are the 4k versions.
            "Abdin et al. 2024, https://arxiv.org/abs/2404.14219; config.json of microsoft/Phi-3-*, "
            "Phi-3.5-mini-instruct, phi-4",
            {
                "phi-3-mini": preset(
                    "L=32, D=3072, F=8192, N=32, V=32_064",
                    3_821_079_552,
                    max_seq_len=4096,
                    sliding_window=2047,
                ),
                "phi-3.5-mini": preset(
                    "L=32, D=3072, F=8192, N=32, V=32_064",
                    max_seq_len=131_072,
                    rope_scaling={
                        "kind": "longrope",
                        "factor": 32.0,
                        "original_max_seq_len": 4096,
                        "short_factor": _SHORT,
                        "long_factor": _LONG,
                    },
                ),
                "phi-3-medium": preset(
                    "L=40, D=5120, F=17_920, N=40, K=10, V=32_064",
                    13_960_238_080,
                    max_seq_len=4096,
                    sliding_window=2047,
                ),
                "phi-4": preset(
                    "L=40, D=5120, F=17_920, N=40, K=10, V=100_352",
                    14_659_507_200,
                    max_seq_len=16_384,
                    rope_theta=250_000.0,
                ),
            },
        ),
        Release(
            "config.json of microsoft/Phi-4-mini-instruct",
            {
                "phi-4-mini": preset(
                    "L=32, D=3072, F=8192, N=24, K=8, V=200_064",
                    3_836_021_760,
                    max_seq_len=131_072,
                    rotary_dim=96,
                    tied_embeddings=True,
                )
            },
        ),
    ),
)
