"""The shape of a model, as data."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from meshwright.errors import ModelError
from meshwright.models.config_tables import (
    MLA,
    Extra,
    Indexer,
    MoE,
    Multipliers,
    RopeScaling,
    Unquantised,
    Variant,
    yarn_magnitude,
)
from meshwright.models.fields import check_field, check_fields
from meshwright.models.layer_kinds import (
    DRAFT_LAYERS,
    FeedForward,
    Layer,
    LayerKind,
    Mixer,
    Stack,
    Window,
    stack_of,
)
from meshwright.models.mixers import (
    MIXERS,
    GatedDelta,
    Lightning,
    LinearUnit,
    Selective,
    ShortConvolution,
    StateMixer,
    StateSpace,
)
from meshwright.models.streams import HyperConnections
from meshwright.units import divisors

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned", "none", "alibi"]
# gelu: the tanh form; gelu_erf: the exact one; relu2: squared; clamped_silu: gpt-oss's, cut off at +-7;
# limited_silu: DeepSeek-V4's, with inputs cut off at 10; xielu: with two trained slopes (Apertus).
Activation = Literal["silu", "gelu", "gelu_erf", "relu", "relu2", "clamped_silu", "limited_silu", "xielu"]
# head: over H, with one scale for all heads; heads: over H, each head with its own; width: over N and H.
QKNorm = Literal["head", "heads", "width"]
# joint: trained with the model; frozen: only the head is trained; alone: the head without the model, as a
# server runs it.
DraftHead = Literal["joint", "frozen", "alone"]
# Default weight of a draft head's loss, if it is trained with the model (DeepSeek-V3, 2024, section 4.2).
DRAFT_WEIGHT = 0.3


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer. The defaults are LLaMA's: RMSNorm, rotary positions, SwiGLU, no biases.

    d_head times num_heads need not be d_model; with MLA it is nope_dim + rope_dim. max_seq_len: the
    longest context. d_ff: of the dense layers, moe.d_ff of one expert.
    tied_embeddings: the output projection is the embedding table.
    parallel: attention and feed-forward both read a layer's input, and their results are added to it;
    shared_norm: they also read the same norm (Falcon, Phi).
    norm_offset: norms multiply by 1 + scale (Gemma). norm_scale: norms have scales. pre_norms: before
    attention and feed-forward. post_norms: after them. inner_norms: before their output projections (BitNet).
    qk_norm: queries and keys are normed, over the letters of `qk_norm_over` and, with qk_norm_last, after
    positions have turned them. q_norm_scale: whether the norm of queries has scales. clip_qkv: queries, keys
    and values are cut off at +- this (OLMo).
    attention_gate: the result of attention is multiplied by a sigmoid of a projection of its input.
    rotary_dim: how many of a head's elements positions turn.
    sliding_window: positions that a local layer sees. global_every: each n-th layer sees all positions and
    the others are local; all are local if it is 0. global_layers: numbers of further layers that see all.
    attention_chunk: a local layer sees its own chunk of this
    number of positions instead (Llama 4). rope_theta_local: the base of local layers, if theirs differs.
    nope_every: each n-th layer has no rotary positions; 0 for none. nope_layers: numbers of further layers
    without them. With a temperature_floor its queries are
    multiplied by 1 + temperature_slope ln(1 + floor((1 + position) / temperature_floor)); if no layer is
    without such positions, all queries are, with position in place of 1 + position (Ministral 3).
    turned_norm: queries and keys are normed over H after positions have turned them, without weights.
    query_scale: factor of q . k; d_head ** -0.5 if None. attention_softcap, logit_softcap: c in
    c tanh(x / c). attention_sinks: each head has a logit that takes weight from all keys (gpt-oss).
    scale_embedding: by sqrt(d_model). embedding_scale, residual_scale, logit_scale: factors of embeddings, of
    the results of attention and feed-forward, and of logits (Granite). residual_inputs: three factors;
    attention, a state and a feed-forward add to their normed input times one of them, not to their input
    (MiniMax-01). position_offset: rows of the table of learned positions before position 0's (OPT).
    head_bias: of the output projection. embedding_norm: embeddings are normed (BLOOM). layers_per_cache:
    consecutive layers that read one cache of keys and values, made by the first of them (cross-layer
    attention, Brandon et al., 2024).
    delta, state_space, short_convolution, lightning, selective, linear_unit: the mixer with a state, if there
    is one (models/mixers/).
    mixers, feed_forwards: of each layer, from the first, repeated over the layers; None for
    attention in all of them, and for feed-forwards as `moe` says. "none" leaves out the norm before it, too.
    compressed, compressed_top_k: a layer also reads compressed keys (DeepSeek-V4). One of them, an entry, is
    a sum over `compressed` positions; with an indexer also over the positions of the entry before. A query
    reads the top_k best entries, or all. q_rank: queries come from a latent of this size. out_rank,
    out_groups: each of out_groups groups of heads has a latent of out_rank elements before the output
    projection.
    values_are_cached_keys: values are the keys as they are cached, turned by positions; the results of
    attention are turned back by the query's position.
    streams: the residual is several streams, mixed before and after each part of a layer (hyper-connections).
    value_dim: elements of a value's head, if not d_head. values_are_keys: no product makes values (Gemma 4).
    multipliers: factors of weights, applied when its files are read (Falcon-H1).
    num_kv_shared: the last layers that read the keys and values of the last layer before them with the same
    window (Gemma 3n). variants: layers with other sizes. extras: weights that only plans know. tower_params:
    of the parts of the model that see or hear, which only memory counts.
    indexer: attention reads the keys that a small attention scores highest. planned_only: a part that plans
    and counts know and `nn` does not compute; such a model does not run.
    lora_rank: the weights are frozen and only adapters of this rank are trained (LoRA, Hu et al. 2021):
    x W + s (x A) B with s = lora_alpha / lora_rank, or 1 if lora_alpha is None.
    mtp_layers: modules that predict further tokens, each with a layer like the last (DeepSeek-V3).
    draft_head: one such module runs. From the last hidden state of a position and the embedding of the next
    token it predicts the token after that one, with a layer of its own and the model's table and head.
    stored_dtype: the number type of matrices in its published files, if they are quantised; plans to serve
    take it by default. unquantised: matrices that these files keep wide.
    family: the model family whose files describe it; LLaMA's or another that computes the same if None.
    """

    name: str
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    norm: Norm = "rms"
    norm_bias: bool = False
    norm_offset: bool = False
    norm_scale: bool = True
    pre_norms: bool = True
    inner_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    positions: Positions = "rope"
    rotary_dim: int | None = None
    rope_theta_local: float | None = None
    gated: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: QKNorm = "head"
    qk_norm_last: bool = False
    q_norm_scale: bool = True
    clip_qkv: float | None = None
    attention_gate: bool = False
    post_norms: bool = False
    scale_embedding: bool = False
    embedding_scale: float | None = None
    residual_scale: float | None = None
    residual_inputs: tuple[float, ...] = ()
    logit_scale: float | None = None
    position_offset: int = 0
    head_bias: bool = False
    embedding_norm: bool = False
    sliding_window: int | None = None
    global_every: int = 0
    global_layers: tuple[int, ...] = ()
    attention_chunk: int | None = None
    nope_every: int = 0
    nope_layers: tuple[int, ...] = ()
    temperature_floor: int | None = None
    temperature_slope: float = 0.1
    turned_norm: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    query_scale: float | None = None
    attention_sinks: bool = False
    layers_per_cache: int = 1
    value_dim: int | None = None
    compressed: int | None = None
    compressed_top_k: int | None = None
    q_rank: int | None = None
    out_rank: int | None = None
    out_groups: int = 1
    values_are_cached_keys: bool = False
    streams: HyperConnections | None = None
    values_are_keys: bool = False
    num_kv_shared: int = 0
    moe: MoE | None = None
    mla: MLA | None = None
    indexer: Indexer | None = None
    delta: GatedDelta | None = None
    state_space: StateSpace | None = None
    short_convolution: ShortConvolution | None = None
    lightning: Lightning | None = None
    selective: Selective | None = None
    linear_unit: LinearUnit | None = None
    mixers: tuple[Mixer, ...] | None = None
    feed_forwards: tuple[FeedForward, ...] | None = None
    planned_only: str | None = None
    multipliers: Multipliers | None = None
    variants: tuple[Variant, ...] = ()
    extras: tuple[Extra, ...] = ()
    tower_params: int = 0
    lora_rank: int | None = None
    lora_alpha: float | None = None
    # Modules for further tokens are counted, and run only as `draft_head`.
    mtp_layers: int = field(default=0, compare=False)
    draft_head: DraftHead | None = None
    stored_dtype: str | None = field(default=None, compare=False)
    unquantised: tuple[Unquantised, ...] = ()
    # Models of two families may compute the same, and are then equal.
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _as_tuples(self, "global_layers", "nope_layers", "residual_inputs")
        _as_records(self)
        check_fields(self, self.name)
        _check_norms(self)
        _check_heads(self)
        if self.mla is not None:
            _check_mla(self, self.mla)
        if self.indexer is not None and self.indexer.block:
            _check_blocks(self, self.indexer)
        _check_compression(self)
        if self.rope_scaling is not None:
            _check_factors(self, self.rope_scaling)
        _check_cache_groups(self)
        _check_mixers(self)
        _check_variants(self)
        if self.draft_head:
            _check_draft_head(self)
        if self.moe is not None and not self.num_expert_layers:
            raise ModelError(
                f"{self.name}: none of {self.num_layers} layers has experts; "
                f"fits: moe.num_dense_layers below {self.num_layers}"
            )

    def __repr__(self) -> str:
        """The name and the sizes by letter, for a mixture also M and E.

        >>> ModelConfig("tiny", 2, 32, 64, 8, 4, 8, 64, 64)
        ModelConfig(tiny: L=2, D=32, F=64, N=8, K=4, H=8, V=64)
        """
        sizes = {
            "L": self.num_layers,
            "D": self.d_model,
            "F": self.d_ff,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.d_head,
            "V": self.vocab_size,
        }
        if self.moe is not None:
            sizes |= {"E": self.moe.num_experts, "M": self.moe.d_ff}
        return f"ModelConfig({self.name}: {', '.join(f'{letter}={size}' for letter, size in sizes.items())})"

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, from the first to the last; only the draft head's if it runs without the model."""
        return (self.draft_layer,) if self.draft_head == "alone" else self.model_layers

    @cached_property
    def draft_layer(self) -> Layer:
        """The layer of the draft head: like the last layer of the model that has attention."""
        return Layer(self._like_draft.kind._replace(stack=DRAFT_LAYERS), 0, 0)

    @cached_property
    def draft_has_experts(self) -> bool:
        """Whether the layer of the draft head is a mixture of experts."""
        return self.moe is not None and self._like_draft.kind.stack == "layers"

    @property
    def _like_draft(self) -> Layer:
        return next(layer for layer in reversed(self.model_layers) if _has_both_parts(layer))

    @cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """Every layer that training runs: the model's, then its draft head's."""
        return (*self.model_layers, self.draft_layer) if self._has_head else self.layers

    @property
    def _has_head(self) -> bool:
        return self.draft_head in ("joint", "frozen")

    @cached_property
    def head(self) -> "ModelConfig":
        """The draft head without its model."""
        return replace(self, draft_head="alone")

    @cached_property
    def model_layers(self) -> tuple[Layer, ...]:
        """Every layer of the model, from the first to the last."""
        return _model_layers(self)

    def _variant(self, number: int) -> int:
        return next((n for n, one in enumerate(self.variants, 1) if number in one.layers), 0)

    def at(self, variant: int) -> "ModelConfig":
        """The model with the sizes of one of its variants; itself for 0."""
        return self.each_variant[variant]

    @cached_property
    def each_variant(self) -> tuple["ModelConfig", ...]:
        """`at` of 0 and of each of the variants."""
        changed = (replace(self, variants=(), **dict(one.values)) for one in self.variants)
        return (self, *changed)

    def _mixer(self, number: int) -> Mixer:
        return "attention" if self.mixers is None else self.mixers[number % len(self.mixers)]

    def _feed_forward(self, number: int) -> FeedForward:
        if self.feed_forwards is not None:
            return self.feed_forwards[number % len(self.feed_forwards)]
        if (moe := self.moe) is None or number < moe.num_dense_layers or (number + 1) % moe.every:
            return "dense"
        return "experts"

    @cached_property
    def state_mixer(self) -> StateMixer | None:
        """The mixer that keeps a state for each sequence; None if all layers have attention."""
        return next((mixer for name in MIXERS if (mixer := getattr(self, name)) is not None), None)

    @property
    def own_indexer(self) -> Indexer | None:
        """The indexer of the layer's own weights; None if it has none or reads an earlier layer's choice."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    @property
    def shares_choice(self) -> bool:
        """Whether the layer reads the keys that an earlier layer's indexer chose."""
        return self.indexer is not None and self.indexer.shared

    @cached_property
    def reads_some_keys(self) -> bool:
        """Whether some layers read chosen or compressed keys."""
        return any(layer.indexer is not None or layer.compressed for layer in self.each_variant)

    @cached_property
    def is_hashed(self) -> bool:
        """Whether a table of token ids chooses the experts of some layers."""
        return any(layer.moe.hashed for layer in self.each_variant if layer.moe)

    @cached_property
    def base(self) -> "ModelConfig":
        """The model without adapters and draft head."""
        if not (self.lora_rank or self.draft_head):
            return self
        return replace(self, lora_rank=None, lora_alpha=None, draft_head=None)

    @cached_property
    def text(self) -> "ModelConfig":
        """The model without towers, as it is trained and served."""
        return replace(self, tower_params=0) if self.tower_params else self

    @property
    def lora_scale(self) -> float:
        """s in x W + s (x A) B."""
        return self.lora_alpha / self.lora_rank if self.lora_alpha and self.lora_rank else 1.0

    @cached_property
    def score_scale(self) -> float | None:
        """The factor of q . k; None for d_head ** -0.5."""
        scaling = self.rope_scaling
        if self.mla is None or scaling is None or not scaling.mscale_all_dim:
            return self.query_scale
        return (self.query_scale or self.d_head**-0.5) * yarn_magnitude(
            scaling.factor, scaling.mscale_all_dim
        ) ** 2

    @cached_property
    def num_dense_layers(self) -> int:
        """P: the dense layers of a mixture of experts; 0 without experts."""
        return self._num_layers_with("dense")

    @property
    def num_expert_layers(self) -> int:
        """The layers that have experts."""
        return self._num_layers_with("experts")

    def _num_layers_with(self, kind: FeedForward) -> int:
        """Layers of a mixture of experts with this feed-forward; 0 without experts."""
        return sum(self._feed_forward(number) == kind for number in range(self.num_layers)) if self.moe else 0

    @cached_property
    def windows(self) -> tuple[Window | None, ...]:
        """The window of each layer; None if it sees all positions, or has no attention."""
        return tuple(
            None
            if self._mixer(layer) == "state"
            or _is_each(self.global_every, layer)
            or layer in self.global_layers
            else self.at(self._variant(layer)).local_window
            for layer in range(self.num_layers)
        )

    @cached_property
    def local_window(self) -> Window | None:
        """The window of local layers."""
        size = self.attention_chunk or self.sliding_window
        if size is None:
            return None
        is_chunk = self.attention_chunk is not None
        return Window(size, is_chunk, self.compressed or 0, self.compressed_top_k or 0)


