"""Parameters, FLOPs, cache bytes and arithmetic intensity of a model, counted from its parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from meshwright.dtypes import dtype_bytes
from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Window
from meshwright.models.parameters import (
    DRAFT_IN,
    Param,
    dimensions,
    is_adapter,
    of_a_layer,
    parameters,
    shapes,
    value_letter,
    variant_of,
)

PARTS = ("mlp", "attention", "vocab", "norms", "router")


@dataclass(frozen=True)
class ParamCount:
    """Parameters by component, over all layers; a tied table counts once.

    mlp: dense, routed and shared feed-forwards. vocab: embedding, output projection and learned positions.
    active: parameters that one token uses: k of E experts and all others.
    """

    mlp: int
    attention: int
    vocab: int
    norms: int
    router: int
    active: int

    @property
    def total(self) -> int:
        return self.mlp + self.attention + self.vocab + self.norms + self.router


def count_params(config: ModelConfig) -> ParamCount:
    """The parameters of `config`.

    A layer of LLaMA has 3DF (MLP), 2D(N + K)H (attention) and 2D (norms). A layer of experts has 3EDM and
    DE (router) instead of 3DF. Embedding and output projection have DV each, the last norm D.
    Source: How to Scale Your Model, "Transformer Math".
    """
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    unused = 0
    for path, shape in shapes(config).items():
        name, size = path.rpartition("/")[2], prod(shape)
        counts[component(name)] += size
        moe = config.at(variant_of(path)).moe
        if moe and name.startswith("expert_"):
            unused += size - size * moe.experts_per_token // moe.num_experts
        unused += size if name.startswith("unused_") else 0
    return ParamCount(**counts, active=sum(counts.values()) - unused)


def choice_biases(config: ModelConfig) -> int:
    """Parameters of the biases that choose experts, which have no gradient.

    DeepSeek-V3 has one for each expert of 58 layers: 58 x 256 = 14,848.
    """
    named = ((path, param, path.partition("/")[0]) for path, param in parameters(config).items())
    return sum(
        prod(param.shape(dimensions(config, stack)))
        for path, param, stack in named
        if path.endswith("/router_choice_bias")
    )


def mtp_params(config: ModelConfig) -> int:
    """Parameters of the modules that predict further tokens, which no other count includes.

    Each has a layer like the last, a matrix [2D, D] for the state and the next token's embedding, and three
    norms [D]. Embedding and output projection are the model's. Source: DeepSeek-V3, arXiv:2412.19437, 2.2.
    """
    last = config.model_layers[-1].kind.stack
    sizes = dimensions(config, last)
    layer = sum(
        prod(param.shape(sizes)) // sizes[param.letters[0]]
        for path, param in parameters(config).items()
        if path.startswith(f"{last}/")
    )
    return _num_left_out(config) * (layer + 2 * config.d_model**2 + 3 * config.d_model)


def mtp_flops_per_token(config: ModelConfig, seq_len: int) -> float | None:
    """FLOPs of one token's pass through these modules, with their logits; None if plans have none."""
    if not (count := _num_left_out(config)):
        return 0.0
    try:
        head = replace(config.base, draft_head="joint")
    except ModelError:
        return None
    model = forward_flops_per_token(config.base, seq_len)
    return count * (forward_flops_per_token(head, seq_len) - model)


def _num_left_out(config: ModelConfig) -> int:
    """Modules for further tokens that are in no other count: a draft head is one of them."""
    return max(config.mtp_layers - bool(config.draft_head), 0)


def component(name: str) -> str:
    """The part of the model that the parameter `name` belongs to.

    >>> component("wq"), component("expert_in_bias"), component("attention_post_norm")
    ('attention', 'mlp', 'norms')
    >>> component("unused_expert_in")
    'mlp'
    """
    name = name.removeprefix("unused_")
    if name in ("embed", "positions", "unembed") or name.startswith("table_"):
        return "vocab"
    if name.startswith(("w_", "expert_", "shared_", "latent_w_")) or name == DRAFT_IN:
        return "mlp"
    if "router" in name:
        return "router"
    return "norms" if "norm" in name else "attention"


