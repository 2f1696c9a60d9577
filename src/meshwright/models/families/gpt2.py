from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.releases import Release, preset
from meshwright.models.families.tensors import HEAD, norms

GPT_SETS = {
    "norm": "layer",
    "norm_bias": True,
    "positions": "learned",
    "gated": False,
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}
_H = "transformer.h.{}"
_QKV = ("NH", "KH", "KH")


def _conv1d(parameter: str, module: str, into: str, out: str) -> dict[str, Tensor]:
    """weight[in, out] and bias[out]: GPT-2 stores its linear layers transposed."""
    return {
        parameter: Tensor(f"{module}.weight", (into, out)),
        f"{parameter}_bias": Tensor(f"{module}.bias", (out,)),
    }


FAMILY = Family(
    "gpt2",
    "GPT-2, GPT-3, Megatron's GPT",
    ("GPT2LMHeadModel",),
    model_types=("gpt2", "gpt-sw3"),
    keys={
        "n_layer": needed("num_layers", "num_hidden_layers"),
        "n_embd": needed("d_model", "hidden_size"),
        "n_inner": Key("d_ff"),
        "n_head": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "n_positions": needed("max_seq_len", "max_position_embeddings"),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "activation_function": Key("activation", "gelu_new", form=ACTIVATION),
    }
    | fixed(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    | ignored("training only", "attn_pdrop", "embd_pdrop", "resid_pdrop", "gradient_checkpointing")
    | ignored("n_positions counts", "n_ctx")
    | ignored("how transformers runs it", "reorder_and_upcast_attn", "task_specific_params")
    | ignored(
        "of classifiers",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    sets=GPT_SETS,
    groups=(),
    prefix="transformer.",
    tensors={
        "embed": Tensor("transformer.wte.weight", ("V", "D")),
        "positions": Tensor("transformer.wpe.weight", ("W", "D")),
        **{
            f"{name}{suffix}": Tensor(f"{_H}.attn.c_attn.{kind}", (*into, part), len(into), _QKV, index)
            for index, (name, part) in enumerate(zip(("wq", "wk", "wv"), _QKV, strict=True))
            for suffix, kind, into in (("", "weight", ("D",)), ("_bias", "bias", ()))
        },
        **norms("attention_norm", f"{_H}.ln_1"),
        **_conv1d("wo", f"{_H}.attn.c_proj", "NH", "D"),
        **norms("mlp_norm", f"{_H}.ln_2"),
        **_conv1d("w_in", f"{_H}.mlp.c_fc", "D", "F"),
        **_conv1d("w_out", f"{_H}.mlp.c_proj", "F", "D"),
        **norms("final_norm", "transformer.ln_f"),
        **HEAD,
    },
    releases=(
        Release(
            "Radford et al. 2019; https://huggingface.co/openai-community/gpt2/blob/main/config.json",
            {
                "gpt2": preset("L=12, D=768, F=3072, N=12", 124_439_808),
                "gpt2-medium": preset("L=24, D=1024, F=4096, N=16", 354_823_168),
                "gpt2-large": preset("L=36, D=1280, F=5120, N=20", 774_030_080),
                "gpt2-xl": preset("L=48, D=1600, F=6400, N=25", 1_557_611_200),
            },
            shared={"vocab_size": 50_257, "max_seq_len": 1024, "tied_embeddings": True, "activation": "gelu"},
        ),
        Release(
            # In the paper every other layer's attention is banded, of unknown width; here all are dense.
            # Its rows contradict themselves twice: 1.3B has 16 heads, not 24, and 13B D = 5120, not 5140.
            "Brown et al. 2020, https://arxiv.org/abs/2005.14165, table 2.1",
            {
                "gpt-3-small": preset("L=12, D=768, F=3072, N=12", "0.125B"),
                "gpt-3-medium": preset("L=24, D=1024, F=4096, N=16"),
                "gpt-3-large": preset("L=24, D=1536, F=6144, N=16"),
                "gpt-3-1.3b": preset("L=24, D=2048, F=8192, N=16", "1.3B"),
                "gpt-3-2.7b": preset("L=32, D=2560, F=10_240, N=32", "2.7B"),
                "gpt-3-6.7b": preset("L=32, D=4096, F=16_384, N=32", "6.7B"),
                "gpt-3-13b": preset("L=40, D=5120, F=20_480, N=40", "13B"),
                "gpt-3-175b": preset("L=96, D=12_288, F=49_152, N=96", "175B"),
            },
            shared={"vocab_size": 50_257, "max_seq_len": 2048, "tied_embeddings": True, "activation": "gelu"},
        ),
        Release(
            "Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, table 1",
            {
                "megatron-gpt-1.7b": preset("L=24, D=2304, F=9216, N=24", "1.7B"),
                "megatron-gpt-3.6b": preset("L=30, D=3072, F=12_288, N=32", "3.6B"),
                "megatron-gpt-7.5b": preset("L=36, D=4096, F=16_384, N=32", "7.5B"),
                "megatron-gpt-18b": preset("L=40, D=6144, F=24_576, N=48", "18.4B"),
                "megatron-gpt-39b": preset("L=48, D=8192, F=32_768, N=64", "39.1B"),
                "megatron-gpt-76b": preset("L=60, D=10_240, F=40_960, N=80", "76.1B"),
                "megatron-gpt-145b": preset("L=80, D=12_288, F=49_152, N=96", "145.6B"),
                "megatron-gpt-310b": preset("L=96, D=16_384, F=65_536, N=128", "310.1B"),
                "megatron-gpt-530b": preset("L=105, D=20_480, F=81_920, N=128", "529.6B"),
                "megatron-gpt-1t": preset("L=128, D=25_600, F=102_400, N=160", "1008.0B"),
            },
            shared={"vocab_size": 51_200, "max_seq_len": 2048, "tied_embeddings": True, "activation": "gelu"},
        ),
    ),
)
