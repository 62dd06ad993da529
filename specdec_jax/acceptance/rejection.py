"""Speculative sampling by rejection (arXiv:2211.17192 and 2302.01318).

Leviathan et al. and Chen et al.: accept drafted token x with probability
min(1, p(x) / q(x)); at the first rejection emit a token of the law proportional to
max(0, p - q); if nothing was rejected emit one from p. Accepted mass min(p, q) plus
rejected mass max(0, p - q) is p, whatever q is.

Greedy decoding is the same rule on one-hot rows, and so is a deterministic draft: with
q one-hot at x the test is `u < p(x)` and the residual is p without x.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.base import Draft, Noise, Verdict
from specdec_jax.rng import draw


@dataclass(frozen=True)
class Rejection:
    """Token-wise rejection for chains. Lossless for every draft law."""

    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = ("none",)
    noise: ClassVar[str] = "round"

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the exact law of the verdict; see `base.AcceptanceRule.law`."""
        return token_wise_law(
            log_accept(draft, target_log_probs), draft, target_log_probs
        )

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict. Uses uniforms 0..N-1 and the Gumbels of one place.

        Raises:
          ValueError: If the draft is a tree.
        """
        log_ratio = log_accept(draft, target_log_probs)
        return token_wise_verdict(noise, log_ratio, draft, target_log_probs)


def token_wise_law(
    log_ratio: Float[Array, " N"], draft: Draft, target_log_probs: Float[Array, "M V"]
) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
    """Returns the law of a rule that tests token by token up to the first failure.

    Args:
      log_ratio: Log of each token's chance to be kept, in nats; above 0 is certain.
      draft: A chain.
      target_log_probs: Policy rows, one more than tokens.

    Returns:
      What `base.AcceptanceRule.law` does; a rejected token is replaced by `residual`.
    """
    accept = jnp.exp(jnp.minimum(log_ratio, 0))
    zero = jnp.zeros((1,), accept.dtype)
    reach = jnp.cumprod(jnp.concatenate([zero + 1, accept]))
    stop = reach * (1 - jnp.concatenate([accept, zero]))
    rows = jax.vmap(lambda n: _next_log_probs(draft, target_log_probs, n))(
        jnp.arange(len(target_log_probs), dtype=jnp.int32)
    )
    return stop, jax.nn.softmax(rows, axis=-1)


def token_wise_verdict(
    noise: Noise,
    log_ratio: Float[Array, " N"],
    draft: Draft,
    target_log_probs: Float[Array, "M V"],
) -> Verdict:
    """Draws the verdict whose law is `token_wise_law`."""
    slots = jnp.arange(len(target_log_probs) - 1, dtype=jnp.int32)
    # Strict: a coin of exactly 0 must not accept a token of probability 0.
    accepted = log_coins(noise, slots, log_ratio) < log_ratio
    num_accepted = jnp.cumprod(accepted.astype(jnp.int32)).sum(dtype=jnp.int32)
    row = _next_log_probs(draft, target_log_probs, num_accepted)
    return Verdict(num_accepted, draw(row, noise, num_accepted), slots)


def log_coins(
    noise: Noise, slots: Int[Array, " N"], like: Float[Array, "..."]
) -> Float[Array, " N"]:
    """Returns the logarithms of one coin a slot, in the dtype of `like`."""
    return jnp.log(jnp.asarray(jax.vmap(noise.uniform)(slots), like.dtype))


def log_accept(
    draft: Draft, target_log_probs: Float[Array, "M V"]
) -> Float[Array, " N"]:
    """Returns log p(x_i) - log q(x_i), in nats; `-inf` where nothing can be accepted.

    A token with q = 0, or with a q that is not a number, was not drawn from the law
    that the draft reports; rejecting it keeps the output's law right.
    """
    if draft.parents is not None:
        raise ValueError(
            "this rule judges chains, got a tree; use multi_draft where the siblings "
            "have a law, else the coupled rule."
        )
    slots = jnp.arange(len(target_log_probs) - 1, dtype=jnp.int32)
    tokens = jnp.clip(draft.tokens, 0, target_log_probs.shape[-1] - 1)
    ratio = target_log_probs[slots, tokens]
    proposed = slots < draft.num_valid
    if draft.log_probs is not None:
        draft_log_probs = draft.log_probs[slots, tokens]
        proposed &= draft_log_probs > -jnp.inf
        ratio = ratio - jnp.where(proposed, draft_log_probs, 0)
    return jnp.where(proposed, ratio, -jnp.inf)


def residual(
    target_log_probs: Float[Array, " V"], draft_log_probs: Float[Array, " V"]
) -> Float[Array, " V"]:
    """Returns the law that replaces a rejected token (Leviathan et al., appendix A.1).

    Where rounding leaves no positive mass the target itself is returned: 5% of pairs
    that are equal up to rounding have an all-zero residual beside a ratio below 1.

    Args:
      target_log_probs: Policy row of the target, in nats.
      draft_log_probs: Row that the token was drawn from, in nats.

    Returns:
      Log of the unnormalised law, in nats; `-inf` marks tokens without mass.

    Example:
      The draft under-weights token 1 only, so a rejection always yields it:

      >>> p, q = jnp.log(jnp.array([0.4, 0.6])), jnp.log(jnp.array([0.5, 0.5]))
      >>> jnp.exp(residual(p, q)).round(3).tolist()
      [0.0, 0.10000000149011612]
    """
    mass = jnp.maximum(jnp.exp(target_log_probs) - jnp.exp(draft_log_probs), 0)
    return jnp.where(mass.sum() > 0, jnp.log(mass), target_log_probs)


def residual_one_hot(
    target_log_probs: Float[Array, " V"], token: Int[Array, ""]
) -> Float[Array, " V"]:
    """Returns the residual against a one-hot draft: the target without `token`."""
    rest = jnp.where(
        jnp.arange(len(target_log_probs), dtype=jnp.int32) == token,
        -jnp.inf,
        target_log_probs,
    )
    return jnp.where(rest.max() > -jnp.inf, rest, target_log_probs)


def _next_log_probs(
    draft: Draft, target_log_probs: Float[Array, "M V"], num_accepted: Int[Array, ""]
) -> Float[Array, " V"]:
    """Returns the law of the next token; the target's own row if none was rejected."""
    target_row = target_log_probs[num_accepted]
    last = len(target_log_probs) - 2
    if last < 0:
        return target_row
    slot = jnp.minimum(num_accepted, last)
    if draft.log_probs is None:
        left = residual_one_hot(target_row, draft.tokens[slot])
    else:
        left = residual(target_row, draft.log_probs[slot])
    return jnp.where(num_accepted < draft.num_valid, left, target_row)
