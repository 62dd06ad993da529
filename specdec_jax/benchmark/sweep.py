"""One drafter at many draft lengths, in turns: what a round of each yields and takes.

The length is the number of drafted tokens, K. Of a chain it is the depth as well; a
tree has fewer levels, and drafting costs a step a level.

A turn of one length on one batch reads the prompts and runs a *lap*: rounds from the
prompts' ends on, for as long as all rows run and none is near its end. So every round
is a whole one of a full batch, as on a server that refills its slots. What a budget
cuts, and rows that wait for the longest text, are the business of `compare`.

After the lap, in the middle of the new text, the parts of a round are timed by doing
each over and over from the same tokens:

    round  a whole one of this length
    pass   the target's alone over K + 1 tokens, policy rows included: T_p(K + 1)
    draft  the longest length's alone: T_q is its share of a level

Once all is compiled, only one state is alive at a time.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.base import Drafter
from specdec_jax.benchmark import programs
from specdec_jax.benchmark.timing import Costs, alternate, timed
from specdec_jax.benchmark.units import batches, check_finite, run_rounds
from specdec_jax.decode import DecodeState
from specdec_jax.drafters import NoDrafter
from specdec_jax.drafters.children import with_num_draft_tokens
from specdec_jax.text.packing import Batch, Plan
from specdec_jax.text.running import Engine

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths that are tried, unless told otherwise."""

HELD_TOKENS, LEAST_HELD = 64, 8
"""One measurement of a part reads that many tokens, and takes at least that many goes:
starting a program costs as much as half a plain step of a small model."""


class Turn(NamedTuple):
    """What one draft length did on one batch, once. Times are in seconds."""

    lap_seconds: float
    rounds: int
    """Target passes of the lap."""
    wide: int
    """Of these, passes that verified a draft; the others were plain steps."""
    num_tokens: int
    """Of all rows."""
    num_drafted: int
    histogram: tuple[int, ...]
    """`[n]` rounds of a row that emitted n drafted tokens, n = 0 .. depth."""
    round_seconds: float
    """Of one held round."""
    round_wide: float
    """Share of the held rounds that verified a draft."""
    pass_seconds: float
    """Of the target's pass over K + 1 tokens."""
    draft_seconds: float
    """Of the longest length's draft; 0 for all others."""


@dataclass(frozen=True)
class Sweep:
    """What `sweep` measured.

    Attributes:
      units: One for each batch: the turns of each draft length, one a repeat.
    """

    units: list[dict[int, list[Turn]]]

    @property
    def lengths(self) -> list[int]:
        """The draft lengths, in order."""
        return sorted(self.units[0])

    def median(self, length: int, field: str) -> np.ndarray:
        """Returns the median over repeats of a field of `Turn`, [units]."""
        turns = [unit[length] for unit in self.units]
        return np.array([np.median([getattr(t, field) for t in own]) for own in turns])

    def costs(self, length: int) -> Costs:
        """Returns seconds and tokens of the laps of each unit."""
        return Costs(
            self.median(length, "lap_seconds"), self.median(length, "num_tokens")
        )

    def histogram(self, length: int) -> np.ndarray:
        """Returns counts of emitted drafts in each unit's lap, [units, depth + 1]."""
        return np.array([unit[length][0].histogram for unit in self.units])

    def depth(self, length: int) -> int:
        """Returns the levels of a draft."""
        return len(self.units[0][length][0].histogram) - 1


def sweep(
    engine: Engine,
    plan: Plan,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch_size: int = 1,
    repeats: int = 3,
    done: Callable[[], Any] = lambda: None,
) -> Sweep:
    """Measures the engine's drafter at each of the draft lengths, in turns.

    Args:
      engine: Target, drafter, rule. The drafter's own length does not matter.
      plan: The requests; their number is a multiple of the batch size.
      lengths: Draft lengths; 0, which all others are measured by, is among them.
      batch_size: Rows of a batch.
      repeats: Turns of each length on each batch, after one that compiles.
      done: Is called after each batch.

    Raises:
      ValueError: The drafter's length cannot be varied.
      FloatingPointError: The target's logits are not finite.
    """
    arms = [_Arm.of(engine, k, max(lengths)) for k in lengths]
    units: list[dict[int, list[Turn]]] = []
    for requests, batch in batches(plan, batch_size):
        indices = [request.index for request in requests]
        turns = {str(arm.length): partial(arm.turn, batch, indices) for arm in arms}
        if not units:
            _compile(list(turns.values()))
        found = alternate(turns, repeats, warm_up=False)
        units.append({int(name): own for name, own in found.items()})
        done()
    return Sweep(units)


