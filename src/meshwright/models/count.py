"""Parameters, FLOPs, cache bytes and arithmetic intensity of a model, counted from its parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

from meshwright.dtypes import dtype_bytes
from meshwright.models.config import ModelConfig, Window
from meshwright.models.parameters import Param, dimensions, is_adapter, of_a_layer, parameters, shapes

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
        if config.moe and name.startswith("expert_"):
            unused += size - size * config.moe.experts_per_token // config.moe.num_experts
    return ParamCount(**counts, active=sum(counts.values()) - unused)


def mtp_params(config: ModelConfig) -> int:
    """Parameters of the modules that predict further tokens, which no other count includes.

    Each has a layer like the last, a matrix [2D, D] for the state and the next token's embedding, and three
    norms [D]. Embedding and output projection are the model's. Source: DeepSeek-V3, arXiv:2412.19437, 2.2.
    """
    sizes, last = dimensions(config), config.layers[-1].kind.stack
    layer = sum(
        prod(param.shape(sizes)) // sizes[param.letters[0]]
        for path, param in parameters(config).items()
        if path.startswith(f"{last}/")
    )
    return config.mtp_layers * (layer + 2 * config.d_model**2 + 3 * config.d_model)


def component(name: str) -> str:
    """The part of the model that the parameter `name` belongs to.

    >>> component("wq"), component("expert_in_bias"), component("attention_post_norm")
    ('attention', 'mlp', 'norms')
    """
    if name in ("embed", "positions", "unembed"):
        return "vocab"
    if name.startswith(("w_", "expert_", "shared_")):
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
    keys = sum(seen_keys(seq_len, window) if causal else seq_len for window in read_windows(config))
    scores = 2 * keys * config.num_heads * _widths(config)
    if mixer := config.state_mixer:
        scores += num_states(config) * mixer.chunk_flops(config.d_model)
    if config.indexer:
        scored = sum(seen_keys(seq_len, None) if causal else seq_len for _ in config.attention_windows)
        scores += 2 * scored * config.indexer.num_heads * config.indexer.head_dim
    return Flops(**counts, scores=scores)


def num_states(config: ModelConfig) -> int:
    """The layers that keep a state for each sequence."""
    return sum(layer.kind.has_state for layer in config.layers)


def read_windows(config: ModelConfig) -> tuple[Window | None, ...]:
    """For each layer with attention, the window with as many keys as a query reads; None for all.

    An indexer chooses as many keys as a window of `top_k` has, anywhere among the positions.
    """
    if config.indexer is None:
        return config.attention_windows
    return (Window(config.indexer.top_k),) * len(config.attention_windows)


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
    return width * (1 - width / (2 * seq_len))


def forward_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """Total of `forward_flops`."""
    return forward_flops(config, seq_len, causal=causal).total


def even_context(config: ModelConfig, seq_len: int) -> float:
    """The context at which a token's attention takes the FLOPs of all its products.

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

    Frozen matrices count two forwards, since they have no gradient.
    """
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
    sizes, weights, shape_of = dimensions(config), parameters(config), shapes(config)
    for path, param in weights.items():
        name = path.rpartition("/")[2]
        is_matrix = len(of_a_layer(param.letters)) > 1 and (param.init == "normal" or is_adapter(path))
        if is_matrix and component(name) != "vocab":
            yield _matrix(config, name, param, sizes, prod(shape_of[path]))
    yield _Matrix("vocab", config.d_model, config.vocab_size, 1, 1, trained=not config.lora_rank)


def _matrix(
    config: ModelConfig, name: str, param: Param, sizes: Mapping[str, int], num_elements: int
) -> _Matrix:
    num_layers = sizes[param.letters[0]]
    routed = config.moe if name.startswith("expert_") else None
    num_stored = num_layers * (routed.num_experts if routed else 1)
    rows = prod(sizes[letter] for letter in param.fan_in)
    columns = num_elements // (num_stored * rows)
    num_used = num_layers * (routed.experts_per_token if routed else 1)
    return _Matrix(component(name), rows, columns, num_stored, num_used, param.trained)


def _widths(config: ModelConfig) -> int:
    """H + O: the elements of one head's key and value."""
    return config.d_head + (config.mla.value_dim if config.mla else config.d_head)


# The cache


def cache_arrays(config: ModelConfig) -> dict[str, str]:
    """The letters of each array in a layer's cache.

    Latent attention caches the latent and the rotary key, which all heads share; keys and values follow.

    >>> from meshwright.models.presets import PRESETS
    >>> cache_arrays(PRESETS["llama-3-8b"]), cache_arrays(PRESETS["deepseek-v3"])
    ({'k': 'BSKH', 'v': 'BSKH'}, {'latent': 'BSR', 'rope': 'BSA'})
    """
    arrays = {"latent": "BSR", "rope": "BSA"} if config.mla else {"k": "BSKH", "v": "BSKH"}
    return arrays | ({"index": "BSy"} if config.indexer else {})


def cache_scales(config: ModelConfig, dtype: str) -> dict[str, str]:
    """The letters of a quantised cache's f32 scales: one for each token and head.

    >>> from meshwright.models.presets import PRESETS
    >>> cache_scales(PRESETS["llama-3-8b"], "int8"), cache_scales(PRESETS["llama-3-8b"], "bf16")
    ({'k': 'BSK', 'v': 'BSK'}, {})
    """
    if dtype_bytes(dtype) >= dtype_bytes("bf16"):
        return {}
    return {name: letters[:-1] for name, letters in cache_arrays(config).items()}


