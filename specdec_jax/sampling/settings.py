"""What a user may write for each sampling setting, and the messages where it is wrong.

Everything here runs on the host, before any program is traced. A message says what
came, what was needed, and what to do.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Setting(NamedTuple):
    """What a numeric setting may be."""

    dtype: type
    """np.int32 or np.float32, in which the value travels to the device."""
    neutral: float
    """The value that changes nothing."""
    valid: Callable[[Any], bool]
    needs: str
    optional: bool = False
    """Whether None is allowed, meaning neutral."""

    def check(self, name: str, value: Any) -> Any:
        """Returns the value as an int or float.

        Raises:
          ValueError: It is of another kind or out of range.
        """
        if value is None and self.optional:
            return None
        if not self._fits(value):
            unless = ", or None" if self.optional else ""
            raise ValueError(f"{name} is {value!r}; it must be {self.needs}{unless}")
        return int(value) if self.dtype is np.int32 else float(value)

    def _fits(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.dtype is np.int32:
            return 0 <= value < 2**31 and value == int(value) and self.valid(value)
        with np.errstate(over="ignore"):
            rounded = np.float32(value)  # it has to be valid where it is used
        return bool(np.isfinite(rounded) and self.valid(rounded))


def _real(neutral: float, valid: Callable, needs: str, optional: bool = False):
    return Setting(np.float32, neutral, valid, needs, optional)


NUMBERS = {
    "temperature": _real(
        0.0,
        lambda v: v == 0 or v >= 1e-3,
        "0 for greedy decoding or at least 0.001 (no small value stands for greedy)",
    ),
    "top_k": Setting(
        np.int32, 2**31 - 1, lambda v: v >= 1, "a whole number, at least 1", True
    ),
    "top_p": _real(1.0, lambda v: 0 < v <= 1, "above 0 and at most 1", True),
    "min_p": _real(0.0, lambda v: 0 <= v <= 1, "between 0 and 1", True),
    "typical_p": _real(1.0, lambda v: 0 < v <= 1, "above 0 and at most 1", True),
    "repetition_penalty": _real(1.0, lambda v: v > 0, "above 0 (1 is no penalty)"),
    "presence_penalty": _real(0.0, lambda v: True, "finite (0 is no penalty)"),
    "frequency_penalty": _real(0.0, lambda v: True, "finite (0 is no penalty)"),
    "no_repeat_ngram_size": Setting(
        np.int32, 0, lambda v: True, "a whole number, at least 0 (0 is off)"
    ),
}
"""The numeric settings, by name."""

WARPERS = ("top_k", "top_p", "min_p", "typical_p")
"""Settings that a greedy row does not have, as in Hugging Face."""

_NOT_OFFERED = {
    "top_h": "use top_p, min_p or typical_p",
    "epsilon_cutoff": "use min_p",
    "eta_cutoff": "use min_p or typical_p",
    "num_beams": "beam search reproduces no law of the target; use temperature=0",
    "penalty_alpha": "contrastive search reproduces no law of the target; use "
    "temperature=0",
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "bad_words_ids": "use banned_tokens, for single tokens",
    "suppress_tokens": "use banned_tokens",
    "sequence_bias": "use logit_bias, for single tokens",
    "guidance_scale": "it needs a second pass of the target",
    "encoder_repetition_penalty": "use repetition_penalty",
    "encoder_no_repeat_ngram_size": "use no_repeat_ngram_size",
    "exponential_decay_length_penalty": "use logit_bias on the EOS ids",
}


def check_names(given: Collection[str], offered: Sequence[str]) -> None:
    """Refuses unknown options, and those of Hugging Face that are not offered.

    Raises:
      ValueError: Naming the option, the nearest offered one, and all of them.

    Example:
      >>> check_names(["num_beams"], ["temperature"])
      Traceback (most recent call last):
      ...
      ValueError: sampling option 'num_beams' is not offered: beam search reproduces \
no law of the target; use temperature=0
    """
    for name in given:
        if name in _NOT_OFFERED:
            raise ValueError(
                f"sampling option {name!r} is not offered: {_NOT_OFFERED[name]}"
            )
        if name not in offered:
            near = difflib.get_close_matches(str(name), offered, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"unknown sampling option {name!r}{hint}; offered are "
                + ", ".join(offered)
            )


def plain(value: Any) -> Any:
    """Turns arrays and sequences into tuples, and NumPy scalars into Python ones.

    Example:
      >>> plain([np.float32(0.5), np.arange(2)])
      (0.5, (0, 1))
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return tuple(plain(v) for v in value)
    return value


