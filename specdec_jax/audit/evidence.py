"""Scored tokens, gathered and tested: one p-value from several statistics.

Sums are gathered as the chunks come; nothing that grows with the vocabulary is kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec_jax.audit import scores
from specdec_jax.audit.power import ENOUGH, SIZE, Power
from specdec_jax.audit.scores import Scores


class Evidence(NamedTuple):
    """What a sample of emitted tokens says about their law."""

    p_value: float
    """Of all tests together, corrected by Bonferroni."""
    tests: dict[str, float]
    """The p-value of each test by itself."""
    power: Power
    """Known before the sample was drawn."""
    num_tokens: int
    """Emitted tokens that were tested."""
    impossible: int
    """Tokens that the target cannot emit."""
    draft_deviation: float | None = None
    """Largest deviation of the draft laws that the loop was told from the draft
    model's own, in probability; costs speed, never exactness. None: not checked."""

    @property
    def lossless(self) -> bool:
        """Whether the sample fits the target's law."""
        return self.p_value >= SIZE

    @property
    def conclusive(self) -> bool:
        """Whether the sample was large enough for its silence to mean something."""
        return self.power.least >= ENOUGH


class _Sum:
    """A sum of scores of mean 0, and what its variance must be."""

    def __init__(self, which: str):
        self.which, self.total, self.variance = which, 0.0, 0.0

    def add(self, found: Scores, places: np.ndarray) -> None:
        values = getattr(found, self.which)[places]
        variances = getattr(found, self.which + "_variance")[places]
        self.total += float(values.sum(dtype=np.float64))
        self.variance += float(variances.sum(dtype=np.float64))

    @property
    def p_value(self) -> float:
        return scores.normal_p_value(self.total, self.variance)


class Gatherer:
    """Gathers scores chunk by chunk.

    Args:
      sums: Tests of a sum: name to the score's name, and to what picks its places.
    """

    def __init__(self, sums: dict[str, tuple[str, Callable]]):
        self._sums = {name: (_Sum(which), pick) for name, (which, pick) in sums.items()}
        self._buckets: list[np.ndarray] = []
        self._num_tokens = self._impossible = 0
        self._draft_deviation: float | None = None

    @property
    def num_tests(self) -> int:
        """How many tests share the audit's size."""
        return len(self._sums) + 1

    def add(
        self,
        found: Scores,
        emitted: np.ndarray,
        buckets: np.ndarray,
        draft_deviation: float | None = None,
        **facts: np.ndarray,
    ) -> None:
        """Adds scored places; `facts` are what the tests pick places by."""
        for total, pick in self._sums.values():
            total.add(found, emitted & pick(**facts))
        self._buckets.append(buckets)
        self._num_tokens += int(emitted.sum())
        self._impossible += int((emitted & ~found.possible).sum())
        if draft_deviation is not None:
            self._draft_deviation = max(self._draft_deviation or 0.0, draft_deviation)

    def evidence(self, power: Power) -> Evidence:
        """Tests everything that was added."""
        tests = {"joint buckets": scores.joint_buckets(np.concatenate(self._buckets))}
        tests |= {name: total.p_value for name, (total, _) in self._sums.items()}
        p_value = scores.corrected(list(tests.values()))
        return Evidence(
            p_value=0.0 if self._impossible else p_value,
            tests=tests,
            power=power,
            num_tokens=self._num_tokens,
            impossible=self._impossible,
            draft_deviation=self._draft_deviation,
        )
