"""Parameters, FLOPs, cache bytes and arithmetic intensity of a model, counted from what runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from meshwright.dtypes import dtype_bytes
from meshwright.models.config import ModelConfig, Window
from meshwright.models.parameters import Param, dimensions, is_adapter, parameters

PARTS = ("mlp", "attention", "vocab", "norms", "router")


@dataclass(frozen=True)
class ParamCount:
    """Parameters by component, over all layers; a tied table counts once.

    mlp: dense, routed and shared feed-forwards; router: what chooses among the routed. vocab: embedding,
    output projection and learned positions. active: those that one token uses, k of E experts and all else.
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

    A layer of LLaMA's has 3DF (MLP), 2D(N + K)H (attention) and 2D (norms), one of experts 3EDM and DE
    (router) instead of the first; besides them DV for each of embed and unembed, and D for the last norm.
    Source: How to Scale Your Model, "Transformer Math".
    """
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    sizes, unused = dimensions(config), 0
    for path, param in parameters(config).items():
        name, size = path.rpartition("/")[2], prod(param.shape(sizes))
        counts[component(name)] += size
        if config.moe and name.startswith("expert_"):
            unused += size - size * config.moe.experts_per_token // config.moe.num_experts
    return ParamCount(**counts, active=sum(counts.values()) - unused)


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
    """FLOPs of one token's forward pass by component, averaged over the positions of a sequence.

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

    The first term is 2 FLOPs a matmul parameter that the token uses (of E experts k; look-ups, norms and
    biases are free; the output projection counts also where it is tied), the second the scores q.k and the
    values, 2 T N (H + O) where their head dimensions differ. causal: the kernel skips what the mask hides,
    also beyond a local layer's window; False counts the whole T x T square, as much published MFU does.
    Source: How to Scale Your Model, "Transformer Math"; training is three times this.
    """
    counts: dict[str, int] = dict.fromkeys(("mlp", "attention", "vocab", "router"), 0)
    for matrix in _matrices(config):
        counts[matrix.part] += 2 * matrix.num_used * matrix.rows * matrix.columns
    keys = sum(seen_keys(seq_len, window) if causal else seq_len for window in config.windows)
    return Flops(**counts, scores=2 * keys * config.num_heads * _widths(config))


def seen_keys(seq_len: int, window: Window | None) -> float:
    """How many keys a query sees, averaged over T positions: T/2, or W (1 - W / 2T) under a window of W.

    In chunks of W it is W/2, and of a last one that is shorter half of its own length.

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
    """FLOPs of one token's forward pass: `forward_flops` in all."""
    return forward_flops(config, seq_len, causal=causal).total


def even_context(config: ModelConfig, seq_len: int) -> float:
    """Positions behind which a token's attention takes as many FLOPs as all its products.

    By the mean slope up to `seq_len` positions, since layers with a window read no more than that.

    >>> from meshwright.models.presets import PRESETS
    >>> round(even_context(PRESETS["llama-3-8b"], 8192))
    28628
    """
    products = forward_flops_per_token(config, 0, causal=False)
    return seq_len * products / (forward_flops_per_token(config, seq_len, causal=False) - products)


def train_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs of one token's forward and backward pass: three forwards, without recomputation.

    Of matrices that are not trained, as beside adapters, only two: they have no gradient.
    """
    frozen = sum(2 * m.num_used * m.rows * m.columns for m in _matrices(config) if not m.trained)
    return 3 * forward_flops_per_token(config, seq_len, causal=causal) - frozen


@dataclass(frozen=True)
class _Matrix:
    """Matrices [rows, columns] of one name: how many there are, and how many a token is multiplied by."""

    part: str
    rows: int
    columns: int
    num_stored: int
    num_used: int
    trained: bool = True


def _matrices(config: ModelConfig) -> Iterator[_Matrix]:
    sizes = dimensions(config)
    for path, param in parameters(config).items():
        name = path.rpartition("/")[2]
        if (param.init == "normal" or is_adapter(path)) and component(name) != "vocab":
            yield _matrix(config, name, param, sizes)
    yield _Matrix("vocab", config.d_model, config.vocab_size, 1, 1, trained=not config.lora_rank)


def _matrix(config: ModelConfig, name: str, param: Param, sizes: Mapping[str, int]) -> _Matrix:
    num_layers = sizes[param.letters[0]]
    routed = config.moe if name.startswith("expert_") else None
    num_stored = num_layers * (routed.num_experts if routed else 1)
    rows = prod(sizes[letter] for letter in param.fan_in)
    columns = prod(param.shape(sizes)) // (num_stored * rows)
    num_used = num_layers * (routed.experts_per_token if routed else 1)
    return _Matrix(component(name), rows, columns, num_stored, num_used, param.trained)


def _widths(config: ModelConfig) -> int:
    """H + O: of one head's key and of its value."""
    return config.d_head + (config.mla.value_dim if config.mla else config.d_head)


# The cache


def cache_arrays(config: ModelConfig) -> dict[str, str]:
    """The arrays that a layer's cache holds, by name, with their letters.

    Keys and values, or with latent attention what they follow from: the latent and the rotary key, which
    are alike in all heads.

    >>> from meshwright.models.presets import PRESETS
    >>> cache_arrays(PRESETS["llama-3-8b"]), cache_arrays(PRESETS["deepseek-v3"])
    ({'k': 'BSKH', 'v': 'BSKH'}, {'latent': 'BSR', 'rope': 'BSA'})
    """
    return {"latent": "BSR", "rope": "BSA"} if config.mla else {"k": "BSKH", "v": "BSKH"}


