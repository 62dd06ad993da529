"""Rules that keep more than they may: the text does not have the target's law.

They are here to be compared with. Neither is ever a default, and each is named lossy
wherever its results are shown. At temperature 0 both give greedy decoding's text.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.acceptance.rejection import (
    log_accept,
    token_wise_law,
    token_wise_verdict,
)
from specdec_jax.base import SIBLINGS, Draft, Noise, Verdict
from specdec_jax.rng import draw


@dataclass(frozen=True)
class Lenience:
    """Keeps token x with probability min(1, p(x) / (factor q(x))). Lossy.

    Leviathan et al. (arXiv:2211.17192, appendix A.5): q is multiplied by the factor
    before it is compared with p; a rejected token is replaced by a draw from
    max(0, p - q), as without lenience. No token comes with more than p(x) / factor.

    Args:
      factor: Between 0 (keeps everything) and 1 (rejection itself), both excluded.
    """

    factor: float = 0.5
    lossless: ClassVar[bool] = False
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = ("none",)
    noise: ClassVar[str] = "round"

    def __post_init__(self):
        """Refuses factors that make no such rule."""
        if not 0 < self.factor < 1:
            raise ValueError(
                f"factor is {self.factor}; it must lie between 0 and 1, both excluded "
                "(1 is the rejection rule)"
            )

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the exact law of the verdict; see `base.AcceptanceRule.law`."""
        ratio = self._log_accept(draft, target_log_probs)
        return token_wise_law(ratio, draft, target_log_probs)

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict, with the noise that rejection would use."""
        ratio = self._log_accept(draft, target_log_probs)
        return token_wise_verdict(noise, ratio, draft, target_log_probs)

    def _log_accept(self, draft, target_log_probs):
        ratio = log_accept(draft, target_log_probs)
        return ratio - jnp.log(jnp.asarray(self.factor, ratio.dtype))


@dataclass(frozen=True)
class Typical:
    """Keeps x if p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats. Lossy.

    Medusa's typical acceptance (arXiv:2401.10774), with its code's defaults. It looks
    at no draft law and flips no coin, so any chain or tree will do; the longest kept
    path wins, of equals the first. The next token is drawn from the target.

    Args:
      epsilon: The bar where the target is sure of itself.
      delta: Factor of the bar where it is not.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    lossless: ClassVar[bool] = False
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = SIBLINGS
    noise: ClassVar[str] = "round"

    def __post_init__(self):
        """Refuses bars that keep everything, or not even what is certain."""
        if not (0 < self.epsilon < 1 and self.delta > 0):
            raise ValueError(
                f"epsilon is {self.epsilon} and delta {self.delta}; epsilon must lie "
                "between 0 and 1, and delta be above 0"
            )

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the exact law of the verdict; see `base.AcceptanceRule.law`."""
        node, _, _ = self._longest(draft, target_log_probs)
        slots = jnp.arange(-1, len(target_log_probs) - 1, dtype=jnp.int32)
        stop = (slots == node).astype(target_log_probs.dtype)
        return stop, jnp.exp(target_log_probs)

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict; only its next token is random."""
        node, depth, path = self._longest(draft, target_log_probs)
        return Verdict(depth, draw(target_log_probs[node + 1], noise, depth), path)

    def _longest(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, " N"]]:
        """Returns the last node of the longest kept path (-1: none), depth and path."""
        slots = jnp.arange(len(target_log_probs) - 1, dtype=jnp.int32)
        if len(slots) == 0:
            none = jnp.zeros((), jnp.int32)
            return none - 1, none, slots
        parents = slots - 1 if draft.parents is None else draft.parents
        likely = self._is_typical(draft.tokens, target_log_probs[parents + 1])
        likely &= slots < draft.num_valid

        def extend(node, carry):
            depths, paths = carry
            before = depths[parents[node] + 1]
            path = paths[parents[node] + 1].at[before].set(node, mode="drop")
            kept = likely[node] & (before >= 0)
            depths = depths.at[node + 1].set(jnp.where(kept, before + 1, -1))
            return depths, paths.at[node + 1].set(path)

        depths = jnp.zeros((len(target_log_probs),), jnp.int32)
        paths = jnp.tile(slots, (len(target_log_probs), 1))
        depths, paths = jax.lax.fori_loop(0, len(slots), extend, (depths, paths))
        best = jnp.argmax(depths).astype(jnp.int32)
        return best - 1, depths[best], paths[best]

    def _is_typical(
        self, tokens: Int[Array, " N"], rows: Float[Array, "N V"]
    ) -> Bool[Array, " N"]:
        """Returns which tokens lie above the bar of their row."""
        probs = jnp.exp(rows)
        entropy = -jnp.where(probs > 0, probs * rows, 0).sum(axis=-1)
        bar = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        tokens = jnp.clip(tokens, 0, rows.shape[1] - 1)
        return jnp.take_along_axis(probs, tokens[:, None], axis=1)[:, 0] > bar
