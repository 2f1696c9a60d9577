"""The forward pass of a Transformer, written once against `ops`.

`nn/` implements the operations with JAX and so runs this file; `cost/` implements them in symbols
and so prices it. Training, prefill and generation are the same function, with and without a cache.
The names given here (`wq`, `attention`, `loss`, ...) are scopes in the compiled program; the audit
recognises operations by them.

Letters: B sequences, T query positions, S key positions, D model, F dense feed-forward, N query
heads, K key-value heads, G = N/K, H head dimension, V vocabulary, W learned positions, Z rank of
adapters.
Stacks of layers: L layers, P dense layers of a mixture of experts; Y and X the layers of either kind
that read the keys and values of an earlier layer.
Experts: E experts, C tokens of one expert, M an expert's feed-forward, U the shared experts', m the latent
that experts read if it is not D.
Latent attention: Q rank of queries, R of keys and values, J a head's part without positions, A its
rotary part (H = J + A), O head dimension of values.
Mixers with a state: small letters, as models/mixers/mixer.py says; and small letters for their stacks.
Sparse attention: x heads of y elements that score keys, or one for each of the K heads.
Compressed keys: w positions of an entry, c series of each position; s positions whose inputs a server keeps
for a later entry, p and a their values and gates together, of keys and of an indexer's keys.
Output by groups: g groups of u heads, each with a latent of j elements.
Experts by a table: t token ids, r experts of each. Streams of the residual: o, as models/streams.py says.
Draft head: h elements of an embedding and a hidden state together.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from meshwright.models.at_layer import AtLayer, Cache, Places, V
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Layer
from meshwright.models.ops import Entries, LatentOps, Ops, Scoring
from meshwright.models.parameters import (
    ADAPTER_A,
    ADAPTER_B,
    DRAFT_EMBED_NORM,
    DRAFT_HIDDEN_NORM,
    DRAFT_IN,
    DRAFT_NORM,
    EMBED_NORM,
    SLOPES,
    first_matrices,
    row_letter,
    value_letter,
)


class Ahead(NamedTuple):
    """The inputs and targets [B, T] of a draft head.

    tokens: after each position. targets: the tokens after these; the last position has none.
    """

    tokens: Any
    targets: Any


def _block(
    config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V, at: AtLayer, shared: Sequence[V] | None = None
) -> tuple[V, Cache, tuple[V, ...] | None]:
    """One layer: x[B, T, D] -> x[B, T, D], the layer's cache, and its keys and values for other layers.

    shared: keys and values of an earlier layer, for a layer without its own. A block has only a mixer or only
    a feed-forward, as its weights say.
    """
    made = None
    config = config.at(getattr(at.kind, "variant", 0))
    norm = partial(_apply_norm, config, ops, w)
    source = x
    h, gates = _part_input(config, ops, w, "attention", x)
    if "wo" in w or "state_out" in w:
        h = ops.kept("attention_norm", norm("attention_norm", h)) if config.pre_norms else h
        mixed = []
        if "wo" in w:
            y, at, made = _attend(config, ops, w, h, at, shared)
            mixed.append(y)
        if "state_out" in w:
            assert config.state_mixer is not None, "a model whose layers have states has a mixer for them"
            y, at = config.state_mixer.mix(ops, w, h, at, norm_eps=config.norm_eps)
            mixed.append(y)
        y = mixed[0] if len(mixed) == 1 else ops.residual("mixed", *mixed)
        if config.post_norms:
            y = norm("attention_post_norm", y)
        x = _added(config, ops, "attention", x, h, int("wo" not in w), y, gates)
    _planned(config, ops, w, x)
    if "w_out" not in w and "router" not in w:
        return x, at.cache, made

    if not config.shared_norm:
        h, gates = _part_input(config, ops, w, "mlp", source if config.parallel else x)
        h = ops.kept("mlp_norm", norm("mlp_norm", h)) if config.pre_norms else h
    if "router" in w:
        y = _mixture(config, ops, w, h, at.places)
    else:
        y = _feed_forward(config, ops, w, h, "w", "BTD,DF->BTF", "BTF,FD->BTD")
    if config.post_norms or ("router" in w and config.moe and config.moe.post_norm):
        y = norm("mlp_post_norm", y)
    return _added(config, ops, "mlp", x, h, 2, y, gates), at.cache, made


def _part_input(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], part: str, x: V) -> tuple[V, V | None]:
    """The input [B, T, D] of a part of a layer, and gates.

    That is x and None; or a sum of the streams of x, and the gates to mix them after the part.
    """
    if config.streams is None or f"{part}_streams" not in w:
        return x, None
    return config.streams.enter(ops, w, part, x)


def _added(
    config: ModelConfig, ops: Ops[V], part: str, x: V, normed: V, number: int, y: V, gates: V | None
) -> V:
    """The residual x after a part of a layer with the result y[B, T, D].

    gates: of the streams of x, None without streams. normed: the part's input, which replaces x if the model
    has `residual_inputs`; number: the index of the part's factor in them.
    """
    if gates is not None:
        return ops.mixed(f"{part}_residual", x, y, gates)
    x = _entered(config, ops, f"{part}_residual_input", x, normed, number)
    return ops.residual(f"{part}_residual", x, _scaled(config, ops, f"{part}_residual_scale", y))


def _planned(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V) -> None:
    """The products with weights that only plans know, each of x[B, T, D] or of an earlier result."""
    made = {"D": x}
    for extra in config.extras:
        if extra.name in w and extra.fan_in in made:
            out = "".join(letter for letter in extra.letters if letter not in extra.fan_in)
            spec = f"BT{extra.fan_in},{extra.letters}->BT{out}"
            (made[out],) = ops.einsums(made[extra.fan_in], w, **{extra.name: spec})


def _attend(
    config: ModelConfig, ops: Ops[V], w: Mapping[str, V], h: V, at: AtLayer, shared: Sequence[V] | None
) -> tuple[V, AtLayer, tuple[V, ...] | None]:
    """y[B, T, D] of the normed h[B, T, D], `at` with the new cache, and keys, values or a choice to share."""
    made = None
    if config.mla:
        a, at, made = _latent_attention(config, ops, w, h, at, shared)
    else:
        a, at, made = _attention(config, ops, w, h, at, shared)
    o = value_letter(config)
    if "wo_down" in w:
        a = ops.grouped("heads", a)
        (a,) = ops.einsums(a, w, wo_down=f"BTgu{o},gu{o}j->BTgj")
        (y,) = ops.einsums(a, w, wo="BTgj,gjD->BTD")
    else:
        (y,) = _products(config, ops, w, a, wo=f"BTN{o},N{o}D->BTD")
    return _biased(ops, w, "wo", y), at, made


def _entered(config: ModelConfig, ops: Ops[V], name: str, x: V, normed: V, part: int) -> V:
    """The input that a layer adds to: x, or its normed form times the factor of this part of the layer."""
    return ops.scale(name, normed, config.residual_inputs[part]) if config.residual_inputs else x


def _scaled(config: ModelConfig, ops: Ops[V], name: str, y: V) -> V:
    """The result of attention or a feed-forward, as it is added to the layer's input."""
    return ops.scale(name, y, config.residual_scale) if config.residual_scale else y


