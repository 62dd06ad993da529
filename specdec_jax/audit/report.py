"""What the levels of an audit found, and what follows from it."""

from typing import Any, NamedTuple

from specdec_jax.audit import enumeration
from specdec_jax.audit.evidence import Evidence
from specdec_jax.audit.exact import ExactLaw
from specdec_jax.audit.loop_law import DRAFT_TOLERANCE
from specdec_jax.audit.power import SIZE
from specdec_jax.audit.texts import Texts

LOSSLESS, LOSSY, INCONCLUSIVE = "lossless", "not lossless", "inconclusive"


class Enumerated(NamedTuple):
    """What enumeration and injected coins came to."""

    by_rule: dict[str, float]
    """Largest deviation of each rule's joint law on small tables."""
    coin_problems: list[str]
    """What is wrong with the coins of the audited rule."""

    @property
    def max_deviation(self) -> float:
        """The largest of all rules."""
        return max(self.by_rule.values())

    @property
    def lossless(self) -> bool:
        """Whether rounding explains the deviations and the coins fall right."""
        return self.max_deviation <= enumeration.TOLERANCE and not self.coin_problems


class Report(NamedTuple):
    """What each level found; None where it was not run."""

    exact_law: ExactLaw | None = None
    enumeration: Enumerated | None = None
    statistics: Evidence | None = None
    identity: Texts | None = None
    lossy_rule: str | None = None
    """The audited rule, if it does not even claim to keep the law."""
    draft_tolerance: float = DRAFT_TOLERANCE
    """Deviation of a draft law that rounding explains; more for small dtypes."""

    @property
    def verdict(self) -> str:
        """LOSSLESS, LOSSY or INCONCLUSIVE.

        Inconclusive: nothing was found, but the sample was too small for its silence
        to mean anything.
        """
        levels = [level for level in self[:4] if level is not None]
        if self.lossy_rule or not all(level.lossless for level in levels):
            return LOSSY
        if self.statistics is not None and not self.statistics.conclusive:
            return INCONCLUSIVE
        return LOSSLESS

    def reasons(self) -> list[str]:
        """Returns what speaks against a clean bill, as sentences."""
        found = []
        if self.lossy_rule:
            found.append(
                f"{self.lossy_rule} is lossy by design: its texts do not have the "
                "target's distribution, whatever the levels found"
            )
        exact, tables, sample, texts = self[:4]
        if exact is not None and not exact.lossless:
            found.append(
                f"the exact law on real logits deviates by {exact.max_deviation:.3g}"
            )
        if tables is not None and not tables.lossless:
            wrong = [n for n, d in tables.by_rule.items() if d > enumeration.TOLERANCE]
            found += [f"the joint law of {name} is not the target's" for name in wrong]
            found += tables.coin_problems
        if sample is not None and not sample.lossless:
            worst = min(sample.tests, key=lambda name: sample.tests[name])
            found.append(
                f"{sample.impossible} emitted tokens are impossible under the target"
                if sample.impossible
                else f"the sample does not fit the target's law ({worst}, p = "
                f"{sample.p_value:.2g} < {SIZE:g})"
            )
        if texts is not None:
            if texts.mismatches:
                found.append(
                    f"{texts.mismatches} texts part from plain decoding where rounding "
                    "does not explain it"
                )
            found += texts.problems
        if sample is not None and sample.lossless and not sample.conclusive:
            found.append(
                f"the sample sees the faults it is judged by with power "
                f"{sample.power.least:.2f} only; use more samples, or a draft that "
                "differs more from the target"
            )
        return found

    def warnings(self) -> list[str]:
        """Returns what costs speed but not exactness, as sentences."""
        gap = None if self.statistics is None else self.statistics.draft_deviation
        if gap is None or gap <= self.draft_tolerance:
            return []
        return [
            f"the draft's laws are {gap:.2g} from those of its model on the same "
            "tokens: its cache, positions or policy are wrong, which costs acceptance"
        ]

    def document(self) -> dict[str, Any]:
        """Returns everything as plain values for JSON; levels not run are None."""
        return {
            "verdict": self.verdict,
            "reasons": self.reasons(),
            "warnings": self.warnings(),
            "exact_law": self.exact_law and self.exact_law._asdict(),
            "enumeration": self.enumeration and _enumeration(self.enumeration),
            "statistics": self.statistics and _statistics(self.statistics),
            "identity": self.identity and _identity(self.identity),
        }


def _enumeration(found: Enumerated) -> dict[str, Any]:
    return {"max_deviation": found.max_deviation, **found._asdict()}


def _statistics(found: Evidence) -> dict[str, Any]:
    return {
        "p_value": found.p_value,
        "power": found.power.least,
        "power_by_fault": found.power.by_fault,
        "num_samples": found.power.num_samples,
        "num_tokens": found.num_tokens,
        "tests": found.tests,
        "impossible": found.impossible,
        "draft_deviation": found.draft_deviation,
    }


def _identity(found: Texts) -> dict[str, Any]:
    lowest, mean, highest = found.agreement
    return {
        "identical": found.identical,
        "near_ties": found.near_ties,
        "mismatches": found.mismatches,
        "differences": [
            {
                "way": one.way,
                "prompt": one.row,
                "position": one.difference.position,
                "margin": one.difference.margin,
                "near_tie": one.difference.margin < found.tie,
            }
            for one in found.found
        ],
        "near_tie_below": found.tie,
        "agreement": {"lowest": lowest, "mean": mean, "highest": highest},
        "rounding": found.rounding,
        "problems": found.problems,
    }
