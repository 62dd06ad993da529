"""From logits to policy rows: penalties, then temperature and truncation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.rng import first_argmax
from specdec_jax.sampling import filters, penalties
from specdec_jax.sampling.penalties import History


class SamplingRows(NamedTuple):
    """Settings of each row as arrays; None where all rows have the neutral value."""

    temperature: Float[Array, " B"] | None = None
    """0 in greedy rows. None: every row is greedy, and nothing is ever drawn."""
    top_k: Int[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None
    min_p: Float[Array, " B"] | None = None
    typical_p: Float[Array, " B"] | None = None
    repetition_penalty: Float[Array, " B"] | None = None
    presence_penalty: Float[Array, " B"] | None = None
    frequency_penalty: Float[Array, " B"] | None = None
    bias: Float[Array, "B V"] | None = None
    """Added to the logits; `-inf` bans a token."""
    no_repeat_ngram_size: Int[Array, " B"] | None = None
    min_length: Int[Array, " B"] | None = None
    """Length of the text, prompt included, below which the EOS ids are impossible."""
    eos_token_ids: Int[Array, "B E"] | None = None
    """-1 is padding. Present only with `min_length`."""
    prompt_length: Int[Array, " B"] | None = None
    """Present only with a presence or frequency penalty."""


def is_greedy(rows: SamplingRows) -> bool:
    """Returns whether every row is greedy. Known without running the program.

    Example:
      >>> from specdec_jax.sampling import Sampling
      >>> is_greedy(Sampling().rows(2, 10))
      True
    """
    return rows.temperature is None


def policy(
    logits: Float[Array, "B S V"], rows: SamplingRows, history: History
) -> Float[Array, "B S V"]:
    """Turns logits into policy rows. The cast to float32 happens here and only here.

    Each row is a function of its own logits, settings and history, bit for bit: the
    other rows, the size of the block and the mesh do not change the order of any sum.

    Args:
      logits: Of any float dtype; float64 stays float64, for exact enumeration.
      rows: Settings of the B rows.
      history: What precedes each of the S rows; read only where a setting needs it.

    Returns:
      Normalised log-probabilities in nats, `-inf` where a token is impossible. At
      temperature 0: 0.0 at the lowest-index argmax of the penalised logits, `-inf`
      elsewhere. A row without a finite maximum (NaN or +inf in the logits, or every
      token forbidden) is NaN throughout.

    Example:
      >>> from specdec_jax.sampling import Sampling
      >>> logits = jnp.log(jnp.array([[[0.1, 0.6, 0.3]]]))
      >>> history = History.plain(jnp.array([[0]]), jnp.array([1]))
      >>> rows = Sampling(temperature=1.0, top_k=2).rows(1, 3)
      >>> [round(p, 3) for p in jnp.exp(policy(logits, rows, history))[0, 0].tolist()]
      [0.0, 0.667, 0.333]
      >>> policy(logits, Sampling().rows(1, 3), history).tolist()
      [[[-inf, 0.0, -inf]]]
    """
    logits = logits.astype(law_dtype(logits))
    logits = _penalise(logits, rows, history)
    best = jnp.max(logits, axis=-1, keepdims=True)
    row = certain(first_argmax(logits), logits.shape[-1]).astype(logits.dtype)
    if rows.temperature is not None:
        sampled = rows.temperature[:, None, None] > 0
        row = jnp.where(sampled, _warp(logits, best, rows), row)
    return jnp.where(jnp.isfinite(best), row, jnp.nan)


def law_dtype(logits: Array) -> Any:
    """Returns the dtype of policy rows: float32, or float64 for logits of it."""
    return jnp.float64 if logits.dtype == jnp.float64 else jnp.float32


def certain(
    tokens: Int[Array, "B S"], vocab_size: int
) -> Float[Array, "B S {vocab_size}"]:
    """Returns the policy rows of tokens that could be no others, in float32.

    Example:
      >>> certain(jnp.array([[1]]), 3).tolist()
      [[[-inf, 0.0, -inf]]]
    """
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    here = ids[None, None] == tokens[..., None]
    return jnp.where(here, jnp.float32(0), -jnp.inf)


def _penalise(
    logits: Float[Array, "B S V"], rows: SamplingRows, history: History
) -> Float[Array, "B S V"]:
    """Applies what may change a greedy choice. Bans are sums, so that NaN survives."""
    vocab_size = logits.shape[-1]
    if rows.bias is not None:
        logits = logits + rows.bias.astype(logits.dtype)[:, None]
    if rows.repetition_penalty is not None:
        start = jnp.zeros_like(history.length)
        counts = penalties.token_counts(history, start, vocab_size)
        logits = penalties.repeat(logits, counts, rows.repetition_penalty)
    if rows.prompt_length is not None:
        counts = penalties.token_counts(history, rows.prompt_length, vocab_size)
        logits = penalties.occur(
            logits, counts, rows.presence_penalty, rows.frequency_penalty
        )
    if rows.no_repeat_ngram_size is not None:
        banned = penalties.completes_ngram(
            history, rows.no_repeat_ngram_size, vocab_size
        )
        logits = logits + jnp.where(banned, -jnp.inf, 0.0).astype(logits.dtype)
    if rows.min_length is not None and rows.eos_token_ids is not None:
        banned = penalties.too_early(
            history, rows.min_length, rows.eos_token_ids, vocab_size
        )
        logits = logits + jnp.where(banned, -jnp.inf, 0.0).astype(logits.dtype)
    return logits


def _warp(
    logits: Float[Array, "B S V"], best: Float[Array, "B S 1"], rows: SamplingRows
) -> Float[Array, "B S V"]:
    """Applies temperature and truncation and normalises.

    Tokens are ordered by the logits themselves: subtracting the maximum and dividing
    can make two of them equal that were not.
    """
    assert rows.temperature is not None
    temperature = rows.temperature.astype(logits.dtype)[:, None, None]
    # The maximum goes first: what is divided is at most 0 and cannot overflow.
    scaled = (logits - best) / jnp.where(temperature > 0, temperature, 1)
    keep = logits > -jnp.inf
    if rows.top_k is not None:
        keep &= filters.top_k(logits, rows.top_k)
    if rows.top_p is not None:
        weight = jnp.where(keep, jnp.exp(scaled), 0)
        keep &= filters.top_mass(logits, weight, rows.top_p)
    if rows.min_p is not None:
        keep &= jnp.exp(scaled) >= rows.min_p.astype(logits.dtype)[:, None, None]
    if rows.typical_p is not None:
        log_probs = filters.log_normalised(jnp.where(keep, scaled, -jnp.inf))
        keep &= filters.typical(log_probs, rows.typical_p)
    return filters.log_normalised(jnp.where(keep, scaled, -jnp.inf))
