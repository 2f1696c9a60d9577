from meshwright.models.families.family import Family, Fixed, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.tensors import HEAD, QKV, fused, linear, norms

_LAYER = "transformer.blocks.{}"

FAMILY = Family(
    "mpt",
    "MPT (ALiBi)",
    ("MptForCausalLM", "MPTForCausalLM"),
    keys={
        "n_layers": needed("num_layers"),
        "d_model": needed("d_model"),
        "n_heads": needed("num_heads"),
        "vocab_size": needed("vocab_size"),
        "max_seq_len": Key("max_seq_len", 2048),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "attn_config.alibi": Fixed((True,)),
        "attn_config.alibi_bias_max": Fixed((8,)),
        "attn_config.attn_type": Fixed(("multihead_attention",)),
        "attn_config.attn_uses_sequence_id": Fixed((False,)),
        "attn_config.clip_qkv": Fixed((None,)),
        "attn_config.prefix_lm": Fixed((False,)),
        "attn_config.qk_ln": Fixed((False,)),
        "attn_config.softmax_scale": Fixed((None,)),
    }
    | fixed(expansion_ratio=4, no_bias=True, logit_scale=None)
    | ignored("ALiBi replaces learned positions", "learned_pos_emb")
    | ignored("its class has one kind of norm", "norm_type")
    | ignored("training only", "emb_pdrop", "resid_pdrop", "attn_config.attn_pdrop", "embedding_fraction")
    | ignored("how its first code ran it", "attn_config.attn_impl", "init_config", "init_device", "verbose")
    | ignored("of the tokenizer", "tokenizer_name"),
    sets={"norm": "layer", "positions": "alibi", "gated": False, "activation": "gelu_erf"},
    groups=(),
    prefix="transformer.",
    tensors={"embed": Tensor("transformer.wte.weight", ("V", "D"))}
    | norms("attention_norm", f"{_LAYER}.norm_1")
    | fused(("wq", "wk", "wv"), f"{_LAYER}.attn.Wqkv", QKV)
    | linear("wo", f"{_LAYER}.attn.out_proj", "D", "NH")
    | norms("mlp_norm", f"{_LAYER}.norm_2")
    | linear("w_in", f"{_LAYER}.ffn.up_proj", "F", "D")
    | linear("w_out", f"{_LAYER}.ffn.down_proj", "D", "F")
    | norms("final_norm", "transformer.norm_f")
    | HEAD,
)
