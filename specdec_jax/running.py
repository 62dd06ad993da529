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
from jaxtyping import Array, Bool, Float, Int

from specdec_jax import decode
from specdec_jax.base import AcceptanceRule, Drafter, LanguageModel, Params
from specdec_jax.detokenize import TextFollower
from specdec_jax.detokenize import decode as decode_text
from specdec_jax.requests import Batch, Plan, Request, pack
from specdec_jax.results import (
    FINISH_REASONS,
    ORIGINS,
    Result,
    acceptance_histogram,
)

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


class Piece(NamedTuple):
    """A piece of a request's text, or its end."""

    index: int
    """The request's place among the prompts."""
    text: str
    """Whole characters; the pieces of a request join to the result's text."""
    origin: str
    """"accepted", "corrected" or "bonus": where the token that completes it is from."""
    result: Result | None = None
    """The request's result in its last piece, None in all others."""


class Look(NamedTuple):
    """What the host sees of a state; new arrays, since the state is donated."""

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    finish: Int[Array, " B"]
    log_probs: Float[Array, "B T"]
    policy_log_probs: Float[Array, "B T"]
    origin: Int[Array, "B T"]
    counts: decode.Counts
    drafted: Int[Array, "B R"]
    """Tokens drafted in each round since the last look."""
    emitted: Int[Array, "B R"]
    """Tokens emitted in each round since the last look."""


def pieces(
    engine: Engine, plan: Plan, *, batch_size: int, rounds_per_look: int | None
) -> Iterator[Piece]:
    """Decodes the requests, batch after batch, and yields their text as it comes.

    Args:
      engine: What decodes.
      plan: The requests.
      batch_size: Rows of a batch at the most.
      rounds_per_look: Rounds between two looks of the host. None: each request comes
        as one last piece without text.
    """
    for first in range(0, len(plan.requests), batch_size):
        last = min(first + batch_size, len(plan.requests))
        rows = [_Row(engine, plan, request) for request in plan.requests[first:last]]
        batch = pack(plan, first, last)
        stopped = np.zeros(len(batch.length), bool)
        follow = rounds_per_look is not None
        for look in _looks(engine, batch, stopped, rounds_per_look):
            for place, row in enumerate(rows):
                if not row.done:
                    yield from row.read(look, place, follow)
                    stopped[place] = row.done
            if all(row.done for row in rows):
                break


def compile_programs(engine: Engine, plan: Plan, *, batch_size: int) -> None:
    """Compiles what `pieces` would run, once for each shape; runs nothing."""
    shapes = set()
    for first in range(0, len(plan.requests), batch_size):
        batch = pack(plan, first, min(first + batch_size, len(plan.requests)))
        if batch.tokens.shape in shapes:
            continue
        shapes.add(batch.tokens.shape)
        parts = _parts(engine)
        rule = parts.pop("rule")
        state = jax.eval_shape(partial(_start, **parts), engine.params, batch)
        stopped = np.zeros(len(batch.length), bool)
        _start.lower(engine.params, batch, **parts).compile()
        _advance.lower(
            engine.params, state, stopped, _TO_THE_END, rule=rule, **parts
        ).compile()


def _parts(engine: Engine) -> dict[str, Any]:
    return {
        "target": engine.target,
        "drafter": engine.drafter,
        "rule": engine.rule,
    }


def _looks(
    engine: Engine, batch: Batch, stopped: np.ndarray, rounds_per_look: int | None
) -> Iterator[Look]:
    """Runs a batch and yields what the host sees after every piece of the run.

    Rows that the caller marks in `stopped` in between emit nothing any more.
    """
    num_rounds = _TO_THE_END
    if rounds_per_look is not None:
        num_rounds = np.int32(min(rounds_per_look, MAX_ROUNDS_PER_LOOK))
    state = _start(engine.params, batch, target=engine.target, drafter=engine.drafter)
    while True:
        state, look = _advance(
            engine.params, state, stopped.copy(), num_rounds, **_parts(engine)
        )
        yield jax.device_get(look)


