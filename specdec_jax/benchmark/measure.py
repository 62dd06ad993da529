"""Plain against speculative decoding, in turns, batch after batch.

Plain is the same target in the K = 0 program, not a speculative program with empty
drafts. On each batch the arms, the parts of a round and the rivals all take turns.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.benchmark import programs
from specdec_jax.benchmark.report import Report, Rival, Run, Unit
from specdec_jax.benchmark.timing import alternate, compile_seconds, timed
from specdec_jax.benchmark.units import batches, check_finite, run_rounds
from specdec_jax.decode import DecodeState
from specdec_jax.drafters import NoDrafter
from specdec_jax.sampling import Sampling
from specdec_jax.text import SpeculativeDecoder
from specdec_jax.text.packing import Batch, Request
from specdec_jax.text.requests import Prompt
from specdec_jax.text.running import Engine

PART_ROUNDS = 64
"""Rounds that one measurement of a part lasts."""

_GREEDY = Sampling()


def compare(
    decoder: SpeculativeDecoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    sampling: Sampling = _GREEDY,
    draft_sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    eos_token_id: int | Sequence[int] | None = None,
    batch_size: int = 1,
    repeats: int = 5,
    rivals: Mapping[str, Rival] | None = None,
    time_compiling: bool = False,
    done: Callable[[], Any] = lambda: None,
) -> Report:
    """Decodes the prompts plainly and speculatively, in turns, and times both.

    Plain is the same target in the K = 0 program. Drift of the machine, prompts,
    budgets and end-of-text tokens are the same for all arms.

    Args:
      decoder: Target, drafter and rule.
      prompts: As for `SpeculativeDecoder.generate`, like the next five.
      max_new_tokens: Budgets.
      sampling: The target's settings.
      draft_sampling: The draft's own.
      seed: Of the requests.
      eos_token_id: What ends a text.
      batch_size: Prompts decoded together.
      repeats: Timed runs of each arm on each batch, after one that warms up.
      rivals: Other engines, by name; they decode one prompt at a time.
      time_compiling: Whether to compile the decoder's programs cold and warm. This
        forgets all programs that this process has compiled.
      done: Is called after each batch.

    Raises:
      ValueError: There is nothing to compare, or what is asked for is impossible.
      FloatingPointError: The target's logits are not finite.
    """
    if decoder.drafter.num_nodes == 0:
        raise ValueError(
            "the decoder drafts nothing, so there is only plain decoding; give a draft "
            "and num_draft_tokens of at least 1"
        )
    if min(batch_size, repeats) < 1:
        raise ValueError(
            f"batch_size is {batch_size} and repeats {repeats}; both must be at least 1"
        )
    if rivals and batch_size != 1:
        raise ValueError(
            f"batch_size is {batch_size}, but other engines decode one prompt at a "
            "time; use batch_size 1"
        )
    plan = decoder.plan(
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        draft_sampling=draft_sampling,
        seed=seed,
        eos_token_id=eos_token_id,
    )
    if not plan.requests:
        raise ValueError("there are no prompts; give at least one")
    compiling: tuple[float | None, float | None] = (None, None)
    if time_compiling:
        first = plan._replace(requests=plan.requests[:batch_size])
        compiling = compile_seconds(lambda: decoder.compile(first))
    units = []
    for requests, batch in batches(plan, batch_size):
        arms = {
            name: partial(
                rival,
                requests[0].token_ids,
                requests[0].max_new_tokens,
                plan.eos_token_ids,
            )
            for name, rival in (rivals or {}).items()
        }
        units.append(_measure(decoder.engine, requests, batch, arms, repeats))
        done()
    return Report(units, decoder.drafter.depth, *compiling)


def _measure(
    engine: Engine,
    requests: list[Request],
    batch: Batch,
    rivals: Mapping[str, Callable[[], Run]],
    repeats: int,
) -> Unit:
    """Measures everything on one batch."""
    indices = [request.index for request in requests]
    plain = _Arm(engine._replace(drafter=NoDrafter()), batch, indices)
    own = _Arm(engine, batch, indices)
    arms: dict[str, Callable[[], Any]] = {
        "plain": plain.run,
        "speculative": own.run,
        **rivals,
    }
    parts = _parts(engine, plain, own)
    measured = alternate(arms | parts, repeats)
    return Unit(
        indices=indices,
        prompts=[request.token_ids for request in requests],
        runs={name: measured[name] for name in arms},
        parts={name: measured[name] for name in parts},
    )


class _Arm:
    """One engine on one batch, from the prefilled state on.

    `finished` is the state after a whole run.
    """

    def __init__(self, engine: Engine, batch: Batch, indices: list[int]):
        self.engine, self._size = engine, len(indices)
        self._prefilled = engine.start(batch)
        _, self.finished = run_rounds(self.engine, self._copy())
        check_finite(self.finished, indices)

    def run(self) -> Run:
        """Decodes the batch to its end."""
        state = self._copy()
        seconds, (tally, state) = timed(lambda: run_rounds(self.engine, state))
        rows = range(self._size)
        tokens, start, end = jax.device_get(
            (state.tokens, state.prompt_length, state.length)
        )
        token_ids = [tokens[row, start[row] : end[row]].tolist() for row in rows]
        counts = state.counts
        sums = [counts.rounds, counts.num_drafted, counts.num_accepted]
        sums += [tally.uncut_rounds, tally.uncut_tokens]
        return Run(
            seconds=seconds,
            num_timed=sum(map(len, token_ids)),
            token_ids=token_ids,
            rounds=int(tally.rounds),
            wide=int(tally.wide),
            counts=tuple(int(x.sum()) for x in sums),
        )

    def _copy(self) -> DecodeState:
        """Returns the prefilled state, to be given up."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self._prefilled))


def _parts(engine: Engine, plain: _Arm, own: _Arm) -> dict[str, Callable[[], float]]:
    """Returns what times a plain round, a round that verifies, and a draft.

    They go on from the two arms' finished states, which are given up.
    """
    drafter = engine.drafter
    draft_rounds = partial(
        programs.draft_rounds, engine.params, drafter=drafter, rule=engine.rule
    )
    draft, middle = draft_rounds(
        programs.midway(own.finished, drafter.depth), num_rounds=np.int32(1)
    )
    replay = programs.Replay(
        drafter.num_nodes, drafter.depth, drafter.hidden_layers, drafter.siblings
    )
    discarding = jax.tree.map(jnp.copy, middle)
    replaying = jax.tree.map(jnp.copy, middle._replace(drafter_state=draft))

    def held(engine):
        return lambda state: run_rounds(engine, state, PART_ROUNDS, hold=True)

    return {
        "step": _each(held(plain.engine), programs.midway(plain.finished, 0)),
        "drafted_step": _each(
            held(engine._replace(drafter=programs.Discarding(drafter))), discarding
        ),
        "verify": _each(held(engine._replace(drafter=replay)), replaying),
        "draft": _each(partial(draft_rounds, num_rounds=PART_ROUNDS), middle),
    }


def _each(
    rounds: Callable[[DecodeState], tuple[Any, DecodeState]], state: DecodeState
) -> Callable[[], float]:
    """Returns what times a round, over `PART_ROUNDS`; calls go on from the last one."""

    def measure() -> float:
        nonlocal state
        seconds, (_, state) = timed(lambda: rounds(state))
        return seconds / PART_ROUNDS

    return measure
