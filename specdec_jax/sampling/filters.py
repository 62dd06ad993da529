"""Which tokens a truncated policy keeps: top-k, top-p, min-p, typical-p.

Three of the four keep the best tokens until their number or their mass reaches a
limit. The definition is by sorting; a sort of five rows of 49,152 logits costs more on
a CPU than the forward pass that made them. `keep_highest` finds the same set without
one, by bisecting first the bit pattern of the last kept value and then, where several
tokens have exactly this value, their index.

All sums are over integers. A sum of floats depends on its order, which the compiler
chooses by the shape of the batch and the mesh: a row of 1,000 logits alone and in a
block of five differed in the last bits, and with them the text could differ.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_INTEGER = {np.dtype("float32"): jnp.int32, np.dtype("float64"): jnp.int64}


def order_free_sum(values: Float[Array, "B S V"]) -> Float[Array, "B S"]:
    """Sums over V without rounding on the way, so that no order can show.

    Each value is cut into pieces of a few bits, so few that V of them fit an integer.
    What is left after 40 bits (69 for float64) is dropped: 2^-22 of the sum at worst,
    where the largest value is 1 and V is 262,144.

    Args:
      values: Between 0 and 1.

    Returns:
      The sums, each rounded to the dtype of the values.

    Example:
      >>> float(order_free_sum(jnp.array([[[0.5, 0.25, 1.0]]]))[0, 0])
      1.75
    """
    integer = _INTEGER[values.dtype]
    bits = jnp.iinfo(integer).bits - 2 - values.shape[-1].bit_length()
    pieces = -(-(jnp.finfo(values.dtype).nmant + 17) // bits)
    sums = []
    for piece in range(1, pieces + 1):
        values = values * 2**bits
        whole = jnp.floor(values)
        values = values - whole
        count = jnp.sum(whole.astype(integer), axis=-1, dtype=integer)
        sums.append(count.astype(values.dtype) * 2.0 ** (-bits * piece))
    return sum(sums[1:], start=sums[0])


def log_normalised(scores: Float[Array, "B S V"]) -> Float[Array, "B S V"]:
    """Returns scores minus the logarithm of the sum of their exponentials.

    Example:
      >>> log_normalised(jnp.array([[[7.0, -jnp.inf]]])).tolist()
      [[[0.0, -inf]]]
    """
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    return scores - jnp.log(order_free_sum(jnp.exp(scores)))[..., None]


def keep_highest(
    key: Float[Array, "B S V"], mass: Int[Array, "B S V"], limit: Int[Array, "B S"]
) -> Bool[Array, "B S V"]:
    """Marks the smallest set of highest keys whose mass reaches the limit.

    Equal keys are taken lowest index first. Where even all tokens do not reach the
    limit, all are marked.

    Args:
      key: What to order by; float32 or float64.
      mass: What to add up, not negative; the sum over V must not overflow.
      limit: At least 1.

    Returns:
      True where a token is kept.

    Example:
      The two highest keys, the first of the two threes being one of them:

      >>> key = jnp.array([[[3.0, 1.0, 4.0, 3.0]]])
      >>> keep_highest(key, jnp.ones((1, 1, 4), int), jnp.array([[2]])).tolist()
      [[[True, False, True, False]]]
    """
    size = key.shape[-1]
    index = jnp.arange(size, dtype=limit.dtype)[None, None]

    def total(chosen: Bool[Array, "B S V"]) -> Int[Array, "B S"]:
        return jnp.sum(mass, axis=-1, where=chosen, dtype=limit.dtype)

    last = _last_kept(key, total, limit)[..., None]
    above, ties = key > last, key == last
    # Nothing to decide where there is one candidate or where all of them are needed.
    single = jnp.sum(ties, axis=-1, dtype=limit.dtype) <= 1
    decided = single | (total(above | ties) <= limit)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = total(above | (ties & (index <= middle[..., None]))) >= limit
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    high = jnp.full_like(limit, size - 1)
    low = jnp.where(decided, high, jnp.zeros_like(high))
    low, _ = lax.while_loop(lambda b: jnp.any(b[0] < b[1]), halve, (low, high))
    return above | (ties & (index <= low[..., None]))


def _last_kept(
    key: Float[Array, "B S V"],
    total: Callable[[Array], Array],
    limit: Int[Array, "B S"],
) -> Float[Array, "B S"]:
    """Returns the largest value such that the keys not below it reach the limit.

    Floats read as integers keep their order once the negative ones are reflected, so
    as many halvings as the dtype has bits end at one exact float; -inf if nothing does.
    """
    integer = _INTEGER[key.dtype]
    infinity = jnp.full(limit.shape, jnp.inf, key.dtype)

    def reflect(bits: Array) -> Array:
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    def as_float(bits: Array) -> Array:
        return lax.bitcast_convert_type(reflect(bits), key.dtype)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounds up, no overflow
        enough = total(key >= as_float(middle)[..., None]) >= limit
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = reflect(lax.bitcast_convert_type(-infinity, integer))
    high = lax.bitcast_convert_type(infinity, integer)
    low, _ = lax.fori_loop(0, jnp.iinfo(integer).bits, halve, (low, high))
    return as_float(low)


def top_k(key: Float[Array, "B S V"], k: Int[Array, " B"]) -> Bool[Array, "B S V"]:
    """Marks the k highest keys of each row, exactly k, lowest index first.

    Example:
      >>> top_k(jnp.array([[[0.5, 0.5, 0.5]]]), jnp.array([2])).tolist()
      [[[True, True, False]]]
    """
    limit = jnp.broadcast_to(k[:, None], key.shape[:2])
    return keep_highest(key, jnp.ones(key.shape, k.dtype), limit)


def top_mass(
    key: Float[Array, "B S V"],
    weight: Float[Array, "B S V"],
    share: Float[Array, " B"],
) -> Bool[Array, "B S V"]:
    """Marks the smallest set of highest keys that holds a share of the weight.

    The token that crosses the share is kept. Weights are rounded to 2^-30 of their sum
    (2^-62 for float64).

    Args:
      key: What to order by.
      weight: Between 0 and 1.
      share: Of each row, in (0, 1]; 1 marks everything.

    Returns:
      True where a token is kept.

    Example:
      >>> weight = jnp.array([[[0.5, 0.3, 0.1, 0.1]]])
      >>> top_mass(weight, weight, jnp.array([0.75])).tolist()
      [[[True, True, False, False]]]
    """
    integer = _INTEGER[key.dtype]
    whole = 2 ** (jnp.iinfo(integer).bits - 2)
    part = weight / order_free_sum(weight)[..., None]
    mass = jnp.round(part * whole).astype(integer)
    total = jnp.sum(mass, axis=-1, dtype=integer)
    share = share.astype(key.dtype)[:, None]
    limit = jnp.ceil(share * total.astype(key.dtype)).astype(integer)
    # Rounding must not drop the last tokens of a row that is not to be truncated.
    limit = jnp.where(share < 1, jnp.maximum(limit, 1), jnp.iinfo(integer).max)
    return keep_highest(key, mass, limit)


def typical(
    log_probs: Float[Array, "B S V"], share: Float[Array, " B"]
) -> Bool[Array, "B S V"]:
    """Marks the tokens whose surprise is nearest to the entropy, up to a share of mass.

    Locally typical sampling (Meister et al. 2023, arXiv:2202.00666): tokens ordered by
    |-log p - H|, the token that crosses the share kept.

    Args:
      log_probs: Normalised, in nats, `-inf` where a token is impossible.
      share: Of each row, in (0, 1]; 1 marks everything.

    Returns:
      True where a token is kept.

    Example:
      The likeliest token says less than the row does on average:

      >>> probs = jnp.array([[[0.4, 0.3, 0.2, 0.1]]])
      >>> typical(jnp.log(probs), jnp.array([0.3])).tolist()
      [[[False, True, False, False]]]
    """
    probs = jnp.exp(log_probs)
    surprise = jnp.where(probs > 0, -log_probs, jnp.zeros_like(log_probs))
    entropy = order_free_sum(probs * surprise)[..., None]  # -p log p < 1
    distance = jnp.abs(-log_probs - entropy)
    return top_mass(-distance, probs, share)
