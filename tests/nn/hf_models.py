"""Tiny models that transformers itself makes, and what they answer in float32 on torch.

Importing this skips the module that does so if torch or transformers is missing.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.models.families.case import LLAMA3_ROPE, SHAPE, Tiny
from tests.models.families.table import TINY

WHY = "the reference is Hugging Face's own model on torch"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

# LLaMA's, by what is tested with them: keys that differ from SHAPE.
_LLAMA: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "stretched": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 8},
}
MODELS = {name: Tiny("Llama", changes) for name, changes in _LLAMA.items()}
MODELS["mistral"] = Tiny("Mistral", {"sliding_window": None})


def make(kind: str, **more: Any) -> Any:
    """The model of this kind, with random weights; those of norms and biases too: ones hide mistakes.

    more: keys of its config besides.
    """
    tiny = TINY.get(kind) or MODELS[kind]
    shape = {k: v for k, v in SHAPE.items() if not tiny.own_names or k in ("vocab_size", "initializer_range")}
    config = getattr(transformers, f"{tiny.config}Config")(**shape | tiny.changes | more)
    torch.manual_seed(7)
    # Only the eager form of attention applies soft caps.
    model = getattr(transformers, tiny.model_class)
    model = model._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-1.0, 1.0)
            elif name.endswith(("bias", "sinks")):
                parameter.uniform_(-0.5, 0.5)
            elif "experts." in name or ".gate.weight" in name or ".router.weight" in name:
                parameter.normal_(std=config.initializer_range)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
            if name.endswith("tid2eid"):  # different experts for each token
                ranks = torch.rand(len(buffer), config.n_routed_experts)
                buffer.copy_(ranks.argsort(-1)[:, : buffer.shape[1]])
    return model


def load(folder: Path) -> Any:
    """The model that transformers finds in `folder`."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def save(kind: str, folder: Path, **more: Any) -> Any:
    """The model, written to `folder` as transformers does."""
    model = make(kind, **more)
    model.save_pretrained(folder)
    return model


def logits(model: Any, tokens: list[list[int]]) -> Any:
    """f32[B, T, V] as numpy."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model's own `generate` appends to the prompt, in which token 0 is no padding."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        answer = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return answer[0, len(prompt) :].tolist()
