"""Parameters, FLOPs and cache bytes of a model, counted from the parameters that run."""

from dataclasses import dataclass
from math import prod

from meshwright.models.config import ModelConfig
from meshwright.models.transformer import dimensions, parameters
from meshwright.units import dtype_bytes

_COMPONENTS = {
    "mlp": ("w_gate", "w_in", "w_out"),
    "attention": ("wq", "wk", "wv", "wo"),
    "vocab": ("embed", "unembed"),
    "norms": ("attention_norm", "mlp_norm", "final_norm"),
}


@dataclass(frozen=True)
class ParamCount:
    """Parameters by component, over all layers; a tied table counts once.

    active: those that one token uses. In a dense model that is all of them.
    """

    mlp: int
    attention: int
    vocab: int
    norms: int

    @property
    def total(self) -> int:
        return self.mlp + self.attention + self.vocab + self.norms

    @property
    def active(self) -> int:
        return self.total


def count_params(config: ModelConfig) -> ParamCount:
    """The parameters of `config`: per layer 3DF (MLP), 2D(N + K)H (attention), 2D (norms).

    Besides them DV for each of embed and unembed, and D for the last norm.
    Source: How to Scale Your Model, "Transformer Math".
    """
    sizes = dimensions(config)
    counts = {path.rpartition("/")[2]: prod(p.shape(sizes)) for path, p in parameters(config).items()}
    assert set(counts) <= {name for names in _COMPONENTS.values() for name in names}
    return ParamCount(**{part: sum(counts.get(n, 0) for n in names) for part, names in _COMPONENTS.items()})


def forward_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs of one token's forward pass at sequence length T, averaged over its positions.

        2 (L (3DF + 2D(N + K)H) + DV)  +  L * 4 T N H   (half of this term when causal)

    The first term is 2 FLOPs a matmul parameter (embedding look-ups and norms are free; the output
    projection counts also where it is tied), the second the scores q.k and the values. causal: the
    kernel skips what the mask hides; False counts the whole T x T square, as much published MFU does.
    Source: How to Scale Your Model, "Transformer Math"; training is three times this.
    """
    params = count_params(config)
    matmul_params = params.mlp + params.attention + config.d_model * config.vocab_size
    scores = 4 * config.num_layers * seq_len * config.num_heads * config.d_head
    return 2 * matmul_params + (scores / 2 if causal else scores)


def train_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs of one token's forward and backward pass: three forwards, without recomputation."""
    return 3 * forward_flops_per_token(config, seq_len, causal=causal)


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bf16") -> int:
    """Bytes of the KV cache for one token: 2 L K H, keys and values, in `dtype`.

    The sources once print L K H alone; keys and values make two.
    """
    elements = 2 * config.num_layers * config.num_kv_heads * config.d_head
    return int(elements * dtype_bytes(dtype))
