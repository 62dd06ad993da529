"""Choosing the children of a tree's nodes: independent, distinct or ranked.

    independent   each child is drawn anew from the law at its parent; of two equal ones
                  both stay (SpecInfer, arXiv:2305.09781)
    distinct      drawn in order without those drawn before, as the largest
                  `log q + gumbel` (Kool et al., arXiv:1903.06059); with noise by
                  position the first child is the coupled draft, and the children are
                  the likeliest to hold what the target will draw
    ranked        the likeliest: a function of the law, so that they have none

At temperature 0 there is one possible token and no law to choose more from. Such rows
get the likeliest at temperature 1, each told as certain, whatever the kind.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.base import Noise
from specdec_jax.rng import NoNoise, first_argmax
from specdec_jax.sampling import SamplingRows, certain, is_greedy

KINDS = ("independent", "distinct", "ranked")

FAR = 2**20
"""Positions between the noises of independent siblings; no text is as long, so that
under noise by position they meet neither each other's nor any token's own."""


def lively(
    rows: SamplingRows, batch_size: int
) -> tuple[SamplingRows, Bool[Array, " B"]]:
    """Returns the settings with temperature 0 read as 1, and in which rows that was.

    Example:
      >>> from specdec_jax.sampling import Sampling
      >>> rows, greedy = lively(Sampling(temperature=[0.0, 0.5]).rows(2, 9), 2)
      >>> rows.temperature.tolist(), greedy.tolist()
      ([1.0, 0.5], [True, False])
    """
    if rows.temperature is None:
        one = jnp.ones((batch_size,), jnp.float32)
        return rows._replace(temperature=one), jnp.ones((batch_size,), bool)
    greedy = rows.temperature == 0
    return rows._replace(temperature=jnp.where(greedy, 1, rows.temperature)), greedy


def unfiltered(rows: SamplingRows) -> SamplingRows:
    """Returns the settings without truncation: a ranking needs every token's place."""
    return rows._replace(top_k=None, top_p=None, min_p=None, typical_p=None)


def choose(
    law: Float[Array, "B S V"],
    greedy: Bool[Array, " B"],
    noise: Noise,
    offset: int,
    *,
    kind: str,
    count: int,
) -> Int[Array, "B S {count}"]:
    """Returns `count` children of each of S nodes, in order.

    Nodes of one depth share the noise: a verdict looks at the children of one of them.
    Where fewer tokens are possible than are asked for, the last ones mean nothing:
    their probability is 0, or they repeat an earlier one.

    Args:
      law: Policy rows at the S nodes, `lively` in greedy rows.
      greedy: Rows whose children are ranked.
      noise: The drafter's.
      offset: Depth of the nodes; 0 is the root.
      kind: One of `KINDS`.
      count: Children of each node.
    """
    batch, size, vocab_size = law.shape
    token_ids = jnp.arange(vocab_size, dtype=jnp.int32)[None, None]
    still = isinstance(noise, NoNoise) or kind == "ranked"
    again = (kind == "independent") & ~greedy[:, None, None]

    def gumbel(source: Noise) -> Array:
        drawn = jnp.asarray(source.gumbel(offset, vocab_size), law.dtype)
        return jnp.where(greedy[:, None], 0, drawn)[:, None]

    shared = jnp.zeros((batch, 1, 1), law.dtype) if still else gumbel(noise)

    def choose_one(rank: Array, carry: Any) -> Any:
        removed, chosen = carry
        scores = law + shared
        if kind == "independent" and not still:
            scores = law + gumbel(noise.child(rank, rank * FAR))
        token = first_argmax(jnp.where(removed, -jnp.inf, scores))
        removed |= (token_ids == token[..., None]) & ~again
        return removed, chosen.at[:, :, rank].set(token)

    start = (
        jnp.zeros(law.shape, bool),
        jnp.zeros((batch, size, count), jnp.int32),
    )
    return jax.lax.fori_loop(0, count, choose_one, start)[1]


def told(
    law: Float[Array, "B S V"], tokens: Int[Array, "B S"], greedy: Bool[Array, " B"]
) -> Float[Array, "B S V"]:
    """Returns what each token was drawn from.

    It is certain in greedy rows, and where the law is not a number.
    """
    drawn = ~greedy[:, None, None] & ~jnp.isnan(law[..., :1])
    return jnp.where(drawn, law, certain(tokens, law.shape[-1]).astype(law.dtype))


def has_laws(rows: SamplingRows, kind: str) -> bool:
    """Returns whether drafts of the kind come with the laws they were drawn from."""
    return kind != "ranked" and not is_greedy(rows)