def bias_of(value: Any) -> Any:
    """Copies `logit_bias`: None, a dict, or a tuple of dicts with one a row.

    Raises:
      ValueError: It is neither, an id is not whole, or a bias is NaN or +inf.

    Example:
      >>> bias_of([{5: 1}, None])
      ({5: 1.0}, {})
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {
            _whole("logit_bias", token): _bias(token, plain(bias))
            for token, bias in value.items()
        }
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"logit_bias is {value!r}; it must map token ids to numbers, or be a "
            "sequence with one such mapping a row"
        )
    return tuple(bias_of({} if row is None else row) for row in value)


def tokens_of(value: Any) -> tuple:
    """Copies `banned_tokens`: a tuple of ids, or a tuple of such tuples.

    Raises:
      ValueError: It is neither, or an id is not a whole number.

    Example:
      >>> tokens_of([[3, 4], []])
      ((3, 4), ())
    """
    value = plain(sorted(value) if isinstance(value, set | frozenset) else value)
    if not isinstance(value, tuple):
        raise ValueError(
            f"banned_tokens is {value!r}; it must be a sequence of token ids, or one "
            "such sequence a row"
        )
    if any(isinstance(v, tuple | set | frozenset) for v in value):
        return tuple(tokens_of(v) for v in value)
    return tuple(_whole("banned_tokens", v) for v in value)


def per_row(name: str, value: Any, batch_size: int) -> Sequence[Any]:
    """Returns one value a row of a setting that was checked by itself.

    Raises:
      ValueError: It is a sequence of another length than the batch.

    Example:
      >>> per_row("temperature", 0.5, 2), per_row("banned_tokens", (7,), 2)
      ([0.5, 0.5], [(7,), (7,)])
    """
    rowwise = isinstance(value, tuple)
    if name == "banned_tokens":
        rowwise = bool(value) and isinstance(value[0], tuple)
    if not rowwise:
        return [value] * batch_size
    if len(value) != batch_size:
        raise ValueError(
            f"{name} has {len(value)} values, but the batch has {batch_size} rows; "
            "give one value for all rows or one for each"
        )
    return value


def known(name: str, token: int, vocab_size: int) -> int:
    """Returns the id.

    Raises:
      ValueError: The vocabulary has no such id.

    Example:
      >>> known("banned_tokens", 7, 8)
      7
    """
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"{name} has the token {token}, but the ids of this model are 0 to "
            f"{vocab_size - 1}"
        )
    return token


def minimum_matters(min_length: Any, prompt_length: Any, eos_token_ids: Any) -> bool:
    """Returns whether a minimum length may forbid an EOS id in some row.

    Example:
      >>> minimum_matters([5], [5], [[0]]), minimum_matters([6], [5], [[0]])
      (False, True)
    """
    if min_length is None or eos_token_ids is None or 0 in np.shape(eos_token_ids):
        return False
    if _is_traced(min_length, prompt_length):
        return True
    # Every row that is asked about follows at least the prompt, or one token.
    start = np.asarray(1 if prompt_length is None else prompt_length)
    return bool(np.any(np.asarray(min_length) > start))


def check_shape(name: str, value: Any, *shape: int | None) -> None:
    """Refuses an array of another shape; None stands for any size.

    Raises:
      ValueError: Saying both shapes.

    Example:
      >>> check_shape("min_length", np.zeros(2), 2)
    """
    given = np.shape(value)
    same = [wanted in (None, size) for wanted, size in zip(shape, given, strict=False)]
    if value is not None and not (len(given) == len(shape) and all(same)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {given}; it must be [{wanted}]")


def check_token_left(bias: np.ndarray | None, eos_token_ids: Any) -> None:
    """Refuses a row that has no token to begin with.

    Raises:
      ValueError: The bias, and the EOS ids where they are forbidden too, leave nothing.

    Example:
      >>> check_token_left(np.array([[-np.inf, 0.0]]), None)
    """
    if bias is None:
        return
    banned = np.isneginf(bias)
    if eos_token_ids is not None and not _is_traced(eos_token_ids):
        for row, ids in enumerate(np.asarray(eos_token_ids)):
            banned[row, ids[(ids >= 0) & (ids < bias.shape[1])]] = True
    for row in np.flatnonzero(banned.all(axis=1)).tolist():
        raise ValueError(
            f"all {bias.shape[1]} tokens of row {row} are forbidden (banned_tokens, "
            "-inf in logit_bias, EOS ids before a minimum length); leave at least one"
        )


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _whole(name: str, token: Any) -> int:
    token = plain(token)
    if isinstance(token, bool) or not isinstance(token, int):
        raise ValueError(f"{name} has the token {token!r}; token ids are whole numbers")
    return token


def _bias(token: Any, bias: Any) -> float:
    if isinstance(bias, int | float) and not isinstance(bias, bool):
        if bias == -np.inf or abs(bias) <= np.finfo(np.float32).max:
            return float(bias)
    raise ValueError(
        f"logit_bias of token {token!r} is {bias!r}; it must be a finite number, or "
        "-inf to ban the token"
    )
