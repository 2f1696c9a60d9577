"""Tiny models that transformers itself makes, and what they answer in float32 on torch.

Importing this skips the module that does, where torch or transformers is missing.
"""

from pathlib import Path
from typing import Any

import pytest

WHY = "the reference is Hugging Face's own model on torch"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    # Ten times the usual, so that the most likely token leads and attention is not uniform.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "stretched": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 8},
    "mistral": {"sliding_window": None},
}


def make(kind: str) -> Any:
    """The model of this kind, with random weights; those of its norms too, since ones hide mistakes."""
    family = ("Mistral", "mistral") if kind == "mistral" else ("Llama", "llama")
    config = getattr(transformers, f"{family[0]}Config")(**SHAPE | MODELS[kind])
    torch.manual_seed(7)
    model = getattr(transformers, f"{family[0]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def save(kind: str, folder: Path) -> Any:
    """The model, written to `folder` as transformers does."""
    model = make(kind)
    model.save_pretrained(folder)
    return model


def logits(model: Any, tokens: list[list[int]]) -> Any:
    """f32[B, T, V] as numpy."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model's own `generate` appends to the prompt."""
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
    return answer[0, len(prompt) :].tolist()
