"""Sampling settings, and the one function that turns logits into policy rows.

`Sampling` is what a user writes. `Sampling.rows` checks it against a batch and turns
it into `SamplingRows`: one array a setting, one entry a row. `policy` applies them. It
serves plain decoding, the draft, and every row of a verified block, because a rule is
exact only if all of them mean the same law by the same settings.

Values never decide a program, only presence does: a setting that is neutral in all
rows is None and costs nothing; otherwise the rows that do not use it carry its neutral
value.

Order (`_get_logits_processor` of transformers 5.24): logit bias, repetition penalty,
no-repeat n-grams, banned tokens, minimum length, temperature, top-k, top-p, min-p,
typical-p. Banned tokens share the array of the bias: nothing in between brings a
token back. Presence and frequency penalties, which Hugging Face lacks, follow the
repetition penalty as in vLLM.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax import filters, penalties
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
      >>> jnp.exp(policy(logits, rows, history)).round(3).tolist()
      [[[0.0, 0.6669999957084656, 0.3330000042915344]]]
      >>> policy(logits, Sampling().rows(1, 3), history).tolist()
      [[[-inf, 0.0, -inf]]]
    """
    if logits.dtype != jnp.float64:
        logits = logits.astype(jnp.float32)
    logits = _penalise(logits, rows, history)
    best = jnp.max(logits, axis=-1, keepdims=True)
    token = jnp.arange(logits.shape[-1])[None, None]
    is_best = token == jnp.argmax(logits, axis=-1, keepdims=True)
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
        key = jnp.where(keep, logits, -jnp.inf)
        keep &= filters.top_mass(key, weight, rows.top_p)
    if rows.min_p is not None:
        keep &= jnp.exp(scaled) >= rows.min_p.astype(logits.dtype)[:, None, None]
    if rows.typical_p is not None:
        log_probs = jax.nn.log_softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)
        keep &= filters.typical(log_probs, rows.typical_p)
    return jax.nn.log_softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)