def _apply_norm(
    config: ModelConfig,
    ops: Ops[V],
    w: Mapping[str, V],
    name: str,
    x: V,
    num_letters: int = 1,
    eps: float | None = None,
) -> V:
    scale, bias = w.get(name), w.get(f"{name}_bias")
    return ops.norm(name, x, scale, bias, kind=config.norm, num_letters=num_letters, eps=eps)


def _biased(ops: Ops[V], w: Mapping[str, V], name: str, y: V) -> V:
    """The product y with the weight `name`, plus its bias if it has one."""
    bias = f"{name}_bias"
    return ops.bias(bias, y, w[bias]) if bias in w else y


def _products(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V, **specs: str) -> tuple[V, ...]:
    """The products of x with the weights of `specs`, plus s (x A) B for weights with adapters."""
    products = ops.einsums(x, w, **specs)
    parts = {name: adapter_specs(spec) for name, spec in specs.items() if name + ADAPTER_A in w}
    if not parts:
        return products
    narrow = ops.einsums(x, w, **{name + ADAPTER_A: a for name, (a, _) in parts.items()})
    added = {}
    for (name, (_, b)), h in zip(parts.items(), narrow, strict=True):
        h = ops.scale(f"{name}_lora_scale", h, config.lora_scale)
        (added[name],) = ops.einsums(h, w, **{name + ADAPTER_B: b})
    return tuple(
        ops.residual(f"{name}_lora_sum", y, added[name]) if name in added else y
        for name, y in zip(specs, products, strict=True)
    )


