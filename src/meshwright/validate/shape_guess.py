"""The model with published dimensions: a preset that has them all, or a guessed shape.

A table gives layers, widths, heads, experts and the number of parameters. It leaves out tied embeddings,
shared experts, dense first layers and latent attention, but these change the number of parameters: the
guess is the possible shape with the nearest count. Names of models are not used.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import log

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA, MoE
from meshwright.models.count import count_params
from meshwright.models.presets import PRESETS
from meshwright.validate.published import AnyRow

# The largest distance of a preset's parameters from the published count, often rounded to two digits.
_ROUNDING = 0.03
# Reduction of the distance, in log(parameters), that justifies one more feature.
_PLAINNESS = 0.004
# DeepSeek-V2 and V3 (2024): the latents and head dimensions of both.
_LATENT_ATTENTION = MLA(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


def model_of(row: AnyRow) -> ModelConfig:
    """The model of a row, with a context of the row's sequences."""
    return _model(
        row.mlp == "gated",
        (row.n_layers, row.d_model, row.d_ff, row.n_heads, row.n_kv_heads, row.d_head, row.vocab),
        row.experts,
        row.experts_per_token,
        row.params_total,
        row.params_active,
        row.seq_len,
    )


@lru_cache(maxsize=1024)
def _model(
    gated: bool,
    sizes: tuple[int, ...],
    num_experts: int | None,
    experts_per_token: int | None,
    total: float | None,
    active: float | None,
    seq_len: int,
) -> ModelConfig:
    experts = (num_experts, experts_per_token)
    for preset in PRESETS.values():
        if _has(preset, gated, sizes, experts) and _distance(preset, total, None) < _ROUNDING:
            return replace(preset, max_seq_len=max(preset.max_seq_len, seq_len))
    shapes = _shapes(_plain(gated, sizes, seq_len), num_experts, experts_per_token)
    return min(shapes, key=lambda shape: _distance(shape[1], total, active) + _PLAINNESS * shape[0])[1]


def _has(
    preset: ModelConfig, gated: bool, sizes: tuple[int, ...], experts: tuple[int | None, int | None]
) -> bool:
    """Whether a preset has these dimensions."""
    moe, mla = preset.moe, preset.mla
    d_ff = moe.d_ff if moe else preset.d_ff
    # Sources disagree about the dimension of a latent head, so any is accepted.
    d_head = sizes[5] if mla else preset.d_head
    dims = (preset.num_layers, preset.d_model, d_ff, preset.num_heads, preset.num_kv_heads, d_head)
    preset_experts = (moe.num_experts, moe.experts_per_token) if moe else (None, None)
    return (preset.gated, dims, preset.vocab_size, preset_experts) == (gated, sizes[:6], sizes[6], experts)


def _distance(config: ModelConfig, total: float | None, active: float | None) -> float:
    """Distance of the parameters from the published counts, in logarithms."""
    counted = count_params(config)
    pairs = ((counted.total, total), (counted.active, active))
    return sum(abs(log(count / published)) for count, published in pairs if published)


def _plain(gated: bool, sizes: tuple[int, ...], seq_len: int) -> ModelConfig:
    """LLaMA's block if the feed-forward is gated, otherwise GPT's."""
    num_layers, d_model, d_ff, num_heads, num_kv_heads, d_head, vocab_size = sizes
    config = ModelConfig(
        name=f"L{num_layers}-D{d_model}-F{d_ff}",
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_head=d_head,
        vocab_size=vocab_size,
        max_seq_len=seq_len,
    )
    if gated:
        return config
    return replace(config, gated=False, activation="gelu", norm="layer", norm_bias=True, positions="learned")


def _shapes(
    plain: ModelConfig, num_experts: int | None, experts_per_token: int | None
) -> Iterator[tuple[int, ModelConfig]]:
    """(number of features, model) of each possible shape."""
    for tied in (False, True):
        config = replace(plain, tied_embeddings=tied)
        if num_experts is None or experts_per_token is None:
            yield 0, config
            continue
        for shared, dense, every, latent in product(range(3), range(4), (1, 2), (False, True)):
            if (dense and every > 1) or dense >= config.num_layers:
                continue
            moe = MoE(
                num_experts,
                experts_per_token,
                config.d_ff,
                num_shared_experts=shared,
                num_dense_layers=dense,
                every=every,
            )
            # A dense layer is as wide as the experts of a token in the other layers together.
            shape = replace(config, moe=moe, d_ff=(experts_per_token + shared) * config.d_ff)
            if latent:
                if config.num_kv_heads != config.num_heads:
                    continue
                mla = _LATENT_ATTENTION
                shape = replace(shape, mla=mla, d_head=mla.nope_dim + mla.rope_dim)
            yield shared + bool(dense) + (every > 1) + latent, shape
