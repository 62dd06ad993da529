"""Runs planned requests on the device, and follows them from the host where needed.

Two programs serve everything: one reads the prompts, one runs rounds. Without stop
strings and streaming the second runs once, to the end. With them it runs a few rounds
at a time; the host looks at the new tokens in between and freezes rows whose text is
complete. What a row comes to does not depend on how often the host looks.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specdec_jax import decode, trace
from specdec_jax.base import AcceptanceRule, Drafter, LanguageModel, Params
from specdec_jax.text.following import Look, Piece, Row
from specdec_jax.text.packing import Batch, Plan, pack

MAX_ROUNDS_PER_LOOK = 64
"""Rounds of which the program keeps a record for the host."""

_TO_THE_END = np.int32(2**31 - 1)


class Engine(NamedTuple):
    """What decodes: the parts that a decoder is made of."""

    params: Params
    target: LanguageModel
    drafter: Drafter
    rule: AcceptanceRule
    tokenizer: Any


def pieces(
    engine: Engine,
    plan: Plan,
    *,
    batch_size: int,
    rounds_per_look: int | None,
    traced: bool = False,
) -> Iterator[Piece]:
    """Decodes the requests, batch after batch, and yields their text as it comes.

    Args:
      engine: What decodes.
      plan: The requests.
      batch_size: Rows of a batch at the most.
      rounds_per_look: Rounds between two looks of the host. None: each request comes
        as one last piece without text.
      traced: Whether the results have their rounds.

    Raises:
      ValueError: A size is below 1, or stop strings come without looks.
    """
    if rounds_per_look is None and plan.stop:
        raise ValueError("stop strings need rounds_per_look, got None")
    if min(batch_size, rounds_per_look or 1) < 1:
        raise ValueError(
            f"batch_size is {batch_size} and rounds_per_look {rounds_per_look}; both "
            "must be at least 1"
        )
    return _pieces(engine, plan, batch_size, rounds_per_look, traced)


def _pieces(
    engine: Engine,
    plan: Plan,
    batch_size: int,
    rounds_per_look: int | None,
    traced: bool,
) -> Iterator[Piece]:
    for first in range(0, len(plan.requests), batch_size):
        last = min(first + batch_size, len(plan.requests))
        rows = [
            Row(request, engine.tokenizer, plan.stop, engine.drafter.depth)
            for request in plan.requests[first:last]
        ]
        batch = pack(plan, first, last)
        stopped = np.zeros(len(batch.length), bool)
        follow = rounds_per_look is not None
        for look in _looks(engine, batch, stopped, rounds_per_look, traced):
            for place, row in enumerate(rows):
                if not row.done:
                    yield from row.read(look, place, follow)
                    stopped[place] = row.done
            if all(row.done for row in rows):
                break


def compile_programs(
    engine: Engine, plan: Plan, *, batch_size: int, traced: bool = False
) -> None:
    """Compiles what `pieces` would run, once for each shape; runs nothing."""
    shapes = set()
    for first in range(0, len(plan.requests), batch_size):
        batch = pack(plan, first, min(first + batch_size, len(plan.requests)))
        if batch.tokens.shape in shapes:
            continue
        shapes.add(batch.tokens.shape)
        parts = _parts(engine)
        rule = parts.pop("rule")
        state = jax.eval_shape(partial(start_batch, **parts), engine.params, batch)
        stopped = np.zeros(len(batch.length), bool)
        start_batch.lower(engine.params, batch, **parts).compile()
        _advance.lower(
            engine.params,
            state,
            stopped,
            _TO_THE_END,
            rule=rule,
            traced=traced,
            **parts,
        ).compile()


def _parts(engine: Engine) -> dict[str, Any]:
    return {
        "target": engine.target,
        "drafter": engine.drafter,
        "rule": engine.rule,
    }


def _looks(
    engine: Engine,
    batch: Batch,
    stopped: np.ndarray,
    rounds_per_look: int | None,
    traced: bool,
) -> Iterator[Look]:
    """Runs a batch and yields what the host sees after every piece of the run.

    Rows that the caller marks in `stopped` in between emit nothing any more.
    """
    num_rounds = _TO_THE_END
    if rounds_per_look is not None or traced:
        most = MAX_ROUNDS_PER_LOOK
        num_rounds = np.int32(min(rounds_per_look or most, most))
    state = start_batch(
        engine.params, batch, target=engine.target, drafter=engine.drafter
    )
    while True:
        state, look = _advance(
            engine.params,
            state,
            stopped.copy(),
            num_rounds,
            traced=traced,
            **_parts(engine),
        )
        yield jax.device_get(look)


@partial(jax.jit, static_argnames=("target", "drafter"))
def start_batch(
    params: Params, batch: Any, *, target: LanguageModel, drafter: Drafter
) -> decode.DecodeState:
    """Makes the state of a `Batch` and reads its prompts."""
    key = jax.vmap(lambda seed, fold: jax.random.fold_in(jax.random.key(seed), fold))(
        batch.seed, batch.fold
    )
    state = decode.init(
        params,
        key,
        batch.tokens,
        batch.length,
        target=target,
        drafter=drafter,
        max_new_tokens=batch.max_new_tokens,
        capacity=decode.buffer_capacity(batch.tokens.shape[1], drafter),
        sampling=batch.sampling,
        draft_sampling=batch.draft_sampling,
        eos_token_ids=batch.eos_token_ids,
    )
    # Rows that fill the batch up are finished before they start.
    state = decode.freeze(state, batch.max_new_tokens == 0, decode.LENGTH)
    return decode.prefill(params, state, target=target, drafter=drafter)


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule", "traced"),
    donate_argnames=("state",),
)
def _advance(
    params: Params,
    state: decode.DecodeState,
    stopped: Bool[Array, " B"],
    num_rounds: Int[Array, ""],
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    traced: bool,
) -> tuple[decode.DecodeState, Look]:
    """Freezes rows, then runs `num_rounds` rounds or until all rows are finished.

    The record of rounds past its end is dropped; nobody asks for it then.
    """

    def unfinished(carry):
        index, state, *_ = carry
        return (index < num_rounds) & ~state.done.all()

    def body(carry):
        index, before, drafted, emitted, rounds = carry
        state, info = decode.step(
            params, before, target=target, drafter=drafter, rule=rule
        )
        num_drafted = jnp.where(info.num_emitted > 0, info.draft.num_valid, 0)
        drafted = drafted.at[:, index].set(num_drafted, mode="drop")
        emitted = emitted.at[:, index].set(info.num_emitted, mode="drop")
        if rounds is not None:
            rounds = trace.record(rounds, index, before, info)
        return index + 1, state, drafted, emitted, rounds

    state = decode.freeze(state, stopped)
    blank = jnp.zeros((len(stopped), MAX_ROUNDS_PER_LOOK), jnp.int32)
    rounds = None
    if traced:
        rounds = trace.blank(len(stopped), MAX_ROUNDS_PER_LOOK, drafter)
    carry = (jnp.zeros((), jnp.int32), state, blank, jnp.zeros_like(blank), rounds)
    _, state, drafted, emitted, rounds = jax.lax.while_loop(unfinished, body, carry)
    look = Look(
        state.tokens,
        state.length,
        state.finish,
        state.log_probs,
        state.policy_log_probs,
        state.origin,
        state.counts,
        drafted,
        emitted,
        rounds,
    )
    return state, look