def _check_cache_groups(config: ModelConfig) -> None:
    """ModelError if layers cannot share caches as `layers_per_cache` says."""
    each = config.layers_per_cache
    if each > 1 and config.mla is not None:
        raise ModelError(
            f"{config.name}: layers_per_cache = {each}, but latent attention (MLA) has latents for each "
            "layer; fits: layers_per_cache = 1"
        )
    if config.num_layers % each:
        fits = divisors(config.num_layers)
        raise ModelError(
            f"{config.name}: {config.num_layers} layers (L) do not divide into groups of layers_per_cache = "
            f"{each}; fits: {', '.join(map(str, fits))}"
        )
    starts = range(0, config.num_layers, each)
    groups = [config.windows[first : first + each] for first in starts]
    if config.rope_theta_local is not None and any(len(set(group)) > 1 for group in groups):
        raise ModelError(
            f"{config.name}: rope_theta_local = {config.rope_theta_local} would turn the queries of layers "
            f"otherwise than the keys that they share with layers_per_cache = {each}; fits: leave one out"
        )
    if (config.nope_every or config.nope_layers) and each > 1:
        raise ModelError(
            f"{config.name}: nope_every = {config.nope_every} leaves queries unturned, but "
            f"layers_per_cache = {each} shares keys that are turned; fits: leave one out"
        )


