"""Every parameter of a model by its letters, and the size of every letter.

`models/transformer.py` explains the letters.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import Extra
from meshwright.models.layer_kinds import DRAFT_LAYERS, KV_SHARED, Layer, Stack, base_stack
from meshwright.models.param import Param

# The first letter of the parameters that are stacked over layers.
STACK_LETTERS: Mapping[Stack, str] = MappingProxyType(
    {
        "layers": "L",
        "dense_layers": "P",
        "kv_shared_layers": "Y",
        "dense_kv_shared_layers": "X",
        "state_layers": "l",
        "dense_state_layers": "d",
        "attention_blocks": "a",
        "state_blocks": "b",
        "expert_blocks": "e",
        "dense_blocks": "f",
        DRAFT_LAYERS: "I",
    }
)
OF_STACKS = "".join(STACK_LETTERS.values())


def of_a_layer(letters: str) -> str:
    """The letters of one layer's parameter.

    >>> of_a_layer("LDNH"), of_a_layer("VD")
    ('DNH', 'VD')
    """
    return letters.lstrip(OF_STACKS)


@lru_cache(maxsize=256)
def dimensions(config: ModelConfig, path: str = "") -> Mapping[str, int]:
    """The size of every letter that the model fixes. L counts the layers of the stack `layers`.

    path: of a parameter, whose layers may be a variant with sizes of its own.
    """
    stacks = Counter(layer.kind.stack for layer in config.layers)
    if config.draft_head:
        stacks[DRAFT_LAYERS] = 1
    if number := variant_of(path):
        stacks = Counter({base_stack(stack): n for stack, n in stacks.items() if variant_of(stack) == number})
        config = config.at(number)
    sizes = {
        **{letter: stacks[stack] for stack, letter in STACK_LETTERS.items() if stacks[stack]},
        "D": config.d_model,
        "F": config.d_ff,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "G": config.num_heads // config.num_kv_heads,
        "H": config.d_head,
        "V": config.vocab_size,
    }
    if config.positions == "learned":
        sizes["W"] = config.max_seq_len + config.position_offset
    if config.lora_rank:
        sizes["Z"] = config.lora_rank
    if config.draft_head:
        sizes["h"] = 2 * config.d_model
    if moe := config.moe:
        sizes |= {"E": moe.num_experts, "M": moe.d_ff, "U": moe.d_ff_all_shared}
        sizes |= {"m": moe.latent} if moe.latent else {}
    if mla := config.mla:
        sizes |= {"R": mla.kv_rank, "J": mla.nope_dim, "A": mla.rope_dim, "O": mla.value_dim}
        sizes |= {"Q": mla.q_rank} if mla.q_rank else {}
    elif config.rotary_dim:
        sizes["A"] = config.rotary_dim
    if indexer := config.indexer:
        sizes |= {"x": indexer.num_heads, "y": indexer.head_dim}
    if mixer := config.state_mixer:
        sizes |= mixer.sizes(config.d_model)
    return MappingProxyType(sizes | _sizes_of_parts(config) | _planned_sizes(config))


def _sizes_of_parts(config: ModelConfig) -> dict[str, int]:
    """The letters of streams, tables of experts, compressed keys and groups of heads."""
    sizes = config.streams.sizes() if config.streams else {}
    if config.moe and config.moe.hashed:
        sizes |= {"t": config.vocab_size, "r": config.moe.experts_per_token}
    if config.compressed:
        series = 2 if config.own_indexer else 1
        sizes |= {"w": config.compressed, "c": series, "s": series * config.compressed - 1}
        sizes |= {"p": 2 * config.d_head}
        sizes |= {"a": 2 * config.own_indexer.head_dim} if config.own_indexer else {}
    if config.out_rank:
        sizes |= {"g": config.out_groups, "u": config.num_heads // config.out_groups, "j": config.out_rank}
    return sizes


def _planned_sizes(config: ModelConfig) -> dict[str, int]:
    """The letters of ranks, and of parts that only plans know."""
    ranks = {"O": config.value_dim, "Q": config.q_rank}
    of_extras = {letter: size for extra in config.extras for letter, size in extra.sizes}
    return {letter: size for letter, size in ranks.items() if size} | of_extras


def variant_of(path: str) -> int:
    """The number of the variant of a parameter's or a stack's layers; 0 for none.

    >>> variant_of("layers.2/wq"), variant_of("layers/wq"), variant_of("embed")
    (2, 0, 0)
    """
    return int(path.partition("/")[0].partition(".")[2] or 0)


def is_latent(letters: Sequence[str]) -> bool:
    """Whether an activation of `letters` is a latent, the input of products with larger results.

    >>> is_latent("BTR"), is_latent("BTD")
    (True, False)
    """
    return letters[-1] in "QR"


@lru_cache(maxsize=256)
def parameters(config: ModelConfig) -> Mapping[str, Param]:
    """Every parameter by its path, the source of shapes, shardings, arrays and counts."""
    params = {"embed": Param("VD")} | (_norm(config, EMBED_NORM, "D") if config.embedding_norm else {})
    if config.positions == "learned":
        params["positions"] = Param("WD")
    stacks = {layer.kind.stack: layer for layer in reversed(config.layers)}
    if config.draft_head:
        stacks |= {DRAFT_LAYERS: config.draft_layer}
    for stack in sorted(stacks, key=lambda one: (_IN_ORDER.index(base_stack(one)), variant_of(one))):
        params |= _stacked(config.at(stacks[stack].kind.variant), stacks[stack])
    params |= {one.name: _extra(one) for one in config.extras if not one.in_layers}
    if config.streams:
        params |= config.streams.head_params()
    if config.draft_head:
        for name in (DRAFT_EMBED_NORM, DRAFT_HIDDEN_NORM, DRAFT_NORM):
            params |= _norm(config, name, "D")
        params[DRAFT_IN] = Param("hD", fan_in="h")
    if config.draft_head != "alone":
        params |= _norm(config, "final_norm", "D")
    if not config.tied_embeddings:
        params["unembed"] = Param("DV")
    if config.head_bias:
        params["unembed_bias"] = Param("V", "zeros")
    params |= dict(_unquantised(config, params))
    if config.lora_rank:
        params = {path: replace(param, trained=is_adapter(path)) for path, param in params.items()}
    if config.draft_head == "frozen":
        params = {
            path: replace(param, trained=param.trained and is_of_draft(path))
            for path, param in params.items()
        }
    return MappingProxyType(params)


def _unquantised(config: ModelConfig, params: Mapping[str, Param]) -> Iterator[tuple[str, Param]]:
    """The matrices that published files keep wide, with their share of layers."""
    for wide in config.unquantised:
        num_layers = len(stacked_layers(config, wide.path.rpartition("/")[0])) or 1
        if wide.path in params:
            share = wide.num_layers / num_layers
            yield wide.path, replace(params[wide.path], wide_in=wide.dtype, wide_share=share)


@lru_cache(maxsize=256)
def stacked_layers(config: ModelConfig, stack: str) -> frozenset[int]:
    """The numbers of the layers whose weights are in the stack; empty for weights without one."""
    return frozenset(n for n, layer in enumerate(config.all_layers) if layer.kind.stack == stack)


@lru_cache(maxsize=256)
def shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every parameter by its path."""
    weights = parameters(config).items()
    return MappingProxyType({path: param.shape(dimensions(config, path)) for path, param in weights})


