"""The training forward of a Llama decoder: no cache, one pass, differentiable.

It reads the parameters of `networks.Decoder` and gives its logits (a test holds the
two together). It exists because the decoder's attention walks the cache in a loop of
unknown length, which reverse mode cannot go through, and because a training step on a
CPU is bound by memory: here query, key and value are one product, gate and up another,
and the row sums of the attention weights come out of the product with the values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.networks.config import DecoderConfig
from specdec_jax.networks.layers import rotary_angles, rotate


def check(config: DecoderConfig) -> None:
    """Raises ValueError for a decoder that `forward` does not cover."""
    plain = config.norm == "rms" and config.gated and config.activation == "silu"
    biases = config.qkv_bias or config.out_bias or config.mlp_bias
    windows = any(config.window(i) is not None for i in range(config.num_layers))
    if not plain or biases or windows or config.qk_norm or config.rotary is None:
        raise ValueError(
            "training covers the Llama layer only: RMS norm, gated SiLU, rotary, no "
            f"biases, no windows, no query/key norm; got {config}"
        )


def forward(
    config: DecoderConfig, params: Any, tokens: Int[Array, "B S"]
) -> Float[Array, "B S V"]:
    """Returns the logits of every token's successor, in float32.

    Args:
      config: Shape of the decoder; see `check`.
      params: The `"params"` of its variables, in float32.
      tokens: Rows of equal length, from position 0.
    """
    batch, size = tokens.shape
    x = params["embed_tokens"]["embedding"][tokens].reshape(batch * size, -1)
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (batch, size))
    assert config.rotary is not None
    angles = rotary_angles(config.rotary, positions)
    for i in range(config.num_layers):
        layer = params[f"layers_{i}"]
        h = _norm(config, layer["input_norm"], x)
        x = x + _attention(config, layer["self_attn"], h, angles, batch)
        h = _norm(config, layer["post_attention_norm"], x)
        x = x + _mlp(config, layer["mlp"], h)
    x = _norm(config, params["norm"], x)
    if config.tied:
        head = params["embed_tokens"]["embedding"].T
    else:
        head = params["lm_head"]["kernel"]
    return (x @ head).reshape(batch, size, -1)


def _norm(config: DecoderConfig, layer: Any, x: Array) -> Array:
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + config.norm_eps) * layer["scale"][None, :]


def _mlp(config: DecoderConfig, layer: Any, x: Array) -> Array:
    kernels = [layer["gate_proj"]["kernel"], layer["up_proj"]["kernel"]]
    both = x @ jnp.concatenate(kernels, axis=1)
    gate, up = both[:, : config.mlp_width], both[:, config.mlp_width :]
    return (jax.nn.silu(gate) * up) @ layer["down_proj"]["kernel"]


def _attention(
    config: DecoderConfig, layer: Any, x: Array, angles: Any, batch: int
) -> Array:
    heads, groups, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    size = x.shape[0] // batch
    kernels = [layer[f"{name}_proj"]["kernel"] for name in "qkv"]
    qkv = (x @ jnp.concatenate(kernels, axis=1)).reshape(batch, size, -1, head_dim)
    q, k, v = jnp.split(qkv, [heads, heads + groups], axis=2)
    q, k = rotate(q * head_dim**-0.5, angles), rotate(k, angles)
    # The query heads of one key/value head are stacked along the rows: one product.
    q = q.transpose(0, 2, 1, 3).reshape(batch * groups, -1, head_dim)
    k = k.transpose(0, 2, 3, 1).reshape(batch * groups, head_dim, size)
    v = v.transpose(0, 2, 1, 3).reshape(batch * groups, size, head_dim)
    visible = jnp.tile(jnp.tril(jnp.ones((size, size), bool)), (heads // groups, 1))
    scores = jnp.where(visible[None], q @ k, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    # A column of ones makes the sum of the weights the product's last column.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    y = jnp.exp(scores - top) @ v
    y = (y[..., :-1] / y[..., -1:]).reshape(batch, heads, size, head_dim)
    y = y.transpose(0, 2, 1, 3).reshape(batch * size, heads * head_dim)
    return y @ layer["o_proj"]["kernel"]