def adapter_specs(spec: str) -> tuple[str, str]:
    """The specs of an adapter's two products, given the spec of its weight.

    >>> adapter_specs("BTD,DNH->BTNH")
    ('BTD,DZ->BTZ', 'BTZ,ZNH->BTNH')
    """
    operands, _, out = spec.partition("->")
    x, weight = operands.split(",")
    inner = "".join(letter for letter in weight if letter not in out)
    outer = "".join(letter for letter in weight if letter in out)
    rows = "".join(letter for letter in x if letter not in inner)
    return f"{x},{inner}Z->{rows}Z", f"{rows}Z,Z{outer}->{out}"


def _attention(
    config: ModelConfig, ops: Ops[V], w: Mapping[str, V], h: V, at: AtLayer, shared: Sequence[V] | None
) -> tuple[V, AtLayer, tuple[V, ...] | None]:
    """a[B, T, N, H] of the normed h[B, T, D], `at` with the new cache, and k, v[B, S, K, H] to share."""
    o = value_letter(config)
    specs = {"wq": "BTD,DNH->BTNH", "wk": "BTD,DKH->BTKH", "wv": f"BTD,DK{o}->BTK{o}"}
    products = _products(config, ops, w, h, **{name: spec for name, spec in specs.items() if name in w})
    down = None
    if "wq_down" in w:
        (down,) = ops.einsums(h, w, wq_down="BTD,DQ->BTQ")
        down = _apply_norm(config, ops, w, "q_latent_norm", down)
        products = (*ops.einsums(down, w, wq_up="BTQ,QNH->BTNH"), *products)
    entries = None
    if config.compressed:
        entries, at = _compressed_keys(config, ops, w, h, at)
    first_positions = entries.places if entries else None
    chosen, at = _chosen_keys(config, ops, w, h, down, at, first_positions)
    q, *kv = (_biased(ops, w, name, y) for name, y in zip(specs, products, strict=False))
    kv = [*kv, *kv] if config.values_are_keys or config.values_are_cached_keys else kv
    num_letters = 2 if config.qk_norm_over == "width" else 1
    if config.qk_norm and not config.qk_norm_last:
        q, kv = _normed(config, ops, w, q, kv, num_letters)
    if config.clip_qkv:
        q, *kv = (
            ops.clip(f"{name}_clip", y, config.clip_qkv) for name, y in zip(specs, (q, *kv), strict=False)
        )
    if config.positions == "rope":
        q = ops.rope("rope_q", q, at)
        kv = [ops.rope("rope_k", kv[0], at), kv[1]] if kv else []
        if config.turned_norm:
            q = ops.turned_norm("turned_norm_q", q, at.kind)
            kv = [ops.turned_norm("turned_norm_k", kv[0], at.kind), kv[1]] if kv else []
        if config.temperature_floor:
            q = ops.temperature("temperature", q, at)
    if config.qk_norm and config.qk_norm_last:
        q, kv = _normed(config, ops, w, q, kv, num_letters)
    if config.layers_per_cache > 1:
        kv = [ops.for_layers(name, x) for name, x in zip("kv", kv, strict=False)]
    k, v = kv or cast("Sequence[V]", shared)
    v = k if config.values_are_cached_keys else v
    scoring = Scoring(config.attention_softcap, config.score_scale, w.get("sinks"), chosen, entries)
    a, at = ops.attention("attention", q, k, v, at, scoring)
    if config.values_are_cached_keys and config.positions == "rope":
        a = ops.rope("rope_a", a, at, back=True)
    a = _gated(config, ops, w, h, a, "H")
    if config.inner_norms:
        a = _apply_norm(config, ops, w, "attention_inner_norm", a, num_letters=2)
    shares = config.layers_per_cache > 1 or config.num_kv_shared
    return a, at, tuple(kv) if kv and shares else None


