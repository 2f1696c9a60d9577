"""Parameters of the parts of a model that see or hear, from their tables in `config.json`.

A record counts an encoder with the matrices that make tokens of its results. Letters: D and F, the widths of
the encoder and of its feed-forward; T, the width of the text model. transformers counts the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

# Tables of parts that see or hear, by their names in files of the hub.
_TABLES = ("vision_config", "vit_config", "audio_config", "encoder_config", "high_res_vision_config")
# Other names of sizes.
_NAMES = {
    "hidden_size": ("embed_dim", "width", "d_model"),
    "num_hidden_layers": ("depth", "layers", "encoder_layers"),
    "intermediate_size": ("encoder_ffn_dim",),
    "num_channels": ("in_channels", "in_chans"),
    "num_attention_heads": ("num_heads", "attention_heads"),
}


class _Unknown(ValueError):
    """A size that the tables lack, or that is no whole number above 0."""


@dataclass(frozen=True)
class TowerTable:
    """A tower's table with the defaults of its class, the keys of the whole file, and the text's width."""

    given: Mapping[str, Any]
    outer: Mapping[str, Any]
    text_width: int

    def size(self, key: str, default: int | None = None) -> int:
        """A size, perhaps under another name; of two equal sides one."""
        value = next(
            (self.given[name] for name in (key, *_NAMES.get(key, ())) if self.given.get(name) is not None),
            default,
        )
        if isinstance(value, list) and value:
            value = value[0]
        if key == "intermediate_size" and value is None:
            ratio = self.given.get("mlp_ratio", 4)
            value = round(ratio * self.width) if isinstance(ratio, int | float) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _Unknown(key)
        return value

    def has(self, key: str, *, default: bool = False) -> bool:
        """Whether a key is on."""
        value = self.given.get(key)
        return default if value is None else bool(value)

    @property
    def width(self) -> int:
        """D."""
        return self.size("hidden_size")

    def patch(self, frames: int = 1) -> int:
        """Numbers in a patch of `frames` images."""
        return self.size("num_channels", 3) * frames * self.size("patch_size") ** 2

    def positions(self) -> int:
        """Patches of an image."""
        return (self.size("image_size") // self.size("patch_size")) ** 2

    def merged(self) -> int:
        """Patches that one token of the text model replaces."""
        return self.size("spatial_merge_size", 2) ** 2

    def layers(
        self,
        *,
        gated: bool = False,
        qkv_bias: bool = True,
        biases: bool = True,
        norm: str = "layer",
        of_a_layer: int = 0,
        inner: int | None = None,
    ) -> int:
        """Attention and a feed-forward with two norms, times the layers; of_a_layer: further numbers."""
        width, inner = self.width, inner or self.size("intermediate_size")
        attention = linear(width, 3 * width, bias=qkv_bias) + linear(width, width, bias=biases)
        mlp = (1 + gated) * linear(width, inner, bias=biases) + linear(inner, width, bias=biases)
        norms = 2 * (2 if norm == "layer" else 1) * width
        return self.size("num_hidden_layers") * (attention + mlp + norms + of_a_layer)


def linear(width: int, out: int, *, bias: bool = True) -> int:
    """Numbers of a matrix and its bias."""
    return width * out + (out if bias else 0)


def two_layers(width: int, inner: int, out: int, *, bias: bool = True) -> int:
    """Numbers of two matrices, one after the other."""
    return linear(width, inner, bias=bias) + linear(inner, out, bias=bias)


@dataclass(frozen=True)
class Tower:
    """An encoder. count: with its own merger; a projector of the whole file is counted by `_PROJECTORS`.

    types: of its table, or of the file if the table has none. defaults: of its class in transformers.
    """

    types: tuple[str, ...]
    count: Callable[[TowerTable], int]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    merges: bool = False


def _siglip(t: TowerTable) -> int:
    width = t.width
    positions = t.size("num_patches") if "num_patches" in t.given else t.positions()
    head = 0
    if t.has("vision_use_head", default=True):
        inner = t.size("intermediate_size")
        head = (
            width
            + linear(width, 3 * width)
            + linear(width, width)
            + 2 * width
            + two_layers(width, inner, width)
        )
    return linear(t.patch(), width) + positions * width + t.layers() + 2 * width + head


def _clip(t: TowerTable) -> int:
    """With a class token, and norms before and after the layers."""
    return t.width + t.patch() * t.width + (t.positions() + 1) * t.width + t.layers() + 4 * t.width


def _pixtral(t: TowerTable) -> int:
    rms = t.layers(gated=True, qkv_bias=False, biases=False, norm="rms")
    return t.patch() * t.width + t.width + rms


def _qwen2(t: TowerTable) -> int:
    """Its table calls the width of the text hidden_size."""
    text, merged = t.size("hidden_size"), t.merged() * t.size("embed_dim")
    sizes = TowerTable({**t.given, "hidden_size": t.size("embed_dim")}, t.outer, t.text_width)
    patches = sizes.patch(t.size("temporal_patch_size", 2)) * sizes.width
    return patches + sizes.layers() + 2 * sizes.width + two_layers(merged, merged, text)


def _qwen25(t: TowerTable) -> int:
    merged = t.merged() * t.width
    rest = t.patch(t.size("temporal_patch_size", 2)) * t.width + t.width
    return rest + t.layers(gated=True, norm="rms") + two_layers(merged, merged, t.size("out_hidden_size"))


def _qwen3(t: TowerTable) -> int:
    """Deep layers have mergers of their own."""
    merged, out = t.merged() * t.width, t.size("out_hidden_size")
    merger = two_layers(merged, merged, out)
    deep = t.given.get("deepstack_visual_indexes") or ()
    rest = (
        linear(t.patch(t.size("temporal_patch_size", 2)), t.width)
        + t.size("num_position_embeddings") * t.width
    )
    return rest + t.layers() + 2 * t.width + merger + len(deep) * (2 * merged + merger)


def _glm(t: TowerTable, *, ocr: bool = False) -> int:
    """A convolution merges patches, and a gated merger follows."""
    width, out = t.width, t.size("out_hidden_size")
    inner = t.size("intermediate_size")
    has_bias = t.has("attention_bias", default=ocr)
    heads = 2 * (width // t.size("num_attention_heads")) if ocr else 0
    layers = t.layers(
        gated=True,
        qkv_bias=has_bias,
        biases=has_bias and ocr,
        norm="rms",
        of_a_layer=heads,
        inner=inner if ocr else out,
    )
    merger_inner = t.size("projection_intermediate_size", 3 * out if ocr else inner)
    merger = linear(out, out, bias=False) + 2 * out + 3 * out * merger_inner
    downsample = linear(width * t.merged(), out)
    rest = linear(t.patch(t.size("temporal_patch_size", 2)), width) + width
    return rest + (0 if ocr else width + t.positions() * width) + layers + downsample + merger


def _internvl(t: TowerTable) -> int:
    """Each layer has scales for both of its sums."""
    bias = t.has("attention_bias") or t.has("qkv_bias")
    width = t.width
    normed = 2 * width if t.has("use_qk_norm") or t.has("qk_normalization") else 0
    layers = t.layers(qkv_bias=bias, of_a_layer=2 * width + normed)
    last = 0 if t.has("use_mean_pooling", default=True) else 2 * width
    return linear(t.patch(), width) + (t.positions() + 2) * width + layers + last


def _llama4(t: TowerTable) -> int:
    width, inner, out = t.width, t.size("intermediate_size"), t.size("projector_output_dim")
    adapter = two_layers(inner, t.size("projector_input_dim"), out, bias=False)
    return (t.positions() + 2) * width + t.patch() * width + 4 * width + t.layers() + adapter


def _moonvit(t: TowerTable) -> int:
    places = t.size("init_pos_emb_height", t.given.get("pos_emb_height")) * t.size(
        "init_pos_emb_width", t.given.get("pos_emb_width")
    )
    width = t.width
    return linear(t.patch(), width) + places * width + t.layers() + 2 * width


def _mllama(t: TowerTable) -> int:
    """Layers, then gated layers; tables of positions for each of the shapes of images."""
    width, tiles = t.width, t.size("max_num_tiles")
    shapes = 1 + len(t.given.get("supported_aspect_ratios") or ())
    places = t.positions() + 1
    number = t.size("num_hidden_layers"), t.size("num_global_layers")
    attention = 4 * width**2 + 4 * width
    layers = sum(number) * (attention + two_layers(width, t.size("intermediate_size"), width))
    tables = places * width + shapes * tiles * places * width + 2 * shapes * tiles * width + 3
    return width + t.patch() * width + tables + 4 * width + layers + 2 * number[1]


def _gemma4(t: TowerTable) -> int:
    width, head = t.width, t.size("head_dim")
    attention = 2 * head * (t.size("num_attention_heads") + t.size("num_key_value_heads")) * width + 2 * head
    layer = attention + 3 * width * t.size("intermediate_size") + 4 * width
    tables = 2 * t.size("position_embedding_size") * width
    return tables + t.patch() * width + t.size("num_hidden_layers") * layer + width * t.text_width


def _minimax(t: TowerTable) -> int:
    return t.patch(t.size("temporal_patch_size", 2)) * t.width + 2 * t.width + t.layers()


def _ernie(t: TowerTable) -> int:
    """Its resampler merges patches, then frames."""
    width = t.width
    merged = width * t.merged()
    frames = t.size("temporal_merge_size", 2)
    resampler = 2 * two_layers(merged, merged, merged) + (frames - 1) * merged**2 + 4 * merged
    resampler += linear(merged, t.text_width) + t.text_width
    return t.patch() * width + t.layers() + 2 * width + resampler


def _dots(t: TowerTable) -> int:
    """dots.ocr's: gated, without biases, with RMS norms."""
    width, merged = t.width, t.merged() * t.width
    layers = t.layers(gated=True, qkv_bias=False, biases=False, norm="rms")
    return (
        linear(t.patch(), width) + 2 * width + layers + 2 * width + two_layers(merged, merged, t.text_width)
    )


