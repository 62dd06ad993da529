"""What an emitted token says about its law, when the laws behind it are known.

Given everything before it, a token y of a lossless decoder has the target's law p, and
so each of these has a known law, whatever the vocabulary's size:

    bucket    the tokens, ordered by q/p, are cut into shares of equal probability; y
              falls into each with the same chance (a token on a cut is split by a coin)
    leak      w(y) = min(q(y)/p(y), 5) less its mean under p: q leaking into the output
    surprise  log p(y) less its mean under p: a law too sharp or too flat

Means and variances are exact sums over the vocabulary, so sums over a text are compared
with what they must be, not with another sample. Places must be chosen without looking
at their tokens: the first place of a round may be, "all accepted tokens" may not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.audit.statistics import goodness_of_fit

MOST_LEAK = 5.0
"""The leak score's ceiling (ALGORITHMS C.3): rare tokens must not decide it."""

NUM_BUCKETS = 4


class Scores(NamedTuple):
    """Scores of emitted tokens; leading axes are the places'."""

    bucket: Int[Array, "..."]
    """0 .. NUM_BUCKETS - 1."""
    leak: Float[Array, "..."]
    leak_variance: Float[Array, "..."]
    surprise: Float[Array, "..."]
    """In nats."""
    surprise_variance: Float[Array, "..."]
    possible: Bool[Array, "..."]
    """Whether the target can emit the token at all."""


def score(
    token: Int[Array, ""],
    coin: Float[Array, ""],
    target_log_probs: Float[Array, " V"],
    draft_log_probs: Float[Array, " V"],
    drafted: Bool[Array, ""],
) -> Scores:
    """Scores one token; vmap for more.

    Args:
      token: What was emitted.
      coin: In [0, 1), to split a token that lies on a cut.
      target_log_probs: The law it should have, in nats.
      draft_log_probs: The law of what was proposed at its place.
      drafted: Whether anything was proposed there; if not, the leak score is 0.

    Example:
      >>> half = jnp.log(jnp.array([0.5, 0.5]))
      >>> one = score(jnp.int32(0), jnp.float32(0.1), half, half, jnp.bool_(True))
      >>> int(one.bucket), float(one.leak), float(one.leak_variance)
      (0, 0.0, 0.0)
    """
    probs = jnp.exp(target_log_probs)
    emitted = jnp.where(probs > 0, probs, 1)
    weight = jnp.minimum(jnp.exp(draft_log_probs) / emitted, MOST_LEAK)
    weight = jnp.where(drafted, weight, 0)
    surprise = jnp.where(probs > 0, target_log_probs, 0)
    order = jnp.where(drafted, weight, probs)
    index = jnp.arange(len(probs), dtype=jnp.int32)
    before = (order < order[token]) | ((order == order[token]) & (index < token))
    share = jnp.where(before, probs, 0).sum() + coin * probs[token]
    bucket = jnp.clip((share * NUM_BUCKETS).astype(jnp.int32), 0, NUM_BUCKETS - 1)

    leak, leak_variance = _centred(weight, probs, token)
    nats, nats_variance = _centred(surprise, probs, token)
    return Scores(bucket, leak, leak_variance, nats, nats_variance, probs[token] > 0)


def _centred(values, probs, token):
    """Returns a value less its mean, and its variance."""
    mean = (probs * values).sum()
    return values[token] - mean, (probs * (values - mean) ** 2).sum()


score_all = jax.jit(jax.vmap(score))
"""`score` for [R] tokens, [R] coins and [R, V] laws."""


def joint_buckets(buckets: np.ndarray) -> float:
    """Returns the p-value of [R, L] buckets: all NUM_BUCKETS^L cells are as likely."""
    length = buckets.shape[1]
    cells = np.ravel_multi_index(tuple(buckets.T), (NUM_BUCKETS,) * length)
    counts = np.bincount(cells, minlength=NUM_BUCKETS**length)
    return goodness_of_fit(counts, np.full(counts.shape, 1 / counts.size))


def normal_p_value(total: float, variance: float) -> float:
    """Returns the two-sided p-value of a sum whose mean is 0.

    Example:
      >>> round(normal_p_value(1.96, 1.0), 3), normal_p_value(0.0, 0.0)
      (0.05, 1.0)
    """
    if variance <= 0:
        return 1.0
    return math.erfc(abs(total) / math.sqrt(2 * variance))


def corrected(p_values: Sequence[float]) -> float:
    """Returns one p-value of several tests, by Bonferroni; NaN counts as 0.

    Example:
      >>> corrected([0.5, 0.01]), corrected([0.9, 0.8])
      (0.02, 1.0)
    """
    least = min((0.0 if p != p else p for p in p_values), default=1.0)
    return min(1.0, least * len(p_values))
