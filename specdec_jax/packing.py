"""Checked requests, packed into arrays of few shapes.

Shapes depend on buckets alone: a batch has a power of two of rows, a prompt as many
slots as its bucket, and the rows that fill the batch up are finished before they start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, UInt32

from specdec_jax import decode
from specdec_jax.sampling import Sampling, SamplingRows
from specdec_jax.sampling.settings import per_row

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


@dataclass(frozen=True)
class Request:
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


def pack(plan: Plan, first: int, last: int) -> Batch:
    """Packs requests `first` to `last - 1` of a plan into one padded batch."""
    requests = plan.requests[first:last]
    size = _power_of_two(len(requests))
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
    row = np.array([*eos, *[-1] * (columns - len(eos))], np.int32)
    return np.tile(row, (size, 1))


def sampling_rows(
    sampling: Sampling,
    requests: Sequence[Request],
    vocab_size: int,
    eos: Sequence[int],
    min_new_tokens: int,
) -> SamplingRows:
    """Returns the settings of all requests as host arrays.

    There is a row for each request, and more up to a power of two: JAX compiles the
    making of an array anew for each shape.
    """
    if not requests:
        return SamplingRows()
    filling = _power_of_two(len(requests)) - len(requests)
    values = {
        one.name: list(per_row(one.name, getattr(sampling, one.name), len(requests)))
        for one in fields(Sampling)
    }
    filled = Sampling(**{k: v + v[:1] * filling for k, v in values.items()})
    length = [len(r.token_ids) for r in requests]
    length = np.array(length + length[:1] * filling, np.int32)
    rows = filled.rows(
        len(length),
        vocab_size,
        prompt_length=length,
        eos_token_ids=eos_rows(eos, len(length)),
        min_length=length + np.int32(min_new_tokens),
    )
    return jax.device_get(rows)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
