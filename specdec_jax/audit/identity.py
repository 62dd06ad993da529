"""Two texts that should be one: near-tie or real difference?

Blocks of different widths round differently, so on real models greedy and coupled texts
may part where two tokens score almost alike. At the first difference the scores are
recomputed from scratch; a gap under `NEAR_TIE` is rounding, anything else is a fault.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specdec_jax.base import LanguageModel, Variables
from specdec_jax.rng import NoNoise, PositionNoise
from specdec_jax.sampling import History, Sampling, SamplingRows, is_greedy, policy
from specdec_jax.state import bucket

NEAR_TIE = 1e-3
"""Gap of scores, in nats, below which float32 rounding explains a difference."""


class Difference(NamedTuple):
    """The first place where two texts part."""

    position: int
    """Index among the new tokens."""
    margin: float
    """How far the lower of the two tokens scores below the best, in nats."""

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin < NEAR_TIE


def explain_difference(
    target: LanguageModel,
    variables: Variables,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    *,
    sampling: Sampling | None = None,
    key: Key[Array, ""] | None = None,
) -> Difference | None:
    """Explains where two continuations of a prompt part, or returns None if they agree.

    Args:
      target: The model that both texts are said to come from.
      variables: Its variables.
      prompt: Token ids before the texts.
      one: New tokens.
      other: New tokens; if one text is the beginning of the other, the place where it
        ends counts as a difference with an infinite margin.
      sampling: Settings of the request; None is greedy.
      key: The request's key, for text drawn with noise by position (plain decoding and
        the coupled rule). Not consumed.

    Returns:
      The place and the gap of log p + gumbel (temperature 0: of the logits).
    """
    parted = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None
    )
    if parted is None:
        if len(one) == len(other):
            return None
        return Difference(min(len(one), len(other)), float("inf"))
    text = [*prompt, *one[:parted]]
    capacity = bucket(len(text))
    tokens = jnp.zeros((1, capacity), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    rows = (sampling or Sampling()).rows(
        1, target.vocab_size, prompt_length=jnp.array([len(prompt)], jnp.int32)
    )
    length = jnp.array([len(text)], jnp.int32)
    scores = _scores(variables, tokens, length, rows, key, target=target)
    pair = scores[jnp.array([one[parted], other[parted]])]
    return Difference(parted, float(scores.max() - pair.min()))


@partial(jax.jit, static_argnames="target")
def _scores(
    variables: Variables,
    tokens: Int[Array, "1 T"],
    length: Int[Array, " 1"],
    rows: SamplingRows,
    key: Key[Array, ""] | None,
    *,
    target: LanguageModel,
) -> Float[Array, " V"]:
    """Returns what the next token is the argmax of, from one forward over the text."""
    cache = target.init_cache(1, tokens.shape[1])
    output, _ = target.apply(variables, tokens, cache)
    logits = jnp.take_along_axis(output.logits, length[:, None, None] - 1, axis=1)
    if is_greedy(rows):
        # A policy row at temperature 0 has no gaps; its logits do.
        return logits[0, 0].astype(jnp.float32)
    law = policy(logits, rows, History.plain(tokens, length))[0, 0]
    noise = NoNoise() if key is None else PositionNoise(key, length[0])
    return law + noise.gumbel(0, law.shape[-1])
