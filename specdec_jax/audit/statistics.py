"""Statistics on the real loop: does what it emitted fit the target's law?"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import chi2


def goodness_of_fit(counts: np.ndarray, law: np.ndarray) -> float:
    """Returns the p-value of Pearson's chi-square test of counts against a law.

    Cells that expect fewer than 5 are pooled, so that the statistic has the law of a
    chi-square. An emission that the target cannot make gives 0.

    Args:
      counts: Observed frequencies, any shape.
      law: Probabilities of the same shape.

    Example:
      >>> round(goodness_of_fit(np.array([50, 50]), np.array([0.5, 0.5])), 3)
      1.0
      >>> goodness_of_fit(np.array([900, 100]), np.array([0.5, 0.5])) < 1e-6
      True
    """
    observed, probs = np.ravel(counts).astype(float), np.ravel(law)
    expected = probs / probs.sum() * observed.sum()
    if observed[probs == 0].sum() > 0:
        return 0.0
    rare = expected < 5
    pooled = [(observed[rare].sum(), expected[rare].sum())] if rare.any() else []
    cells = np.array([*zip(observed[~rare], expected[~rare], strict=True), *pooled])
    cells = cells[cells[:, 1] > 0]
    statistic = ((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1]).sum()
    degrees = max(len(cells) - 1, 1)
    return float(chi2.sf(jnp.float32(statistic), jnp.float32(degrees)))


def joint_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns how often each sequence occurs: [R, L] tokens to (V,) * L counts."""
    length = tokens.shape[1]
    cells = np.ravel_multi_index(tuple(tokens.T), (vocab_size,) * length)
    counts = np.bincount(cells, minlength=vocab_size**length)
    return counts.reshape((vocab_size,) * length)