Number = float | Sequence[float]
Count = int | Sequence[int]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings with Hugging Face's names; immutable, hashable, checked.

    Each field is one value for all rows, or a sequence with one value a row.

    Example:
      >>> settings = Sampling(temperature=[0.0, 0.8], top_p=0.9)
      >>> settings.rows(2, 100).top_p.tolist()  # greedy rows are not truncated
      [1.0, 0.8999999761581421]
    """

    temperature: Number = 0.0
    """0 is greedy: a branch of its own, never a small temperature."""
    top_k: int | Sequence[int | None] | None = None
    """Exactly this many tokens are kept; among equal logits the lower ids."""
    top_p: float | Sequence[float | None] | None = None
    """The likeliest tokens are kept until they hold this much; the last one stays."""
    min_p: float | Sequence[float | None] | None = None
    """Tokens with less than this fraction of the best one's probability go."""
    typical_p: float | Sequence[float | None] | None = None
    repetition_penalty: Number = 1.0
    """Over prompt and generated tokens; 1 is none."""
    presence_penalty: Number = 0.0
    """Subtracted from the logits of generated tokens, once."""
    frequency_penalty: Number = 0.0
    """Subtracted for each time a token was generated."""
    logit_bias: Mapping[int, float] | Sequence[Any] | None = None
    """Token id to a sum added to its logit; or one such mapping a row."""
    banned_tokens: Sequence[Any] = ()
    """Token ids that never occur; or one sequence of ids a row."""
    no_repeat_ngram_size: Count = 0
    """No n-gram of this size occurs twice, prompt included; 0 is off."""

    def __post_init__(self) -> None:
        """Checks each value by itself and freezes sequences and mappings.

        Raises:
          ValueError: A value is of the wrong kind or outside its range.
        """
        for name, setting in _SETTINGS.items():
            value = _plain(getattr(self, name))
            per_row = isinstance(value, tuple)
            checked = tuple(
                setting.check(name, v) for v in (value if per_row else (value,))
            )
            object.__setattr__(self, name, checked if per_row else checked[0])
        object.__setattr__(self, "logit_bias", _frozen_bias(self.logit_bias))
        object.__setattr__(self, "banned_tokens", _frozen_tokens(self.banned_tokens))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Sampling":
        """Makes settings from named options, such as a request or a command line.

        Options that are None are left out.

        Raises:
          ValueError: An option is unknown, or known to Hugging Face and not offered.

        Example:
          >>> Sampling.from_options({"temperature": 0.7, "top_k": None}).temperature
          0.7
          >>> Sampling.from_options({"topp": 0.9})
          Traceback (most recent call last):
          ...
          ValueError: unknown sampling option 'topp' (did you mean 'top_p'?); offered \
are temperature, top_k, top_p, min_p, typical_p, repetition_penalty, presence_penalty, \
frequency_penalty, logit_bias, banned_tokens, no_repeat_ngram_size
        """
        offered = [field.name for field in fields(cls)]
        given = {name: value for name, value in options.items() if value is not None}
        for name in given:
            if name in _NOT_OFFERED:
                raise ValueError(
                    f"sampling option {name!r} is not offered: {_NOT_OFFERED[name]}"
                )
            if name not in offered:
                near = difflib.get_close_matches(str(name), offered, n=2, cutoff=0.6)
                hint = " or ".join(map(repr, near))
                raise ValueError(
                    f"unknown sampling option {name!r}"
                    + (f" (did you mean {hint}?)" if near else "")
                    + f"; offered are {', '.join(offered)}"
                )
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
        """Checks the settings against a batch and makes them arrays.

        Args:
          batch_size: B.
          vocab_size: V of the model whose logits are meant.
          prompt_length: [B]; needed with a presence or frequency penalty.
          eos_token_ids: [B, E] with -1 as padding; needed with `min_length`.
          min_length: [B], length (prompt included) before which no EOS may come.

        Returns:
          Arrays int32 and float32; None for each setting that is neutral in all rows.

        Raises:
          ValueError: A sequence is not B long, an id is not below V, a row has no
            token left, or an argument that a setting needs is missing.

        Example:
          >>> rows = Sampling(temperature=1.0, top_k=[5, None]).rows(2, 100)
          >>> rows.top_k.tolist(), rows.top_p
          ([5, 100], None)
        """
        columns = self._columns(batch_size, vocab_size)
        bias = self._bias(batch_size, vocab_size)
        min_length, eos = _minimum(batch_size, vocab_size, min_length, eos_token_ids)
        _check_something_left(bias, eos)
        if "presence_penalty" in columns or "frequency_penalty" in columns:
            if prompt_length is None:
                raise ValueError(
                    "presence_penalty and frequency_penalty count generated tokens "
                    "only: pass prompt_length, one int a row"
                )
            columns["prompt_length"] = jnp.asarray(prompt_length, jnp.int32)
        found = {"bias": bias, "min_length": min_length, "eos_token_ids": eos}
        columns |= {k: jnp.asarray(v) for k, v in found.items() if v is not None}
        return SamplingRows(**columns)

    def _columns(self, batch_size: int, vocab_size: int) -> dict[str, Array]:
        """Returns the settings that are not neutral, one value a row."""
        greedy = np.array(_column(self, "temperature", batch_size)) == 0
        columns = {}
        for name, setting in _SETTINGS.items():
            neutral = vocab_size if name == "top_k" else setting.neutral
            given = _column(self, name, batch_size)
            values = np.array(
                [neutral if v is None else v for v in given],
                np.int32 if setting.kind is int else np.float32,
            )
            if name == "top_k":
                values = np.minimum(values, vocab_size)
            if name in _WARPERS:
                values = np.where(greedy, np.array(neutral, values.dtype), values)
            if np.any(values != neutral):
                columns[name] = jnp.asarray(values)
        return columns

    def _bias(self, batch_size: int, vocab_size: int) -> np.ndarray | None:
        """Returns logit bias and banned tokens as one dense array, or None."""
        bias = np.zeros((batch_size, vocab_size), np.float32)
        for row, pairs in enumerate(_column(self, "logit_bias", batch_size)):
            for token, value in pairs or ():
                bias[row, _checked_id("logit_bias", token, vocab_size)] = value
        for row, tokens in enumerate(_column(self, "banned_tokens", batch_size)):
            for token in tokens:
                bias[row, _checked_id("banned_tokens", token, vocab_size)] = -np.inf
        return bias if bias.any() else None


class _Setting(NamedTuple):
    """What a number may be."""

    kind: type
    neutral: float
    valid: Callable[[float], bool]
    needs: str
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Returns the value as its kind, or raises ValueError."""
        if value is None and self.optional:
            return None
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or (self.kind is int and value != int(value) if not wrong else False):
            raise ValueError(f"{name} is {value!r}; it must be {self.needs}")
        if not (math.isfinite(value) and self.valid(value)):
            raise ValueError(f"{name} is {value!r}; it must be {self.needs}")
        return self.kind(value)


_OFF = ", or None to switch it off"
_SETTINGS = {
    "temperature": _Setting(
        float,
        0.0,
        lambda v: v == 0 or v >= 1e-3,
        "0 for greedy decoding or at least 0.001 (smaller ones are not a way to write "
        "greedy)",
    ),
    "top_k": _Setting(int, 0, lambda v: v >= 1, "a whole number >= 1" + _OFF, True),
    "top_p": _Setting(float, 1.0, lambda v: 0 < v <= 1, "in (0, 1]" + _OFF, True),
    "min_p": _Setting(float, 0.0, lambda v: 0 <= v <= 1, "in [0, 1]" + _OFF, True),
    "typical_p": _Setting(float, 1.0, lambda v: 0 < v <= 1, "in (0, 1]" + _OFF, True),
    "repetition_penalty": _Setting(
        float, 1.0, lambda v: v > 0, "above 0; 1 is no penalty"
    ),
    "presence_penalty": _Setting(float, 0.0, lambda v: True, "finite; 0 is no penalty"),
    "frequency_penalty": _Setting(
        float, 0.0, lambda v: True, "finite; 0 is no penalty"
    ),
    "no_repeat_ngram_size": _Setting(
        int, 0, lambda v: v >= 0, "a whole number; 0 is off"
    ),
}
_WARPERS = ("top_k", "top_p", "min_p", "typical_p")
_NOT_OFFERED = {
    "top_h": "use top_p, min_p or typical_p",
    "epsilon_cutoff": "use min_p",
    "eta_cutoff": "use min_p or typical_p",
    "num_beams": "beam search has no single law to reproduce; use temperature=0",
    "penalty_alpha": "contrastive search has no law to reproduce; use temperature=0",
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "bad_words_ids": "use banned_tokens for single tokens",
    "suppress_tokens": "use banned_tokens",
    "sequence_bias": "use logit_bias for single tokens",
    "guidance_scale": "it needs a second pass of the target",
    "encoder_repetition_penalty": "use repetition_penalty",
    "encoder_no_repeat_ngram_size": "use no_repeat_ngram_size",
}


def _plain(value: Any) -> Any:
    """Turns arrays and sequences into tuples of Python numbers, scalars into one."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return value


