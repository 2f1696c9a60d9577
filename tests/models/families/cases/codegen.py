from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "codegen": Tiny(
        "CodeGen",
        {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 64, "rotary_dim": 4},
        written="CodeGenForCausalLM",
        own_names=True,
        split="nightly",
    ),
}