def _compile(turns: list[Callable[[], Turn]]) -> None:
    """Runs each turn once, several at a time: XLA compiles in one thread."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for turn in [pool.submit(turn) for turn in turns]:
            turn.result()


def with_length(drafter: Drafter, num_draft_tokens: int) -> Drafter:
    """Returns the drafter with another draft length; none for 0.

    Raises:
      ValueError: It has no `num_draft_tokens` to change.

    Example:
      >>> from specdec_jax.drafters import NgramDrafter
      >>> with_length(NgramDrafter(4), 7).num_nodes
      7
    """
    if num_draft_tokens == 0:
        return NoDrafter()
    changed: Drafter = with_num_draft_tokens(drafter, num_draft_tokens)
    return changed


@dataclass(frozen=True)
class _Arm:
    """One draft length.

    Attributes:
      engine: With a drafter of this length.
      starter: Reads the prompts for it.
      is_longest: Whether the draft alone is timed here.
    """

    engine: Engine
    starter: Drafter
    is_longest: bool

    @classmethod
    def of(cls, engine: Engine, length: int, longest: int) -> "_Arm":
        """Makes the arm; prompts are read by the longest if its state serves all."""
        own, most = (with_length(engine.drafter, k) for k in (length, longest))
        states = [
            jax.eval_shape(partial(drafter.init, engine.params, 1, 128))
            for drafter in (own, most)
        ]
        serves = states[0] == states[1] and most.depth >= own.depth
        starter = most if serves else own
        return cls(engine._replace(drafter=own), starter, length == longest)

    @property
    def length(self) -> int:
        """K, the number of drafted tokens."""
        return self.engine.drafter.num_nodes

    def turn(self, batch: Batch, indices: list[int]) -> Turn:
        """Reads the prompts, runs a lap, and times the parts in the middle of it."""
        engine, start = self.engine, self._start(batch)
        lap_seconds, (tally, state) = timed(
            lambda: run_rounds(engine, start, together=True)
        )
        check_finite(state, indices)
        counts = jax.device_get(state.counts)
        num_tokens = int((state.length - state.prompt_length).sum())
        held = jax.block_until_ready(programs.midway(state, engine.drafter.depth))
        round_seconds, (held_tally, state) = self._each(
            lambda times: run_rounds(engine, held, times, hold=True)
        )
        draft_seconds = 0.0
        if self.is_longest:
            draft_seconds, (_, state) = self._each(partial(self._drafts, state))
        pass_seconds, _ = self._each(partial(self._passes, state))
        return Turn(
            lap_seconds=lap_seconds,
            rounds=int(tally.rounds),
            wide=int(tally.wide),
            num_tokens=num_tokens,
            num_drafted=int(counts.num_drafted.sum()),
            histogram=tuple(counts.histogram.sum(axis=0).tolist()),
            round_seconds=round_seconds,
            round_wide=int(held_tally.wide) / int(held_tally.rounds),
            pass_seconds=pass_seconds,
            draft_seconds=draft_seconds,
        )

    def _start(self, batch: Batch) -> DecodeState:
        """Reads the prompts; a full draft fits wherever a row lacks a token."""
        state = self.engine.start(batch, self.starter)
        histogram = state.counts.histogram[:, : self.engine.drafter.depth + 1]
        return jax.block_until_ready(
            state._replace(
                limit=state.limit + np.int32(self.engine.drafter.depth),
                counts=state.counts._replace(histogram=histogram),
            )
        )

    def _each(self, repeated: Callable[[int], Any]) -> tuple[float, Any]:
        """Returns the seconds of one of the repeated things, and what they came to."""
        times = max(HELD_TOKENS // (self.length + 1), LEAST_HELD)
        seconds, result = timed(lambda: repeated(times))
        return seconds / times, result

    def _drafts(self, state: DecodeState, times: int) -> Any:
        engine = self.engine
        return programs.draft_rounds(
            engine.params,
            state,
            np.int32(times),
            drafter=engine.drafter,
            rule=engine.rule,
        )

    def _passes(self, state: DecodeState, times: int) -> Any:
        return programs.target_passes(
            self.engine.params,
            state,
            np.int32(times),
            target=self.engine.target,
            width=self.length + 1,
        )
