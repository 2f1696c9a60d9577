from typing import Any

from tests.models.families.case import NTK, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "hunyuan_v1_dense": Tiny(
        "HunYuanDenseV1",
        {
            "rope_parameters": NTK,
        },
        written="HunYuanDenseV1ForCausalLM",
        nightly=True,
    ),
}