def _frozen_bias(value: Any) -> Any:
    """Turns a mapping into sorted pairs, a sequence of them into a tuple of such."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        pairs = []
        for token, bias in value.items():
            token, bias = _plain(token), _plain(bias)
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not number or math.isnan(bias) or bias == math.inf:
                raise ValueError(
                    f"logit_bias of token {token!r} is {bias!r}; it must be finite, or "
                    "-inf to ban the token"
                )
            pairs.append((_whole("logit_bias", token), float(bias)))
        return tuple(sorted(pairs)) or None
    value = tuple(value) if isinstance(value, list | tuple) else value
    if not isinstance(value, tuple):
        raise ValueError(
            f"logit_bias is {value!r}; it must map token ids to numbers, or be one "
            "such mapping a row"
        )
    # Pairs are what this function returns: `dataclasses.replace` hands them back.
    if value and all(isinstance(v, tuple) and len(v) == 2 for v in value):
        if all(isinstance(v[0], int) for v in value):
            return _frozen_bias(dict(value))
    return tuple(
        _frozen_bias(dict(v) if isinstance(v, tuple) else v) or () for v in value
    )


def _frozen_tokens(value: Any) -> tuple:
    """Turns ids, or ids a row, into tuples of ints."""
    value = _plain(sorted(value) if isinstance(value, set | frozenset) else value)
    if not isinstance(value, tuple):
        raise ValueError(
            f"banned_tokens is {value!r}; it must be a sequence of token ids, or one "
            "sequence a row"
        )
    if any(isinstance(v, tuple) for v in value):
        return tuple(_frozen_tokens(v) for v in value)
    return tuple(_whole("banned_tokens", v) for v in value)


def _whole(name: str, token: Any) -> int:
    """Returns the id, or raises ValueError if it is not a whole number."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise ValueError(f"{name} has the token {token!r}; token ids are whole numbers")
    return token


def _checked_id(name: str, token: int, vocab_size: int) -> int:
    """Returns the id, or raises ValueError if the vocabulary has no such token."""
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"{name} has the token {token}; ids of this model are 0 to {vocab_size - 1}"
        )
    return token


def _column(settings: Sampling, name: str, batch_size: int) -> Sequence[Any]:
    """Returns one value a row, or raises ValueError if the length is another."""
    value = getattr(settings, name)
    if name in ("logit_bias", "banned_tokens"):
        # Nested: bias rows are tuples of pairs, token rows tuples of ids.
        inner = value and isinstance(value[0], tuple) and value[0]
        single = not value or not isinstance(value[0], tuple)
        if name == "logit_bias" and not single:
            single = bool(inner) and isinstance(inner[0], int)
        per_row = not single
    else:
        per_row = isinstance(value, tuple)
    if not per_row:
        return [value] * batch_size
    if len(value) != batch_size:
        raise ValueError(
            f"{name} has {len(value)} values and the batch {batch_size} rows; give one "
            "value for all rows or one a row"
        )
    return value


def _minimum(
    batch_size: int, vocab_size: int, min_length: Any, eos_token_ids: Any
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns minimum lengths and EOS ids, or None twice where they change nothing."""
    if min_length is None or not np.any(np.asarray(min_length) > 0):
        return None, None
    if eos_token_ids is None:
        return None, None
    return np.asarray(min_length, np.int32), np.asarray(eos_token_ids, np.int32)


def _check_something_left(bias: np.ndarray | None, eos: np.ndarray | None) -> None:
    """Raises ValueError if a row has no possible token left."""
    if bias is None:
        return
    banned = np.isneginf(bias)
    for row in np.flatnonzero(banned.all(axis=-1)):
        raise ValueError(
            f"row {row} bans all {bias.shape[-1]} tokens (banned_tokens, or -inf in "
            "logit_bias); leave at least one"
        )