def _check_mixers(config: ModelConfig) -> None:
    """Reduce `mixers` and `feed_forwards` to their shortest periods; ModelError if parts contradict."""
    for name in ("mixers", "feed_forwards"):
        if (listed := getattr(config, name)) is None:
            continue
        if not isinstance(listed, list | tuple) or not listed:
            raise ModelError(f"{config.name}: {name} = {listed!r} must be a list with a name for each layer")
        kinds = get_args(Mixer if name == "mixers" else FeedForward)
        for kind in listed:
            if kind not in kinds:
                raise ModelError(f"{config.name}: {name} has {kind!r}; fits: {', '.join(kinds)}")
        of_layers = (tuple(listed) * config.num_layers)[: config.num_layers]
        object.__setattr__(config, name, _shortest_period(of_layers))
    if config.mixers in (("attention",), ()):
        object.__setattr__(config, "mixers", None)
    tables = [name for name in MIXERS if getattr(config, name) is not None]
    used = {"state", "both"} & {*(config.mixers or ())}
    if len(tables) > 1:
        raise ModelError(f"{config.name}: {' and '.join(tables)}; a model has one mixer with a state")
    if bool(tables) != bool(used):
        raise ModelError(
            f"{config.name}: mixers = {config.mixers} with {tables[0] if tables else 'no state'}; "
            f"fits: a table {' or '.join(MIXERS)}, and mixers with 'state' or 'both'"
        )
    if config.mixers and config.layers_per_cache > 1:
        raise ModelError(
            f"{config.name}: layers_per_cache = {config.layers_per_cache} with mixers; fits: leave one out"
        )
    if config.feed_forwards and "experts" in config.feed_forwards and config.moe is None:
        raise ModelError(f"{config.name}: feed_forwards has 'experts' without a table moe")
    empty = [
        number
        for number in range(config.num_layers)
        if config._mixer(number) == "none" and config._feed_forward(number) == "none"
    ]
    if empty:
        raise ModelError(f"{config.name}: layer {empty[0]} has neither a mixer nor a feed-forward")


