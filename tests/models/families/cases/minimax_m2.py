from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "minimax_m2": Tiny(
        "MiniMaxM2",
        {"head_dim": 8, "rotary_dim": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
        written="MiniMaxM2ForCausalLM",
    ),
}
