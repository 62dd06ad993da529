"""Sampling settings, and the one function that turns logits into policy rows.

`Sampling` is what a user writes. `Sampling.rows` checks it against a batch and turns
it into `SamplingRows`: one array a setting, one entry a row. `policy` applies them. It
serves plain decoding, the draft, and every row of a verified block, because a rule is
exact only if all of them mean the same law by the same settings.

Values never decide a program, only presence does: a setting that is neutral in all
rows is None and costs nothing; otherwise the rows that do not use it carry its neutral
value.

Order, that of `GenerationMixin._get_logits_processor` in transformers 5.24: logit
bias, repetition penalty, no-repeat n-grams, banned tokens, minimum length, temperature,
top-k, top-p, min-p, typical-p. Banned tokens share the array of the bias: nothing in
between brings a token back. Presence and frequency penalties, which Hugging Face
lacks, follow the repetition penalty as in vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from specdec_jax import filters, penalties, settings
from specdec_jax.penalties import History

__all__ = ["History", "Sampling", "SamplingRows", "is_greedy", "policy"]


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
      >>> logits = jnp.log(jnp.array([[[0.1, 0.6, 0.3]]]))
      >>> history = History.plain(jnp.array([[0]]), jnp.array([1]))
      >>> rows = Sampling(temperature=1.0, top_k=2).rows(1, 3)
      >>> [round(p, 3) for p in jnp.exp(policy(logits, rows, history))[0, 0].tolist()]
      [0.0, 0.667, 0.333]
      >>> policy(logits, Sampling().rows(1, 3), history).tolist()
      [[[-inf, 0.0, -inf]]]
    """
    if logits.dtype != jnp.float64:
        logits = logits.astype(jnp.float32)
    logits = _penalise(logits, rows, history)
    best = jnp.max(logits, axis=-1, keepdims=True)
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    is_best = token == lax.argmax(logits, 2, jnp.int32)[..., None]
    row = jnp.where(is_best, 0.0, -jnp.inf).astype(logits.dtype)
    if rows.temperature is not None:
        sampled = rows.temperature[:, None, None] > 0
        row = jnp.where(sampled, _warp(logits, best, rows), row)
    return jnp.where(jnp.isfinite(best), row, jnp.nan)


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