def _compressed_keys(
    config: ModelConfig,
    ops: Ops[V],
    w: Mapping[str, V],
    h: V,
    at: AtLayer,
    name: str = "compressor",
    letter: str = "H",
) -> tuple[Entries[V], AtLayer]:
    """The entries [B, S, H] of h[B, T, D], normed and with rotary positions, and `at` with the new cache.

    Source: DeepSeek-AI, "DeepSeek-V4", 2026, sections 2.3.1 and 2.3.2.
    """
    weights = f"{name}_kv", f"{name}_gate"
    values, gates = ops.einsums(h, w, **dict.fromkeys(weights, f"BTD,Dc{letter}->BTc{letter}"))
    entries, at = ops.compressed(name, values, gates, w[f"{name}_positions"], at)
    normed = _apply_norm(config, ops, w, f"{name}_norm", entries.values)
    turned = ops.rope(f"rope_{name}", normed, at._replace(places=entries.places))
    return entries._replace(values=turned), at


def _gated(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], h: V, a: V, o: str) -> V:
    """The result of attention a[B, T, N, o], gated by a projection of h[B, T, D] if the model has a gate."""
    if not config.attention_gate:
        return a
    (gate,) = _products(config, ops, w, h, wg=f"BTD,DN{o}->BTN{o}")
    return ops.gated("attention_gate", a, gate)


def _normed(
    config: ModelConfig, ops: Ops[V], w: Mapping[str, V], q: V, kv: list[V], num_letters: int
) -> tuple[V, list[V]]:
    """Normed queries and keys, with the values; no keys and values if an earlier layer has them."""
    q = _apply_norm(config, ops, w, "q_norm", q, num_letters)
    return q, [_apply_norm(config, ops, w, "k_norm", kv[0], num_letters), kv[1]] if kv else []


def _latent_attention(
    config: ModelConfig, ops: Ops[V], w: Mapping[str, V], h: V, at: AtLayer, shared: Sequence[V] | None
) -> tuple[V, AtLayer, tuple[V, ...] | None]:
    """a[B, T, N, O] of the normed h[B, T, D] through latents, and `at` with the new cache (DeepSeek-V2).

    Also returns the keys that the layer's indexer chose if later layers read them, otherwise None.

    A cache holds the normed latent [R] and the turned rotary key [A] of each token, R + A elements a layer;
    keys and values follow from them (`spelt_out`).
    """
    assert config.mla is not None, "latent attention has sizes of its own"
    down, eps = None, config.mla.norm_eps
    if "wq_down" in w:
        down, latent, rope = ops.einsums(
            h, w, wq_down="BTD,DQ->BTQ", wkv_down="BTD,DR->BTR", wk_rope="BTD,DA->BTA"
        )
        down = ops.kept("q_latent_norm", _apply_norm(config, ops, w, "q_latent_norm", down, eps=eps))
        (q,) = ops.einsums(down, w, wq_up="BTQ,QNH->BTNH")
    else:
        q, latent, rope = ops.einsums(h, w, wq="BTD,DNH->BTNH", wkv_down="BTD,DR->BTR", wk_rope="BTD,DA->BTA")
    latent = ops.kept("kv_latent_norm", _apply_norm(config, ops, w, "kv_latent_norm", latent, eps=eps))
    q, rope = ops.rope("rope_q", q, at), ops.rope("rope_k", rope, at)
    if config.temperature_floor:
        q = ops.temperature("temperature", q, at)
    if config.shares_choice:
        (chosen,) = cast("Sequence[V]", shared)
    else:
        chosen, at = _chosen_keys(config, ops, w, h, down, at)
    scoring = Scoring(scale=config.score_scale, chosen=chosen)
    a, at = ops.latent_attention("attention", q, latent, rope, w, at, scoring)
    indexer = config.own_indexer
    handed_on = (chosen,) if chosen is not None and indexer and indexer.handed_on else None
    return _gated(config, ops, w, h, a, "O"), at, handed_on


