"""Layers that several networks share: linear, embedding, norms, MLP, rotary.

Weights are stored [in, out] in the compute dtype. In float32 every product asks for
the highest precision itself, because accelerators otherwise multiply float32 in fewer
bits and no parity test would hold there. Norms and rotary compute in float32.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.networks.config import Rotary

ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
    "relu": nn.relu,
}


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Precision of products in `dtype`: the highest for float32, else the default."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


class Linear(nn.Module):
    """Affine map of the last axis; `kernel` is [in, out]."""

    features: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*A D"]) -> Float[Array, "*A F"]:
        """Returns `x @ kernel + bias`."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, self.dtype)
        y = jnp.matmul(x, kernel, precision=precision(self.dtype))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape[1:], self.dtype)
            y = y + _last(bias, y.ndim)
        return y


class Embedding(nn.Module):
    """Table of vectors, looked up by id; also the LM head when tied."""

    size: int
    width: int
    dtype: Any

    def setup(self):
        """Makes the table."""
        self.embedding = self.param(
            "embedding",
            nn.initializers.normal(0.02),
            (self.size, self.width),
            self.dtype,
        )

    def __call__(self, ids: Int[Array, "*A"]) -> Float[Array, "*A D"]:
        """Returns the rows; ids outside the table are clipped into it."""
        return jnp.take(self.embedding, ids, axis=0, mode="clip")

    def attend(self, x: Float[Array, "*A D"]) -> Float[Array, "*A V"]:
        """Returns the product of `x` with every row."""
        return jnp.einsum(
            "...d,vd->...v", x, self.embedding, precision=precision(self.dtype)
        )


class Norm(nn.Module):
    """RMS norm ("rms") or layer norm with bias ("layer"), computed in float32."""

    kind: str
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
        """Normalises the last axis."""
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.param("scale", ones, x.shape[-1:], self.dtype)
        y = y * _last(scale, y.ndim).astype(jnp.float32)
        if self.kind == "layer":
            bias = self.param("bias", zeros, x.shape[-1:], self.dtype)
            y = y + _last(bias, y.ndim).astype(jnp.float32)
        return y.astype(self.dtype)


class MLP(nn.Module):
    """Two or, when gated, three projections around an activation."""

    features: int
    activation: str
    gated: bool
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
        """Applies the MLP to the last axis."""

        def linear(features: int, name: str) -> Linear:
            return Linear(features, self.use_bias, self.dtype, name=name)

        act = ACTIVATIONS[self.activation]
        inner = linear(self.features, "up_proj")(x)
        if self.gated:
            inner = act(linear(self.features, "gate_proj")(x)) * inner
        else:
            inner = act(inner)
        return linear(x.shape[-1], "down_proj")(inner)


def rotary_angles(
    rotary: Rotary, positions: Int[Array, "B S"]
) -> tuple[Float[Array, "B S 1 R"], Float[Array, "B S 1 R"]]:
    """Returns cosine and sine of R angles for each position, in float32."""
    frequencies = jnp.asarray(rotary.frequencies, jnp.float32)[None, None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale


def rotate(
    x: Float[Array, "B S H E"],
    angles: tuple[Float[Array, "B S 1 R"], Float[Array, "B S 1 R"]],
) -> Float[Array, "B S H E"]:
    """Rotates the pairs (i, i + R) of each head, i < R; the rest pass through."""
    cos, sin = angles
    pairs = cos.shape[-1]
    y = x.astype(jnp.float32)
    first, second, rest = y[..., :pairs], y[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(t.astype(x.dtype) for t in turned), rest], axis=-1)


def _last(vector: Array, ndim: int) -> Array:
    """Gives a vector leading axes, so that nothing is promoted in silence."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)
