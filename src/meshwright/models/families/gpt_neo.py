from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, ignored, needed
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.tensors import HEAD, linear, norms

_H = "transformer.h.{}"


class _LocalLayers:
    """`attention_types` lists [[kinds, times], ...]; without it, every second layer is local."""

    parts: Mapping[str, Part] = {
        "attention_types": Part(("global_layers",), (list,)),
        "attention_layers": Part(("global_layers",), (list,)),
        "window_size": Part(("sliding_window",), (int,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        listed = given.get("attention_types") or [[["global", "local"], fields["num_layers"] // 2]]
        kinds = [kind for kinds, times in listed for kind in kinds * times]
        if len(kinds) != fields["num_layers"]:
            raise ModelError(f"{name}: attention_types lists {len(kinds)} of {fields['num_layers']} layers")
        numbers = tuple(number for number, kind in enumerate(kinds) if kind == "global")
        if len(numbers) == len(kinds):
            return {}
        return {"sliding_window": given.get("window_size", 256), "global_layers": numbers}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = ["global" if window is None else "local" for window in model.windows]
        return {
            "attention_types": [[[kind], 1] for kind in kinds],
            "window_size": model.sliding_window or 256,
        }


FAMILY = Family(
    "gpt_neo",
    "GPT-Neo",
    ("GPTNeoForCausalLM",),
    keys={
        "num_layers": needed("num_layers", "num_hidden_layers"),
        "hidden_size": needed("d_model"),
        "intermediate_size": Key("d_ff"),
        "num_heads": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "max_position_embeddings": needed("max_seq_len"),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "activation_function": Key("activation", "gelu_new", form=ACTIVATION),
    }
    | ignored("training only", "attention_dropout", "embed_dropout", "resid_dropout", "classifier_dropout")
    | ignored("training only", "gradient_checkpointing")
    | ignored("of classifiers", "summary_activation", "summary_first_dropout", "summary_proj_to_labels")
    | ignored("of classifiers", "summary_type", "summary_use_proj"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "positions": "learned",
        "gated": False,
        "attention_out_bias": True,
        "mlp_bias": True,
        # Scores are not divided.
        "query_scale": 1.0,
    },
    groups=(_LocalLayers(),),
    prefix="transformer.",
    tensors={
        "embed": Tensor("transformer.wte.weight", ("V", "D")),
        "positions": Tensor("transformer.wpe.weight", ("W", "D")),
        **norms("attention_norm", f"{_H}.ln_1"),
        **linear("wq", f"{_H}.attn.attention.q_proj", "NH", "D"),
        **linear("wk", f"{_H}.attn.attention.k_proj", "KH", "D"),
        **linear("wv", f"{_H}.attn.attention.v_proj", "KH", "D"),
        **linear("wo", f"{_H}.attn.attention.out_proj", "D", "NH"),
        **norms("mlp_norm", f"{_H}.ln_2"),
        **linear("w_in", f"{_H}.mlp.c_fc", "F", "D"),
        **linear("w_out", f"{_H}.mlp.c_proj", "D", "F"),
        **norms("final_norm", "transformer.ln_f"),
        **HEAD,
    },
)