def _whisper(t: TowerTable) -> int:
    """Two convolutions of three taps, and keys without bias."""
    width, bands = t.width, t.size("num_mel_bins", 128)
    convolutions = linear(3 * bands, width) + linear(3 * width, width)
    positions = 0 if t.given.get("output_dim") else t.size("max_source_positions", 1500) * width
    out = t.given.get("output_dim")
    projected = linear(width, out) + 2 * out if isinstance(out, int) else 0
    return convolutions + positions + t.layers(of_a_layer=-width) + 2 * width + projected


def _gemma4_audio(t: TowerTable) -> int:
    """A conformer after two convolutions, whose results are projected twice."""
    width, out = t.width, t.size("output_proj_dims")
    first, second = t.given["subsampling_conv_channels"]
    scales = first + second
    # The bands are the number of channels; each convolution of 3 x 3 halves them.
    convolutions = 9 * first + 9 * first * second + scales + first // 4 * second * width
    feed_forward = two_layers(width, 4 * width, width, bias=False) + 2 * width
    # Keys of positions have a matrix of their own.
    attention = 5 * linear(width, width, bias=False) + width // t.size("num_attention_heads")
    taps = t.size("conv_kernel_size") * width
    convolution = linear(width, 2 * width, bias=False) + taps + linear(width, width, bias=False) + 2 * width
    layer = 2 * feed_forward + attention + convolution + 3 * width
    return convolutions + t.size("num_hidden_layers") * layer + linear(width, out) + out * t.text_width


