"""The nested records of a ModelConfig: rotary scaling, experts, attention, parts of single layers."""

from dataclasses import dataclass
from math import log
from typing import Any, Literal

from meshwright.errors import ModelError
from meshwright.models.fields import check_fields, is_number

IndexNorm = Literal["layer", "rms", "both"]
RopeKind = Literal["llama3", "linear", "yarn", "longrope", "dynamic"]
# sparsemixer: k times a softmax of logits near the largest that is left (Phi-3.5-MoE). sqrtsoftplus: the root
# of a softplus (DeepSeek-V4).
RouterScore = Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"]


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched beyond `original_max_seq_len` positions.

    kind:
      llama3: frequencies of wavelengths longer than original_max_seq_len / low_freq_factor are divided by
        factor. Wavelengths shorter than original_max_seq_len / high_freq_factor keep theirs. Frequencies
        between these are interpolated.
      linear: all are divided by factor.
      dynamic: none is changed within max_seq_len positions, and longer sequences do not run.
      yarn (Peng et al., 2023): frequencies that turn less than beta_slow times within the original length
        are divided by factor. Frequencies that turn more than beta_fast times are kept. Those between are
        interpolated by their number, with whole bounds if `truncate`.
      longrope (Ding et al., 2024): each frequency is divided by its own long_factor if the sequence is
        longer than the original length, otherwise by its own short_factor.

    attention_factor: yarn and longrope multiply cosines and sines by it. None: it follows from factor, and
    for yarn also from mscale and mscale_all_dim. Latent attention multiplies scores by the square of the
    latter.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int | None = None
    kind: RopeKind = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "rope_scaling")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and not (
                isinstance(factors, list | tuple) and all(is_number(f) and f > 0 for f in factors)
            ):
                raise ModelError(f"rope_scaling: {name} = {factors!r} must be a list of numbers above 0")
            object.__setattr__(self, name, None if factors is None else tuple(map(float, factors)))
        if self.original_max_seq_len is None and self.kind not in ("linear", "dynamic"):
            raise ModelError(f"rope_scaling lacks original_max_seq_len, which kind {self.kind!r} needs")
        if self.kind == "longrope" and not (self.short_factor and self.long_factor):
            raise ModelError("rope_scaling lacks short_factor or long_factor, which kind 'longrope' needs")
        if self.low_freq_factor > self.high_freq_factor:
            raise ModelError(
                f"rope_scaling: low_freq_factor = {self.low_freq_factor} must be at most "
                f"high_freq_factor = {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class MoE:
    """A mixture of experts in place of the feed-forward (Shazeer et al., 2017).

    num_experts (E), experts_per_token (k): each token goes through k of E experts. d_ff (M): width of an
    expert. num_shared_experts, d_ff_shared: all tokens go through these, as wide as an expert if
    d_ff_shared is None. shared_gate: their sum is multiplied by a sigmoid of the token's product with one
    vector (Qwen2-MoE). num_dense_layers: the first layers, with a dense feed-forward. every: each n-th
    layer has experts, the others are dense. router_bias, expert_bias: whether these have biases.

    score: the function of the router's logits: a softmax over all experts, or a sigmoid of each. choice_bias:
    added to the scores to choose the experts, but not to weigh them (DeepSeek-V3). num_groups: the experts
    are in this number of groups, and a token's experts are in the groups_per_token best. A group scores as
    its best expert, or with sigmoids as its best two. normalized: the weights of a token's experts add up to
    1. chosen_by_logits: the bias is added to the logits. hashed: a table lists the experts of each token
    id, and scores only weigh them (DeepSeek-V4). post_norm: the result of experts is normed. scaling:
    factor of the weights. scales_input: the weights multiply the input of an expert, not its output (Llama
    4). latent (m): the elements that experts read and write; a matrix projects a token down to them, and
    another the sum of its experts back to d_model (Nemotron 3). None: d_model elements. latent_norm: the sum
    is normed before its projection (Kimi K3).
    """

    num_experts: int
    experts_per_token: int
    d_ff: int
    num_shared_experts: int = 0
    d_ff_shared: int | None = None
    num_dense_layers: int = 0
    every: int = 1
    router_bias: bool = False
    expert_bias: bool = False
    score: RouterScore = "softmax"
    choice_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    normalized: bool = True
    scaling: float = 1.0
    scales_input: bool = False
    shared_gate: bool = False
    chosen_by_logits: bool = False
    hashed: bool = False
    post_norm: bool = False
    latent: int | None = None
    latent_norm: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "moe")
        if self.num_experts % self.num_groups or self.groups_per_token > self.num_groups:
            raise ModelError(
                f"moe: {self.num_experts} experts (E) in {self.num_groups} groups, {self.groups_per_token} "
                "of them for a token; fits: groups that divide the experts, and at most all of them"
            )
        if self.experts_per_token > self.num_experts:
            raise ModelError(
                f"moe: a token cannot go through {self.experts_per_token} of {self.num_experts} experts (E)"
            )

    @property
    def d_ff_all_shared(self) -> int:
        """U: the width of all shared experts together."""
        return self.num_shared_experts * (self.d_ff_shared or self.d_ff)


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values come from one latent.

    kv_rank (R): size of that latent. q_rank (Q): size of the queries' latent; None projects queries at once.
    nope_dim (J), rope_dim (A): elements of a query's or key's head without and with rotary positions; the
    latter are the same in all heads of a key. value_dim (O): elements of a value's head. norm_eps: of the
    norms of both latents, 1e-6 in published implementations for any `norm_eps` of the model.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self, "mla")
        if self.rope_dim % 2:
            raise ModelError(f"mla: rope_dim = {self.rope_dim} is odd; rotary positions turn pairs")


