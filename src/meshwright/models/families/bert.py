from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, matrix, vector
from meshwright.models.families.family import Family, Key, fixed, ignored, needed
from meshwright.models.families.keys import activation


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table of token types, and the product before the output projection, whose norm is the last norm."""
    width = fields["d_model"]
    return {
        "extras": (
            vector("table_types", "tD", in_layers=False, t=given.get("type_vocab_size") or 2),
            matrix("w_head", "Dk", "D", in_layers=False, k=width),
            vector("w_head_bias", "k", in_layers=False, k=width),
        )
    }


# Encoders that transformers also runs as decoders, with a causal mask.
FAMILY = Family(
    "bert",
    "BERT, RoBERTa (as decoders)",
    (
        "BertLMHeadModel", "RobertaForCausalLM", "XLMRobertaForCausalLM", "CamembertForCausalLM",
        "Data2VecTextForCausalLM", "ErnieForCausalLM",
    ),
    model_types=("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie"),
    keys={
        "num_hidden_layers": needed("num_layers"),
        "hidden_size": needed("d_model"),
        "intermediate_size": needed("d_ff"),
        "num_attention_heads": needed("num_heads"),
        "vocab_size": needed("vocab_size"),
        "max_position_embeddings": needed("max_seq_len"),
        "layer_norm_eps": Key("norm_eps", 1e-12),
        "tie_word_embeddings": Key("tied_embeddings", True),
    }
    | activation("gelu")
    | fixed(use_task_id=False)
    | ignored("of task embeddings, which it lacks", "task_type_vocab_size")
    | ignored("training only", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    | ignored("as its class computes it", "position_embedding_type"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "positions": "learned",
        "embedding_norm": True,
        "gated": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "planned_only": "norms of residual sums (BERT)",
    },
    groups=(ByLayer(_read, {"type_vocab_size": ("extras",)}),),
    tensors={},
    is_written=False,
)  # fmt: skip