def _any_tower(t: TowerTable) -> int:
    """A tower of an unknown kind, taken for a plain one."""
    width = t.width
    places = t.positions() if t.given.get("image_size") else 0
    patch = t.patch() if t.given.get("patch_size") else 0
    return patch * width + places * width + t.layers() + 2 * width


def _sizes(width: int, inner: int, layers: int, patch: int, **more: object) -> dict[str, Any]:
    """Defaults of a class."""
    named = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "patch_size": patch,
    }
    return named | more


_QWEN_DEFAULTS = {"depth": 32, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_GLM_DEFAULTS = {"depth": 24, "num_heads": 12, "image_size": 336, "patch_size": 14, "hidden_size": 1536}
_GLM_OCR_DEFAULTS = _GLM_DEFAULTS | {
    "hidden_size": 1024,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
TOWERS: tuple[Tower, ...] = (
    Tower(("siglip_vision_model", "siglip"), _siglip, _sizes(768, 3072, 12, 16, image_size=224)),
    Tower(("siglip2_vision_model",), _siglip, _sizes(768, 3072, 12, 16, num_patches=256)),
    Tower(
        ("idefics3_vision", "smolvlm_vision", "granite_docling_vision", "idefics3", "smolvlm"),
        _siglip,
        _sizes(1152, 3072, 12, 32, image_size=224, vision_use_head=False),
    ),
    Tower(("clip_vision_model",), _clip, _sizes(768, 3072, 12, 32, image_size=224)),
    Tower(("pixtral",), _pixtral, _sizes(1024, 4096, 24, 16, image_size=1024)),
    Tower(
        ("qwen2_vl_vision", "qwen2_vl"),
        _qwen2,
        _QWEN_DEFAULTS | {"embed_dim": 1280, "hidden_size": 3584},
        merges=True,
    ),
    Tower(
        ("qwen2_5_vl_vision", "qwen2_5_vl", "qwen2_5_omni_vision_encoder"),
        _qwen25,
        _QWEN_DEFAULTS | {"hidden_size": 3584, "intermediate_size": 3420, "out_hidden_size": 3584},
        merges=True,
    ),
    Tower(
        (
            "qwen3_vl_vision",
            "qwen3_vl",
            "qwen3_vl_moe_vision",
            "qwen3_vl_moe",
            "qwen3_5_vision",
            "qwen3_5",
            "qwen3_5_moe_vision",
            "qwen3_5_moe",
            "qwen3_omni_moe_vision_encoder",
        ),
        _qwen3,
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "patch_size": 16,
            "out_hidden_size": 3584,
            "num_position_embeddings": 2304,
        },
        merges=True,
    ),
    Tower(
        ("glm4v_vision", "glm4v", "glm46v", "glm4v_moe_vision", "glm4v_moe"),
        _glm,
        _GLM_DEFAULTS | {"out_hidden_size": 4096, "intermediate_size": 13_696},
        merges=True,
    ),
    Tower(("glm_ocr_vision", "glm_ocr"), lambda table: _glm(table, ocr=True), _GLM_OCR_DEFAULTS, merges=True),
    Tower(
        ("glm5_next_vision", "glm5_next"),
        lambda table: _glm(table, ocr=True),
        _GLM_OCR_DEFAULTS | {"projection_intermediate_size": 10_240},
        merges=True,
    ),
    Tower(
        ("internvl_vision", "intern_vit_6b", "internvl", "internvl_chat"),
        _internvl,
        _sizes(1024, 4096, 24, 14, image_size=448),
    ),
    Tower(
        ("llama4_vision_model",),
        _llama4,
        _sizes(
            768,
            5632,
            34,
            14,
            image_size=448,
            projector_input_dim=4096,
            projector_output_dim=4096,
            vision_output_dim=7680,
        ),
    ),
    Tower(
        ("moonvit", "kimi_k25_vision", "kimi_k25"),
        _moonvit,
        _sizes(1152, 4304, 27, 14, pos_emb_height=64, pos_emb_width=64),
    ),
    Tower(
        ("mllama_vision_model",),
        _mllama,
        _sizes(
            1280,
            5120,
            32,
            14,
            num_global_layers=8,
            image_size=448,
            max_num_tiles=4,
            vision_output_dim=7680,
            supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        ),
    ),
    Tower(
        ("gemma4_vision",),
        _gemma4,
        _sizes(
            768,
            3072,
            16,
            16,
            num_attention_heads=12,
            num_key_value_heads=12,
            head_dim=64,
            position_embedding_size=10240,
        ),
    ),
    Tower(
        ("gemma4_audio",),
        _gemma4_audio,
        {
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "output_proj_dims": 1536,
            "conv_kernel_size": 5,
            "subsampling_conv_channels": [128, 32],
        },
    ),
    Tower(("minimax_m3_vl_vision", "minimax_m3_vl"), _minimax, _sizes(1280, 5120, 32, 14)),
    Tower(
        ("ernie4_5_vl_moe_vision", "DFNRope_vision_transformer"),
        _ernie,
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 5120, "patch_size": 14},
        merges=True,
    ),
    Tower(("dots_vit", "dots_ocr"), _dots, {"patch_size": 14}, merges=True),
    Tower(
        ("qwen2_audio_encoder", "qwen2_5_omni_audio_encoder", "voxtral_encoder", "whisper"),
        _whisper,
        {"d_model": 1280, "encoder_ffn_dim": 5120, "encoder_layers": 32},
    ),
)