@dataclass(frozen=True)
class Indexer:
    """Sparse attention: a query reads the top_k keys of the highest scores (DeepSeek-V3.2, 2025).

        score = sum over num_heads (x) of weight relu(q . k)

    of queries from the queries' latent, or from the token if there is none, and one key of head_dim (y)
    elements a token, which is cached too. With latent attention, rotary positions turn the first A elements
    of both. weighted: heads have weights. normed: keys have a layer norm; or keys, or both keys and
    queries, an RMS norm. norm_eps: of that norm. shared: the layer reads the keys that an earlier layer's
    indexer chose, and has none of its own (GLM-5.2). handed_on: later layers read its choice.
    block: positions of a block, if blocks are chosen (MiniMax-M3); None: single keys, for all heads. Each
    head of the indexer chooses top_k / block blocks for the query heads of one KV head. A block's score
    is the score of its best key, q . k. local_blocks: number of blocks that are always among them: the
    query's own and the ones before it.
    Sources: DeepSeek-AI, "DeepSeek-V3.2", https://arxiv.org/abs/2512.02556; MiniMax-M3 in transformers 5.
    """

    num_heads: int
    head_dim: int
    top_k: int
    weighted: bool = True
    normed: IndexNorm = "layer"
    norm_eps: float = 1e-6
    shared: bool = False
    handed_on: bool = False
    block: int | None = None
    local_blocks: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "indexer")
        if self.block and (self.weighted or self.top_k % self.block):
            raise ModelError(
                f"indexer: blocks of {self.block} keys are chosen without weights, and top_k = {self.top_k} "
                f"must be a multiple of {self.block}"
            )

    @property
    def block_size(self) -> int:
        """Positions that are chosen together: 1 if keys are chosen one by one."""
        return self.block or 1

    @property
    def head_letter(self) -> str:
        """The letter of its heads: K if each chooses for one KV head."""
        return "K" if self.block else "x"


@dataclass(frozen=True)
class Unquantised:
    """A matrix that files in a narrow type, `dtype`, keep wide. num_layers: the number of layers that do."""

    dtype: str
    path: str
    num_layers: int


@dataclass(frozen=True)
class Multipliers:
    """Factors of products in a model's files: a parameter is the file's tensor times its factors.

    attention_in, state_in: of the input of attention, and of the mixer with a state. attention_out,
    state_out: of their results. key, mlp_gate, mlp_out and, of a state, `z`, `x`, `b`, `c`, `step`: of the
    product of the weight of that name.
    Source: Falcon-LLM Team, "Falcon-H1", https://arxiv.org/abs/2507.22448.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    mlp_gate: float = 1.0
    mlp_out: float = 1.0
    state_in: float = 1.0
    state_out: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    step: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "multipliers")


@dataclass(frozen=True)
class Extra:
    """A weight that plans and counts know and `nn` does not compute.

    letters: of its dimensions; sizes: of its letters that the model does not have, in pairs. fan_in: the
    letters that its product with a token sums over; "" for a table or a vector. in_layers: whether each
    layer has it. A name that begins with table_, w_ or router_, or contains norm, is counted as vocabulary,
    feed-forward, router or norm, others as attention. After unused_, a name is counted in the same way, and
    the weight is active for no token.
    """

    name: str
    letters: str
    sizes: tuple[tuple[str, int], ...] = ()
    fan_in: str = ""
    in_layers: bool = True


@dataclass(frozen=True)
class Variant:
    """Layers that differ from the model in sizes or parts: their numbers, and their values of its fields."""

    layers: tuple[int, ...]
    values: tuple[tuple[str, Any], ...]


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The factor of scores if positions are stretched by `factor`: 0.1 m ln f + 1 (YaRN)."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0
