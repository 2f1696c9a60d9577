from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, MTP, SIZES
from meshwright.models.families.releases import Release, mixture, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS, NEXT_LAYER, experts

LATENT_FIELDS = {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
_YARN = {"kind": "yarn", "original_max_seq_len": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
V3_PRESET = preset(
    "L=61, D=7168, F=18_432, N=128, V=129_280",
    "671B",
    "37B",
    max_seq_len=163_840,
    rope_scaling=_YARN | {"factor": 40.0},
    moe=mixture(
        256, 8, 2048, num_shared_experts=1, num_dense_layers=3, num_groups=8, groups_per_token=4, scaling=2.5
    ),
)

FAMILY = Family(
    "deepseek_v3",
    "DeepSeek-V3, R1, Kimi K2",
    ("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    wrappers=("kimi_k25",),
    keys=SIZES
    | LATENT
    | DEEPSEEK_EXPERTS
    | {"norm_topk_prob": Key("moe.normalized", True), "routed_scaling_factor": Key("moe.scaling", 2.5)}
    | fixed(attention_bias=False, scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    | ignored("its class has no such biases", "mlp_bias")
    | ignored("of DeepSeek-VL2's class", "lm_head", "rm_head", "use_mla")
    | MTP,
    sets={"moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | LATENT_TENSORS | experts(),
    more_layers=True,
    drafts=NEXT_LAYER,
    releases=(
        Release(
            # Without the module that predicts a second token: 14 billion parameters of its files.
            "DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437; config.json of deepseek-ai/DeepSeek-V3, R1",
            {"deepseek-v3": V3_PRESET, "deepseek-r1": V3_PRESET},
            shared={
                "norm_eps": 1e-6,
                "d_head": 192,
                "mla": LATENT_FIELDS,
                "mtp_layers": 1,
                "stored_dtype": "fp8",
            },
        ),
        Release(
            "Kimi Team 2025, https://arxiv.org/abs/2507.20534; moonshotai/Kimi-K2-Base, Kimi-K2.5",
            {
                "kimi-k2": preset(
                    "L=61, D=7168, F=18_432, N=64, V=163_840",
                    "1026B",
                    "32B",
                    stored_dtype="fp8",
                    max_seq_len=131_072,
                    rope_theta=50_000.0,
                    rope_scaling=_YARN | {"factor": 32.0, "beta_fast": 1.0},
                    moe=mixture(384, 8, 2048, num_shared_experts=1, num_dense_layers=1, scaling=2.827),
                ),
                # The language model of a model that also sees.
                "kimi-k2.5": preset(
                    "L=61, D=7168, F=18_432, N=64, V=163_840",
                    "1026B",
                    "32B",
                    max_seq_len=262_144,
                    rope_theta=50_000.0,
                    rope_scaling=_YARN | {"factor": 64.0, "beta_fast": 1.0},
                    moe=mixture(384, 8, 2048, num_shared_experts=1, num_dense_layers=1, scaling=2.827),
                ),
            },
            shared={"norm_eps": 1e-6, "d_head": 192, "mla": LATENT_FIELDS},
        ),
        Release(
            # The language model of a model that also sees.
            "Mistral AI 2025, https://mistral.ai/news/mistral-3; mistralai/Mistral-Large-3-675B-*",
            {
                "mistral-large-3": preset(
                    "L=61, D=7168, F=16_384, N=128, V=131_072",
                    "673B",
                    "39B",
                    max_seq_len=262_144,
                    norm_eps=1e-6,
                    d_head=192,
                    mla=LATENT_FIELDS,
                    moe=mixture(128, 4, 4096, num_shared_experts=1, num_dense_layers=3, scaling=1.0),
                )
            },
        ),
    ),
)
