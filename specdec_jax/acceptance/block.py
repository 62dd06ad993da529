"""Block verification (Sun et al., arXiv:2403.10444): judges a chain as a whole.

With w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)) and S_i the mass of
max(0, w_i P_i - Q_i), coin i is below h_i = S_i / (S_i + 1 - w_i), h_K = w_K. The
*last* such coin says how much is kept (a failure before it does not matter), and the
next token has the law proportional to max(0, w_i P_i - Q_i), or P_K after all K.

Then P(at least i kept | x_1..x_i) = w_i: of all rules that look at the drafted path
only, none keeps more in expectation, and E[kept] = sum of E[w_i]. It gains over
token-wise rejection where ratios vary along the path, and nothing under a greedy target
or for a one-hot draft.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.acceptance.rejection import Rejection, log_accept, log_coins
from specdec_jax.base import Draft, Noise, Verdict
from specdec_jax.rng import draw


@dataclass(frozen=True)
class Block:
    """Block verification for chains. Lossless; keeps no less than `Rejection`.

    Drafts without `log_probs` are one-hot, where it has nothing to gain: rejection
    judges them.
    """

    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = ("none",)
    noise: ClassVar[str] = "round"

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the exact law of the verdict; see `base.AcceptanceRule.law`."""
        if draft.log_probs is None:
            return Rejection().law(draft, target_log_probs)
        log_weights, log_keep = self._chances(draft, target_log_probs)
        rows = jax.vmap(
            lambda n: self._next_log_probs(draft, target_log_probs, log_weights, n)
        )(jnp.arange(len(target_log_probs), dtype=jnp.int32))
        return self._stop(jnp.exp(log_keep)), jax.nn.softmax(rows, axis=-1)

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict. Uses uniforms 0..N-1 and the Gumbels of one place.

        Raises:
          ValueError: If the draft is a tree.
        """
        if draft.log_probs is None:
            return Rejection()(noise, draft, target_log_probs)
        slots = jnp.arange(len(target_log_probs) - 1, dtype=jnp.int32)
        log_weights, log_keep = self._chances(draft, target_log_probs)
        below = log_coins(noise, slots, log_keep) < log_keep
        num_accepted = self._count(below)
        row = self._next_log_probs(draft, target_log_probs, log_weights, num_accepted)
        return Verdict(num_accepted, draw(row, noise, num_accepted), slots)

    def _chances(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, " N"]]:
        """Returns log w_0 .. log w_N and log h_1 .. log h_N."""
        num_nodes = len(target_log_probs) - 1
        log_weights = self._log_weights(log_accept(draft, target_log_probs))
        if num_nodes == 0:
            return log_weights, log_weights[1:]
        inner = log_weights[1:-1]
        assert draft.log_probs is not None  # such drafts went to rejection
        left = jax.vmap(_left)(inner, target_log_probs[1:-1], draft.log_probs[1:])
        mass = left.sum(axis=-1)
        # 1 - w; 0/0 stands for a token that target and draft agree on: it is kept.
        share = mass - jnp.expm1(inner)
        keep = jnp.where(share > 0, mass / jnp.where(share > 0, share, 1), 1)
        log_keep = jnp.append(jnp.log(keep), log_weights[-1:])
        slots = jnp.arange(num_nodes, dtype=jnp.int32)
        is_last = slots == draft.num_valid - 1
        return log_weights, jnp.where(is_last, log_weights[1:], log_keep)

    def _log_weights(self, log_ratio: Float[Array, " N"]) -> Float[Array, " M"]:
        """Returns log w_0 .. log w_N: the running product, clipped at every step."""
        zero = jnp.zeros((), log_ratio.dtype)

        def step(weight, ratio):
            weight = jnp.minimum(weight + ratio, 0)
            return weight, weight

        return jnp.append(zero, jax.lax.scan(step, zero, log_ratio)[1])

    def _stop(self, keep: Float[Array, " N"]) -> Float[Array, " M"]:
        """Returns P(0 kept) .. P(N kept) from the chance that each coin is below."""
        one = jnp.ones((1,), keep.dtype)
        fail_later = jnp.cumprod(jnp.append(one, 1 - keep[::-1]))[::-1]
        return jnp.append(one, keep) * fail_later

    def _count(self, below: Array) -> Int[Array, ""]:
        """Returns how many tokens are kept: up to the last coin below its chance."""
        place = jnp.arange(1, len(below) + 1, dtype=jnp.int32)
        return jnp.where(below, place, 0).max(initial=0)

    def _next_log_probs(self, draft, target_log_probs, log_weights, num_accepted):
        """Returns the law of the next token; the target's own row after all drafts."""
        target_row = target_log_probs[num_accepted]
        last = len(target_log_probs) - 2
        if last < 0:
            return target_row
        proposal = draft.log_probs[jnp.minimum(num_accepted, last)]
        left = _left(log_weights[num_accepted], target_row, proposal)
        left = jnp.where(left.sum() > 0, jnp.log(left), target_row)
        return jnp.where(num_accepted < draft.num_valid, left, target_row)


def _left(
    log_weight: Float[Array, ""],
    target_log_probs: Float[Array, " V"],
    draft_log_probs: Float[Array, " V"],
) -> Float[Array, " V"]:
    """Returns the masses max(0, w P - Q)."""
    weighted = jnp.exp(log_weight + target_log_probs)
    return jnp.maximum(weighted - jnp.exp(draft_log_probs), 0)
