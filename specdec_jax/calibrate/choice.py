"""Which draft length to use, how much that matters, and whether to speculate at all."""

from collections.abc import Mapping
from dataclasses import dataclass

from specdec_jax.benchmark.bootstrap import Estimate

RESOLUTION = 0.01
"""Lengths whose speedups differ by less are equal; the shortest of them is chosen."""

FLAT = 0.03
"""Lengths that lose at most this much against the best are its plateau."""

MISFIT = 0.1
"""Where prediction and clock differ by more, the verdict says so."""


@dataclass(frozen=True)
class Choice:
    """What to do.

    Attributes:
      num_draft_tokens: The recommended K; 0 is no speculation.
      plateau: Shortest and longest length tried that lose at most `FLAT`, with
        everything between them.
      verdict: The same in words.
    """

    num_draft_tokens: int
    plateau: tuple[int, int]
    verdict: str


def choose(
    measured: Mapping[int, Estimate], predicted: Mapping[int, float] | None = None
) -> Choice:
    """Returns the shortest draft length that is as fast as the fastest.

    Args:
      measured: Speedup over plain decoding of each draft length, 0 included.
      predicted: The same by the parts of a round; what it misses is mentioned.

    Example:
      >>> speedups = {0: 1.0, 1: 1.4, 2: 1.61, 3: 1.62, 4: 1.5}
      >>> choice = choose({k: Estimate(s, s, s) for k, s in speedups.items()})
      >>> choice.num_draft_tokens, choice.plateau
      (2, (2, 3))
    """
    values = {k: one.value for k, one in measured.items()}
    top = max(values.values())
    chosen = min(k for k, value in values.items() if value >= (1 - RESOLUTION) * top)
    plateau = _plateau(values)
    sentences = (
        _why_not(measured) if chosen == 0 else _why(chosen, plateau, measured),
        _misfit(values, predicted or {}),
    )
    return Choice(chosen, plateau, " ".join(filter(None, sentences)))


def _plateau(values: Mapping[int, float]) -> tuple[int, int]:
    """Returns the ends of the run of lengths around the fastest that are as good."""
    lengths = sorted(values)
    best = max(lengths, key=lambda k: values[k])
    low = high = lengths.index(best)
    good = [values[k] >= (1 - FLAT) * values[best] for k in lengths]
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(lengths) and good[high + 1]:
        high += 1
    return lengths[low], lengths[high]


def _why_not(measured: Mapping[int, Estimate]) -> str:
    drafting = {k: one for k, one in measured.items() if k}
    best = max(drafting, key=lambda k: drafting[k].value)
    return (
        f"Do not use speculation here: the best draft length tried, {best}, is "
        f"{_times(drafting[best])} as fast as plain decoding."
    )


def _why(
    chosen: int, plateau: tuple[int, int], measured: Mapping[int, Estimate]
) -> str:
    low, high = plateau
    others = [k for k in measured if k not in range(low, high + 1)]
    text = (
        f"Draft {chosen} token{'s' * (chosen > 1)} a round: {_times(measured[chosen])} "
        "as fast as plain decoding."
    )
    if measured[chosen].low <= 1:
        text += " The prompts do not agree that it is faster at all: measure more."
    if low < high:
        text += f" The peak is flat: from {low} to {high} at most {FLAT:.0%} are lost."
    elif others:
        near = min(others, key=lambda k: -measured[k].value)
        loss = 1 - measured[near].value / measured[chosen].value
        text += f" The peak is sharp: the next best, {near}, loses {loss:.0%}."
    if high == max(measured):
        text += " It reaches the longest draft tried; longer ones may be as fast."
    return text


def _misfit(values: Mapping[int, float], predicted: Mapping[int, float]) -> str:
    """Says where the clock and the parts disagree most, if they do."""
    gaps = {k: predicted[k] / values[k] - 1 for k in predicted}
    worst = max(gaps, key=lambda k: abs(gaps[k]), default=0)
    if abs(gaps.get(worst, 0)) <= MISFIT:
        return ""
    return (
        f"The parts of a round predict {abs(gaps[worst]):.0%} "
        f"{'more' if gaps[worst] > 0 else 'less'} at {worst}: they were not measured "
        "under the same load, so measure again on a quiet device or with more repeats."
    )


def _times(one: Estimate) -> str:
    return f"{one.value:.2f} times (over prompts {one.low:.2f} to {one.high:.2f})"