def cache_scales(config: ModelConfig, dtype: str) -> dict[str, str]:
    """The f32 scales beside those arrays, where they are quantised: of each token one for each head.

    >>> from meshwright.models.presets import PRESETS
    >>> cache_scales(PRESETS["llama-3-8b"], "int8"), cache_scales(PRESETS["llama-3-8b"], "bf16")
    ({'k': 'BSK', 'v': 'BSK'}, {})
    """
    if dtype_bytes(dtype) >= dtype_bytes("bf16"):
        return {}
    return {name: letters[:-1] for name, letters in cache_arrays(config).items()}


def cache_windows(config: ModelConfig) -> tuple[Window | None, ...]:
    """The window of each cache, the widest of the layers that read it; None where it holds all positions."""
    each = config.layers_per_cache
    groups = (config.windows[first : first + each] for first in range(0, config.num_layers, each))
    return tuple(None if None in group else max(filter(None, group)) for group in groups)


def widest_window(config: ModelConfig) -> Window | None:
    """The widest window of a cache; None where every cache keeps all positions."""
    return max((window for window in cache_windows(config) if window), default=None)


def cached_positions(seq_len: int, window: Window | None) -> int:
    """Positions that a cache keeps of a sequence on its way to so many: at most those of its window.

    >>> cached_positions(4096, None), cached_positions(4096, Window(1024))
    (4096, 1024)
    """
    return min(seq_len, window.size if window else seq_len)


def read_positions(seq_len: int, window: Window | None) -> int:
    """Positions of so many that their last query reads.

    >>> read_positions(4096, Window(1024)), read_positions(4096 + 8, Window(1024, chunked=True))
    (1024, 8)
    """
    return seq_len - max(0, window.first(seq_len - 1) if window else 0)


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bf16") -> int:
    """Bytes that one more token takes in the cache, in `dtype`, where no window is full yet.

        2 L K H   keys and values;   L (R + A) with latent attention: the latent and one rotary key

    Of layers that share a cache one counts. The sources once print L K H alone; keys and values make two.
    Scales of quantised ones (`cache_scales`) are not counted, here and below, as they are not in the sources.
    """
    return int(len(cache_windows(config)) * _kv_elements(config) * dtype_bytes(dtype))


def kv_cache_bytes(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> int:
    """Bytes of the cache of one sequence of S tokens: a local layer keeps those of its window alone."""
    num_tokens = sum(cached_positions(seq_len, window) for window in cache_windows(config))
    return int(num_tokens * _kv_elements(config) * dtype_bytes(dtype))


def kv_read_bytes(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> int:
    """Bytes of the cache that one token after S reads: every layer reads, also one that shares."""
    num_tokens = sum(read_positions(seq_len, window) for window in config.windows)
    return int(num_tokens * _kv_elements(config) * dtype_bytes(dtype))


def _kv_elements(config: ModelConfig) -> int:
    """Elements of one token's cache in one layer."""
    sizes = {**dimensions(config), "B": 1, "S": 1}
    return sum(prod(sizes[letter] for letter in letters) for letters in cache_arrays(config).values())


# Arithmetic intensity


def matmul_intensity(config: ModelConfig, part: str, num_tokens: int, dtype: str = "bf16") -> float:
    """FLOPs a byte of a component's products with `num_tokens` tokens: 2 B D F / (2 (B D + D F + B F)).

    It nears B where B is far below D and F. Of E experts as many are read as the tokens can choose.
    Zero where the model has no such component.
    """
    flops = moved = 0
    for m in (matrix for matrix in _matrices(config) if matrix.part == part):
        flops += 2 * num_tokens * m.num_used * m.rows * m.columns
        moved += min(m.num_stored, m.num_used * num_tokens) * m.rows * m.columns
        moved += num_tokens * m.num_used * (m.rows + m.columns)
    return flops / (moved * dtype_bytes(dtype)) if moved else 0.0


def prefill_intensity(config: ModelConfig, seq_len: int, dtype: str = "bf16") -> float:
    """FLOPs a byte of attention over T queries and T keys: T G / (G + 1) in bf16, the mask not counted.

    A query of a local layer sees its window alone. Latent attention spells keys and values out: G = 1.
    """
    widths = _widths(config)
    seen = sum(cached_positions(seq_len, window) for window in config.windows)
    flops = 2 * seq_len * seen * config.num_heads * widths
    elements = config.num_layers * seq_len * (config.num_heads + config.num_kv_heads) * widths
    return flops / (elements * dtype_bytes(dtype))


def generation_intensity(config: ModelConfig, num_keys: int, dtype: str = "bf16") -> float:
    """FLOPs a byte of attention of one query over S keys: S G / (G + S) in bf16, towards G = N / K.

    A local layer reads its window alone. In latent attention all heads read one latent of R elements, the
    values, and A more of the keys, once: towards N (2R + A) / (R + A), almost 2N.
    """
    widths = _widths(config)
    if config.mla:
        widths = 2 * config.mla.kv_rank + config.mla.rope_dim
    read = sum(read_positions(num_keys, window) for window in config.windows)
    flops = 2 * read * config.num_heads * widths
    elements = config.num_layers * config.num_heads * widths + read * _kv_elements(config)
    return flops / (elements * dtype_bytes(dtype))
