"""Block verification as an exact law, in replaceable parts (arXiv:2403.10444).

Sun et al.: with w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), let S_i be the mass
of max(0, w_i P_i - Q_i) and h_i = S_i / (S_i + 1 - w_i), h_K = w_K. The last coin below
its h_i says how much is kept; the next token has the law proportional to
max(0, w_i P_i - Q_i). Three ways to get it wrong were shipped; two of them leave every
marginal almost right.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specdec_jax.acceptance import rejection
from specdec_jax.base import Draft


@dataclass(frozen=True)
class BlockLaw:
    """The law of block verification for chains with laws; exact as it comes.

    Args:
      first_failure: Stops at the first coin that fails, as token-wise rules do.
      token_residual: Corrects by max(0, P - Q), as token-wise rules do.
      clip_at_end: Clips the product of ratios once instead of at every step.
    """

    first_failure: bool = False
    token_residual: bool = False
    clip_at_end: bool = False
    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = True
    siblings: ClassVar[tuple[str, ...]] = ("none",)
    noise: ClassVar[str] = "round"

    def law(self, draft: Draft, target_log_probs: Float[Array, "M V"]):
        """See `base.AcceptanceRule.law`."""
        assert draft.log_probs is not None
        weights = self._weights(draft, target_log_probs)
        target = jnp.exp(target_log_probs)
        zero = jnp.zeros((1, target.shape[1]), target.dtype)
        proposed = jnp.concatenate([jnp.exp(draft.log_probs), zero])
        left = jnp.maximum(weights[:, None] * target - proposed, 0)
        mass = left.sum(-1)[:-1]
        share = mass + 1 - weights[:-1]
        inner = jnp.where(share > 0, mass / jnp.where(share > 0, share, 1), 1)
        keep = jnp.concatenate([inner[1:], weights[-1:]])
        if self.token_residual:
            left = jnp.maximum(target - proposed, 0)
        total = left.sum(-1, keepdims=True)
        rows = jnp.where(total > 0, left / jnp.where(total > 0, total, 1), target)
        return self._stop(keep), rows

    def _weights(self, draft, target):
        """Returns w_0 .. w_K."""
        one = jnp.ones((), target.dtype)
        ratios = jnp.exp(rejection.log_accept(draft, target))
        if self.clip_at_end:
            running = jnp.cumprod(ratios)
            return jnp.minimum(jnp.concatenate([one[None], running]), 1)

        def step(weight, ratio):
            weight = jnp.minimum(weight * ratio, 1)
            return weight, weight

        return jnp.concatenate([one[None], jax.lax.scan(step, one, ratios)[1]])

    def _stop(self, keep):
        """Returns P(0 kept) .. P(K kept) from the chance that each coin is below."""
        one = jnp.ones((1,), keep.dtype)
        if self.first_failure:
            reach = jnp.concatenate([one, jnp.cumprod(keep)])
            return reach * (1 - jnp.concatenate([keep, one - 1]))
        fails_later = jnp.cumprod(jnp.concatenate([one, 1 - keep[::-1]]))[::-1]
        return jnp.concatenate([one, keep]) * fails_later