def _shortest_period(listed: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest start that repeats to the whole, perhaps cut off at the end.

    >>> _shortest_period(("state", "state", "attention", "state", "state"))
    ('state', 'state', 'attention')
    """
    for period in range(1, len(listed)):
        if listed == (listed[:period] * len(listed))[: len(listed)]:
            return listed[:period]
    return listed


def _is_each(every: int, number: int) -> bool:
    """Whether layer `number` is the last of `every` layers; never if that is 0."""
    return bool(every) and (number + 1) % every == 0


def _as_tuples(config: ModelConfig, *names: str) -> None:
    """Lists of a file as tuples, which can be hashed."""
    for name in names:
        if isinstance(values := getattr(config, name), list):
            object.__setattr__(config, name, tuple(values))


def _as_records(config: ModelConfig) -> None:
    """Tables of a file as records."""
    extras = (Extra(**one) if isinstance(one, dict) else one for one in config.extras)
    of_pairs = (replace(one, sizes=tuple((letter, size) for letter, size in one.sizes)) for one in extras)
    variants = (Variant(**one) if isinstance(one, dict) else one for one in config.variants)
    wide = (Unquantised(**one) if isinstance(one, dict) else one for one in config.unquantised)
    object.__setattr__(config, "extras", tuple(of_pairs))
    object.__setattr__(config, "unquantised", tuple(wide))
    object.__setattr__(config, "variants", tuple(map(_with_tuples, variants)))


def _with_tuples(variant: Variant) -> Variant:
    """The variant with its values as records. A pair without a value is None, since TOML has no null."""
    values = ((name, _record(name, value[0] if value else None)) for name, *value in variant.values)
    return Variant(tuple(variant.layers), tuple(values))


def _record(name: str, value: Any) -> Any:
    """The value of a field that is a table or a list in a file."""
    if name in ALL_TABLES and isinstance(value, dict):
        return ALL_TABLES[name](**value)
    if name == "extras":
        return tuple(Extra(**one) if isinstance(one, dict) else one for one in value)
    return tuple(value) if isinstance(value, list) else value


# Fields that may differ between the layers of a model that runs.
_RUN_BY_LAYER = {
    "attention_out_bias", "indexer", "compressed", "compressed_top_k", "moe", "rope_theta", "rope_scaling",
}  # fmt: skip


def _check_variants(config: ModelConfig) -> None:
    """ModelError if variants or extras contradict the model."""
    parts = ("variants", "extras", "value_dim", "num_kv_shared")
    used = {name for name in parts if getattr(config, name)}
    if {name for one in config.variants for name, _ in one.values} <= _RUN_BY_LAYER:
        used -= {"variants"}
    if used and not config.planned_only:
        raise ModelError(
            f"{config.name}: {', '.join(sorted(used))} can be planned, not yet run; set planned_only to the "
            f"part's name. Variants that differ only in {', '.join(sorted(_RUN_BY_LAYER))} need none"
        )
    letters = Counter(letter for letter, _ in {pair for extra in config.extras for pair in extra.sizes})
    if letters and max(letters.values()) > 1:
        raise ModelError(
            f"{config.name}: extras give the letter {max(letters, key=letters.__getitem__)} two sizes"
        )
    for variant in config.variants:
        if unknown := [name for name, _ in variant.values if name not in _FIELDS]:
            raise ModelError(f"{config.name}: variants: {unknown[0]!r} is not a field of a model")
    if config.num_kv_shared >= config.num_layers:
        raise ModelError(
            f"{config.name}: num_kv_shared = {config.num_kv_shared} must be below {config.num_layers} layers"
        )


def _model_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """The layers with their places in the stacks, and among the caches and states."""
    rows: Counter[Stack] = Counter()
    layers: list[Layer] = []
    caches = states = 0
    chooser, shares_choice = -1, any(layer.shares_choice for layer in config.each_variant)
    cache_of: dict[Window | None, int] = {}
    for number, window in enumerate(config.windows):
        mixer = config._mixer(number)
        reuses = number >= config.num_layers - config.num_kv_shared
        shares = number % config.layers_per_cache > 0 or (reuses and mixer == "attention")
        variant = config._variant(number)
        is_dense = config.moe is not None and config._feed_forward(number) != "experts"
        stack = stack_of(mixer, config._feed_forward(number), is_dense=is_dense, shares=shares)
        stack += f".{variant}" if variant else ""
        turned = (
            config.positions == "rope"
            and not _is_each(config.nope_every, number)
            and number not in config.nope_layers
        )
        has_state = mixer in ("state", "both")
        # Compressed keys: the inputs that a later entry still sums are a state of the sequence.
        keeps_inputs = mixer == "attention" and bool(config.at(variant).compressed)
        slope = (
            config.state_mixer.slope(number, config.num_layers) if config.state_mixer and has_state else 1.0
        )
        kind = LayerKind(stack, window, turned, mixer, variant, slope)
        caches += kind.attends and not shares
        keeps_state = has_state or keeps_inputs
        states += keeps_state
        cache, state = caches - 1 if kind.attends else -1, states - 1 if keeps_state else -1
        if reuses and kind.attends:
            cache = cache_of.get(window, cache)
        elif kind.attends:
            cache_of[window] = cache
        if shares_choice and config.at(variant).own_indexer:
            chooser = number
        layers.append(Layer(kind, rows[stack], cache, state, chooser))
        rows[stack] += 1
    return tuple(layers)


def _has_both_parts(layer: Layer) -> bool:
    """Whether the layer has attention with keys of its own, and a feed-forward."""
    return layer.kind.mixer == "attention" and layer.kind.stack in ("layers", "dense_layers")


def _check_draft_head(config: ModelConfig) -> None:
    """ModelError if the model cannot have a draft head."""
    if config.lora_rank:
        raise ModelError(
            f"{config.name}: lora_rank = {config.lora_rank} and draft_head = {config.draft_head!r} train "
            "different weights; leave one out"
        )
    if not any(map(_has_both_parts, config.model_layers)):
        raise ModelError(
            f"{config.name}: a draft head is a layer with attention and a feed-forward, and this model has "
            "none; leave draft_head out"
        )
    lacks = {
        "parts that only plans know": config.planned_only is not None,
        f"positions = {config.positions!r}": config.positions not in ("rope", "none"),
        f"layers_per_cache = {config.layers_per_cache}": config.layers_per_cache > 1,
        "hyper-connections": config.streams is not None,
    }
    for part, lacking in lacks.items():
        if lacking:
            raise ModelError(f"{config.name}: a draft head does not go with {part}; leave draft_head out")


def _check_norms(config: ModelConfig) -> None:
    if config.residual_inputs and not (len(config.residual_inputs) == 3 and config.pre_norms):
        raise ModelError(
            f"{config.name}: residual_inputs = {config.residual_inputs} are three factors, of attention, a "
            "state and a feed-forward, and need pre_norms"
        )
    if config.shared_norm and not (config.parallel and config.pre_norms):
        raise ModelError(
            f"{config.name}: shared_norm = True is for parallel = True and pre_norms = True; set all three"
        )


def _check_heads(config: ModelConfig) -> None:
    """ModelError if heads do not divide, or options of positions and windows contradict."""
    if config.num_heads % config.num_kv_heads:
        fits = ", ".join(map(str, divisors(config.num_heads)))
        raise ModelError(
            f"{config.name}: {config.num_heads} query heads (N) do not divide over "
            f"{config.num_kv_heads} KV heads (K); fits: K in {{{fits}}}"
        )
    if config.positions == "rope" and config.d_head % 2:
        raise ModelError(f"{config.name}: d_head = {config.d_head} is odd; rotary positions turn pairs")
    if config.rotary_dim is not None and (config.rotary_dim % 2 or config.rotary_dim > config.d_head):
        raise ModelError(
            f"{config.name}: rotary_dim = {config.rotary_dim} must be even and at most d_head = "
            f"{config.d_head}"
        )
    for option in ("nope_every", "temperature_floor", "turned_norm"):
        needs_heads = config.mla is not None and option != "temperature_floor"
        if getattr(config, option) and (config.positions != "rope" or needs_heads):
            raise ModelError(
                f"{config.name}: {option} = {getattr(config, option)} is for rotary positions without latent "
                "attention (MLA); leave it out"
            )
    if config.attention_chunk is not None and config.sliding_window is not None:
        raise ModelError(
            f"{config.name}: attention_chunk = {config.attention_chunk} and sliding_window = "
            f"{config.sliding_window}: local layers see a chunk or a window; leave one out"
        )


def _check_mla(config: ModelConfig, mla: MLA) -> None:
    if config.d_head != mla.nope_dim + mla.rope_dim:
        raise ModelError(
            f"{config.name}: d_head = {config.d_head} must be mla.nope_dim + mla.rope_dim = "
            f"{mla.nope_dim} + {mla.rope_dim} = {mla.nope_dim + mla.rope_dim}"
        )
    if config.num_kv_heads != config.num_heads:
        raise ModelError(
            f"{config.name}: num_kv_heads = {config.num_kv_heads}, but latent attention has one per query "
            f"head; fits: {config.num_heads}"
        )
    if config.lora_rank is not None:
        raise ModelError(
            f"{config.name}: lora_rank = {config.lora_rank} with latent attention (MLA), "
            "whose weights take no adapters; leave it out"
        )


def _check_blocks(config: ModelConfig, indexer: Indexer) -> None:
    """ModelError if an indexer cannot choose blocks of keys for each KV head."""
    if config.mla is not None or indexer.num_heads != config.num_kv_heads:
        raise ModelError(
            f"{config.name}: an indexer that chooses blocks has a head for each KV head; fits: "
            f"indexer.num_heads = {config.num_kv_heads}, without latent attention (MLA)"
        )
    if (config.rotary_dim or config.d_head) > indexer.head_dim:
        raise ModelError(
            f"{config.name}: positions turn {config.rotary_dim or config.d_head} elements of a head, more "
            f"than indexer.head_dim = {indexer.head_dim}"
        )


def _check_compression(config: ModelConfig) -> None:
    """ModelError if keys cannot be compressed, or groups of heads do not divide."""
    if config.compressed and not (config.values_are_cached_keys and config.sliding_window):
        raise ModelError(
            f"{config.name}: compressed = {config.compressed} needs values_are_cached_keys and sliding_window"
        )
    if config.values_are_cached_keys and (config.mla or config.values_are_keys):
        raise ModelError(
            f"{config.name}: values_are_cached_keys does not go with latent attention (MLA) or "
            "values_are_keys; leave one out"
        )
    if config.out_rank and config.num_heads % config.out_groups:
        raise ModelError(
            f"{config.name}: {config.num_heads} query heads (N) do not divide into out_groups = "
            f"{config.out_groups}; fits: {', '.join(map(str, divisors(config.num_heads)))}"
        )


def _check_factors(config: ModelConfig, scaling: RopeScaling) -> None:
    """ModelError if LongRoPE does not have one factor for each frequency."""
    num_pairs = (config.rotary_dim or (config.mla.rope_dim if config.mla else config.d_head)) // 2
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != num_pairs:
            raise ModelError(
                f"{config.name}: rope_scaling: {len(factors)} numbers in {name}; fits: one for each of the "
                f"{num_pairs} pairs that positions turn"
            )


# The tables of ModelConfig that config.json describes key by key.
TABLES: dict[str, type] = {
    "moe": MoE,
    "mla": MLA,
    "indexer": Indexer,
    "multipliers": Multipliers,
    "streams": HyperConnections,
    **MIXERS,
}

# All tables of ModelConfig; a family's `Rope` reads rope_scaling.
ALL_TABLES: dict[str, type] = {"rope_scaling": RopeScaling} | TABLES


def check_config_value(name: str, value: object, model: str) -> None:
    """ModelError if a field of ModelConfig cannot have this value."""
    check_field(_FIELDS[name].type, name, value, model)


_FIELDS = {each.name: each for each in fields(ModelConfig)}
