"""Bootstrap intervals over what was drawn independently: prompts, or their batches."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

LEVEL = 0.9
"""Coverage of all intervals."""

DRAWS = 2000


class Estimate(NamedTuple):
    """A value, and the interval that holds 90% of what other draws would have given."""

    value: float
    low: float
    high: float


def estimate(
    statistic: Callable[[Float[np.ndarray, "D U"]], Float[np.ndarray, " D"]],
    num_units: int,
) -> Estimate:
    """Returns a statistic of all units, with the quantiles of its bootstrap.

    Args:
      statistic: Takes how often each of the U units counts, a row a draw.
      num_units: U.

    Example:
      >>> heights = np.array([1.0, 2.0, 3.0])
      >>> estimate(lambda weights: weights @ heights / weights.sum(axis=1), 3).value
      2.0
    """
    rng = np.random.default_rng(0)
    draws = rng.multinomial(num_units, [1 / num_units] * num_units, DRAWS)
    weights = np.concatenate([np.ones((1, num_units)), draws])
    value, *others = np.asarray(statistic(weights), np.float64)
    low, high = np.quantile(others, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high))
