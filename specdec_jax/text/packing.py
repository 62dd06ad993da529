"""Checked requests, packed into arrays of few shapes.

Shapes depend on buckets alone: a batch has a power of two of rows, a prompt as many
slots as its bucket, and the rows that fill the batch up are finished before they start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, UInt32

from specdec_jax import decode
from specdec_jax.sampling import Sampling, SamplingRows, settings
from specdec_jax.text.detokenize import decode as decode_text
from specdec_jax.text.requests import (
    Prompt,
    eos_ids,
    is_per_prompt,
    per_prompt,
    stop_strings,
)

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

    def select(self, places: Sequence[int]) -> "Plan":
        """Returns the plan of some of its requests."""
        rows = np.array(places, np.int64)

        def cut(settings: SamplingRows) -> SamplingRows:
            return jax.tree.map(lambda leaf: leaf[rows], settings)

        return self._replace(
            requests=[self.requests[place] for place in places],
            sampling=cut(self.sampling),
            draft_sampling=self.draft_sampling and cut(self.draft_sampling),
        )


def make_plan(
    prompts: list[Prompt],
    *,
    encode: Callable[[Prompt, int], list[int]],
    tokenizer: Any,
    vocab_size: int,
    default_eos: Sequence[int],
    max_new_tokens: Any,
    sampling: Sampling,
    draft_sampling: Sampling | None,
    seed: Any,
    eos_token_id: Any,
    min_new_tokens: int,
    stop: Any,
    indices: Sequence[int] | None,
) -> Plan:
    """Checks what `SpeculativeDecoder.plan` was asked for; see there.

    Args:
      prompts: Texts and token ids.
      encode: Turns a prompt with its budget into tokens, or refuses it.
      tokenizer: For the text of prompts that are ids, and for stop strings.
      vocab_size: V of the target.
      default_eos: The checkpoint's EOS ids.
      max_new_tokens: As the user gave it, like all that follow.
      sampling: Settings of the target's policy.
      draft_sampling: Settings of the draft's policy, or None.
      seed: One for all prompts or one a prompt.
      eos_token_id: None, an id or several.
      min_new_tokens: One for all prompts.
      stop: A string or several.
      indices: Places of the prompts, or None.

    Raises:
      ValueError: Something asked for is impossible.
    """
    size = len(prompts)
    budgets = per_prompt("max_new_tokens", max_new_tokens, size, 1, 2**30)
    [minimum] = per_prompt("min_new_tokens", min_new_tokens, 1, 0, 2**30)
    seeds = per_prompt("seed", seed, size, 0, 2**32 - 1)
    places = list(range(size) if indices is None else indices)
    folds = [0] * size if is_per_prompt(seed) else places
    eos = eos_ids(eos_token_id, default_eos, vocab_size)
    strings = stop_strings(stop, tokenizer)
    tokens = [encode(p, budget) for p, budget in zip(prompts, budgets, strict=True)]
    texts = [p if isinstance(p, str) else decode_text(tokenizer, p) for p in prompts]
    columns = zip(places, texts, tokens, budgets, seeds, folds, strict=True)
    requests = [Request(*column) for column in columns]

    def rows(asked: Sampling) -> SamplingRows:
        return sampling_rows(asked, requests, vocab_size, eos, minimum)

    return Plan(
        requests=requests,
        eos_token_ids=eos,
        stop=strings,
        sampling=rows(sampling),
        draft_sampling=None if draft_sampling is None else rows(draft_sampling),
    )


def by_bucket(plan: Plan, batch_size: int) -> list[tuple[int, list[int]]]:
    """Returns the plan's requests by the slots they need, and their places.

    Requests that fit one batch make one, whatever their lengths.

    Returns:
      Slots and places in the plan, shorter buckets first.
    """
    groups: dict[int, list[int]] = {}
    for place, request in enumerate(plan.requests):
        groups.setdefault(_slots(request), []).append(place)
    if len(plan.requests) <= batch_size and groups:
        return [(max(groups), list(range(len(plan.requests))))]
    return sorted(groups.items())


def _slots(request: Request) -> int:
    return decode.bucket(len(request.token_ids) + request.max_new_tokens)


def row_count(num_requests: int, multiple: int = 1) -> int:
    """Returns the rows of a batch: a power of two, rounded up to a multiple.

    Example:
      >>> row_count(3), row_count(1, 8), row_count(5, 3)
      (4, 8, 9)
    """
    size = 1 << (num_requests - 1).bit_length()
    return -(-size // multiple) * multiple


def pack(
    plan: Plan,
    places: Sequence[int],
    size: int | None = None,
    slots: int | None = None,
) -> Batch:
    """Packs some requests of a plan into one padded batch.

    Args:
      plan: The requests.
      places: Places in the plan; one at least, `size` at the most.
      size: Rows of the batch; by default the `row_count` of the requests.
      slots: Width of the batch, S; by default what the longest request needs.
    """
    requests = [plan.requests[place] for place in places]
    size = size or row_count(len(requests))
    slots = slots or max(_slots(request) for request in requests)
    filling = size - len(requests)
    tokens = np.zeros((size, slots), np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.token_ids)] = request.token_ids

    def column(values: Sequence[int], fill: int, dtype: Any) -> np.ndarray:
        return np.array([*values, *[fill] * filling], dtype)

    # Any valid values do for the rows that fill the batch: those of its first row.
    rows = np.array([*places, *[places[0]] * filling])

    def fill_up(settings: SamplingRows) -> SamplingRows:
        return jax.tree.map(lambda leaf: leaf[rows], settings)

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
    filling = row_count(len(requests)) - len(requests)
    values = {
        one.name: list(
            settings.per_row(one.name, getattr(sampling, one.name), len(requests))
        )
        for one in fields(Sampling)
    }
    filled = Sampling(**{k: v + v[:1] * filling for k, v in values.items()})
    lengths = [len(r.token_ids) for r in requests]
    length = np.array(lengths + lengths[:1] * filling, np.int32)
    rows = filled.rows(
        len(length),
        vocab_size,
        prompt_length=length,
        eos_token_ids=eos_rows(eos, len(length)),
        min_length=length + np.int32(min_new_tokens),
    )
    return jax.device_get(rows)
