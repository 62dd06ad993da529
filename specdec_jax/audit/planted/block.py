"""Block verification, wrong in the ways that were shipped (ALGORITHMS B.3).

Each changes one part of the real rule. Two of them leave every marginal almost right.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from specdec_jax.acceptance import Block


@dataclass(frozen=True)
class StopsAtFirstFailure(Block):
    """Stops at the first coin that fails, as token-wise rules do."""

    def _stop(self, keep):
        one = jnp.ones((1,), keep.dtype)
        reach = jnp.append(one, jnp.cumprod(keep))
        return reach * (1 - jnp.append(keep, 0 * one))

    def _count(self, below):
        return jnp.cumprod(below.astype(jnp.int32)).sum(dtype=jnp.int32)


@dataclass(frozen=True)
class TokenResidual(Block):
    """Corrects by max(0, P - Q), as token-wise rules do."""

    def _next_log_probs(self, draft, target_log_probs, log_weights, num_accepted):
        whole = jnp.zeros_like(log_weights)
        return super()._next_log_probs(draft, target_log_probs, whole, num_accepted)


@dataclass(frozen=True)
class ClipsAtTheEnd(Block):
    """Clips the product of ratios once instead of at every step."""

    def _log_weights(self, log_ratio):
        zero = jnp.zeros((1,), log_ratio.dtype)
        return jnp.minimum(jnp.append(zero, jnp.cumsum(log_ratio)), 0)
