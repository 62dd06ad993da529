"""What a user writes, checked, and turned into one array a setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specdec_jax.sampling import settings
from specdec_jax.sampling.law import SamplingRows

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
