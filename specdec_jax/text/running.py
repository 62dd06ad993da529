"""Runs planned requests on the device, and follows them from the host where needed.

Requests of one bucket share a batch. Rows that finished are refilled from the queue,
several at once, so that the batch stays full to the end of the queue:

    row 0   a a a a a a a d d d d d d
    row 1   b b b c c c c c c c e e e      look, refill

Three programs serve everything: one starts a batch and reads its prompts, one runs
rounds, one refills rows. Without stop strings and streaming the second runs until rows
are to be refilled, or to the end. With them it runs a few rounds at a time; the host
looks at the new tokens in between and freezes rows whose text is complete. What a row
comes to depends neither on how often the host looks nor on who had its place before.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specdec_jax import decode, trace
from specdec_jax.base import AcceptanceRule, Drafter, LanguageModel, Params
from specdec_jax.sharding import Placement
from specdec_jax.text.following import Look, Piece, Row
from specdec_jax.text.packing import Batch, Plan, by_bucket, pack, row_count

MAX_ROUNDS_PER_LOOK = 64
"""Rounds of which the program keeps a record for the host."""

REFILL = 4
"""A batch is refilled when a part of 1 / REFILL of its rows is free, that many at once:
reading prompts together is cheaper than one by one, and few rows stand idle."""

_TO_THE_END = np.int32(2**31 - 1)


class Engine(NamedTuple):
    """What decodes: the parts that a decoder is made of."""

    params: Params
    target: LanguageModel
    drafter: Drafter
    rule: AcceptanceRule
    tokenizer: Any
    placement: Placement | None = None
    """Where they lie on a mesh; None leaves it to JAX."""

    @property
    def static(self) -> dict[str, Any]:
        """What the programs are compiled for, by the names of their arguments."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "rule": self.rule,
            "placement": self.placement,
        }

    def start(self, batch: Any, drafter: Drafter | None = None) -> decode.DecodeState:
        """Makes the state of a batch and reads its prompts; see `start_batch`."""
        return start_batch(
            self.params,
            batch,
            target=self.target,
            drafter=drafter or self.drafter,
            placement=self.placement,
        )


def pieces(
    engine: Engine,
    plan: Plan,
    *,
    batch_size: int,
    rounds_per_look: int | None,
    traced: bool = False,
) -> Iterator[Piece]:
    """Decodes the requests and yields their text as it comes.

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
    for slots, indices in by_bucket(plan, batch_size):
        pool = _Pool(engine, plan, slots, indices, batch_size)
        yield from pool.run(rounds_per_look, traced)


class _Pool:
    """A batch of rows, and the queue of requests that are still to get one."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        slots: int,
        indices: Sequence[int],
        batch_size: int,
    ):
        self._engine, self._plan, self._slots = engine, plan, slots
        self._size, self._refill_size = sizes(engine, len(indices), batch_size)
        self._queue = deque(indices)
        self._rows: list[Row | None] = [None] * self._size
        self._stopped = np.zeros(self._size, bool)

    def run(self, rounds_per_look: int | None, traced: bool) -> Iterator[Piece]:
        """Yields pieces until the queue is empty and every row is finished."""
        static = self._engine.static
        rule = static.pop("rule")
        params, follow = self._engine.params, rounds_per_look is not None
        num_rounds = _TO_THE_END
        if follow or traced:
            most = MAX_ROUNDS_PER_LOOK
            num_rounds = np.int32(min(rounds_per_look or most, most))
        _, batch = self._next(self._size)
        state = self._engine.start(batch)
        while any(row is not None for row in self._rows):
            enough = self._refill_size if self._queue else self._size
            state, look = _advance(
                params,
                state,
                self._stopped.copy(),
                num_rounds,
                np.int32(enough),
                rule=rule,
                traced=traced,
                **static,
            )
            yield from self._read(jax.device_get(look), follow)
            while self._queue and self._rows.count(None) >= self._refill_size:
                places, batch = self._next(self._refill_size)
                state = _refill(params, state, places, batch, **static)

    def _read(self, look: Look, follow: bool) -> Iterator[Piece]:
        for place, row in enumerate(self._rows):
            if row is None:
                continue
            yield from row.read(look, place, follow)
            if row.done:
                self._rows[place], self._stopped[place] = None, True

    def _next(self, size: int) -> tuple[np.ndarray, Batch]:
        """Gives free places to the next requests; the rest are out of range."""
        free = [place for place, row in enumerate(self._rows) if row is None]
        count = min(size, len(self._queue))
        indices = [self._queue.popleft() for _ in range(count)]
        engine, plan = self._engine, self._plan
        for place, index in zip(free, indices, strict=False):
            request = plan.requests[index]
            depth = engine.drafter.depth
            self._rows[place] = Row(
                request, engine.tokenizer, plan.stop, depth, engine.rule.lossless
            )
            self._stopped[place] = False
        places = [*free[:count], *[self._size] * (size - count)]
        return np.array(places, np.int32), pack(plan, indices, size, self._slots)


