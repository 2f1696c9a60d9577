"""Cross-layer attention: layers that read the keys and values of one before them, against a plain reference.

transformers has no model with such groups (in Hunyuan-Large's every layer norms the shared keys anew), so the
reference is written out here, layer by layer, on one device.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from tests.nn.one_device import TOKENS, Step, assert_agrees, on_the_host
from tests.nn.small_models import MIXTURE, SHARED, SHARED_BY_FOUR, SHARED_MIXTURE, TINY

from meshwright.errors import LayoutError, ModelError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.runnable import why_not
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA
from meshwright.models.count import count_params, forward_flops, kv_bytes_per_token
from meshwright.models.layer_kinds import Window
from meshwright.models.parameters import parameters
from meshwright.nn.params import flatten

pytestmark = pytest.mark.sampled(4)


def reference_loss(config: ModelConfig, params: dict[str, Any], rows: np.ndarray) -> Array:
    """The mean cross-entropy of the tokens after each."""
    logits = reference_logits(config, params, rows[:, :-1])
    nats = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(nats - jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0])


def reference_logits(config: ModelConfig, params: dict[str, Any], tokens: Any) -> Array:
    """logits[B, T, V] of a model of dense layers; keys and values are made by each group's first."""
    x, made, taken = params["embed"][tokens], None, {"layers": 0, "kv_shared_layers": 0}
    for number, window in enumerate(config.windows):
        stack = "kv_shared_layers" if number % config.layers_per_cache else "layers"
        w = {name: stacked[taken[stack]] for name, stacked in params[stack].items()}
        taken[stack] += 1
        h = _rms(config, x) * w["attention_norm"]
        q = jnp.einsum("btd,dnh->btnh", h, w["wq"]) + w.get("wq_bias", 0)
        q = _rms(config, q) * w["q_norm"] if config.qk_norm else q
        if stack == "layers":
            k = jnp.einsum("btd,dkh->btkh", h, w["wk"]) + w.get("wk_bias", 0)
            v = jnp.einsum("btd,dkh->btkh", h, w["wv"]) + w.get("wv_bias", 0)
            k = _rms(config, k) * w["k_norm"] if config.qk_norm else k
            made = _turned(config, k), v
        assert made is not None and not any(name.startswith(("wk", "wv")) for name in w if stack != "layers")
        a = _attended(config, _turned(config, q), *made, window)
        x = x + jnp.einsum("btnh,nhd->btd", a, w["wo"])
        h = _rms(config, x) * w["mlp_norm"]
        x = x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_in"])) @ w["w_out"]
    return (_rms(config, x) * params["final_norm"]) @ params["unembed"]


def _rms(config: ModelConfig, x: Array) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_eps)


def _turned(config: ModelConfig, x: Array) -> Array:
    """Rotary positions, of which element i turns with element i + H/2."""
    half = config.d_head // 2
    angles = np.arange(x.shape[1])[:, None] * config.rope_theta ** -(np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attended(config: ModelConfig, q: Array, k: Array, v: Array, window: Window | None) -> Array:
    group = config.num_heads // config.num_kv_heads
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * config.d_head**-0.5
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (window.size if window else len(distance)))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), v)