def _two_wide(t: TowerTable) -> int:
    """Two matrices, from the tower's width to the text's."""
    return two_layers(t.width, t.text_width, t.text_width)


def _of_mistral(t: TowerTable) -> int:
    width, text, bias = t.width, t.text_width, bool(t.outer.get("multimodal_projector_bias"))
    merge = t.outer.get("spatial_merge_size") or 2
    return width + width * merge**2 * width + two_layers(width, text, text, bias=bias)


def _of_shuffled(t: TowerTable) -> int:
    """InternVL's: a norm and two matrices over the patches that one token replaces."""
    merged = round(t.width / float(t.outer.get("downsample_ratio") or 0.5) ** 2)
    return 2 * merged + two_layers(merged, t.text_width, t.text_width)


def _of_kimi(t: TowerTable) -> int:
    merged = t.width * prod(t.given.get("merge_kernel_size") or (2, 2))
    return 2 * t.width + two_layers(merged, merged, t.text_width)


def _of_minimax(t: TowerTable) -> int:
    inner = t.outer.get("projector_hidden_size") or t.text_width
    merged = t.merged() * t.text_width
    return two_layers(t.width, inner, t.text_width) + two_layers(merged, inner, t.text_width)


def _of_lfm2(t: TowerTable) -> int:
    merged, inner = (
        t.width * (t.outer.get("downsample_factor") or 2) ** 2,
        t.outer.get("projector_hidden_size"),
    )
    norm = 2 * merged if t.outer.get("projector_use_layernorm", True) else 0
    return norm + two_layers(merged, inner or 2560, t.text_width)


