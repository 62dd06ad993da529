"""Layers that several networks share: linear, embedding, norms, MLP, rotary.

Weights are stored in the compute dtype, as [in, out] or, for CPUs, in tiles:

    [in, out]            row after row, each as long as the layer is wide
    [out / 64, in, 64]   64 columns after 64 columns, each tile in one piece of memory

A verify pass multiplies a handful of rows, for which a CPU walks down 64 columns at a
time; in the first layout each step of that walk is a page further on. In tiles the
whole pass of SmolLM2-135M over 5 tokens takes 27 ms instead of 36, and 24 instead of 26
over one.

In float32 every product asks for the highest precision itself, because accelerators
otherwise multiply float32 in fewer bits and no parity test would hold there. Norms and
rotary compute in float32.
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


TILE = 64
"""Columns of a tile; with 128 a product takes longer than without tiles."""


def tile(kernel: Any) -> Any:
    """Cuts a kernel [in, out] into tiles [out / 64, in, 64]; NumPy's or JAX's arrays.

    Example:
      >>> tile(jnp.zeros((8, 128))).shape
      (2, 8, 64)
    """
    size, columns = kernel.shape
    return kernel.reshape(size, columns // TILE, TILE).transpose(1, 0, 2)


def _kernel_shape(size: int, columns: int, tiled: bool) -> tuple[int, ...]:
    """Shape of a kernel; in tiles if they come out even."""
    if tiled and columns % TILE == 0:
        return columns // TILE, size, TILE
    return size, columns


def product(x: Float[Array, "*A D"], kernel: Array) -> Float[Array, "*A F"]:
    """Returns `x @ kernel`, for both layouts of the kernel."""
    if kernel.ndim == 2:
        return jnp.matmul(x, kernel, precision=precision(kernel.dtype))
    rows = x.reshape(1, -1, x.shape[-1])
    # One product a tile, as a batch: any other form makes XLA put the tiles together.
    y = jax.lax.dot_general(
        jnp.broadcast_to(rows, (len(kernel), *rows.shape[1:])),
        kernel,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision(kernel.dtype),
    )
    return y.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)


def _param(module: Any, name: str, init: Any, shape: tuple[int, ...]) -> Array:
    """Returns a parameter of the module; makes it under `init`.

    `Module.param` compares shapes by tracing `init` anew in every call, a fifth of the
    time that tracing a program takes. Whoever loads weights has compared them.
    """
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, init, shape, module.dtype)


class Linear(nn.Module):
    """Affine map of the last axis; `kernel` is [in, out] or its tiles."""

    features: int
    use_bias: bool
    dtype: Any
    tiled: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*A D"]) -> Float[Array, "*A F"]:
        """Returns `x @ kernel + bias`."""
        shape = _kernel_shape(x.shape[-1], self.features, self.tiled)
        init = nn.initializers.lecun_normal(-2, -1, range(len(shape) - 2))
        y = product(x, _param(self, "kernel", init, shape))
        if self.use_bias:
            shape = (self.features,)
            bias = _param(self, "bias", nn.initializers.zeros, shape)
            y = y + _last(bias, y.ndim)
        return y


class Embedding(nn.Module):
    """Table of vectors [size, width], looked up by id; also the LM head when tied.

    In tiles it is stored as the head's kernel [width, size] would be.

    Attributes:
      size: Ids.
      width: Of a vector.
      dtype: Of the table.
      tiled: Whether it is stored in tiles.
      sliced: Whether the vectors of a few tokens are cut out one by one. A TPU's gather
        wants the table in another layout than the head, and copies it in every round;
        but of a table that is split over devices a slice would gather the whole.
    """

    size: int
    width: int
    dtype: Any
    tiled: bool = False
    sliced: bool = False

    def setup(self):
        """Makes the table."""
        shape = _kernel_shape(self.width, self.size, self.tiled)
        shape = shape if len(shape) == 3 else (self.size, self.width)
        init = nn.initializers.normal(0.02)
        self.embedding = _param(self, "embedding", init, shape)

    def __call__(self, ids: Int[Array, "*A"]) -> Float[Array, "*A D"]:
        """Returns the rows; ids outside the table are clipped into it."""
        if self.embedding.ndim == 3:
            ids = jnp.clip(ids, 0, self.size - 1)
            return self.embedding[ids // TILE, :, ids % TILE]
        if self.sliced and ids.size <= MOST_SLICES:
            ids = jnp.clip(ids, 0, self.size - 1)
            return _slices(self.embedding, ids.reshape(-1)).reshape(*ids.shape, -1)
        return jnp.take(self.embedding, ids, axis=0, mode="clip")

    def attend(self, x: Float[Array, "*A D"]) -> Float[Array, "*A V"]:
        """Returns the product of `x` with every row."""
        if self.embedding.ndim == 3:
            return product(x, self.embedding)
        return jnp.einsum(
            "...d,vd->...v", x, self.embedding, precision=precision(self.dtype)
        )


MOST_SLICES = 512
"""Tokens whose vectors are cut out one by one; a prompt's are gathered."""


def _slices(table: Float[Array, "V D"], ids: Int[Array, " A"]) -> Float[Array, "A D"]:
    def cut(_: None, token: Array) -> tuple[None, Array]:
        return None, jax.lax.dynamic_index_in_dim(table, token, 0, keepdims=False)

    return jax.lax.scan(cut, None, ids, unroll=8)[1]


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
        scale = _param(self, "scale", ones, x.shape[-1:])
        y = y * _last(scale, y.ndim).astype(jnp.float32)
        if self.kind == "layer":
            bias = _param(self, "bias", zeros, x.shape[-1:])
            y = y + _last(bias, y.ndim).astype(jnp.float32)
        return y.astype(self.dtype)


class MLP(nn.Module):
    """Two or, when gated, three projections around an activation."""

    features: int
    activation: str
    gated: bool
    use_bias: bool
    dtype: Any
    tiled: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
        """Applies the MLP to the last axis."""

        def linear(features: int, name: str) -> Linear:
            return Linear(features, self.use_bias, self.dtype, self.tiled, name=name)

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
    turns = jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale
    # Else XLA computes them anew in every layer, head by head: 5% of a small model.
    return jax.lax.optimization_barrier(turns)


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