def _chosen_keys(
    config: ModelConfig,
    ops: Ops[V],
    w: Mapping[str, V],
    h: V,
    down: V | None,
    at: AtLayer,
    entries: Places | None = None,
) -> tuple[V | None, AtLayer]:
    """The keys that an indexer chooses for each query, None without an indexer, and `at` with the new cache.

    entries: the first positions of compressed keys, if it chooses among them. The indexer reads the normed
    h[B, T, D] and the queries' latent down[B, T, Q]. No gradient passes through the choice, so training
    leaves the indexer's weights as they are.
    """
    indexer = config.own_indexer
    if indexer is None:
        return None, at
    norm = "layer" if indexer.normed == "layer" else "rms"

    def choose(w: Mapping[str, V], h: V, down: V | None) -> tuple[V, AtLayer]:
        source, heads = "D" if down is None else "Q", indexer.head_letter
        spec = f"BT{source},{source}{heads}y->BT{heads}y"
        (q,) = ops.einsums(h if down is None else down, w, index_q=spec)
        if "index_q_norm" in w:
            q = ops.norm("index_q_norm", q, w["index_q_norm"], kind=norm, eps=indexer.norm_eps)
        if entries is not None:
            (k, _), after = _compressed_keys(config, ops, w, h, at, "index", "y")
            q = ops.rope("rope_index_q", q, at, leading=True)
            (heads,) = ops.einsums(h, w, index_weights="BTD,Dx->BTx")
            return ops.index("index", q, k, heads, after, entries)
        specs = {"index_k": "BTD,Dy->BTy", "index_weights": "BTD,Dx->BTx"}
        k, *weights = ops.einsums(h, w, **{name: spec for name, spec in specs.items() if name in w})
        scale, bias = w["index_norm"], w.get("index_norm_bias")
        k = ops.norm("index_norm", k, scale, bias, kind=norm, eps=indexer.norm_eps)
        if config.mla or indexer.block:
            q = ops.rope("rope_index_q", q, at, leading=True)
            k = ops.rope("rope_index_k", k, at, leading=True)
        return ops.index("index", q, k, weights[0] if weights else None, at)

    of_index = {name: weight for name, weight in w.items() if name.startswith("index_")}
    return ops.undifferentiated(choose, of_index, h, down)


def spelt_out(ops: LatentOps[V], w: Mapping[str, V], latent: V, rope: V) -> tuple[V, V]:
    """k[B, T, N, H] and v[B, T, N, O] of latent[B, T, R] and rope[B, T, A], for training and prefill.

    Generation may absorb wk_up into the queries and wv_up into the result instead. Then it attends to the
    latents, which are one KV head of R + A and R elements.
    """
    k, v = ops.einsums(latent, w, wk_up="BTR,RNJ->BTNJ", wv_up="BTR,RNO->BTNO")
    return ops.join_rope("join_rope", k, rope), v


def _feed_forward(
    config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V, prefix: str, into: str, out: str
) -> V:
    """y of x, of the same shape, through the weights with this prefix; into, out: first and last einsum."""
    names = [f"{prefix}_{name}" for name in first_matrices(config)]
    products = _products(config, ops, w, x, **dict.fromkeys(names, into))
    biased = (_biased(ops, w, name, y) for name, y in zip(names, products, strict=True))
    gate, *up = (ops.kept(name, y) for name, y in zip(names, biased, strict=True))
    name = f"{prefix}_activation"
    slopes = (w[SLOPES[0]], w[SLOPES[1]]) if config.activation == "xielu" else None
    h = ops.kept(name, ops.activation(name, gate, up[0] if up else None, config.activation, slopes))
    if config.inner_norms:
        h = _apply_norm(config, ops, w, "mlp_inner_norm", h)
    (y,) = _products(config, ops, w, h, **{f"{prefix}_out": out})
    return _biased(ops, w, f"{prefix}_out", y)


