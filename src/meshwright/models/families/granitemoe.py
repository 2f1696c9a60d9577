from meshwright.models.families.family import Family, Rule, Tensor, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EXPERTS, LLAMA_KEYS, MULTIPLIERS
from meshwright.models.families.releases import by_letter, mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, fused_experts

_MOE = f"{LAYER}.block_sparse_moe"
GRANITE_MOE_KEYS: dict[str, Rule] = (
    LLAMA_KEYS | ATTENTION_BIAS | MULTIPLIERS | EXPERTS | {"intermediate_size": needed(("d_ff", "moe.d_ff"))}
)
GRANITE_MOE_TENSORS = (
    LLAMA_TENSORS
    | {"router": Tensor(f"{_MOE}.router.layer.weight", ("E", "D"))}
    | fused_experts(_MOE, "input_linear", "output_linear")
)

FAMILY = Family(
    "granitemoe",
    "Granite 3 (experts)",
    ("GraniteMoeForCausalLM",),
    keys=GRANITE_MOE_KEYS,
    groups=(Rope(),),
    tensors=GRANITE_MOE_TENSORS,
    releases=release(
        "Granite Team 2024, Granite 3.0 Language Models; config.json of granite-3.1-*-a*m-base",
        {
            "granite-3.1-1b-a400m": preset(
                "L=24, D=1024, F=512, N=16", moe=mixture(32, 8, 512), logit_scale=1 / 6
            ),
            "granite-3.1-3b-a800m": preset(
                "L=32, D=1536, F=512, N=24", moe=mixture(40, 8, 512), logit_scale=1 / 6
            ),
        },
        shared=by_letter("K=8, V=49_152")
        | {
            "max_seq_len": 131_072,
            "norm_eps": 1e-6,
            "rope_theta": 1_500_000.0,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "query_scale": 1 / 64,
            "tied_embeddings": True,
        },
    ),
)
