"""Counts of what followed in the text itself: prompt lookup with a law.

`NgramDrafter` proposes one continuation, whose law is one-hot. At temperature 0 that is
right; above, a law that knows several continuations is accepted more often (ALGORITHMS
0.2, C2). Here every earlier place votes for the token that followed it,

    q(v)  ~  sum over places j with x[j+1] = v of  sharpness^size(j),

where size(j) is how many of the last tokens the text before j repeats, up to
`max_ngram`. Longer matches outvote shorter ones by powers, so this backs off smoothly;
places that match nothing do not vote, and where no place does there is no law: the
drafter proposes nothing.

On texts that the bundled target draws at temperature 1, alpha is .257 at the places
with a match; prompt lookup has .217 there, and the likeliest vote alone .226. From 1 to
64, `sharpness` moves it by .006.

It is a `base.LanguageModel` without weights: `ModelDrafter(NgramCounts(V), K)` drafts
with it, and composed drafters take it as any other model. Counting takes [B, T] work a
token, and no table of contexts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from specdec_jax.base import ModelOutput
from specdec_jax.drafters.ngram import match_sizes


class TokenCache(NamedTuple):
    """The tokens read; satisfies `base.Cache`."""

    length: Int[Array, " B"]
    tokens: Int[Array, "B T"]

    def rewind(self, length: Int[Array, " B"]) -> "TokenCache":
        """See `base.Cache`."""
        return self._replace(length=length)

    def commit(self, start: Int[Array, " B"], path: Int[Array, "B P"]) -> "TokenCache":
        """See `base.Cache`."""
        rows = jnp.arange(len(start), dtype=jnp.int32)[:, None]
        slots = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
        moved = self.tokens[rows, start[:, None] + path]
        return self._replace(tokens=self.tokens.at[rows, slots].set(moved, mode="drop"))


@dataclass(frozen=True)
class NgramCounts:
    """Scores the next token by what followed the latest tokens earlier in the row.

    Args:
      vocab_size: The target's.
      max_ngram: Most tokens of an ending that are compared.
      sharpness: How much more a match counts that is one token longer.
    """

    vocab_size: int
    max_ngram: int = 3
    sharpness: int = 4

    def __post_init__(self):
        """Refuses sizes that count nothing."""
        if min(self.vocab_size, self.max_ngram, self.sharpness) < 1:
            raise ValueError(
                "vocab_size, max_ngram and sharpness must be at least 1, got "
                f"{self.vocab_size}, {self.max_ngram} and {self.sharpness}"
            )

    def init_cache(self, batch_size: int, capacity: int) -> TokenCache:
        """Returns an empty cache.

        Raises:
          ValueError: The votes of that many places would not fit into an int32.
        """
        if self.sharpness**self.max_ngram * capacity >= 2**31:
            raise ValueError(
                f"sharpness {self.sharpness} to the power {self.max_ngram} is too much "
                f"for {capacity} tokens; use a smaller one"
            )
        shape = (batch_size, capacity)
        length = jnp.zeros((batch_size,), jnp.int32)
        return TokenCache(length, jnp.zeros(shape, jnp.int32))

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`; the variables are not looked at.

        Logits are the logarithms of the votes, `-inf` throughout where there are none.

        Raises:
          ValueError: For a block that is no chain, or a hidden layer.
        """
        if block is not None or hidden_layers:
            raise ValueError(
                "n-gram counts read chains and have no hidden layers; draft a tree "
                "with another model"
            )
        rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        slots = cache.length[:, None] + steps
        seen = cache.tokens.at[rows, slots].set(tokens, mode="drop")
        votes = self._votes(seen, slots)
        logits = jnp.where(votes > 0, jnp.log(votes.astype(jnp.float32)), -jnp.inf)
        return ModelOutput(logits), TokenCache(cache.length + tokens.shape[1], seen)

    def _votes(
        self, tokens: Int[Array, "B T"], ends: Int[Array, "B S"]
    ) -> Int[Array, "B S V"]:
        """Returns the votes after the texts that end at the given slots."""
        size = match_sizes(tokens, ends, self.max_ngram)
        power = jnp.int32(self.sharpness) ** size
        weight = jnp.where(size > 0, power, 0)
        # Sums of integers: no order of adding changes a row's law.
        following = jnp.roll(tokens, -1, axis=1)[:, None]
        batch, num_ends, _ = size.shape
        row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        end = jnp.arange(num_ends, dtype=jnp.int32)[None, :, None]
        votes = jnp.zeros((batch, num_ends, self.vocab_size), jnp.int32)
        return votes.at[row, end, following].add(weight, mode="drop")