# FLOPs


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token's forward pass by component, averaged over a sequence's positions.

    attention: its projections; scores: q . k and the sum of values; vocab: the output projection.
    """

    mlp: float
    attention: float
    scores: float
    vocab: float
    router: float

    @property
    def total(self) -> float:
        return self.mlp + self.attention + self.scores + self.vocab + self.router


@lru_cache(maxsize=256)
def forward_flops(config: ModelConfig, seq_len: int, *, causal: bool = True) -> Flops:
    """FLOPs of one token's forward pass at sequence length T.

        2 (L (3DF + 2D(N + K)H) + DV)  +  L * 4 T N H   (half of this term when causal)

    The first term is 2 FLOPs for each matmul parameter that the token uses: k of E experts; the output
    projection even if it is tied; not look-ups, norms and biases. The second is the scores q.k and the
    values, 2 T N (H + O) if their head dimensions differ, and in layers with a state the work of the mixer
    in chunks (`StateMixer.chunk_flops`). causal: the kernel skips masked positions, also
    outside a local layer's window. False counts the whole T x T square, as most published MFUs do.
    Source: How to Scale Your Model, "Transformer Math"; training is three times this.
    """
    counts: dict[str, int] = dict.fromkeys(("mlp", "attention", "vocab", "router"), 0)
    for matrix in _matrices(config):
        counts[matrix.part] += 2 * matrix.num_used * matrix.rows * matrix.columns
    scores = 0.0
    for layer, window in _attending(config):
        keys = seen_keys(seq_len, window) if causal else seq_len
        scores += 2 * keys * layer.num_heads * _widths(layer)
    if mixer := config.state_mixer:
        scores += sum(layer.kind.has_state for layer in config.layers) * mixer.chunk_flops(config.d_model)
    for layer, window in _attending(config):
        if indexer := layer.own_indexer:
            scored = seen_keys(seq_len, None) if causal else seq_len
            scored = scored / (window.compressed if window and window.compressed else 1)
            scores += 2 * scored * indexer.num_heads * indexer.head_dim
    return Flops(**counts, scores=scores)


def num_states(config: ModelConfig) -> int:
    """The layers that keep a state for each sequence."""
    return len(state_variants(config))


def _attending(config: ModelConfig) -> Iterator[tuple[ModelConfig, Window | None]]:
    """The sizes and the window of reads of each layer that has attention."""
    layers = (layer for layer in config.all_layers if layer.kind.attends)
    for layer, window in zip(layers, read_windows(config), strict=True):
        yield config.at(layer.kind.variant), window


def read_windows(config: ModelConfig) -> tuple[Window | None, ...]:
    """For each layer with attention, a window of the number of keys that a query reads; None for all.

    An indexer counts as a window of `top_k` keys, although it chooses them among all positions.
    """
    layers = (layer.kind for layer in config.all_layers if layer.kind.attends)
    return tuple(
        Window(indexer.top_k)
        if kind.window is None and (indexer := config.at(kind.variant).indexer)
        else kind.window
        for kind in layers
    )


def seen_keys(seq_len: int, window: Window | None) -> float:
    """Keys that a query sees, averaged over T positions: T/2, or W (1 - W / 2T) in a window of W.

    In chunks of W it is W/2, and half its length in a shorter last chunk.

    >>> seen_keys(4096, None), seen_keys(4096, Window(1024)), seen_keys(4096, Window(1024, chunked=True))
    (2048.0, 896.0, 512.0)
    """
    width = min(window.size if window else seq_len, seq_len)
    if not seq_len:
        return 0.0
    if window and window.chunked:
        rest = seq_len % width
        return ((seq_len - rest) * width + rest**2) / (2 * seq_len)
    seen = width * (1 - width / (2 * seq_len))
    if window and (entries := window.entries(seq_len)):
        read = window.read_entries(seq_len)
        seen += read * (1 - read / (2 * entries))
    return seen


def forward_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """Total of `forward_flops`."""
    return forward_flops(config, seq_len, causal=causal).total


def even_context(config: ModelConfig, seq_len: int) -> float:
    """The context whose attention takes the same FLOPs a token as all products.

    By the mean slope up to `seq_len` positions, since layers with a window read no more.

    >>> from meshwright.models.presets import PRESETS
    >>> round(even_context(PRESETS["llama-3-8b"], 8192))
    28628
    """
    products = forward_flops_per_token(config, 0, causal=False)
    if forward_flops_per_token(config, seq_len, causal=False) == products:
        return inf
    return seq_len * products / (forward_flops_per_token(config, seq_len, causal=False) - products)


def train_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs of one token's forward and backward pass: three forwards, without recomputation.

    Frozen matrices count two forwards, since they have no gradient. If only the draft head is trained, the
    model counts one forward without logits, since no loss reads them.
    """
    if config.draft_head == "frozen":
        of_model = forward_flops_per_token(config.base, seq_len, causal=causal)
        of_head = forward_flops_per_token(config, seq_len, causal=causal) - of_model
        logits = 2 * config.d_model * config.vocab_size
        return (of_model - logits) + (3 * of_head - logits)
    frozen = sum(2 * m.num_used * m.rows * m.columns for m in _matrices(config) if not m.trained)
    return 3 * forward_flops_per_token(config, seq_len, causal=causal) - frozen