# The parameters before the first layer.
EMBED_NORM = "embed_norm"
ENTERING = ("embed", EMBED_NORM, f"{EMBED_NORM}_bias", "positions")

# The parameters of a draft head next to its layer: the norms of its inputs and of its result, and the
# projection of both inputs [h, D].
DRAFT_EMBED_NORM, DRAFT_HIDDEN_NORM, DRAFT_NORM = "draft_embed_norm", "draft_hidden_norm", "draft_norm"
DRAFT_IN = "draft_in"


def is_of_draft(path: str) -> bool:
    """Whether the parameter is of the draft head only.

    >>> is_of_draft("draft_layers/wq"), is_of_draft("draft_in"), is_of_draft("layers/wq")
    (True, True, False)
    """
    return path.startswith("draft_")


# Adapters are named after their weight: x A and (x A) B.
ADAPTER_A, ADAPTER_B = "_lora_a", "_lora_b"
_ADAPTED = ("wq", "wk", "wv", "wo", "w_gate", "w_in", "w_out")


def is_adapter(path: str) -> bool:
    """Whether the parameter is one of an adapter's two matrices.

    >>> is_adapter("layers/wq_lora_a"), is_adapter("layers/wq")
    (True, False)
    """
    return path.endswith((ADAPTER_A, ADAPTER_B))


def _adapters(block: Mapping[str, Param]) -> dict[str, Param]:
    """A and B of every product of a layer but the experts': w[D, N, H] has a[D, Z] and b[Z, N, H]."""
    params = {}
    for name in (name for name in _ADAPTED if name in block):
        inner = block[name].fan_in
        outer = block[name].letters.replace(inner, "")
        params[name + ADAPTER_A] = Param(inner + "Z", fan_in=inner)
        params[name + ADAPTER_B] = Param("Z" + outer, "zeros", fan_in="Z")
    return params


