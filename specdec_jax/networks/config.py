"""What kind of decoder a checkpoint holds, as one hashable value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding, half-split layout, with all scaling already applied.

    Attributes:
      frequencies: Radians a position for each pair; twice as many head dimensions are
        rotated, the rest pass through.
      scale: Factor on cosine and sine (YaRN and LongRoPE).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a causal decoder.

    Attributes:
      vocab_size: Columns of the LM head, V.
      width: Size of the residual stream, D.
      num_layers: Layers.
      num_heads: Query heads.
      num_kv_heads: Key/value heads; each serves `num_heads / num_kv_heads` query heads.
      head_dim: Size of a head; need not be `width / num_heads`.
      mlp_width: Inner size of the MLP.
      max_positions: The most positions the checkpoint is made for.
      activation: "silu", "gelu", "gelu_tanh" or "relu".
      gated: Whether the MLP is `down(act(gate(x)) * up(x))`, else `down(act(up(x)))`.
      norm: "rms" (scale only) or "layer" (centred, scale and bias).
      norm_eps: Added to the variance.
      qk_norm: RMS norm over each head of queries and keys, before rotation.
      rotary: Rotary embedding, or None for a learned position table.
      windows: For each layer, how many positions a token sees (itself included), or
        None for all. Empty means None for all layers.
      tied: Whether the LM head is the embedding.
      qkv_bias: Biases of the query, key and value projections.
      out_bias: Bias of the attention's output projection.
      mlp_bias: Biases of the MLP.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-6
    qk_norm: bool = False
    rotary: Rotary | None = None
    windows: tuple[int | None, ...] = ()
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        """Raises ValueError where the numbers do not fit together."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} "
                "key/value heads equally"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows lists {len(self.windows)} layers, the model has "
                f"{self.num_layers}"
            )
        if self.rotary and 2 * len(self.rotary.frequencies) > self.head_dim:
            raise ValueError(
                f"{len(self.rotary.frequencies)} rotary pairs do not fit into a head "
                f"of {self.head_dim}"
            )

    def window(self, layer: int) -> int | None:
        """How many positions a token sees in `layer`, or None for all."""
        return self.windows[layer] if self.windows else None
