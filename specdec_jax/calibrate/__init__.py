"""Measures alpha and c on your own load, then chooses the draft length.

    overlap     alpha by its definition, on the target's own text
    prediction  what survival and the parts of a round say about each length
    trees       which tree to try of each number of nodes, if trees are drafted
    choice      the length to use, how flat the peak is, and the verdict
    bootstrap   intervals over prompts
    figure      all of it as a picture

The times come from `benchmark.sweep`, which says what is timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specdec_jax.benchmark.bootstrap import Estimate
from specdec_jax.benchmark.sweep import LENGTHS, Sweep, sweep
from specdec_jax.calibrate import prediction
from specdec_jax.calibrate.choice import Choice, choose
from specdec_jax.calibrate.overlap import Overlaps, overlaps
from specdec_jax.calibrate.trees import Grown, grow
from specdec_jax.sampling import Sampling
from specdec_jax.text import SpeculativeDecoder
from specdec_jax.text.packing import Plan
from specdec_jax.text.requests import Prompt, as_prompts, is_per_prompt

__all__ = ["LENGTHS", "Calibration", "Choice", "Estimate", "calibrate", "choose"]

_GREEDY = Sampling()


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` measured.

    Attributes:
      sweep: Laps and parts of every draft length.
      overlaps: Of draft and target on the target's own text.
      grown: The trees that were tried, if the draft is one.
    """

    sweep: Sweep
    overlaps: Overlaps
    grown: Grown | None = None

    @cached_property
    def alpha(self) -> Estimate:
        """The mean of sum min(p, q), with its interval over prompts."""
        return self.overlaps.alpha()

    @cached_property
    def parts(self) -> prediction.Parts:
        """Of all units, each once."""
        return prediction.Parts.of(self.sweep)

    @cached_property
    def predicted(self) -> dict[int, Estimate]:
        """The speedup of each draft length by survival and the parts of a round."""
        return self._each(lambda k: prediction.predicted(self.sweep, k))

    @cached_property
    def measured(self) -> dict[int, Estimate]:
        """The speedup of each draft length by the clock."""
        return self._each(lambda k: prediction.measured(self.sweep, k))

    @cached_property
    def choice(self) -> Choice:
        """The draft length to use."""
        return choose(self.measured, {k: e.value for k, e in self.predicted.items()})

    def summary(self) -> dict[str, Any]:
        """Returns all of it as plain values for JSON; draft lengths are strings.

        Times are in seconds; `survival` is that of the longest draft.
        """
        parts, choice = self.parts, self.choice
        survival = self._each(lambda k: parts.survival(k)[0].tolist())
        return {
            "alpha": self.alpha._asdict(),
            "cost_ratio": float(parts.cost_ratio[0]),
            "verify_factor": _named(self._each(lambda k: parts.verify_factor(k)[0])),
            "overhead_seconds": _named(self._each(lambda k: parts.overhead(k)[0])),
            "wide_round_share": _named(self._each(lambda k: parts.wide_share(k)[0])),
            "survival": survival[max(survival)],
            "survival_by_length": {str(k): row for k, row in survival.items()},
            "acceptance_rate": _named(self._each(self._acceptance_rate)),
            "predicted_speedup": _named(
                {k: e.value for k, e in self.predicted.items()}
            ),
            "predicted_interval": _ends(self.predicted),
            "measured_speedup": _named({k: e.value for k, e in self.measured.items()}),
            "measured_interval": _ends(self.measured),
            "recommended_num_draft_tokens": choice.num_draft_tokens,
            "plateau": list(choice.plateau),
            "verdict": choice.verdict,
            "step_seconds": float(parts.step[0]),
            "draft_step_seconds": float(parts.draft_step[0]),
            "num_tokens": int(sum(self.sweep.costs(0).tokens)),
            "num_units": len(self.sweep.units),
            **self._told_trees(),
        }

    def _told_trees(self) -> dict[str, Any]:
        """Returns the parents of each tree, and of the one to use; {} for chains."""
        if self.grown is None:
            return {}
        trees = {
            str(size): list(parents)
            for size, parents in self.grown.trees
            if size in self.sweep.lengths
        }
        chosen = str(self.choice.num_draft_tokens)
        return {
            "trees": trees,
            "recommended_tree": trees.get(chosen),
            "rank_acceptance": list(self.grown.ranks.acceptance),
            "rank_offered": list(self.grown.ranks.offered),
        }

    def _each(self, of: Callable[[int], Any]) -> dict[int, Any]:
        return {k: of(k) for k in self.sweep.lengths}

    def _acceptance_rate(self, length: int) -> float:
        """Returns accepted over drafted tokens of the laps."""
        places = np.arange(self.sweep.depth(length) + 1)
        accepted = self.sweep.histogram(length) @ places
        drafted = self.sweep.median(length, "num_drafted")
        return accepted.sum() / max(drafted.sum(), 1)