@pytest.mark.parametrize(
    "config",
    [pytest.param(SHARED, marks=pytest.mark.slow), SHARED_BY_FOUR],
    ids=lambda config: config.name,
)
def test_loss_and_gradients_are_those_written_out(config: ModelConfig) -> None:
    """Differences seen are at most 2e-6 of a tensor's largest entry."""
    params = on_the_host(config)
    with jax.numpy_rank_promotion("allow"):
        expected_loss, expected = jax.jit(jax.value_and_grad(lambda w: reference_loss(config, w, TOKENS)))(
            params
        )
    loss, gradients = Step(config, Layout.of(weights_dtype="f32", compute_dtype="f32"))()
    assert loss == pytest.approx(float(expected_loss), rel=5e-6)
    assert gradients.keys() == flatten(expected).keys() == parameters(config).keys()
    for path, one in flatten(expected).items():
        scale = float(np.abs(one).max())
        assert scale > 0, path
        np.testing.assert_allclose(gradients[path], one, rtol=0, atol=1e-5 * scale, err_msg=path)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param(SHARED, "data=2,fsdp=2,tensor=2,sequence_parallel=true", marks=pytest.mark.slow),
        *(
            pytest.param(config, text, marks=pytest.mark.slow)
            for config, text in (
                (SHARED, "context=2,fsdp=2,tensor=2,remat=full"),
                (SHARED, "context=2,tensor=2,fsdp=2,context_method=ring,remat=matmuls"),
                (SHARED, "context=2,fsdp=2,tensor=2,context_method=ulysses"),
                (SHARED, "fsdp=2,tensor=2,tensor2=2,sequence_parallel=true"),
                (SHARED, "tensor=4,kv_replicas=2,offload=true"),
                (SHARED_BY_FOUR, "data=4,tensor=2,zero=2,remat=full"),
                (SHARED_MIXTURE, "data=2,fsdp=4,expert=2,remat=matmuls"),
                (SHARED_MIXTURE, "fsdp=2,tensor=2,tensor2=2,expert=2,grouped=true"),
            )
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
def test_layouts_agree(config: ModelConfig, text: str) -> None:
    assert_agrees(config, Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32"))


def test_what_layers_that_share_have_not_is_not_counted() -> None:
    """Half of the layers have no wk and wv [D, K, H], and caches hold those of the others alone."""
    alone = replace(SHARED, layers_per_cache=1, qk_norm=False, qkv_bias=False)
    both = replace(alone, layers_per_cache=2)
    of_a_layer = 2 * 32 * 4 * 8
    assert count_params(alone).total - count_params(both).total == 2 * of_a_layer
    assert forward_flops(alone, 16).attention - forward_flops(both, 16).attention == 2 * 2 * of_a_layer
    assert forward_flops(alone, 16).scores == forward_flops(both, 16).scores
    assert kv_bytes_per_token(both) * 2 == kv_bytes_per_token(alone)


def test_stacks_of_a_mixture() -> None:
    """A dense layer first; of each group the second layer has no keys and values."""
    stacks = [layer.kind.stack for layer in SHARED_MIXTURE.layers]
    assert stacks == ["dense_layers", "kv_shared_layers", "layers", "kv_shared_layers"]
    held = parameters(SHARED_MIXTURE)
    assert {path.rpartition("/")[0] for path in held if path.endswith("/wk")} == {"dense_layers", "layers"}
    assert {path.rpartition("/")[0] for path in held if path.endswith("/router")} == {
        "layers",
        "kv_shared_layers",
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"layers_per_cache": 3},
            "4 layers (L) do not divide into groups of layers_per_cache = 3; fits: 1, 2, 4",
        ),
        (
            {"num_kv_heads": 8, "d_head": 12, "mla": MLA(16, 8, 4, 6), "qk_norm": False},
            "layers_per_cache = 2, but latent attention (MLA) has latents for each layer; "
            "fits: layers_per_cache = 1",
        ),
        (
            {"rope_theta_local": 100.0},
            "rope_theta_local = 100.0 would turn the queries of layers otherwise than the keys that they "
            "share with layers_per_cache = 2; fits: leave one out",
        ),
    ],
)
def test_groups_that_are_none(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        replace(SHARED, **changed)
    assert str(error.value) == f"shared: {message}"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("pipe=4,microbatches=4,schedule=lanes", "{1, 2}"),
        ("pipe=3,microbatches=4,schedule=1f1b", "{1, 2}"),
        ("pipe=2,microbatches=2,interleave=2,schedule=interleaved", "{1}"),
    ],
)
def test_a_group_lies_on_one_stage(text: str, fits: str) -> None:
    layout = Layout.parse(text)
    with pytest.raises(LayoutError) as error:
        check_fits(layout, SHARED)
    assert str(error.value) == (
        f"layout: with pipe = {layout.pipe} and schedule = {layout.schedule.pipeline} a stage would begin "
        f"within a group of layers_per_cache = 2 of the 4 layers (L) of shared; fits: pipe in {fits}"
    )
    assert why_not(SHARED, layout) == str(error.value).partition(";")[0]
    assert why_not(replace(TINY, num_layers=4), layout) is None


def test_stages_of_lanes_have_the_same_stacks() -> None:
    layout = Layout.parse("pipe=2,fsdp=2,microbatches=2,schedule=lanes")
    with pytest.raises(LayoutError, match="cuts mixture into stages with unlike layers"):
        check_fits(layout, replace(MIXTURE, num_layers=4))
