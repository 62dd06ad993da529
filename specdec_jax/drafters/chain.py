"""Drawing a chain, token by token, and when to stop.

Whether a token is proposed may depend on everything known before it is drawn, and not
on the token itself (ALGORITHMS 0.1 and B.9). So there are two places to stop: before a
token is drawn, by the law it would be drawn from, and after it, when the token that
triggered the stop is kept and judged like any other. Dropping that token would be
biased: what is left would be the law given that the draft liked its own token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specdec_jax.base import Draft, RoundContext
from specdec_jax.rng import draw
from specdec_jax.sampling import History, is_greedy, law_dtype, policy


@dataclass(frozen=True)
class Stop:
    """When a row ends its draft early; a row stops by whichever comes first.

    Both look at the draft's raw law, softmax(logits), before temperature and filters:
    so greedy rows stop too, where the policy is one-hot.

    It pays where drafting is dear: a round is verified at full width in any case,
    unless every row stops before its first token, and drafting ends when the last row
    of the batch has stopped. A threshold is part of the compiled program.

    Args:
      below: Stops after a token whose probability is less (Hugging Face's
        `assistant_confidence_threshold`, .4 there); the token is kept.
      entropy: Stops before a token whose law has more entropy, in nats. AdaEDL
        (arXiv:2410.18351) stops where 1 - sqrt(g H) < l, which is H > (1 - l)^2 / g.
    """

    below: float | None = None
    entropy: float | None = None

    def __post_init__(self):
        """Refuses thresholds that never or always stop."""
        if self.below is None and self.entropy is None:
            raise ValueError("give a Stop a threshold: below or entropy")
        if self.below is not None and not 0 < self.below < 1:
            raise ValueError(
                f"below is {self.below}; it is a probability between 0 and 1"
            )
        if self.entropy is not None and not self.entropy > 0:
            raise ValueError(f"entropy is {self.entropy}; it must be above 0 nats")

    def before(self, log_probs: Float[Array, "B V"]) -> Bool[Array, " B"]:
        """Returns the rows that stop before they draw, by their raw law."""
        if self.entropy is None:
            return jnp.zeros(len(log_probs), bool)
        terms = jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0)
        return -terms.sum(axis=-1) > self.entropy

    def after(self, log_prob: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Returns the rows that stop, given their token's raw log-probability."""
        if self.below is None:
            return jnp.zeros(len(log_prob), bool)
        return jnp.exp(log_prob) < self.below


def draw_chain(
    read: Callable[[Array, Any], tuple[Array, Any]],
    logits: Float[Array, "B 1 V"],
    cache: Any,
    context: RoundContext,
    num_nodes: int,
    stop: Stop | None = None,
) -> tuple[Draft, Any]:
    """Draws a chain in as many reads as the row that draws longest needs, less one.

    A row also ends where its law is none: logits without a finite maximum (every token
    forbidden or unknown to the draft, or a model that has nothing to say).

    Args:
      read: Takes tokens [B, 1] and a cache; returns logits [B, 1, V] and the cache.
      logits: After the last committed token.
      cache: Holds all committed tokens.
      context: What the drafter was given.
      num_nodes: Slots of the draft, K.
      stop: When rows end early.

    Returns:
      The draft, with the law of each token unless all rows are greedy, and the cache.
    """
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    keep_laws = not is_greedy(context.sampling)

    def draw_next(index, logits, limit, tokens, laws):
        history = History.plain(tokens, context.length + index)
        law = policy(logits, context.sampling, history)[:, 0]
        usable = ~jnp.isnan(law[:, 0])  # a policy row is a number throughout or nowhere
        before = ~usable
        if stop is not None:
            raw = _raw_law(logits)
            before |= stop.before(raw)
        limit = jnp.where(before, jnp.minimum(limit, index), limit)
        token = draw(law, context.noise, index)
        if stop is not None:
            after = stop.after(raw[rows, token])
            limit = jnp.where(after, jnp.minimum(limit, index + 1), limit)
        tokens = tokens.at[rows, context.length + index].set(token, mode="drop")
        if keep_laws:
            law = jnp.where(usable[:, None], law, 0)
            laws = jax.lax.dynamic_update_index_in_dim(laws, law, index, 1)
        return token, limit, tokens, laws

    def body(carry):
        index, token, cache, *rest = carry
        logits, cache = read(token[:, None], cache)
        token, *rest = draw_next(index, logits, *rest)
        return index + 1, token, cache, *rest

    laws = None
    if keep_laws:
        shape = (len(rows), num_nodes, logits.shape[-1])
        laws = jnp.zeros(shape, law_dtype(logits))
    zero = jnp.zeros((), jnp.int32)
    token, *rest = draw_next(zero, logits, context.max_draft, context.tokens, laws)
    with jax.named_scope("drafting"):  # `plan` tells the loop by it
        _, _, cache, limit, tokens, laws = jax.lax.while_loop(
            lambda carry: carry[0] < carry[3].max(),
            body,
            (zero + 1, token, cache, *rest),
        )
    slots = context.length[:, None] + jnp.arange(num_nodes, dtype=jnp.int32)[None]
    drafted = jnp.take_along_axis(tokens, slots, axis=1)
    return Draft(drafted, limit, laws), cache


def _raw_law(logits: Float[Array, "B 1 V"]) -> Float[Array, "B V"]:
    """Returns the law of the logits as they are, in nats; NaN where there is none."""
    return jax.nn.log_softmax(logits[:, 0].astype(law_dtype(logits)), axis=-1)