@dataclass(frozen=True)
class _Matrix:
    """Matrices [rows, columns] of one name: the number stored, and the number that a token uses."""

    part: str
    rows: int
    columns: int
    num_stored: int
    num_used: int
    trained: bool = True


def _matrices(config: ModelConfig) -> Iterator[_Matrix]:
    weights, shape_of = parameters(config), shapes(config)
    for path, param in weights.items():
        name = path.rpartition("/")[2]
        is_matrix = len(of_a_layer(param.letters)) > 1 and (param.init == "normal" or is_adapter(path))
        if is_matrix and component(name) != "vocab":
            yield _matrix(config.at(variant_of(path)), path, param, dimensions(config, path), shape_of[path])
    num_used = 2 if config.draft_head in ("joint", "frozen") else 1  # the head's logits, too
    yield _Matrix("vocab", config.d_model, config.vocab_size, 1, num_used, trained=not config.lora_rank)


def _matrix(
    config: ModelConfig, path: str, param: Param, sizes: Mapping[str, int], shape: Sequence[int]
) -> _Matrix:
    stack, _, name = path.rpartition("/")
    num_layers = shape[0] if stack else 1
    routed = config.moe if name.startswith("expert_") else None
    num_stored = num_layers * (routed.num_experts if routed else 1)
    rows = prod(sizes[letter] for letter in param.fan_in)
    columns = prod(shape) // (num_stored * rows)
    num_used = num_layers * (routed.experts_per_token if routed else 1)
    return _Matrix(component(name), rows, columns, num_stored, num_used, param.trained)


def _widths(config: ModelConfig) -> int:
    """H + O: the elements of one head's key and value."""
    return config.d_head + (config.mla.value_dim if config.mla else config.value_dim or config.d_head)


# The cache


def pool_arrays(config: ModelConfig) -> dict[str, str]:
    """The letters of a layer's arrays of pages: `cache_arrays`, and the entries of compressed keys."""
    return cache_arrays(config) | ({"entries": "BSH"} if config.compressed else {})


