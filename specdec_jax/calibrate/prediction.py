"""What the parts of a round say about each draft length, beside what the clock said.

With S_k and the share w of wide rounds as the laps counted them, `theory.speedup` is
asked for E[N] / T(K), where in seconds

    T(K) = D T_q + w T_p(K + 1) + (1 - w) T_p(1) + o(K)

with D levels, K of them in a chain. A plain step takes T(0) = T_p(1) + o(0), the unit
of all of them. The overhead o(K) is what a whole round takes beyond its drafting and
the target's pass: the rule, the bookkeeping of the loop, the reading of the last two
tokens with which a model's draft begins. It is below 0 where a part alone is slower
than inside a round. The cost ratio c is T(0) / T_q, the verify factor v(K) is
T_p(K + 1) / T_p(1).

Each length has its own survival: a round of a long draft mostly begins where a draft
was rejected, which is a hard place. For the bundled pair at temperature 0 the survival
of K = 16 would make E[N] at K = 4 come out 9% short. Held rounds share no second with
the laps that they predict.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from specdec_jax import theory
from specdec_jax.benchmark.bootstrap import Estimate, estimate
from specdec_jax.benchmark.sweep import Sweep

Weights = Float[np.ndarray, "D U"]


@dataclass(frozen=True)
class Parts:
    """Means over a sweep's units, weighted in D ways; times are in seconds.

    Attributes:
      sweep: What was measured.
      weights: How often each unit counts.
    """

    sweep: Sweep
    weights: Weights

    @classmethod
    def of(cls, sweep: Sweep) -> "Parts":
        """Returns the means in which each unit counts once."""
        return cls(sweep, np.ones((1, len(sweep.units))))

    @property
    def step(self) -> Float[np.ndarray, " D"]:
        """A whole round of plain decoding."""
        return self._mean(0, "round_seconds")

    @property
    def draft_step(self) -> Float[np.ndarray, " D"]:
        """T_q: a drafted level; of a chain, a token."""
        longest = max(self.sweep.lengths)
        return self._mean(longest, "draft_seconds") / self.sweep.depth(longest)

    @property
    def cost_ratio(self) -> Float[np.ndarray, " D"]:
        """A plain step over a drafted level."""
        return self.step / self.draft_step

    def verify_factor(self, length: int) -> Float[np.ndarray, " D"]:
        """Returns T_p(K + 1) over T_p(1)."""
        return self._mean(length, "pass_seconds") / self._mean(0, "pass_seconds")

    def overhead(self, length: int) -> Float[np.ndarray, " D"]:
        """Returns the seconds of a held round beyond its drafting and its pass."""
        drafting = self.sweep.depth(length) * self.draft_step
        passing = self._passing(length, self._mean(length, "round_wide"))
        return self._mean(length, "round_seconds") - drafting - passing

    def wide_share(self, length: int) -> Float[np.ndarray, " D"]:
        """Returns the share of the laps' rounds in which something was drafted."""
        wide, rounds = (self._mean(length, name) for name in ("wide", "rounds"))
        return wide / np.maximum(rounds, 1)

    def survival(self, length: int) -> Float[np.ndarray, "D K"]:
        """Returns S_1..S_D: shares of rounds that emitted at least k drafts."""
        counts = self.weights @ self.sweep.histogram(length)
        reached = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
        return reached[:, 1:] / np.maximum(reached[:, :1], 1)

    def speedup(self, length: int) -> Float[np.ndarray, " D"]:
        """Returns the predicted speedup of a draft length."""
        passing = self._passing(length, self.wide_share(length))
        factor = (passing + self.overhead(length)) / self.step
        depth = self.sweep.depth(length)
        curve = theory.speedup(
            jnp.asarray(self.survival(length), jnp.float32),
            jnp.asarray(self.cost_ratio, jnp.float32),
            jnp.asarray(np.repeat(factor[:, None], depth + 1, axis=1), jnp.float32),
        )
        return np.asarray(curve[:, -1])

    def _passing(
        self, length: int, wide: Float[np.ndarray, " D"]
    ) -> Float[np.ndarray, " D"]:
        """Returns the seconds of the target's pass, if a share of them is wide."""
        narrow = self._mean(0, "pass_seconds")
        return wide * self._mean(length, "pass_seconds") + (1 - wide) * narrow

    def _mean(self, length: int, field: str) -> Float[np.ndarray, " D"]:
        """Returns the mean over units of the medians over repeats."""
        per_unit = self.sweep.median(length, field)
        return self.weights @ per_unit / self.weights.sum(axis=1)


def predicted(sweep: Sweep, length: int) -> Estimate:
    """Returns the speedup that the parts predict, with its bootstrap over units."""
    return estimate(
        lambda weights: Parts(sweep, weights).speedup(length), len(sweep.units)
    )


def measured(sweep: Sweep, length: int) -> Estimate:
    """Returns the speedup of the laps: seconds a token, plain over speculative."""

    def rate(weights: Weights, length: int) -> Float[np.ndarray, " D"]:
        seconds, tokens = sweep.costs(length)
        return (weights @ tokens) / (weights @ seconds)

    return estimate(
        lambda weights: rate(weights, length) / rate(weights, 0), len(sweep.units)
    )