def _mixture(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], h: V, places: Places) -> V:
    """y[B, T, D] of h[B, T, D]: each token through its k experts and the shared experts."""
    bias, choice, table = (w.get(f"router_{name}") for name in ("bias", "choice_bias", "table"))
    gates = ops.router("router", h, w["router"], bias, choice, table=table, places=places)

    def through(ops: Ops[V], w: Mapping[str, V], d: V) -> V:
        d, m = ops.kept("dispatch", d), row_letter(config)
        return _feed_forward(config, ops, w, d, "expert", f"EC{m},E{m}M->ECM", f"ECM,EM{m}->EC{m}")

    weights = {name: weight for name, weight in w.items() if name.startswith("expert_")}
    x = h
    if "latent_w_in" in w:
        (x,) = ops.einsums(h, w, latent_w_in="BTD,Dm->BTm")
        x = _biased(ops, w, "latent_w_in", x)
    y = ops.experts(through, weights, x, gates)
    if "latent_w_out" in w:
        y = _apply_norm(config, ops, w, "latent_norm", y) if "latent_norm" in w else y
        (y,) = ops.einsums(y, w, latent_w_out="BTm,mD->BTD")
        y = _biased(ops, w, "latent_w_out", y)
    if "shared_in" not in w:
        return y
    shared = _feed_forward(config, ops, w, h, "shared", "BTD,DU->BTU", "BTU,UD->BTD")
    gate = ops.dot("shared_router", h, w["shared_router"]) if "shared_router" in w else None
    return ops.add_shared_experts("shared", y, shared, gate)


# The forward pass in parts, which stages of a pipeline combine


def enter(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], tokens: V, places: Places) -> V:
    """x[B, T, D] of tokens[B, T], before the first layer."""
    x = _embedded(config, ops, w, tokens)
    if config.positions == "learned":
        x = ops.add_positions("positions", x, places, w["positions"])
    _planned(config, ops, w, x)
    return ops.spread("streams", x, config.streams) if config.streams else x


def _embedded(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], tokens: V) -> V:
    """The embeddings x[B, T, D] of tokens[B, T], scaled and normed."""
    x = ops.embed("embed", tokens, w["embed"])
    if config.scale_embedding:
        x = ops.scale("scale_embedding", x, config.d_model**0.5)
    if config.embedding_scale:
        x = ops.scale("embedding_scale", x, config.embedding_scale)
    return _apply_norm(config, ops, w, EMBED_NORM, x) if config.embedding_norm else x


def enter_draft(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], tokens: V, hidden: V) -> V:
    """x[B, T, D] before the layer of a draft head (DeepSeek-V3, arXiv:2412.19437, equation 21).

    tokens[B, T]: the token after each position. hidden[B, T, D]: of the positions, after the final norm, or a
    draft head's own for positions of drafts.
    """
    x = _apply_norm(config, ops, w, DRAFT_EMBED_NORM, _embedded(config, ops, w, tokens))
    hidden = _apply_norm(config, ops, w, DRAFT_HIDDEN_NORM, hidden)
    (x,) = ops.einsums(ops.join("draft_join", x, hidden), w, **{DRAFT_IN: "BTh,hD->BTD"})
    return x


def through(
    config: ModelConfig,
    ops: Ops[V],
    w: Mapping[str, V],
    x: V,
    places: Places,
    cache: Cache,
    layers: Sequence[Layer],
) -> tuple[V, Cache]:
    """x[B, T, D] after some consecutive layers of `config.layers`, and the cache."""
    return ops.layers(partial(_block, config), w, x, places, cache, layers)


def leave(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V, indices: V | None = None) -> V:
    """logits[B, T, V] of x[B, T, D] after the last layer; with indices[B, n] only of positions in it."""
    x = _joined(config, ops, w, x)
    x = x if indices is None else ops.take("take", x, indices)
    x = _logits_input(config, ops, _apply_norm(config, ops, w, _last_norm(config), x))
    (out,) = ops.einsums(x, w, **_head(config))
    out = _biased(ops, w, "unembed", out)
    return ops.softcap("logit_softcap", out, config.logit_softcap) if config.logit_softcap else out


