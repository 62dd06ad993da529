"""What a user asks for, checked on the host and packed into arrays of few shapes.

Nothing here is traced. Messages say what came, what was needed and the remedy. Shapes
depend on buckets alone: a batch has a power of two of rows, a prompt as many slots as
its bucket, and the rows that fill the batch up are finished before they start.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, UInt32

from specdec_jax import decode
from specdec_jax.sampling import Sampling, SamplingRows

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""

_EOS_COLUMNS = 4
"""EOS ids are padded to a multiple of this, so that their number decides no program."""


class Batch(NamedTuple):
    """One batch as host arrays."""

    tokens: Int[np.ndarray, "B S"]
    """Right-padded prompts; S is the bucket of the longest prompt with its budget."""
    length: Int[np.ndarray, " B"]
    """Tokens of each prompt; 1 in rows that only fill the batch."""
    max_new_tokens: Int[np.ndarray, " B"]
    """Budgets; 0 in rows that only fill the batch."""
    seed: UInt32[np.ndarray, " B"]
    fold: UInt32[np.ndarray, " B"]
    """A request's key is `fold_in(key(seed), fold)`."""
    eos_token_ids: Int[np.ndarray, "B E"]
    sampling: SamplingRows
    draft_sampling: SamplingRows | None


class Request(NamedTuple):
    """One checked request."""

    index: int
    """Place among the prompts."""
    text: str
    """The prompt as text; decoded where it came as token ids."""
    token_ids: list[int]
    max_new_tokens: int
    seed: int
    fold: int


class Plan(NamedTuple):
    """All requests of one call, checked; settings are host arrays, a row a request."""

    requests: list[Request]
    eos_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    sampling: SamplingRows
    draft_sampling: SamplingRows | None


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts; a single prompt becomes a list of one.

    Raises:
      ValueError: It is neither text, nor token ids, nor a sequence of such.

    Example:
      >>> as_prompts("one"), as_prompts(["one", [2, 3]]), as_prompts([2, 3])
      (['one'], ['one', [2, 3]], [[2, 3]])
    """
    if isinstance(prompts, str):
        return [prompts]
    try:
        prompts = list(prompts)
    except TypeError:
        raise ValueError(
            f"prompts is {prompts!r}; give text, token ids, or a list of such"
        ) from None
    if prompts and all(_is_whole(token) for token in prompts):
        return [[int(token) for token in prompts]]
    return [p if isinstance(p, str) else as_token_ids(p) for p in prompts]


def as_token_ids(prompt: Any) -> list[int]:
    """Returns token ids as Python ints.

    Raises:
      ValueError: It is not a sequence of whole numbers.

    Example:
      >>> as_token_ids(np.array([1, 2]))
      [1, 2]
    """
    try:
        tokens = list(prompt)
    except TypeError:
        tokens = [None]
    if not all(_is_whole(token) for token in tokens):
        raise ValueError(
            f"a prompt is {prompt!r}; it must be text or a sequence of token ids"
        )
    return [int(token) for token in tokens]


def encode(prompt: Prompt, tokenizer: Any, bos_token_id: int | None) -> list[int]:
    """Returns the tokens of a prompt, with the BOS that the tokenizer adds, once.

    Args:
      prompt: Text, or token ids, which are taken as they are.
      tokenizer: A transformers tokenizer; None takes token ids only.
      bos_token_id: What an empty prompt becomes, if there is one.

    Raises:
      ValueError: Text without a tokenizer, or an empty prompt without a BOS.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "the checkpoint has no tokenizer, so a prompt must be token ids, "
                f"got {prompt!r}; put its tokenizer.json beside the weights"
            )
        tokens = list(tokenizer(prompt).input_ids)
        twice = bos_token_id is not None and tokens[:2] == [bos_token_id] * 2
        # Text that begins with the BOS, as templates make it: it is there already.
        tokens = tokens[1:] if twice else tokens
    else:
        tokens = as_token_ids(prompt)
    if not tokens and bos_token_id is not None:
        tokens = [bos_token_id]
    if not tokens:
        raise ValueError(
            "a prompt is empty and the checkpoint has no BOS token to begin with; "
            "give at least one token"
        )
    return tokens


