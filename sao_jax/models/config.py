"""The shape of a model, as plain frozen data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
      vocab_size: number of token ids.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides `num_heads`.
      head_dim: width of one head; even.
      mlp_dim: width of the gated MLP.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      qk_norm: RMSNorm on queries and keys, per head, before the rotation.
      tied: the output head is the transposed embedding.
      dtype: type of activations and matrix products, "float32" or "bfloat16". Parameters, norms, softmax and
        log-probs are float32 in both cases.
    """

    vocab_size: int
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_dim: int = 192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    tied: bool = True
    dtype: str = "float32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and value < 1:
                raise ValueError(f"model {field.name} is {value}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model head_dim is {self.head_dim}; rotary positions need an even width")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"model dtype is {self.dtype!r}; allowed: float32, bfloat16")