def cache_arrays(config: ModelConfig) -> dict[str, str]:
    """The letters of each array in a layer's cache.

    Latent attention caches the latent and the rotary key, which all heads share; keys and values follow.

    >>> from meshwright.models.presets import PRESETS
    >>> cache_arrays(PRESETS["llama-3-8b"]), cache_arrays(PRESETS["deepseek-v3"])
    ({'k': 'BSKH', 'v': 'BSKH'}, {'latent': 'BSR', 'rope': 'BSA'})
    """
    of_heads = {"k": "BSKH", "v": f"BSK{value_letter(config)}"}
    of_heads = {"k": "BSKH"} if config.values_are_cached_keys else of_heads
    arrays = {"latent": "BSR", "rope": "BSA"} if config.mla else of_heads
    return arrays | ({"index": "BSy"} if config.own_indexer else {})


def cache_scales(config: ModelConfig, dtype: str) -> dict[str, str]:
    """The letters of a quantised cache's f32 scales: one for each token and head.

    >>> from meshwright.models.presets import PRESETS
    >>> cache_scales(PRESETS["llama-3-8b"], "int8"), cache_scales(PRESETS["llama-3-8b"], "bf16")
    ({'k': 'BSK', 'v': 'BSK'}, {})
    """
    if dtype_bytes(dtype) >= dtype_bytes("bf16"):
        return {}
    return {name: letters[:-1] for name, letters in cache_arrays(config).items()}


class Cache(NamedTuple):
    """A cache of keys and values: its window, None for all positions, and the variant of its layer."""

    window: Window | None
    variant: int = 0


def caches(config: ModelConfig) -> tuple[Cache, ...]:
    """Each cache, with the widest window of the layers that read it."""
    windows: dict[int, list[Window | None]] = {}
    variants: dict[int, int] = {}
    for layer in config.layers:
        if layer.kind.attends:
            windows.setdefault(layer.cache, []).append(layer.kind.window)
            variants.setdefault(layer.cache, layer.kind.variant)
    return tuple(
        Cache(None if None in group else max(filter(None, group)), variants[cache])
        for cache, group in sorted(windows.items())
    )


def cache_windows(config: ModelConfig) -> tuple[Window | None, ...]:
    """The window of each cache, the widest of the layers that read it; None for all positions."""
    return tuple(cache.window for cache in caches(config))


def widest_window(config: ModelConfig) -> Window | None:
    """The widest window of a cache; None if every cache keeps all positions."""
    return max((window for window in cache_windows(config) if window), default=None)


def cached_positions(seq_len: int, window: Window | None) -> int:
    """Positions that a cache keeps of a sequence of `seq_len`: at most its window.

    >>> cached_positions(4096, None), cached_positions(4096, Window(1024))
    (4096, 1024)
    """
    if window is None:
        return seq_len
    return min(seq_len, window.size) + window.entries(seq_len)


def positions_of_arrays(
    config: ModelConfig, cache: Cache, seq_len: int, *, is_whole: bool = False
) -> dict[str, int]:
    """Positions that each of `cache_arrays` keeps of a sequence. is_whole: a window has all positions.

    An indexer's keys of compressed positions are sums as entries are: it has one for each entry, and none for
    the positions of the window.
    """
    window = cache.window
    if is_whole and window is not None:
        window = window._replace(size=seq_len)
    kept = cached_positions(seq_len, window)
    of_index = window.entries(seq_len) if window and window.compressed else kept
    return {name: of_index if name == "index" else kept for name in cache_arrays(config.at(cache.variant))}


def read_positions(seq_len: int, window: Window | None) -> int:
    """Positions that the last query of a sequence of `seq_len` reads.

    >>> read_positions(4096, Window(1024)), read_positions(4096 + 8, Window(1024, chunked=True))
    (1024, 8)
    """
    if window is None:
        return seq_len
    return seq_len - max(0, window.first(seq_len - 1)) + window.read_entries(seq_len)


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bf16") -> int:
    """Bytes that one more token adds to the cache, in `dtype`, before any window is full.

        2 L K H   keys and values;   L (R + A) with latent attention: the latent and one rotary key

    Layers that share a cache count once. One source prints L K H, without the 2 for keys and values. Scales
    of quantised caches (`cache_scales`) are not counted, here and below, as in the sources.
    """
    return _cache_bytes(config, caches(config), 1, dtype)