def calibrate(
    decoder: SpeculativeDecoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    lengths: Sequence[int] = LENGTHS,
    max_new_tokens: int | Sequence[int] = 64,
    sampling: Sampling = _GREEDY,
    seed: int | Sequence[int] = 0,
    eos_token_id: int | Sequence[int] | None = None,
    batch_size: int = 1,
    repeats: int = 3,
    done: Callable[[], Any] = lambda: None,
) -> Calibration:
    """Measures a pair on prompts, at the batch size, length and policy of its use.

    Prompts are taken round and round until the last batch is full.

    Args:
      decoder: Target, drafter and rule; the drafter's own length does not matter. If
        it drafts a tree, this is drafted first to see how often children of each rank
        are accepted, and the lengths are numbers of nodes; see `trees`.
      prompts: As for `SpeculativeDecoder.generate`, like the next four that are there.
      lengths: Draft lengths to try besides 0.
      max_new_tokens: Budgets, at least 2.
      sampling: Settings of target and draft.
      seed: Of the requests.
      eos_token_id: What ends a text.
      batch_size: Prompts decoded together.
      repeats: Turns of each length on each batch that are timed; medians count.
      done: Is called after each batch.

    Raises:
      ValueError: There is nothing to measure, or what is asked for is impossible.
      FloatingPointError: The target's logits are not finite.
    """
    tried = sorted({0, *lengths})
    _check(decoder, tried, batch_size, repeats)
    given = as_prompts(prompts)
    size = -(-len(given) // batch_size) * batch_size

    def filled(values: Any) -> Any:
        """Repeats what was given for each prompt; `plan` refuses another number."""
        if not is_per_prompt(values) or len(values) != len(given):
            return values
        return [values[i % len(given)] for i in range(size)]

    plan = decoder.plan(
        [given[i % len(given)] for i in range(size)],
        max_new_tokens=filled(max_new_tokens),
        sampling=sampling,
        seed=filled(seed),
        eos_token_id=eos_token_id,
    )
    _check_plan(plan)
    engine: Any = decoder.engine
    grown = None
    if decoder.drafter.siblings != "none":
        grown = grow(engine, plan, sizes=tried[1:], batch_size=batch_size)
        engine = engine._replace(drafter=grown)
        sizes = [size for size, _ in grown.trees if size > 1 or 1 in tried]
        tried = [0, *(sizes or [1])]  # where nothing is accepted, no tree grows
    found = overlaps(engine, plan, num_prompts=len(given), batch_size=batch_size)
    turns = sweep(
        engine,
        plan,
        lengths=tried,
        batch_size=batch_size,
        repeats=repeats,
        done=done,
    )
    return Calibration(turns, found, grown)


def _check(
    decoder: SpeculativeDecoder, lengths: list[int], batch_size: int, repeats: int
) -> None:
    """Refuses what cannot be measured, before anything is decoded."""
    if decoder.drafter.num_nodes == 0:
        raise ValueError(
            "the decoder drafts nothing, so there is nothing to calibrate; give a "
            "draft and num_draft_tokens of at least 1"
        )
    if lengths[0] < 0 or lengths[-1] < 1:
        raise ValueError(
            f"lengths are {lengths}; give draft lengths of at least 1, such as "
            f"{LENGTHS[1:]}"
        )
    if min(batch_size, repeats) < 1:
        raise ValueError(
            f"batch_size is {batch_size} and repeats {repeats}; both must be at least 1"
        )


def _check_plan(plan: Plan) -> None:
    if not plan.requests:
        raise ValueError("there are no prompts; give at least one")
    shortest = min(request.max_new_tokens for request in plan.requests)
    if shortest < 2:
        raise ValueError(
            f"max_new_tokens is {shortest}; it must be at least 2, since a text's last "
            "token is never drafted"
        )


def _named(values: dict[int, Any]) -> dict[str, float]:
    return {str(k): float(value) for k, value in values.items()}


def _ends(estimates: dict[int, Estimate]) -> dict[str, list[float]]:
    return {str(k): [one.low, one.high] for k, one in estimates.items()}