def check_fits(
    tokens: Sequence[int],
    max_new_tokens: int,
    vocab_size: int,
    max_positions: int | None,
) -> None:
    """Refuses a request that the model cannot hold.

    Raises:
      ValueError: An id is not in the vocabulary, or positions run out.

    Example:
      >>> check_fits([5] * 60, 10, 100, 64)
      Traceback (most recent call last):
      ...
      ValueError: a prompt of 60 tokens with max_new_tokens 10 needs 70 positions, but \
the model has 64; shorten the prompt or lower max_new_tokens
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"a prompt has the token {token}, but the ids of this model are 0 to "
                f"{vocab_size - 1}"
            )
    needed = len(tokens) + max_new_tokens
    if max_positions is not None and needed > max_positions:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens with max_new_tokens {max_new_tokens} "
            f"needs {needed} positions, but the model has {max_positions}; shorten "
            "the prompt or lower max_new_tokens"
        )


def per_prompt(name: str, value: Any, size: int, least: int, most: int) -> list[int]:
    """Returns one whole number for each prompt.

    Raises:
      ValueError: A value is of another kind or out of range, or their number differs.

    Example:
      >>> per_prompt("max_new_tokens", 5, 2, 1, 9), per_prompt("seed", [3, 4], 2, 0, 9)
      ([5, 5], [3, 4])
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    values = list(value) if isinstance(value, list | tuple) else None
    for one in [value] if values is None else values:
        if not _is_whole(one) or not least <= one <= most:
            raise ValueError(
                f"{name} is {one!r}; it must be a whole number from {least} to {most}"
            )
    if values is None:
        return [int(value)] * size
    if len(values) != size:
        raise ValueError(
            f"{name} has {len(values)} values for {size} prompts; give one for all or "
            "one for each"
        )
    return [int(one) for one in values]


def eos_ids(value: Any, default: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a text: None is the checkpoint's, () none at all.

    Raises:
      ValueError: An id is not in the vocabulary.

    Example:
      >>> eos_ids(None, (2,), 9), eos_ids(3, (2,), 9), eos_ids((), (2,), 9)
      ((2,), (3,), ())
    """
    if value is None:
        return tuple(default)
    value = value.tolist() if hasattr(value, "tolist") else value
    ids = (value,) if not isinstance(value, list | tuple | set | frozenset) else value
    for token in ids:
        if not _is_whole(token) or not 0 <= token < vocab_size:
            raise ValueError(
                f"eos_token_id has {token!r}, but the ids of this model are 0 to "
                f"{vocab_size - 1}; use () for none"
            )
    return tuple(sorted(int(token) for token in ids))


def stop_strings(stop: Any, tokenizer: Any) -> tuple[str, ...]:
    """Returns the stop strings; a single one becomes a tuple of one.

    Raises:
      ValueError: One is not text or empty, can never occur, or there is no tokenizer.

    Example:
      >>> stop_strings((), None)
      ()
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"stop has {one!r}; a stop string must be text, not empty")
        if one in special:
            raise ValueError(
                f"stop has {one!r}, a special token, which is no part of the text; "
                f"use eos_token_id={tokenizer.convert_tokens_to_ids(one)}"
            )
        if tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, and the checkpoint has none"
            )
    return strings


def pack(plan: Plan, first: int, last: int) -> Batch:
    """Packs requests `first` to `last - 1` of a plan into one padded batch."""
    requests = plan.requests[first:last]
    size = 1 << (len(requests) - 1).bit_length()
    filling = size - len(requests)
    longest = max(len(r.token_ids) + r.max_new_tokens for r in requests)
    tokens = np.zeros((size, decode.bucket(longest)), np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.token_ids)] = request.token_ids

    def column(values: Sequence[int], fill: int, dtype: Any) -> np.ndarray:
        return np.array([*values, *[fill] * filling], dtype)

    # Any valid values do for the rows that fill the batch: those of its first row.
    places = np.array([*range(first, first + len(requests)), *[first] * filling])

    def fill_up(rows: SamplingRows) -> SamplingRows:
        return jax.tree.map(lambda leaf: leaf[places], rows)

    return Batch(
        tokens=tokens,
        length=column([len(r.token_ids) for r in requests], 1, np.int32),
        max_new_tokens=column([r.max_new_tokens for r in requests], 0, np.int32),
        seed=column([r.seed for r in requests], 0, np.uint32),
        fold=column([r.fold for r in requests], 0, np.uint32),
        eos_token_ids=eos_rows(plan.eos_token_ids, size),
        sampling=fill_up(plan.sampling),
        draft_sampling=plan.draft_sampling and fill_up(plan.draft_sampling),
    )


def eos_rows(eos: Sequence[int], size: int) -> Int[np.ndarray, "B E"]:
    """Returns the EOS ids once a row, padded with -1, which matches nothing.

    Example:
      >>> eos_rows((2, 7), 1).tolist()
      [[2, 7, -1, -1]]
    """
    columns = -(-max(len(eos), 1) // _EOS_COLUMNS) * _EOS_COLUMNS
    return np.array([[*eos, *[-1] * (columns - len(eos))]] * size, np.int32)


def sampling_rows(
    sampling: Sampling,
    requests: Sequence[Request],
    vocab_size: int,
    eos: Sequence[int],
    min_new_tokens: int,
) -> SamplingRows:
    """Returns the settings of all requests as host arrays, one row each."""
    length = np.array([len(r.token_ids) for r in requests], np.int32)
    rows = sampling.rows(
        len(requests),
        vocab_size,
        prompt_length=length,
        eos_token_ids=eos_rows(eos, len(requests)),
        min_length=length + np.int32(min_new_tokens),
    )
    return jax.device_get(rows)


def _is_whole(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) or (
        hasattr(value, "dtype") and np.ndim(value) == 0 and value.dtype.kind in "iu"
    )
    return bool(whole) and not isinstance(value, bool)