def final_norm(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V) -> V:
    """The last hidden state[B, T, D]: x[B, T, D] after the last layer and the final norm."""
    return _apply_norm(config, ops, w, _last_norm(config), _joined(config, ops, w, x))


def _last_norm(config: ModelConfig) -> str:
    return DRAFT_NORM if config.draft_head == "alone" else "final_norm"


def _joined(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V) -> V:
    """x[B, T, D] after the last layer: the weighted sum of its streams, if it has several."""
    return config.streams.joined(ops, w, x) if config.streams else x


def leave_with_loss(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], x: V, targets: V) -> V:
    """The mean cross-entropy of targets[B, T] by x[B, T, D] after the last layer, in nats per token."""
    return _loss_of_hidden(config, ops, w, final_norm(config, ops, w, x), targets)


def _loss_of_hidden(config: ModelConfig, ops: Ops[V], w: Mapping[str, V], hidden: V, targets: V) -> V:
    """The mean cross-entropy of targets[B, T] by hidden[B, T, D] after the final norm."""
    is_draft = config.draft_head == "alone"
    x = ops.kept(DRAFT_NORM if is_draft else "final_norm", _logits_input(config, ops, hidden))
    name, cap = "draft_loss" if is_draft else "loss", config.logit_softcap
    return ops.loss(name, x, w, targets, cap, has_last=not is_draft, **_head(config))


def _logits_input(config: ModelConfig, ops: Ops[V], x: V) -> V:
    """x[B, T, D], whose product with the head is the scaled logits."""
    return ops.scale("logit_scale", x, config.logit_scale) if config.logit_scale else x


def _head(config: ModelConfig) -> dict[str, str]:
    """The product that makes logits[B, T, V] of x[B, T, D]; a tied model reads its embedding table again."""
    return {"embed": "BTD,VD->BTV"} if config.tied_embeddings else {"unembed": "BTD,DV->BTV"}


# The whole forward pass


def with_tokens(config: ModelConfig, places: Places, tokens: Any) -> Places:
    """The places with the ids of the tokens, if a table of them chooses experts."""
    return places._replace(tokens=tokens) if config.is_hashed else places


def logits(
    config: ModelConfig,
    ops: Ops[V],
    w: Mapping[str, V],
    tokens: V,
    places: Places,
    cache: Cache = None,
    indices: V | None = None,
) -> tuple[V, Cache]:
    """logits[B, T, V] after each of tokens[B, T], and the cache, in training, prefill and generation.

    indices[B, n]: the positions in T whose logits are returned, [B, n, V]; None for all.
    """
    places = with_tokens(config, places, tokens)
    x = enter(config, ops, w, tokens, places)
    x, cache = through(config, ops, w, x, places, cache, config.layers)
    return leave(config, ops, w, x, indices), cache


def losses(
    config: ModelConfig,
    ops: Ops[V],
    w: Mapping[str, V],
    tokens: V,
    targets: V,
    places: Places,
    ahead: Ahead | None = None,
) -> tuple[V, Cache]:
    """The mean cross-entropy of targets[B, T], and the result of `layers` instead of a cache.

    ahead: of a model with a draft head. The loss of a head that is trained with the model is in the second
    result; if only the head is trained, its loss is the first.
    """
    places = with_tokens(config, places, tokens)
    x = enter(config, ops, w, tokens, places)
    x, handed_on = through(config, ops, w, x, places, None, config.layers)
    hidden = final_norm(config, ops, w, x)
    if config.draft_head is None or ahead is None:
        return _loss_of_hidden(config, ops, w, hidden, targets), handed_on
    is_frozen = config.draft_head == "frozen"
    head, read = config.head, ops.detached(hidden) if is_frozen else hidden
    x = enter_draft(head, ops, w, ahead.tokens, read)
    x, of_head = through(head, ops, w, x, places, None, head.layers)
    if is_frozen:
        return leave_with_loss(head, ops, w, x, ahead.targets), of_head
    loss = _loss_of_hidden(config, ops, w, hidden, targets)
    return loss, ops.with_draft_loss(handed_on, leave_with_loss(head, ops, w, x, ahead.targets))
