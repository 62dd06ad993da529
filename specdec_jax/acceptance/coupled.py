"""Draw first, then look: the coupled rule, also the membership rule for any tree.

The target draws its own token `y = argmax(log p + gumbel)` at each place and goes on
while `y` is among the drafted children. Every emitted token is the target's own draw,
so nothing about the draft matters, not even its law: with noise by absolute position
the text *equals* plain decoding under the same key, and a drafter that draws with the
same noise is accepted often (Daliri, Musco and Suresh, arXiv:2408.07978). On ranked or
pruned trees this is the membership rule; at temperature 0, greedy tree verification.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.base import SIBLINGS, Draft, Noise, Verdict
from specdec_jax.rng import draw


@dataclass(frozen=True)
class Coupled:
    """Keeps the target's own draws while they are drafted. Lossless for any draft."""

    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = SIBLINGS
    noise: ClassVar[str] = "position"

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the law given a draft made without looking at this noise.

        With shared noise the draft is a function of it, and the emitted tokens are
        plain decoding's by construction. See `base.AcceptanceRule.law`.
        """
        parents, first = _family(draft)
        num_nodes = len(parents)
        vocab_size = target_log_probs.shape[-1]
        probs = jnp.exp(target_log_probs)
        reach = [jnp.ones((), probs.dtype)]
        drafted = jnp.zeros((num_nodes + 1, vocab_size), bool)
        for node in range(num_nodes):
            parent, token = parents[node] + 1, draft.tokens[node]
            reach.append(
                jnp.where(first[node], jnp.stack(reach)[parent], 0)
                * probs[parent, token]
            )
            drafted = drafted.at[parent, token].max(first[node])
        left = jnp.where(drafted, 0, probs)
        mass = left.sum(axis=-1, keepdims=True)
        law = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), probs)
        return jnp.stack(reach) * mass[:, 0], law

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict with the Gumbels of the places it walks through."""
        parents, first = _family(draft)
        token = draw(target_log_probs[0], noise, 0)
        if not len(parents):
            return Verdict(jnp.zeros((), jnp.int32), token, parents)

        def child(node: Int[Array, ""], token: Int[Array, ""]) -> Int[Array, ""]:
            match = first & (parents == node) & (draft.tokens == token)
            return jnp.where(match.any(), jnp.argmax(match), -1).astype(jnp.int32)

        def descend(carry):
            depth, node, _, path = carry
            path = path.at[depth].set(node)
            token = draw(target_log_probs[node + 1], noise, depth + 1)
            return depth + 1, child(node, token), token, path

        root = jnp.full((), -1, jnp.int32)
        depth, _, token, path = jax.lax.while_loop(
            lambda carry: carry[1] >= 0,
            descend,
            (jnp.zeros((), jnp.int32), child(root, token), token, parents),
        )
        return Verdict(depth, token, path)


def _family(draft: Draft) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Returns each node's parent, and whether it counts: valid and no duplicate.

    Of siblings with one token the first counts. A chain has no siblings.
    """
    num_nodes = draft.tokens.shape[0]
    slots = jnp.arange(num_nodes, dtype=jnp.int32)
    valid = slots < draft.num_valid
    if draft.parents is None:
        return slots - 1, valid
    parents, tokens = draft.parents, draft.tokens
    same = (parents[:, None] == parents[None]) & (tokens[:, None] == tokens[None])
    earlier = slots[:, None] > slots[None]
    return draft.parents, valid & ~(same & earlier).any(axis=1)