# Dense layers come first in a mixture of experts.
_IN_ORDER: tuple[Stack, ...] = (
    "dense_layers",
    "dense_state_layers",
    "dense_kv_shared_layers",
    "layers",
    "state_layers",
    "kv_shared_layers",
    "attention_blocks",
    "state_blocks",
    "expert_blocks",
    "dense_blocks",
    DRAFT_LAYERS,
)
_OF_KEYS_AND_VALUES = ("wk", "wv", "k_norm")
_WITH_EXPERTS: tuple[Stack, ...] = ("layers", "kv_shared_layers", "state_layers", "expert_blocks")
_ONLY_MIXERS: tuple[Stack, ...] = ("attention_blocks", "state_blocks")


def _stacked(config: ModelConfig, layer: Layer) -> dict[str, Param]:
    """The weights of the stack that the layer is in."""
    stack, kind = base_stack(layer.kind.stack), layer.kind
    block: dict[str, Param] = {}
    if kind.mixer != "none":
        block |= _norm(config, "attention_norm", "D") if config.pre_norms else {}
        block |= config.streams.params("attention") if config.streams else {}
        if kind.attends:
            block |= _latent_attention(config) if config.mla else _attention(config)
        if kind.has_state:
            assert config.state_mixer is not None, "a layer with a state has a mixer for it"
            block |= config.state_mixer.params()
        block |= _norm(config, "attention_post_norm", "D") if config.post_norms else {}
    if stack not in _ONLY_MIXERS:
        block |= config.streams.params("mlp") if config.streams else {}
        block |= _norm(config, "mlp_norm", "D") if config.pre_norms and not config.shared_norm else {}
        has_experts = config.draft_has_experts if stack == DRAFT_LAYERS else stack in _WITH_EXPERTS
        experts = config.moe if has_experts else None
        block |= _experts(config) if experts else _mlp(config)
        is_normed = config.post_norms or (experts is not None and experts.post_norm)
        block |= _norm(config, "mlp_post_norm", "D") if is_normed else {}
    if stack in KV_SHARED:
        block = {name: param for name, param in block.items() if not name.startswith(_OF_KEYS_AND_VALUES)}
    block |= {one.name: _extra(one) for one in config.extras if one.in_layers}
    if config.lora_rank:
        block |= _adapters(block)
    letter = STACK_LETTERS[stack]
    return {
        f"{kind.stack}/{name}": replace(param, letters=letter + param.letters)
        for name, param in block.items()
    }


def _extra(extra: Extra) -> Param:
    return Param(extra.letters, "normal" if extra.fan_in else "taps", extra.fan_in)


def _norm(config: ModelConfig, name: str, letter: str) -> dict[str, Param]:
    """The scale and bias of a norm whose input ends with `letter`."""
    scale = {name: Param(letter, "zeros" if config.norm_offset else "ones")} if config.norm_scale else {}
    return scale | ({f"{name}_bias": Param(letter, "zeros")} if config.norm_bias else {})


def _attention(config: ModelConfig) -> dict[str, Param]:
    o = value_letter(config)
    has_values = not (config.values_are_keys or config.values_are_cached_keys)
    params = {"wq": Param("DNH"), "wk": Param("DKH")} | ({"wv": Param(f"DK{o}")} if has_values else {})
    params["wo"] = Param(f"N{o}D", fan_in=f"N{o}")
    if config.out_rank:
        params |= {"wo_down": Param(f"gu{o}j", fan_in=f"u{o}"), "wo": Param("gjD", fan_in="gj")}
    if config.q_rank:
        del params["wq"]
        params |= {"wq_down": Param("DQ"), "wq_up": Param("QNH", fan_in="Q")}
        params |= _norm(config, "q_latent_norm", "Q")
    params |= _indexer(config)
    if config.compressed:
        params |= _compressor("compressor", "H") | _norm(config, "compressor_norm", "H")
    if config.qkv_bias:
        params |= {"wq_bias": Param("NH", "zeros"), "wk_bias": Param("KH", "zeros")}
        params |= {"wv_bias": Param(f"K{o}", "zeros")} if has_values else {}
    if config.qk_norm:
        q, k = ("H", "H") if config.qk_norm_over == "head" else ("NH", "KH")
        params |= _norm(config, "q_norm", q) if config.q_norm_scale else {}
        params |= _norm(config, "k_norm", k)
    if config.attention_gate:
        params["wg"] = Param("DNH")
    if config.inner_norms:
        params |= _norm(config, "attention_inner_norm", "NH")
    if config.attention_sinks:
        params["sinks"] = Param("N", "zeros")
    if config.attention_out_bias:
        params["wo_bias"] = Param("D", "zeros")
    return params


def value_letter(config: ModelConfig) -> str:
    """The letter of a value's head: O if its size differs from a key's, or attention is latent."""
    return "O" if config.mla or config.value_dim else "H"


