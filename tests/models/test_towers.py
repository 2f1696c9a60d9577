"""Parameters of vision and audio towers, as transformers counts them on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.families.table import FILES

from meshwright.cli.main import main
from meshwright.models.explained import explain_config
from meshwright.models.hf import from_hf, to_hf
from meshwright.models.presets import PRESETS
from meshwright.models.towers import count_towers

_SEEING = [
    *(
        "deepseek_vl",
        "gemma3",
        "gemma4",
        "glm4v",
        "glm5_next",
        "glm_ocr",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lighton_ocr",
    ),
    *("llama4", "llava", "llava_next", "minimax_m3_vl", "mistral3", "mllama", "paligemma", "qwen2_5_vl"),
    *("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "smolvlm"),
    *("qwen2_audio", "qwen2_5_omni_thinker", "voxtral"),
]
_GEMMA = {
    "model_type": "gemma3",
    "text_config": FILES["gemma-3-4b"]["text_config"],
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


@pytest.mark.parametrize("model_type", _SEEING)
def test_transformers_counts_the_same(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto as auto

    towers = {"vision_config": {}, "audio_config": {}} if model_type == "gemma4" else {}
    made = transformers.CONFIG_MAPPING[model_type](**towers)
    made.text_config.num_hidden_layers = 1
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers"):
        if listed := getattr(made.text_config, name, None):
            setattr(made.text_config, name, listed[:1])
    if model_type == "mllama":
        made.text_config.cross_attention_layers = []
    names: dict[str, Any] = {
        **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    with torch.device("meta"):
        model = getattr(transformers, names[model_type])(made)
    inner = getattr(model, "model", model)
    text = ("language_model", "text_model", "lm_head")
    expected = sum(
        p.numel() for name, part in inner.named_children() if name not in text for p in part.parameters()
    )
    file = made.to_dict()
    assert count_towers(file, made.text_config.hidden_size).params == expected


def test_a_published_model_has_the_published_count() -> None:
    """Gemma 3 4B, whose files hold 4,300,079,472 parameters."""
    config = from_hf(_GEMMA, "gemma-3-4b")
    assert config.text == PRESETS["gemma-3-4b"]
    assert config.tower_params + 3_880_263_168 == 4_300_079_472
    assert "vision_config" not in to_hf(config)
    line = next(line for line in explain_config(_GEMMA, "mine").keys if line.key == "vision_config")
    assert (line.verdict, line.meaning) == ("read", "tower_params = 419816304")


def test_towers_of_unknown_kinds_are_estimated_or_named() -> None:
    plain = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "model_type": "mine"}
    with pytest.warns(UserWarning, match="vision_config counted as a plain tower"):
        config = from_hf(_GEMMA | {"vision_config": plain}, "mine")
    layers = 2 * (4 * 64**2 + 4 * 64 + 2 * 64 * 128 + 64 + 128 + 4 * 64)
    assert config.tower_params == layers + 2 * 64 + 64 * 2560 + 64
    with pytest.warns(UserWarning, match="vision_config not counted in memory"):
        assert from_hf(_GEMMA | {"vision_config": {"layers": "many"}}, "mine").tower_params == 0


def test_the_command_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_GEMMA))
    assert main(["model", str(tmp_path)]) == 0
    assert "419,816,304 more, which see or hear" in capsys.readouterr().out
    assert main(["model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tower_params"] == 419_816_304
    serve = ["plan", "serve", "--model", str(tmp_path), "--hardware", "h100:1", "--phase", "generate"]
    assert main([*serve, "--batch", "8", "--context", "4k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_chip"]["weights"] == 2 * 4_300_079_472