def cache_windows(config: ModelConfig) -> tuple[Window | None, ...]:
    """The window of each cache, the widest of the layers that read it; None for all positions."""
    each, windows = config.layers_per_cache, config.attention_windows
    groups = (windows[first : first + each] for first in range(0, len(windows), each))
    return tuple(None if None in group else max(filter(None, group)) for group in groups)


def widest_window(config: ModelConfig) -> Window | None:
    """The widest window of a cache; None if every cache keeps all positions."""
    return max((window for window in cache_windows(config) if window), default=None)


def cached_positions(seq_len: int, window: Window | None) -> int:
    """Positions that a cache keeps of a sequence of `seq_len`: at most its window.

    >>> cached_positions(4096, None), cached_positions(4096, Window(1024))
    (4096, 1024)
    """
    return min(seq_len, window.size if window else seq_len)


def read_positions(seq_len: int, window: Window | None) -> int:
    """Positions that the last query of a sequence of `seq_len` reads.

    >>> read_positions(4096, Window(1024)), read_positions(4096 + 8, Window(1024, chunked=True))
    (1024, 8)
    """
    return seq_len - max(0, window.first(seq_len - 1) if window else 0)


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bf16") -> int:
    """Bytes that one more token adds to the cache, in `dtype`, before any window is full.

        2 L K H   keys and values;   L (R + A) with latent attention: the latent and one rotary key

    Layers that share a cache count once. One source prints L K H, without the 2 for keys and values. Scales
    of quantised caches (`cache_scales`) are not counted, here and below, as in the sources.
    """
    return int(len(cache_windows(config)) * _kv_elements(config) * dtype_bytes(dtype))


def kv_cache_bytes(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> int:
    """Bytes of the cache of one sequence of S tokens; a local layer keeps only its window."""
    num_tokens = sum(cached_positions(seq_len, window) for window in cache_windows(config))
    return int(num_tokens * _kv_elements(config) * dtype_bytes(dtype))


def kv_read_bytes(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> int:
    """Bytes of the cache that one token after S reads; layers that share a cache all read it.

    With an indexer: the keys of the index at all positions, and the rest at the chosen positions.
    """
    num_tokens = sum(read_positions(seq_len, window) for window in read_windows(config))
    read = num_tokens * _kv_elements(config)
    if config.indexer:
        read += (len(config.attention_windows) * seq_len - num_tokens) * config.indexer.head_dim
    return int(read * dtype_bytes(dtype))


def state_arrays(config: ModelConfig, dtype: str = "bf16") -> dict[str, tuple[str, str]]:
    """Letters and type of each array that a layer with a state keeps of a sequence, `dtype` by default.

    >>> from meshwright.models.presets import PRESETS
    >>> state_arrays(PRESETS["llama-3-8b"])
    {}
    """
    if config.state_mixer is None:
        return {}
    return {name: (one.letters, one.dtype or dtype) for name, one in config.state_mixer.states().items()}


def state_bytes(config: ModelConfig, dtype: str = "bf16") -> int:
    """Bytes of the states of one sequence over all layers, whatever its length.

    Recurrent states are float32; the inputs that convolutions remember are in `dtype`.
    """
    sizes = {**dimensions(config), "B": 1}
    elements = (
        prod(sizes[letter] for letter in letters) * dtype_bytes(kept)
        for letters, kept in state_arrays(config, dtype).values()
    )
    return int(num_states(config) * sum(elements))


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
    num_caches, num_with_state = config.num_attention_layers, num_states(config)
    counts = []
    for mixer in (mixer for mixer in kinds if mixer != "none"):
        layers = [layer for layer in config.layers if layer.kind.mixer == mixer]
        stacks = {layer.kind.stack for layer in layers}
        params = sum(
            prod(shape)
            for path, shape in shapes(config).items()
            if path.partition("/")[0] in stacks and component(path.rpartition("/")[2]) == "attention"
        )
        attends, has_state = layers[0].kind.attends, layers[0].kind.has_state
        cached = len(layers) / num_caches if attends else 0
        kept = len(layers) / num_with_state if has_state else 0
        counts.append(
            LayerKindCount(
                by_name[mixer],
                len(layers),
                params,
                int(cached * kv_bytes_per_token(config, dtype)),
                int(cached * kv_cache_bytes(config, seq_len, dtype)),
                int(kept * state_bytes(config, dtype)),
            )
        )
    return counts


def _kv_elements(config: ModelConfig) -> int:
    """Elements of one token's cache in one layer."""
    sizes = {**dimensions(config), "B": 1, "S": 1}
    return sum(prod(sizes[letter] for letter in letters) for letters in cache_arrays(config).values())


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
    widths = _widths(config)
    seen = sum(cached_positions(seq_len, window) for window in read_windows(config))
    flops = 2 * seq_len * seen * config.num_heads * widths
    if not flops:
        return 0.0
    elements = config.num_attention_layers * seq_len * (config.num_heads + config.num_kv_heads) * widths
    return flops / (elements * dtype_bytes(dtype))


def generation_intensity(config: ModelConfig, num_keys: int, dtype: str = "bf16") -> float:
    """FLOPs per byte of attention of one query over S keys: S G / (G + S) in bf16, towards G = N / K.

    A local layer reads only its window. In latent attention all heads read one latent of R elements, which
    are the values, and A more elements of the keys: towards N (2R + A) / (R + A), almost 2N.
    """
    widths = _widths(config)
    if config.mla:
        widths = 2 * config.mla.kv_rank + config.mla.rope_dim
    read = sum(read_positions(num_keys, window) for window in read_windows(config))
    flops = 2 * read * config.num_heads * widths
    if not flops:
        return 0.0
    elements = config.num_attention_layers * config.num_heads * widths + read * _kv_elements(config)
    return flops / (elements * dtype_bytes(dtype))
