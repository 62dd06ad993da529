"""A draft length for each row, from what was accepted before.

Whatever past rounds told may decide how much is drafted next (ALGORITHMS 0.2, C4).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from specdec_jax.base import RoundContext
from specdec_jax.drafters.around import Around
from specdec_jax.drafters.children import with_num_draft_tokens


@dataclass(frozen=True)
class Adaptive(Around):
    """Lets another drafter draft more after full acceptance, less after a rejection.

    The heuristic of Hugging Face's assisted generation: two tokens more after a round
    that accepted all it drafted, one less otherwise, between `least` and the drafter's
    own length. Rounds that drafted nothing change nothing. As lossless as the drafter.

    It pays where acceptance varies much from text to text; on an even load the best
    fixed length wins, since verifying always takes the full width and only drafting is
    saved, up to the longest row's length.

    Args:
      drafter: What drafts; of chains.
      start: Length of each row's first draft.
      least: Length below which it never falls, at least 1: at 0 a row would draft
        nothing and never learn better.
    """

    start: int = 5
    least: int = 1

    def __post_init__(self):
        """Refuses trees and lengths out of range."""
        if self.drafter.siblings != "none":
            raise ValueError(
                f"adaptive lengths are for chains, and {self.drafter} drafts trees"
            )
        if not 1 <= self.least <= self.start:
            raise ValueError(
                f"least must be at least 1 and start at least that, got {self.least} "
                f"and {self.start}"
            )

    @property
    def model(self) -> Any:
        """The drafter's model, if it has one."""
        return getattr(self.drafter, "model", None)

    def with_num_draft_tokens(self, num_draft_tokens: int) -> "Adaptive":
        """Returns the same with another K for the drafter."""
        inner = with_num_draft_tokens(self.drafter, num_draft_tokens)
        return replace(self, drafter=inner)

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns each row's length, and the drafter's own state."""
        inner = self.drafter.init(params, batch_size, capacity, inputs)
        start = min(self.start, self.depth)
        return jnp.full((batch_size,), start, jnp.int32), inner

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Hands the chunk on."""
        length, inner = state
        inner = self.drafter.prefill(
            params, inner, tokens, start, num_valid, target_output
        )
        return length, inner

    def draft(self, state, context: RoundContext):
        """Drafts no more than each row's length."""
        length, inner = state
        context = context._replace(max_draft=jnp.minimum(context.max_draft, length))
        draft, inner, cache = self.drafter.draft(inner, context)
        return draft, (length, inner), cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Moves each row's length by what became of its draft."""
        length, inner = state
        inner = self.drafter.update(
            params, inner, context, draft, target_output, verdict
        )
        step = jnp.where(verdict.num_accepted == draft.num_valid, 2, -1)
        step = jnp.where(draft.num_valid > 0, step, 0)
        length = jnp.clip(length + step, min(self.least, self.depth), self.depth)
        return length.astype(jnp.int32), inner