@partial(jax.jit, static_argnames=("target", "drafter"))
def _start(
    params: Params, batch: Batch, *, target: LanguageModel, drafter: Drafter
) -> decode.DecodeState:
    """Makes the state of a batch and reads its prompts."""
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
    static_argnames=("target", "drafter", "rule"),
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
) -> tuple[decode.DecodeState, Look]:
    """Freezes rows, then runs `num_rounds` rounds or until all rows are finished.

    The record of rounds past its end is dropped; nobody asks for it then.
    """

    def unfinished(carry):
        index, state, _, _ = carry
        return (index < num_rounds) & ~state.done.all()

    def body(carry):
        index, state, drafted, emitted = carry
        state, info = decode.step(
            params, state, target=target, drafter=drafter, rule=rule
        )
        num_drafted = jnp.where(info.num_emitted > 0, info.draft.num_valid, 0)
        drafted = drafted.at[:, index].set(num_drafted, mode="drop")
        emitted = emitted.at[:, index].set(info.num_emitted, mode="drop")
        return index + 1, state, drafted, emitted

    state = decode.freeze(state, stopped)
    blank = jnp.zeros((len(stopped), MAX_ROUNDS_PER_LOOK), jnp.int32)
    carry = (jnp.zeros((), jnp.int32), state, blank, jnp.zeros_like(blank))
    _, state, drafted, emitted = jax.lax.while_loop(unfinished, body, carry)
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
    )
    return state, look


class _Row:
    """One request as the host sees it."""

    def __init__(self, engine: Engine, plan: Plan, request: Request):
        self.done = False
        self._request = request
        self._tokenizer = engine.tokenizer
        self._depth = engine.drafter.depth
        self._text = TextFollower(engine.tokenizer, plan.stop)
        self._num_tokens = 0
        self._num_drafted = 0

    def read(self, look: Look, place: int, follow: bool) -> Iterator[Piece]:
        """Yields the pieces that are new in row `place`, and the last one if it ended.

        With `follow` false only the last one comes, without text.
        """
        reason = FINISH_REASONS[look.finish[place]]
        start = len(self._request.token_ids)
        length = int(look.length[place]) - start
        if follow:
            for at in range(self._num_tokens, length):
                origin = ORIGINS[look.origin[place, start + at]]
                if reason == "eos" and at == length - 1:
                    break  # the EOS is no part of the text
                stopped = self._text.push(int(look.tokens[place, start + at]))
                text = self._text.take()
                if text:
                    yield Piece(self._request.index, text, origin)
                if stopped:
                    length, reason = at + 1, "stop"
                    break
        self.done = reason != "running"
        if self.done:
            yield self._end(look, place, length, reason, follow)
        self._num_tokens = length
        self._num_drafted = int(look.counts.num_drafted[place])

    def _end(
        self, look: Look, place: int, length: int, reason: str, follow: bool
    ) -> Piece:
        start = len(self._request.token_ids)
        new = slice(start, start + length)
        tokens = look.tokens[place, new].tolist()
        origins = look.origin[place, new].tolist()
        if follow:
            tail = self._text.finish()
            text = self._text.text
        else:
            tail = ""
            text = decode_text(
                self._tokenizer, tokens[:-1] if reason == "eos" else tokens
            )
        rounds, num_drafted, histogram = self._counts(look, place, origins, reason)
        result = Result(
            index=self._request.index,
            prompt=self._request.text,
            prompt_token_ids=self._request.token_ids,
            text=text,
            token_ids=tokens,
            finish_reason=reason,
            logprobs=look.log_probs[place, new].tolist(),
            policy_logprobs=look.policy_log_probs[place, new].tolist(),
            origins=[ORIGINS[origin] for origin in origins],
            rounds=rounds,
            num_drafted=num_drafted,
            num_accepted=sum(ORIGINS[origin] == "accepted" for origin in origins),
            acceptance_histogram=histogram,
        )
        last = result.origins[-1] if origins else ""
        return Piece(self._request.index, tail, last, result)

    def _counts(
        self, look: Look, place: int, origins: list[int], reason: str
    ) -> tuple[int, int, list[int]]:
        """Returns rounds, drafted tokens and histogram of the tokens that stay."""
        if reason != "stop":
            counts = jax.tree.map(lambda leaf: leaf[place], look.counts)
            return (
                int(counts.rounds),
                int(counts.num_drafted),
                counts.histogram.tolist(),
            )
        histogram = acceptance_histogram(origins, self._depth)
        # The device ran on to the next look: count to the round of the last token.
        reached = np.cumsum(look.emitted[place])
        rounds = np.searchsorted(reached, len(origins) - self._num_tokens) + 1
        drafted = self._num_drafted + int(look.drafted[place, :rounds].sum())
        return sum(histogram), drafted, histogram
