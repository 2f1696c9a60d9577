"""Names of tensors that several families share; `LLAMA_TENSORS | {...}` is most of a family's."""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.models.families.family import Arrangement, DraftNames, Tensor

LAYER = "model.layers.{}"
QKV = ("NH", "KH", "KH")
# Draft heads of DeepSeek-V3 and of families after it: a layer after the last.
NEXT_LAYER = DraftNames(LAYER, "enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN_DRAFTS = DraftNames(
    "mtp.layers.{}",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    of_head="mtp",
    counted_apart=True,
)


def linear(parameter: str, module: str, out: str, into: str, pairs: str = "") -> dict[str, Tensor]:
    """weight[out, in] and bias[out] of a linear layer."""
    return {
        parameter: Tensor(f"{module}.weight", (out, into), pairs=pairs),
        f"{parameter}_bias": Tensor(f"{module}.bias", (out,), pairs=pairs),
    }


def norms(parameter: str, module: str, letter: str = "D") -> dict[str, Tensor]:
    """weight and bias of a norm."""
    return {
        parameter: Tensor(f"{module}.weight", (letter,)),
        f"{parameter}_bias": Tensor(f"{module}.bias", (letter,)),
    }


def fused(
    parameters: tuple[str, ...],
    module: str,
    parts: tuple[str, ...],
    into: str = "D",
    arranged: Arrangement = "after",
) -> dict[str, Tensor]:
    """weight[out, in] and bias[out] of a linear layer that computes several products."""
    return {
        f"{parameter}{suffix}": Tensor(
            f"{module}.{kind}", (part.replace("KG", "N"), *rest), 0, parts, index, arranged
        )
        for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True))
        for suffix, kind, rest in (("", "weight", (into,)), ("_bias", "bias", ()))
    }


def feed_forward(prefix: str, module: str, inner: str, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """The tensors of one gated feed-forward. names: its modules for gate, in and out."""
    gate, into, out = names
    return (
        linear(f"{prefix}_gate", f"{module}.{gate}", inner, "D")
        | linear(f"{prefix}_in", f"{module}.{into}", inner, "D")
        | linear(f"{prefix}_out", f"{module}.{out}", "D", inner)
    )


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EMBEDDING = {"embed": Tensor("model.embed_tokens.weight", ("V", "D"))}
HEAD = {"unembed": Tensor("lm_head.weight", ("V", "D"))}
LLAMA_TENSORS = (
    EMBEDDING
    | norms("attention_norm", f"{LAYER}.input_layernorm")
    | linear("wq", f"{LAYER}.self_attn.q_proj", "NH", "D")
    | linear("wk", f"{LAYER}.self_attn.k_proj", "KH", "D")
    | linear("wv", f"{LAYER}.self_attn.v_proj", "KH", "D")
    | linear("wo", f"{LAYER}.self_attn.o_proj", "D", "NH")
    | norms("q_norm", f"{LAYER}.self_attn.q_norm", "H")
    | norms("k_norm", f"{LAYER}.self_attn.k_norm", "H")
    | norms("mlp_norm", f"{LAYER}.post_attention_layernorm")
    | feed_forward("w", f"{LAYER}.mlp", "F", PROJECTIONS)
    | norms("final_norm", "model.norm")
    | HEAD
)
# Without the norms before attention and feed-forward.
POST_NORMS_ONLY = norms("attention_post_norm", f"{LAYER}.post_attention_layernorm") | norms(
    "mlp_post_norm", f"{LAYER}.post_feedforward_layernorm"
)
# Norms of queries and keys over all heads, or of each head with its own scale.
WIDE_QK_NORMS = {
    "q_norm": Tensor(f"{LAYER}.self_attn.q_norm.weight", ("NH",)),
    "k_norm": Tensor(f"{LAYER}.self_attn.k_norm.weight", ("KH",)),
}
# LLaMA's post_attention_layernorm is before the feed-forward; in Gemma 2 and 3 it is after attention.
POST_NORMS = (
    norms("attention_post_norm", f"{LAYER}.post_attention_layernorm")
    | norms("mlp_norm", f"{LAYER}.pre_feedforward_layernorm")
    | norms("mlp_post_norm", f"{LAYER}.post_feedforward_layernorm")
)


def experts(
    module: str = f"{LAYER}.mlp", names: tuple[str, str, str] = PROJECTIONS, shared: str = "shared_experts"
) -> dict[str, Tensor]:
    """A router, a tensor for each matrix of each expert, and the shared experts."""
    return (
        {
            "router": Tensor(f"{module}.gate.weight", ("E", "D")),
            "router_choice_bias": Tensor(f"{module}.gate.e_score_correction_bias", ("E",)),
        }
        | feed_forward("expert", f"{module}.experts.{{}}", "M", names)
        | feed_forward("shared", f"{module}.{shared}", "U", names)
    )


def gate_up(module: str, arranged: Arrangement = "after") -> dict[str, Tensor]:
    """gate_up_proj[E, D, 2M] and down_proj[E, M, D] of all experts, with their biases."""
    parts = ("M", "M")
    return {
        **{
            f"expert_{name}{suffix}": Tensor(
                f"{module}.gate_up_proj{suffix}", dims, len(dims) - 1, parts, index, arranged
            )
            for index, name in enumerate(("gate", "in"))
            for suffix, dims in (("", ("E", "D", "M")), ("_bias", ("E", "M")))
        },
        "expert_out": Tensor(f"{module}.down_proj", ("E", "M", "D")),
        "expert_out_bias": Tensor(f"{module}.down_proj_bias", ("E", "D")),
    }


def fused_experts(
    module: str, into: str, out: str, letter: str = "M", prefix: str = "expert", suffix: str = ".weight"
) -> dict[str, Tensor]:
    """Gate and in as rows of one tensor, and out, of all experts or of one feed-forward."""
    experts = ("E",) if prefix == "expert" else ()
    dims = (*experts, letter, "D")
    return {
        f"{prefix}_{name}": Tensor(f"{module}.{into}{suffix}", dims, len(experts), (letter, letter), index)
        for index, name in enumerate(("gate", "in"))
    } | {f"{prefix}_out": Tensor(f"{module}.{out}{suffix}", (*experts, "D", letter))}


def in_pairs(tensors: Mapping[str, Tensor], *parameters: str) -> dict[str, Tensor]:
    """These tensors, in files whose rotary positions turn neighbouring elements of a head."""
    return {name: replace(tensors[name], pairs="H") for name in parameters}


_KV_DOWN, _KV_UP = ("R", "A"), ("NJ", "NO")
_KV_A = f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight"
LATENT_TENSORS = {
    **in_pairs(LLAMA_TENSORS, "wq"),
    "wq_down": Tensor(f"{LAYER}.self_attn.q_a_proj.weight", ("Q", "D")),
    "q_latent_norm": Tensor(f"{LAYER}.self_attn.q_a_layernorm.weight", ("Q",)),
    "wq_up": Tensor(f"{LAYER}.self_attn.q_b_proj.weight", ("NH", "Q"), pairs="H"),
    "wkv_down": Tensor(_KV_A, ("R", "D"), 0, _KV_DOWN, 0),
    "wk_rope": Tensor(_KV_A, ("A", "D"), 0, _KV_DOWN, 1, pairs="A"),
    "kv_latent_norm": Tensor(f"{LAYER}.self_attn.kv_a_layernorm.weight", ("R",)),
    **fused(("wk_up", "wv_up"), f"{LAYER}.self_attn.kv_b_proj", _KV_UP, "R", "within"),
    "wo": Tensor(f"{LAYER}.self_attn.o_proj.weight", ("D", "NO")),
}