def _latent_attention(config: ModelConfig) -> dict[str, Param]:
    assert config.mla is not None
    queries = {"wq": Param("DNH")}
    if config.mla.q_rank:
        queries = {"wq_down": Param("DQ"), "wq_up": Param("QNH", fan_in="Q")}
        queries |= _norm(config, "q_latent_norm", "Q")
    return (
        queries
        | _indexer(config)
        | {
            "wkv_down": Param("DR"),
            "wk_rope": Param("DA"),
            **_norm(config, "kv_latent_norm", "R"),
            "wk_up": Param("RNJ", fan_in="R"),
            "wv_up": Param("RNO", fan_in="R"),
            "wo": Param("NOD", fan_in="NO"),
        }
        | ({"wg": Param("DNO")} if config.attention_gate else {})
    )


def _indexer(config: ModelConfig) -> dict[str, Param]:
    """The weights of the indexer; the cross-entropy has no gradient to them."""
    if (indexer := config.own_indexer) is None:
        return {}
    source = "Q" if config.q_rank or (config.mla and config.mla.q_rank) else "D"
    params = {"index_q": Param(f"{source}{indexer.head_letter}y", fan_in=source)}
    params |= _compressor("index", "y") if config.compressed else {"index_k": Param("Dy")}
    scale = Param("y", "zeros" if config.norm_offset else "ones")
    params["index_norm"] = scale
    if indexer.normed == "layer":
        params["index_norm_bias"] = Param("y", "zeros")
    if indexer.normed == "both":
        params["index_q_norm"] = scale
    if indexer.weighted:
        params["index_weights"] = Param("Dx")
    return {name: replace(param, trained=False) for name, param in params.items()}


def _compressor(name: str, head: str) -> dict[str, Param]:
    """The weights of compressed keys or of an indexer's, without their norm.

    w: positions of an entry; c: series. With two, an entry sums the second at its own positions, and the
    first at the positions of the entry before.
    """
    matrices = {f"{name}_kv": Param(f"Dc{head}"), f"{name}_gate": Param(f"Dc{head}")}
    return matrices | {f"{name}_positions": Param(f"wc{head}", "zeros")}


def _mlp(config: ModelConfig) -> dict[str, Param]:
    params = {f"w_{name}": Param("DF") for name in first_matrices(config)} | {
        "w_out": Param("FD", fan_in="F")
    }
    if config.mlp_bias:
        params |= {f"w_{name}_bias": Param("F", "zeros") for name in first_matrices(config)}
        params["w_out_bias"] = Param("D", "zeros")
    if config.inner_norms:
        params |= _norm(config, "mlp_inner_norm", "F")
    if config.activation == "xielu":
        params |= {name: Param("", "zeros") for name in SLOPES}
    return params


# The trained slopes of xIELU, for positive and negative inputs.
SLOPES = ("w_slope_up", "w_slope_down")


def _experts(config: ModelConfig) -> dict[str, Param]:
    assert config.moe is not None
    params = {"router": Param("DE")}
    if config.moe.router_bias:
        params["router_bias"] = Param("E", "zeros")
    if config.moe.choice_bias:
        params["router_choice_bias"] = Param("E", "zeros", has_gradient=False)
    if config.moe.hashed:
        params["router_table"] = Param("tr", "experts", "E", trained=False, has_gradient=False)
    d = row_letter(config)
    params |= {f"expert_{name}": Param(f"E{d}M", fan_in=d) for name in first_matrices(config)}
    params["expert_out"] = Param(f"EM{d}", fan_in="M")
    if config.moe.expert_bias:
        params |= {f"expert_{name}_bias": Param("EM", "zeros") for name in first_matrices(config)}
        params["expert_out_bias"] = Param(f"E{d}", "zeros")
    if config.moe.latent:
        params |= {"latent_w_in": Param("Dm"), "latent_w_out": Param("mD", fan_in="m")}
        params |= {"latent_w_in_bias": Param("m", "zeros")} if config.mlp_bias else {}
        params |= {"latent_w_out_bias": Param("D", "zeros")} if config.mlp_bias else {}
        params |= _norm(config, "latent_norm", "m") if config.moe.latent_norm else {}
    if config.moe.num_shared_experts:
        params |= {f"shared_{name}": Param("DU") for name in first_matrices(config)}
        params["shared_out"] = Param("UD", fan_in="U")
        if config.moe.shared_gate:
            params["shared_router"] = Param("D")
    return params


def row_letter(config: ModelConfig) -> str:
    """The letter of the elements that experts read and write: D, or m if they read a latent."""
    return "m" if config.moe and config.moe.latent else "D"


def first_matrices(config: ModelConfig) -> tuple[str, ...]:
    """The matrices that a feed-forward multiplies its input by."""
    return ("gate", "in") if config.gated else ("in",)
