"""Attention of a block over itself and over the cached past.

Each query keeps a running softmax (Milakov and Gimelshein 2018): first over the block,
where every token sees at least itself, so that the maximum is finite from the start;
then over the cache, `SLOT_BLOCK` slots at a time, as far as the longest row reaches.

    cache   |#####|#####|##...|.....|.....|      # visible   . garbage
              i=0   i=1   i=2     never read

The trip count is dynamic, so a step costs what is live, not what was allocated. A
slot block that a row does not see leaves its state **bitwise** unchanged (the maximum
stays, exp(-inf) is 0, the old sums are multiplied by exp(0) = 1): a row's result
depends neither on the capacity nor on how long its batch-mates are.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.cache import SLOT_BLOCK, read, write
from specdec_jax.networks.config import DecoderConfig
from specdec_jax.networks.layers import Linear, Norm, precision, rotate


class View(NamedTuple):
    """What a block's tokens may see; the same for all layers."""

    length: Int[Array, " B"]
    """Cached slots of each row that all of the block's tokens see."""
    positions: Int[Array, "B M"]
    """Position of each token of the block's tree; the last S are the block's own, those
    before them are in the cache from `length` on."""
    ancestors: Bool[Array, "B S M"]
    """`[b, s, t]`: token t of the tree is s or an ancestor of s."""
    angles: tuple[Array, Array] | None
    """Cosine and sine of the rotary embedding."""
    longest: Int[Array, ""]
    """Cached slots of the longest row; found once: rows may be on many devices."""
    earliest: Int[Array, ""]
    """The least position of a block token."""


class _Running(NamedTuple):
    """Softmax state of each query: maximum, sum, weighted sum of values."""

    top: Float[Array, "B H G S"]
    total: Float[Array, "B H G S"]
    mixed: Float[Array, "B H G S E"]


class Attention(nn.Module):
    """Self-attention with grouped queries; writes keys and values into the cache."""

    config: DecoderConfig
    window: int | None
    dtype: Any
    tiled: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        keys: Float[Array, "B H E T"],
        values: Float[Array, "B H E T"],
        view: View,
    ) -> tuple[Float[Array, "B S D"], Array, Array]:
        """Returns the mixed values, and both buffers with the block written."""
        config, (batch, block, width) = self.config, x.shape
        heads = config.num_kv_heads

        def project(name: str, num_heads: int) -> Array:
            features = num_heads * config.head_dim
            linear = Linear(
                features, config.qkv_bias, self.dtype, self.tiled, name=name
            )
            y = linear(x)
            if not self.tiled:
                # Else a TPU takes product and heads as one, in another layout of the
                # weights for each width of the block, and copies them in every round.
                y = jax.lax.optimization_barrier(y)
            return y.reshape(batch, block, num_heads, config.head_dim)

        q = project("q_proj", config.num_heads)
        k = project("k_proj", heads)
        v = project("v_proj", heads)
        if config.qk_norm:
            q = Norm("rms", config.norm_eps, self.dtype, name="q_norm")(q)
            k = Norm("rms", config.norm_eps, self.dtype, name="k_norm")(k)
        if view.angles is not None:
            q, k = rotate(q, view.angles), rotate(k, view.angles)
        # Query head h reads key/value head h // G: [B S H G E] -> [B H G S E].
        q = q.reshape(batch, block, heads, -1, config.head_dim)
        q = q.transpose(0, 2, 3, 1, 4) * config.head_dim**-0.5
        k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1)  # [B H E S]
        # Written before it is read, so that the update can happen in place.
        before = view.positions.shape[1] - block
        at = view.length + before
        keys, values = write(keys, k, at), write(values, v, at)
        if before:
            k = jnp.concatenate([read(keys, view.length, before), k], axis=3)
            v = jnp.concatenate([read(values, view.length, before), v], axis=3)
        state = _over_block(q, k, v, view, self.window)
        state = _over_cache(q, keys, values, view, self.window, state)
        y = (state.mixed / state.total[..., None]).astype(self.dtype)
        y = y.transpose(0, 3, 1, 2, 4).reshape(batch, block, -1)
        out = Linear(width, config.out_bias, self.dtype, self.tiled, name="o_proj")
        return out(y), keys, values


def _scores(q: Array, k: Array) -> Float[Array, "B H G S T"]:
    return jnp.einsum(
        "bhgse,bhet->bhgst",
        q,
        k,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )


def _mix(weights: Array, v: Array) -> Float[Array, "B H G S E"]:
    return jnp.einsum(
        "bhgst,bhet->bhgse",
        weights.astype(v.dtype),
        v,
        precision=precision(v.dtype),
        preferred_element_type=jnp.float32,
    )


def _over_block(
    q: Array, k: Array, v: Array, view: View, window: int | None
) -> _Running:
    """Starts the running softmax with the tokens of the block's tree."""
    visible = view.ancestors
    if window is not None:
        own = view.positions[:, -q.shape[3] :]
        ahead = own[:, :, None] - view.positions[:, None, :]
        visible &= ahead < window
    scores = jnp.where(visible[:, None, None], _scores(q, k), -jnp.inf)
    top = scores.max(axis=-1)
    weights = jnp.exp(scores - top[..., None])
    return _Running(top, weights.sum(axis=-1), _mix(weights, v))


def _over_cache(
    q: Array,
    keys: Array,
    values: Array,
    view: View,
    window: int | None,
    state: _Running,
) -> _Running:
    """Carries the running softmax through the cached slots."""

    def step(i: Array, state: _Running) -> _Running:
        start = i * SLOT_BLOCK
        k = jax.lax.dynamic_slice_in_dim(keys, start, SLOT_BLOCK, axis=3)
        v = jax.lax.dynamic_slice_in_dim(values, start, SLOT_BLOCK, axis=3)
        slots = start + jnp.arange(SLOT_BLOCK, dtype=jnp.int32)
        live = slots[None, :] < view.length[:, None]
        visible = live[:, None, :]
        if window is not None:
            ahead = view.positions[:, -q.shape[3] :, None] - slots[None, None, :]
            visible = visible & (ahead < window)
        scores = jnp.where(visible[:, None, None], _scores(q, k), -jnp.inf)
        # A weight of 0 does not silence garbage (0 * nan is nan): drop the values too.
        v = jnp.where(live[:, None, None, :], v, jnp.zeros((), v.dtype))
        top = jnp.maximum(state.top, scores.max(axis=-1))
        shrink = jnp.exp(state.top - top)
        weights = jnp.exp(scores - top[..., None])
        return _Running(
            top,
            state.total * shrink + weights.sum(axis=-1),
            state.mixed * shrink[..., None] + _mix(weights, v),
        )

    first = jnp.zeros((), jnp.int32)
    if window is not None:
        # Rows further back see none of the skipped blocks either.
        oldest = view.earliest - (window - 1)
        first = jnp.maximum(oldest, 0) // SLOT_BLOCK
    last = (view.longest + SLOT_BLOCK - 1) // SLOT_BLOCK
    with jax.named_scope("over_cache"):  # `plan` tells the loop by it
        return jax.lax.fori_loop(first, last, step, state)
