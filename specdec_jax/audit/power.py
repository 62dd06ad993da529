"""How likely a fault of a known kind is to be seen, before anything is run.

The law that each named fault emits at the first place of a round is known from p and q
alone, so the leak score's mean and variance under it are too. Later places and other
tests only add to it.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from specdec_jax.audit.scores import MOST_LEAK

SIZE = 1e-3
"""Chance that one audit calls a lossless decoder lossy, all its tests together."""

ENOUGH = 0.9
"""Power below which silence proves nothing."""


def _first_unconditional(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return q


def _rejected(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return 1 - np.minimum(p, q).sum(-1, keepdims=True)


def _no_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.minimum(p, q) + _rejected(p, q) * p


def _absolute(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    gap = np.abs(p - q)
    total = gap.sum(-1, keepdims=True)
    share = gap / np.where(total > 0, total, 1)
    return np.minimum(p, q) + _rejected(p, q) * share


def _lenient(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    kept = np.minimum(p / 0.9, q)
    left = np.maximum(p - q, 0)
    total = left.sum(-1, keepdims=True)
    share = left / np.where(total > 0, total, 1)
    return kept + (1 - kept.sum(-1, keepdims=True)) * share


NAMED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "first token unconditional": _first_unconditional,
    "no residual": _no_residual,
    "absolute difference as residual": _absolute,
    "lenience 0.9": _lenient,
}
"""Laws [C, V] that faults emit at the first place of a round, from p and q."""

JUDGED_BY = ("first token unconditional", "no residual")
"""Faults that an audit must be able to see, or it is inconclusive."""


class Power(NamedTuple):
    """What a sample can show."""

    num_samples: int
    """Emitted tokens at the first places of rounds."""
    by_fault: dict[str, float]
    """Chance that the named fault is seen."""

    @property
    def least(self) -> float:
        """The lowest over `JUDGED_BY`."""
        return min(self.by_fault[name] for name in JUDGED_BY)

    def __str__(self) -> str:
        chances = ", ".join(f"{n} {p:.3f}" for n, p in self.by_fault.items())
        return f"{self.num_samples} drafted places; power: {chances}"


def telling(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """Returns how much a missing residual shifts the leak score at contexts, [C].

    In standard deviations of one token's score; 0 where nothing is proposed.
    """
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    weight = _leak_weight(p, q)
    mean, variance = _moments(p, weight)
    sigma = np.sqrt(np.maximum(variance, 0))
    shift = np.abs(_moments(_no_residual(p, q), weight)[0] - mean)
    found = shift / np.where(sigma > 0, sigma, 1)
    return np.where((q.sum(-1) > 0.5) & (sigma > 0), found, 0)


def power(
    target: np.ndarray, draft: np.ndarray, num_samples: int, num_tests: int
) -> Power:
    """Returns the power of the leak score with `num_samples` tokens a context.

    Args:
      target: [C, V] probabilities, the target's policy at each context.
      draft: [C, V] probabilities of what is proposed there; rows of zeros where
        nothing is.
      num_samples: Tokens drawn at each context.
      num_tests: Tests that share the audit's size.

    Example:
      >>> p, q = np.array([[0.4, 0.6]]), np.array([[0.6, 0.4]])
      >>> power(p, q, 1000, 5).by_fault["no residual"] > 0.9
      True
    """
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    drafted = q.sum(-1) > 0.5
    p, q = p[drafted], q[drafted]
    weight = _leak_weight(p, q)
    bar = -NormalDist().inv_cdf(SIZE / num_tests / 2)

    mean, variance = _moments(p, weight)
    sigma = math.sqrt(max(num_samples * variance.sum(), 0.0))
    chances = {}
    for name, law_of in NAMED.items():
        law = law_of(p, q)
        if (law[p == 0] > 1e-9).any():
            # A single impossible token is proof.
            leaking = np.where(p == 0, law, 0).sum()
            impossible = 1 - math.exp(-num_samples * leaking)
        else:
            impossible = 0.0
        faulty, spread = _moments(law, weight)
        shift = num_samples * (faulty - mean).sum()
        width = math.sqrt(max(num_samples * spread.sum(), 0.0))
        chances[name] = max(impossible, _beyond(bar * sigma, shift, width))
    return Power(num_samples * len(target), chances)


def _leak_weight(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns the leak score of each token."""
    return np.minimum(q / np.where(p > 0, p, 1), MOST_LEAK)


def _moments(law: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and variance [C] of a score under a law."""
    mean = (law * weight).sum(-1)
    return mean, (law * weight**2).sum(-1) - mean**2


def _beyond(bar: float, mean: float, sigma: float) -> float:
    """Returns P(|X| > bar) for a normal X."""
    if sigma <= 0:
        return float(abs(mean) > bar)
    law = NormalDist(mean, sigma)
    return 1 - law.cdf(bar) + law.cdf(-bar)
