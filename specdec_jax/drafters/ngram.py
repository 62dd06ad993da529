"""Prompt lookup: copy what followed the last occurrence of the latest tokens.

A draft without a model (Saxena 2023; ALGORITHMS B.8): find the latest earlier place
whose ending matches the text's ending best, up to `max_ngram` tokens, and propose what
came after it. The proposal is a function of committed tokens, hence one-hot.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from specdec_jax.base import Draft, RoundContext


@dataclass(frozen=True)
class NgramDrafter:
    """Proposes by n-gram lookup in the row's own tokens, from max_ngram down to 1.

    Args:
      num_draft_tokens: Tokens proposed a round at the most, K.
      max_ngram: Longest ending that is compared; the longest match wins, then the
        latest place.
    """

    num_draft_tokens: int
    max_ngram: int = 3
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses sizes that make no draft."""
        if self.num_draft_tokens < 1 or self.max_ngram < 1:
            raise ValueError(
                "num_draft_tokens and max_ngram must be at least 1, got "
                f"{self.num_draft_tokens} and {self.max_ngram}; "
                "for plain decoding use no drafter."
            )

    @property
    def num_nodes(self) -> int:
        """K."""
        return self.num_draft_tokens

    depth = num_nodes

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns the empty state: all it needs is the tokens."""
        return ()

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Returns the state as it is."""
        return state

    def draft(self, state, context: RoundContext):
        """Returns the tokens after the best match; none if nothing matches."""
        place, matched = longest_match(context.tokens, context.length, self.max_ngram)
        offsets = jnp.arange(1, self.num_draft_tokens + 1, dtype=jnp.int32)
        last_slot = context.tokens.shape[1] - 1
        tokens = jnp.take_along_axis(
            context.tokens,
            jnp.minimum(place[:, None] + offsets[None, :], last_slot),
            axis=1,
        )
        available = jnp.minimum(context.length - 1 - place, self.num_draft_tokens)
        num_valid = jnp.where(matched > 0, available, 0)
        num_valid = jnp.minimum(num_valid, context.max_draft)
        return Draft(tokens, num_valid), state, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is."""
        return state


def longest_match(
    tokens: Int[Array, "B T"], length: Int[Array, " B"], max_ngram: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns the slot where the best earlier match of the ending ends, and its size.

    Example:
      The ending `5 6` occurred before at slots 1 and 2:

      >>> place, size = longest_match(
      ...     jnp.array([[4, 5, 6, 7, 5, 6, 0, 0]]), jnp.array([6]), 3)
      >>> place.tolist(), size.tolist()
      ([2], [2])
    """
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    size = match_sizes(tokens, length[:, None] - 1, max_ngram)[:, 0]
    best = size.max(axis=1)
    latest = jnp.where(size == best[:, None], slots, -1).max(axis=1)
    return latest, best


def match_sizes(
    tokens: Int[Array, "B T"], ends: Int[Array, "B S"], max_ngram: int
) -> Int[Array, "B S T"]:
    """Returns how many tokens up to each earlier slot repeat those up to an end.

    Example:
      Before the ending `6` at slot 5, `5 6` stands at slot 2 and a lone `6` at slot 3:

      >>> match_sizes(
      ...     jnp.array([[4, 5, 6, 6, 5, 6, 9]]), jnp.array([[5]]), 3).tolist()
      [[[0, 0, 2, 1, 0, 0, 0]]]
    """
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None]
    ends = ends[..., None]
    matching = slots < ends
    size = jnp.zeros(matching.shape, jnp.int32)
    for back in range(max_ngram):
        at = jnp.clip(ends[..., 0] - back, 0, tokens.shape[1] - 1)
        ending = jnp.take_along_axis(tokens, at, axis=1)[..., None]
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, None, : tokens.shape[1]]
        matching &= (shifted == ending) & (slots >= back)
        size += matching.astype(jnp.int32)
    return size
