"""Random numbers as pure functions of where they are used.

A request owns one typed threefry key. Every number it ever uses is a function of that
key and of a place, so that a row's tokens depend neither on its batch-mates nor on its
slot, the padding, the mesh or the number of processes:

    RoundNoise     (request key, committed length at round start, purpose, tag, offset)
    PositionNoise  (request key, tag, absolute position)
    NoNoise        nothing: the static type of an all-greedy program

Drafter and rule get different purposes under RoundNoise and the very same object under
PositionNoise, where sharing is the point (Daliri, Musco and Suresh, arXiv:2408.07978).
Numbers are float32 whatever the dtype of the weights: bfloat16 uniforms are 0 with
probability 2^-7, and bfloat16 Gumbels take 128 values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specdec_jax.base import Noise

DRAFT, ACCEPT = 0, 1
"""Purposes of a round's two independent streams."""

_GUMBEL, _UNIFORM, _CHILD = 0, 1, 2


def fold(key: Key[Array, "*B"], *data: Any) -> Key[Array, "*B"]:
    """Folds integers, scalar or one a row, into each key; no key is consumed.

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> bool((fold(keys, 7)[1] == jax.random.fold_in(keys[1], 7)).all())
      True
    """
    for datum in data:
        datum = jnp.broadcast_to(jnp.asarray(datum, jnp.int32), key.shape)
        fold_in = jax.vmap(jax.random.fold_in) if key.ndim else jax.random.fold_in
        key = fold_in(key, datum)
    return key


def request_keys(key: Array, batch_size: int, first: int = 0) -> Key[Array, " B"]:
    """Returns one key a request: `fold_in(key, first + i)`, or `key` if it is [B].

    Args:
      key: One typed key for the whole data set, or one for each row.
      batch_size: Number of rows.
      first: Position of row 0 in the data set.

    Raises:
      ValueError: For a raw uint32 key, a wrong number of keys, or an `rbg` key (under
        vmap its numbers depend on the batch).
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"key must be a typed key, got an array of {key.dtype}; "
            "make it with jax.random.key(seed)."
        )
    if "rbg" in str(jax.random.key_impl(key)):
        raise ValueError(
            "rbg keys give a row numbers that depend on its batch; use threefry: "
            "jax.random.key(seed, impl='threefry2x32')."
        )
    if key.ndim == 0:
        rows = first + jnp.arange(batch_size, dtype=jnp.int32)
        return fold(jnp.broadcast_to(key, (batch_size,)), rows)
    if key.shape != (batch_size,):
        raise ValueError(
            f"got {key.shape} keys for {batch_size} rows; pass one key or one a row."
        )
    return key


class NoNoise(NamedTuple):
    """Noise of a program in which every row is greedy: it draws nothing."""

    def gumbel(self, offset: Any, vocab_size: int) -> float:
        """Returns 0: the argmax is the draw."""
        return 0.0

    def uniform(self, offset: Any) -> float:
        """Returns 1/2: between the two acceptance probabilities there are, 0 and 1."""
        return 0.5

    def child(self, index: Any, shift: Any = 0) -> "NoNoise":
        """Returns itself."""
        return self


class RoundNoise(NamedTuple):
    """Noise of one purpose in one round; independent between purposes and rounds."""

    key: Key[Array, "*B"]

    @classmethod
    def at(
        cls, key: Key[Array, " B"], length: Int[Array, " B"], purpose: int
    ) -> "RoundNoise":
        """Returns the noise of the round that starts with `length` tokens."""
        return cls(fold(key, length, purpose))

    def gumbel(self, offset: Any, vocab_size: int) -> Float[Array, "*B V"]:
        """Returns Gumbel noise for the token `offset` places after the start."""
        return _gumbel(fold(self.key, _GUMBEL, offset), vocab_size)

    def uniform(self, offset: Any) -> Float[Array, "*B"]:
        """Returns uniforms in [0, 1) for slot `offset` of the draft."""
        return _uniform(fold(self.key, _UNIFORM, offset))

    def child(self, index: Any, shift: Any = 0) -> "RoundNoise":
        """Returns an independent stream; `shift` plays no part."""
        return RoundNoise(fold(self.key, _CHILD, index))


class PositionNoise(NamedTuple):
    """Noise by absolute position: one object for plain decoding, drafter and rule."""

    key: Key[Array, "*B"]
    position: Int[Array, "*B"]
    """Position that offset 0 stands for."""

    def gumbel(self, offset: Any, vocab_size: int) -> Float[Array, "*B V"]:
        """Returns the Gumbel noise of the token at `position + offset`."""
        return _gumbel(fold(self.key, _GUMBEL, self.position + offset), vocab_size)

    def uniform(self, offset: Any) -> Float[Array, "*B"]:
        """Returns uniforms in [0, 1) for `position + offset`."""
        return _uniform(fold(self.key, _UNIFORM, self.position + offset))

    def child(self, index: Any, shift: Any = 0) -> "PositionNoise":
        """Returns the same noise, moved by `shift` positions."""
        return PositionNoise(self.key, self.position + shift)


def draw(
    log_probs: Float[Array, "*B V"], noise: Noise, offset: Any
) -> Int[Array, "*B"]:
    """Draws one token a row by the Gumbel-max trick; the only place that draws.

    Args:
      log_probs: Law to draw from, in nats, normalised or not; `-inf` is never drawn.
      noise: Where the randomness comes from.
      offset: Tokens after the round's start.

    Returns:
      int32 token ids; the lowest index wins a tie.

    Example:
      >>> draw(jnp.array([[0.0, 0.0], [-jnp.inf, 0.0]]), NoNoise(), 0).tolist()
      [0, 1]
    """
    gumbel = noise.gumbel(offset, log_probs.shape[-1])
    return first_argmax(log_probs + jnp.asarray(gumbel, log_probs.dtype))


def first_argmax(scores: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Returns the lowest index of each row's maximum; the last index of a NaN row.

    It is `argmax` as two plain reductions: XLA's own compares pairs of value and index,
    which no CPU does many at a time (4 times slower at V = 4,096).

    Example:
      >>> first_argmax(jnp.array([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]])).tolist()
      [1, 0]
    """
    last = scores.shape[-1] - 1
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(best, index, last).min(axis=-1)


def _gumbel(key: Key[Array, "*B"], vocab_size: int) -> Float[Array, "*B V"]:
    if key.ndim:
        return jax.vmap(_gumbel, (0, None))(key, vocab_size)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def _uniform(key: Key[Array, "*B"]) -> Float[Array, "*B"]:
    if key.ndim:
        return jax.vmap(_uniform)(key)
    return jax.random.uniform(key, (), jnp.float32)