def sizes(engine: Engine, num_requests: int, batch_size: int) -> tuple[int, int]:
    """Returns the rows of a batch, and how many are refilled at once."""
    over = engine.placement.data if engine.placement else 1
    size = row_count(min(num_requests, batch_size), over)
    return size, row_count(max(size // REFILL, 1), over)


def state_shapes(engine: Engine, batch: Batch) -> decode.DecodeState:
    """Returns the shapes of the state that `Engine.start` makes of a batch."""
    state = jax.eval_shape(engine.start, batch)
    return state if engine.placement is None else engine.placement.shapes(state)


def compile_programs(
    engine: Engine, plan: Plan, *, batch_size: int, traced: bool = False
) -> None:
    """Compiles what `pieces` would run, once for each shape; runs nothing."""
    static = engine.static
    rule = static.pop("rule")
    seen = set()
    for slots, indices in by_bucket(plan, batch_size):
        size, refill_size = sizes(engine, len(indices), batch_size)
        batch = pack(plan, indices[:size], size, slots)
        refills = len(indices) > size
        if (shape := (size, slots, refills)) in seen:
            continue
        seen.add(shape)
        state = state_shapes(engine, batch)
        start_batch.lower(engine.params, batch, **static).compile()
        _advance.lower(
            engine.params,
            state,
            np.zeros(size, bool),
            _TO_THE_END,
            np.int32(size),
            rule=rule,
            traced=traced,
            **static,
        ).compile()
        if refills:
            places = np.zeros(refill_size, np.int32)
            batch = pack(plan, indices[:1], refill_size, slots)
            _refill.lower(engine.params, state, places, batch, **static).compile()


@partial(jax.jit, static_argnames=("target", "drafter", "placement"))
def start_batch(
    params: Params,
    batch: Any,
    *,
    target: LanguageModel,
    drafter: Drafter,
    placement: Placement | None = None,
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
    if placement is not None:
        state = placement.pin(state)
    state = decode.prefill(params, state, target=target, drafter=drafter)
    return state if placement is None else placement.pin(state)


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "placement"),
    donate_argnames=("state",),
)
def _refill(
    params: Params,
    state: decode.DecodeState,
    places: Int[Array, " R"],
    batch: Any,
    *,
    target: LanguageModel,
    drafter: Drafter,
    placement: Placement | None,
) -> decode.DecodeState:
    """Puts a new `Batch` of R rows into the given places; those past the end drop."""
    static = {"target": target, "drafter": drafter, "placement": placement}
    state = decode.insert(state, places, start_batch(params, batch, **static))
    return state if placement is None else placement.pin(state)


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule", "placement", "traced"),
    donate_argnames=("state",),
)
def _advance(
    params: Params,
    state: decode.DecodeState,
    stopped: Bool[Array, " B"],
    num_rounds: Int[Array, ""],
    enough: Int[Array, ""],
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    placement: Placement | None,
    traced: bool,
) -> tuple[decode.DecodeState, Look]:
    """Freezes rows, then runs `num_rounds` rounds or until `enough` rows are finished.

    The record of rounds past its end is dropped; nobody asks for it then.
    """

    def unfinished(carry):
        index, state, *_ = carry
        return (index < num_rounds) & (state.done.sum(dtype=jnp.int32) < enough)

    def body(carry):
        index, before, drafted, emitted, rounds = carry
        state, info = decode.step(
            params, before, target=target, drafter=drafter, rule=rule
        )
        if placement is not None:  # nothing is to wander from device to device
            state = placement.pin(state)
        num_drafted = jnp.where(info.num_emitted > 0, info.draft.num_valid, 0)
        drafted = drafted.at[:, index].set(num_drafted, mode="drop")
        emitted = emitted.at[:, index].set(info.num_emitted, mode="drop")
        if rounds is not None:
            rounds = trace.record(rounds, index, before, info)
        return index + 1, state, drafted, emitted, rounds

    state = decode.freeze(state, stopped)
    if placement is not None:
        state = placement.pin(state)
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
    if placement is not None and jax.process_count() > 1:
        look = placement.replicate(look)  # a process sees what its devices have
    return state, look