# From a tower's results to the text model, by the type of the whole file; two matrices otherwise.
_PROJECTORS: Mapping[str, Callable[[TowerTable], int]] = {
    "gemma3": lambda t: t.width * t.text_width + t.width,
    "shieldgemma2": lambda t: t.width * t.text_width + t.width,
    "paligemma": lambda t: linear(t.width, t.text_width),
    "mistral3": _of_mistral,
    "lighton_ocr": _of_mistral,
    "internvl": _of_shuffled,
    "internvl_chat": _of_shuffled,
    "qianfan_ocr": _of_shuffled,
    "llama4": lambda t: t.size("vision_output_dim") * t.text_width,
    "mllama": lambda t: linear(t.size("vision_output_dim"), t.text_width),
    "kimi_k25": _of_kimi,
    "kimi_vl": _of_kimi,
    "minimax_m3_vl": _of_minimax,
    "lfm2_vl": _of_lfm2,
    "lfm3_vl": _of_lfm2,
    "idefics3": lambda t: t.width * (t.outer.get("scale_factor") or 2) ** 2 * t.text_width,
    "smolvlm": lambda t: t.width * (t.outer.get("scale_factor") or 2) ** 2 * t.text_width,
    "qwen2_audio": lambda t: linear(t.width, t.text_width),
    "voxtral": lambda t: two_layers(t.size("intermediate_size"), t.text_width, t.text_width, bias=False),
    "gemma4": lambda t: 0,
    "qwen2_5_omni_thinker": lambda t: 0,
}


@dataclass(frozen=True)
class TowerCount:
    """The parameters of a file's towers, by the name of their table.

    assumed: tables of unknown kinds, counted as plain towers. uncounted: tables that give no sizes.
    """

    by_table: Mapping[str, int]
    assumed: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        """The parameters of all towers."""
        return sum(self.by_table.values())


def count_towers(config: Mapping[str, Any], text_width: int) -> TowerCount:
    """The parameters of the towers of a config.json, whose text model is text_width wide."""
    outer = config.get("thinker_config")
    outer = outer if isinstance(outer, Mapping) else config
    by_table: dict[str, int] = {}
    assumed, uncounted = [], []
    for name, given in _tables(outer):
        kind = given.get("model_type") or outer.get("model_type")
        tower = next((each for each in TOWERS if kind in each.types), None)
        table = TowerTable({**(tower.defaults if tower else {}), **given}, outer, text_width)
        project = _PROJECTORS.get(str(outer.get("model_type")), _two_wide)
        try:
            params = tower.count(table) if tower else _any_tower(table)
            by_table[name] = params + (0 if tower and tower.merges else project(table))
        except (ArithmeticError, LookupError, TypeError, ValueError):
            uncounted.append(name)
        else:
            assumed += [] if tower else [name]
    return TowerCount(by_table, tuple(assumed), tuple(uncounted))


def _tables(outer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables of towers that a file has, without keys that are null."""
    for name in _TABLES:
        table = outer.get(name)
        if isinstance(table, Mapping) and table:
            yield name, {key: value for key, value in table.items() if value is not None}
