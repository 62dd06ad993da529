"""What a comparison came to, beside what the cost model predicts.

The model is ALGORITHMS A.5.10, speedup = E[N] / (v(K) + K/c + o), with measured parts:

    T_p(1)    a round of the K = 0 program
    T_p(K+1)  a round that verifies a full draft that cost nothing
    T_q       a K-th of the drafter's whole `draft`, so that K/c = T_draft / T_p(1);
              what it adds to a plain round, or takes by itself if that is more

All three are rounds of the loop, policy and bookkeeping included, in the middle of the
text, so o is inside. A round without any draft costs one plain step: rounds are weighed
by their width. The prediction is for the rounds that were run, cut ones included, since
that is what was timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.benchmark.timing import Costs, speedup, speedup_interval


class Run(NamedTuple):
    """One timed decoding of one unit."""

    seconds: float
    num_timed: int
    """Tokens that these seconds decoded."""
    token_ids: list[list[int]]
    """New tokens of each row."""
    rounds: int = 0
    """Target passes."""
    wide: int = 0
    """Target passes that verified a draft."""
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Sums over rows: rounds, drafted, accepted; uncut rounds and their tokens."""


Rival = Callable[[list[int], int, tuple[int, ...]], Run]
"""Another engine: decodes one prompt greedily, given its ids, the budget and EOS ids.

Reading the prompt is not in the seconds.
"""


class Unit(NamedTuple):
    """What was measured on one batch; each list has one entry a repeat."""

    indices: list[int]
    """Places of the unit's prompts."""
    prompts: list[list[int]]
    runs: dict[str, list[Run]]
    """"plain", "speculative", and the rivals."""
    parts: dict[str, list[float]]
    """Seconds of one round: "step" (plain), "verify", "draft", and "drafted_step", a
    plain step behind a draft that is thrown away."""


@dataclass(frozen=True)
class Report:
    """What `compare` measured.

    Attributes:
      units: One for each batch.
      num_draft_tokens: Draft steps of a round, K: levels of a tree.
      cold_compile_seconds: Of the speculative programs, nothing cached; None where it
        was not asked for.
      warm_compile_seconds: The same with the disk cache filled.
    """

    units: list[Unit]
    num_draft_tokens: int
    cold_compile_seconds: float | None = None
    warm_compile_seconds: float | None = None

    def costs(self, arm: str) -> Costs:
        """Returns seconds (median of the repeats) and tokens of each unit."""
        runs = [unit.runs[arm] for unit in self.units]
        return Costs(
            np.array([np.median([run.seconds for run in own]) for own in runs]),
            np.array([own[0].num_timed for own in runs]),
        )

    def part(self, name: str) -> float:
        """Returns the seconds of one round's part, the mean over units of medians."""
        return float(np.mean([np.median(unit.parts[name]) for unit in self.units]))

    @property
    def speedup(self) -> float:
        """Seconds a token, plain over speculative."""
        return speedup(self.costs("plain"), self.costs("speculative"))

    @property
    def verify_factor(self) -> float:
        """v(K) = T_p(K+1) / T_p(1)."""
        return self.part("verify") / self.part("step")

    @property
    def draft_seconds(self) -> float:
        """Returns the seconds of one round's draft.

        Beside a target pass a draft takes longer than over and over by itself, since
        its weights have left the processor's nearest cache.
        """
        beside = self.part("drafted_step") - self.part("step")
        return max(beside, self.part("draft"))

    @property
    def draft_cost(self) -> float:
        """T_draft / T_p(1), which is K / c."""
        return self.draft_seconds / self.part("step")

    @property
    def predicted_speedup(self) -> float:
        """What the parts say about the rounds that were run."""
        plain, own = self._sum("plain"), self._sum("speculative")
        narrow = own.rounds - own.wide
        cost = (
            own.wide * self.verify_factor + narrow + own.rounds * self.draft_cost
        ) / own.num_timed
        return plain.rounds / plain.num_timed / cost

    def summary(self) -> dict[str, Any]:
        """Returns all of it as plain values for JSON; times are in seconds."""
        own = self._sum("speculative")
        rounds, drafted, accepted, uncut_rounds, uncut_tokens = own.counts
        low, high = speedup_interval(self.costs("plain"), self.costs("speculative"))
        return {
            "plain": self._arm("plain"),
            "speculative": self._arm("speculative"),
            "speedup": self.speedup,
            "speedup_low": low,
            "speedup_high": high,
            "predicted_speedup": self.predicted_speedup,
            "mean_acceptance_length": own.num_timed / rounds,
            "uncut_acceptance_length": uncut_tokens / max(uncut_rounds, 1),
            "draft_acceptance_rate": accepted / max(drafted, 1),
            "wide_round_share": own.wide / own.rounds,
            "verify_factor": self.verify_factor,
            "cost_ratio": self.num_draft_tokens / self.draft_cost,
            "part_seconds": {
                "step": self.part("step"),
                "verify": self.part("verify"),
                "draft": self.draft_seconds,
            },
            "cold_compile_seconds": self.cold_compile_seconds,
            "warm_compile_seconds": self.warm_compile_seconds,
            "same_tokens": self._same_tokens(),
            "units": [self._unit(unit) for unit in self.units],
        }

    def _sum(self, arm: str) -> Run:
        """Returns the runs of all units as one; its seconds and tokens mean nothing."""
        runs = [unit.runs[arm][0] for unit in self.units]
        return Run(
            seconds=0.0,
            num_timed=sum(run.num_timed for run in runs),
            token_ids=[],
            rounds=sum(run.rounds for run in runs),
            wide=sum(run.wide for run in runs),
            counts=tuple(map(sum, zip(*(run.counts for run in runs), strict=True))),
        )

    def _arm(self, arm: str) -> dict[str, Any]:
        costs, run = self.costs(arm), self._sum(arm)
        turns = [
            sum(unit.runs[arm][turn].seconds for unit in self.units)
            for turn in range(len(self.units[0].runs[arm]))
        ]
        return {
            "tokens_per_second": costs.tokens_per_second(),
            "by_repeat": [run.num_timed / turn for turn in turns],
            "num_tokens": run.num_timed,
            "rounds": run.rounds,
        }

    def _same_tokens(self) -> int:
        """Returns how many prompts have the same text in both arms."""
        return sum(
            ours == theirs
            for unit in self.units
            for ours, theirs in zip(
                unit.runs["plain"][0].token_ids,
                unit.runs["speculative"][0].token_ids,
                strict=True,
            )
        )

    def _unit(self, unit: Unit) -> dict[str, Any]:
        own = unit.runs["speculative"][0]
        median = {
            arm: float(np.median([run.seconds for run in runs]))
            for arm, runs in unit.runs.items()
        }
        return {
            "indices": unit.indices,
            "num_prompt_tokens": [len(prompt) for prompt in unit.prompts],
            "num_tokens": [len(row) for row in own.token_ids],
            "rounds": own.rounds,
            "seconds": median,
        }