PerRow = Any
"""One value for all rows, or a sequence or array with one value a row.

Not annotated further: `settings` says better what is wrong than a type checker."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings with Hugging Face's names: immutable, hashable, checked.

    Each field is one value for all rows, or a sequence with one value a row; None in a
    sequence is neutral where None alone is.

    Raises:
      ValueError: A value is of the wrong kind or outside its range.

    Example:
      >>> sampling = Sampling(temperature=[0.0, 0.75], top_p=0.5)
      >>> sampling.rows(2, 100).top_p.tolist()  # a greedy row is not truncated
      [1.0, 0.5]
    """

    temperature: PerRow = 0.0
    """0 is greedy: a branch of its own. Values in (0, 0.001) are refused."""
    top_k: PerRow = None
    """Exactly this many tokens are kept; among equal logits those of lowest id."""
    top_p: PerRow = None
    """The likeliest tokens are kept until they hold this much; the last one stays."""
    min_p: PerRow = None
    """Tokens with less than this fraction of the best one's probability go."""
    typical_p: PerRow = None
    """As top_p, but by nearness of a token's surprise to the row's entropy."""
    repetition_penalty: PerRow = 1.0
    """Divides positive, multiplies negative logits of all tokens in the text."""
    presence_penalty: PerRow = 0.0
    """Subtracted from the logit of each generated token, once."""
    frequency_penalty: PerRow = 0.0
    """Subtracted for each time a token was generated."""
    logit_bias: PerRow = field(default=None, hash=False)
    """Mapping from ids to what is added to their logits, before anything else."""
    banned_tokens: PerRow = ()
    """Ids that never occur, EOS ids included (`suppress_tokens` in Hugging Face)."""
    no_repeat_ngram_size: PerRow = 0
    """No n-gram of this size occurs twice in the text, prompt included; 0 is off."""

    def __post_init__(self) -> None:
        for name, setting in settings.NUMBERS.items():
            value = settings.plain(getattr(self, name))
            if isinstance(value, tuple):
                value = tuple(setting.check(name, v) for v in value)
            else:
                value = setting.check(name, value)
            object.__setattr__(self, name, value)
        bias, banned = self.logit_bias, self.banned_tokens
        object.__setattr__(self, "logit_bias", settings.bias_of(bias))
        object.__setattr__(self, "banned_tokens", settings.tokens_of(banned))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Sampling":
        """Makes settings from options that came by name, leaving out those of None.

        Raises:
          ValueError: An option is unknown, or Hugging Face's but not offered here.

        Example:
          >>> Sampling.from_options({"temperature": 0.7, "top_k": None}).temperature
          0.7
        """
        given = {name: value for name, value in options.items() if value is not None}
        settings.check_names(given, [one.name for one in fields(cls)])
        return cls(**given)

    def rows(
        self,
        batch_size: int,
        vocab_size: int,
        *,
        prompt_length: Any = None,
        eos_token_ids: Any = None,
        min_length: Any = None,
    ) -> SamplingRows:
        """Checks the settings against a batch and turns them into arrays.

        The three arguments of the batch may be traced; what depends on their values
        is then not checked.

        Args:
          batch_size: B.
          vocab_size: V of the model whose logits are meant.
          prompt_length: [B]; needed with a presence or frequency penalty.
          eos_token_ids: [B, E], -1 is padding.
          min_length: [B], length of the text, prompt included, before which no EOS may
            come. Without EOS ids it changes nothing.

        Returns:
          New arrays, int32 and float32; None for each setting neutral in all rows.

        Raises:
          ValueError: An array or sequence is not B long, an id is not in the
            vocabulary, a row has no token left, or the prompt lengths are missing.

        Example:
          >>> rows = Sampling(temperature=1.0, top_k=[5, None]).rows(2, 100)
          >>> rows.top_k.tolist(), rows.top_p
          ([5, 100], None)
        """
        settings.check_shape("prompt_length", prompt_length, batch_size)
        settings.check_shape("min_length", min_length, batch_size)
        settings.check_shape("eos_token_ids", eos_token_ids, batch_size, None)
        columns = self._numbers(batch_size, vocab_size)
        bias = self._bias(batch_size, vocab_size)
        if bias is not None:
            columns["bias"] = jnp.asarray(bias)
        if settings.minimum_matters(min_length, prompt_length, eos_token_ids):
            columns["min_length"] = jnp.array(min_length, jnp.int32)
            columns["eos_token_ids"] = jnp.array(eos_token_ids, jnp.int32)
        if "presence_penalty" in columns or "frequency_penalty" in columns:
            if prompt_length is None:
                raise ValueError(
                    "presence_penalty and frequency_penalty count generated tokens "
                    "only; give prompt_length, one number a row"
                )
            columns["prompt_length"] = jnp.array(prompt_length, jnp.int32)
        settings.check_token_left(bias, columns.get("eos_token_ids"))
        return SamplingRows(**columns)

    def _numbers(self, batch_size: int, vocab_size: int) -> dict[str, Array]:
        """Returns the numeric settings that are not neutral, as arrays."""
        columns, greedy = {}, np.zeros(batch_size, bool)
        for name, setting in settings.NUMBERS.items():  # temperature is the first
            given = settings.per_row(name, getattr(self, name), batch_size)
            values = [setting.neutral if v is None else v for v in given]
            column, neutral = np.array(values, setting.dtype), setting.neutral
            if name == "temperature":
                greedy = column == 0
            if name == "top_k":
                neutral = vocab_size
                column = np.minimum(column, np.int32(vocab_size))
            if name in settings.WARPERS:
                column[greedy] = neutral
            if np.any(column != neutral):
                columns[name] = jnp.asarray(column)
        return columns

    def _bias(self, batch_size: int, vocab_size: int) -> np.ndarray | None:
        """Returns logit bias and banned tokens as one dense array, or None."""
        bias = np.zeros((batch_size, vocab_size), np.float32)
        given = settings.per_row("logit_bias", self.logit_bias, batch_size)
        for row, mapping in enumerate(given):
            for token, value in (mapping or {}).items():
                bias[row, settings.known("logit_bias", token, vocab_size)] = value
        given = settings.per_row("banned_tokens", self.banned_tokens, batch_size)
        for row, tokens in enumerate(given):
            for token in tokens:
                bias[row, settings.known("banned_tokens", token, vocab_size)] = -np.inf
        return bias if bias.any() else None