def kv_cache_bytes(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> int:
    """Bytes of the cache of one sequence of S tokens; a local layer keeps only its window."""
    return _cache_bytes(config, caches(config), seq_len, dtype)


def _cache_bytes(config: ModelConfig, some: Iterable[Cache], seq_len: int, dtype: str) -> int:
    """Bytes of some of the caches of one sequence."""

    def elements(cache: Cache) -> int:
        widths = _array_widths(config, cache.variant)
        return sum(widths[name] * n for name, n in positions_of_arrays(config, cache, seq_len).items())

    return int(sum(map(elements, some)) * dtype_bytes(dtype))


def kv_read_bytes(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> int:
    """Bytes of the cache that one token after S reads; layers that share a cache all read it.

    With an indexer: the keys of the index at all positions, and the rest at the chosen positions.
    """
    read = 0
    for layer, window in _attending(config):
        index_dim = layer.own_indexer.head_dim if layer.own_indexer else 0
        scored = window.entries(seq_len) if window and window.compressed else seq_len
        read += read_positions(seq_len, window) * (_kv_elements(layer) - index_dim) + scored * index_dim
    return int(read * dtype_bytes(dtype))


def state_arrays(config: ModelConfig, dtype: str = "bf16") -> dict[str, tuple[str, str]]:
    """Letters and type of each array that a layer with a state keeps of a sequence, `dtype` by default.

    >>> from meshwright.models.presets import PRESETS
    >>> state_arrays(PRESETS["llama-3-8b"])
    {}
    """
    if config.compressed:
        # Values and gates, concatenated, of the last positions that a later entry sums.
        arrays = {"compressor": "Bscp"} | ({"index": "Bsca"} if config.own_indexer else {})
        return {f"{name}_inputs": (letters, dtype) for name, letters in arrays.items()}
    if config.state_mixer is None:
        return {}
    return {name: (one.letters, one.dtype or dtype) for name, one in config.state_mixer.states().items()}


def state_variants(config: ModelConfig) -> list[int]:
    """The variant of each layer with a state, in the order of the states."""
    return [layer.kind.variant for layer in config.layers if layer.state >= 0]


def mixer_state_bytes(config: ModelConfig, dtype: str = "bf16") -> int:
    """Bytes of the states of one sequence of any length, over all layers.

    Recurrent states are float32; the inputs that convolutions remember are in `dtype`.
    """

    def of_layer(config: ModelConfig) -> float:
        sizes = {**dimensions(config), "B": 1}
        return sum(
            prod(sizes[letter] for letter in letters) * dtype_bytes(kept)
            for letters, kept in state_arrays(config, dtype).values()
        )

    return int(sum(of_layer(config.at(variant)) for variant in state_variants(config)))


@dataclass(frozen=True)
class LayerKindCount:
    """Layers of one mixer: their number, parameters without the feed-forward, and memory of one sequence.

    cache_bytes: at the sequence length; state_bytes: at any length.
    """

    mixer: str
    num_layers: int
    params: int
    cache_bytes_per_token: int
    cache_bytes: int
    state_bytes: int


def layer_kinds(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> list[LayerKindCount]:
    """The kinds of mixers in the model, with the memory that each keeps of a sequence of S tokens.

    >>> from meshwright.models.presets import PRESETS
    >>> [(kind.mixer, kind.num_layers) for kind in layer_kinds(PRESETS["qwen3-next-80b-a3b"], 4096)]
    [('gated delta rule', 36), ('attention', 12)]
    """
    kinds = dict.fromkeys(layer.kind.mixer for layer in config.layers)
    by_name = {
        "attention": "latent attention" if config.mla else "attention",
        "state": config.state_mixer.title if config.state_mixer else "",
        "none": "",
    }
    by_name["both"] = f"{by_name['attention']} and {by_name['state']}"
    num_with_state = num_states(config)
    counts = []
    for mixer in (mixer for mixer in kinds if mixer != "none"):
        layers = [layer for layer in config.layers if layer.kind.mixer == mixer]
        stacks = {layer.kind.stack for layer in layers}
        params = sum(
            prod(shape)
            for path, shape in shapes(config).items()
            if path.partition("/")[0] in stacks and component(path.rpartition("/")[2]) == "attention"
        )
        cached = {layer.cache for layer in layers if layer.kind.attends}
        of_caches = [one for number, one in enumerate(caches(config)) if number in cached]
        kept = len(layers) / num_with_state if layers[0].kind.has_state else 0
        counts.append(
            LayerKindCount(
                by_name[mixer],
                len(layers),
                params,
                _cache_bytes(config, of_caches, 1, dtype),
                _cache_bytes(config, of_caches, seq_len, dtype),
                int(kept * mixer_state_bytes(config, dtype)),
            )
        )
    return counts


@lru_cache(maxsize=256)
def _array_widths(config: ModelConfig, variant: int = 0) -> Mapping[str, int]:
    """Elements of one position in each array of one layer's cache, perhaps of a variant."""
    config = config.at(variant)
    sizes = {**dimensions(config), "B": 1, "S": 1}
    arrays = cache_arrays(config).items()
    return {name: prod(sizes[letter] for letter in letters) for name, letters in arrays}


def _kv_elements(config: ModelConfig) -> int:
    """Elements of one position in all arrays of one layer's cache."""
    return sum(_array_widths(config).values())


# Arithmetic intensity


def matmul_intensity(config: ModelConfig, part: str, num_tokens: int, dtype: str = "bf16") -> float:
    """FLOPs per byte of a component's products with `num_tokens` tokens: 2 B D F / (2 (B D + D F + B F)).

    It approaches B if B is far below D and F. min(E, k B) experts are read. Zero if the model has no such
    component.
    """
    flops = moved = 0
    for m in (matrix for matrix in _matrices(config) if matrix.part == part):
        flops += 2 * num_tokens * m.num_used * m.rows * m.columns
        moved += min(m.num_stored, m.num_used * num_tokens) * m.rows * m.columns
        moved += num_tokens * m.num_used * (m.rows + m.columns)
    return flops / (moved * dtype_bytes(dtype)) if moved else 0.0


def prefill_intensity(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> float:
    """FLOPs per byte of attention over T queries and T keys: T G / (G + 1) in bf16, without the mask.

    A query of a local layer sees only its window. Latent attention computes all keys and values: G = 1.
    """
    flops = elements = 0
    for layer, window in _attending(config):
        widths = _widths(layer)
        flops += 2 * seq_len * cached_positions(seq_len, window) * layer.num_heads * widths
        elements += seq_len * (layer.num_heads + layer.num_kv_heads) * widths
    if not flops:
        return 0.0
    return flops / (elements * dtype_bytes(dtype))


def generation_intensity(config: ModelConfig, num_keys: int, dtype: str = "bf16") -> float:
    """FLOPs per byte of attention of one query over S keys: S G / (G + S) in bf16, towards G = N / K.

    A local layer reads only its window. In latent attention all heads read one latent of R elements, which
    are the values, and A more elements of the keys: towards N (2R + A) / (R + A), almost 2N.
    """
    flops = elements = 0
    for layer, window in _attending(config):
        widths = 2 * layer.mla.kv_rank + layer.mla.rope_dim if layer.mla else _widths(layer)
        read = read_positions(num_keys, window)
        flops += 2 * read * layer.num_heads * widths
        elements += layer.num_heads * widths + read * _kv_elements(layer)
    if not flops:
        return 0.0
    return flops / (elements * dtype_bytes(dtype))
