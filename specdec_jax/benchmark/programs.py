"""The compiled programs that are timed, built from the public loop.

`decode_rounds` is the deployed loop with a few counters. It can also *hold* its rows:
every round then starts from the same committed tokens, so that one kind of round is
measured over and over at one context. And it can run them *together*: it then ends with
the first row, so that every round is a whole one of the whole batch.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specdec_jax import decode, rng
from specdec_jax.base import (
    AcceptanceRule,
    Draft,
    Drafter,
    LanguageModel,
    Params,
    RoundContext,
)
from specdec_jax.drafters.around import Around
from specdec_jax.sampling import History, is_greedy, policy


class Tally(NamedTuple):
    """Counts over the rounds of a run."""

    rounds: Int[Array, ""]
    """Target passes, each over the whole batch."""
    wide: Int[Array, ""]
    """Passes that verified a draft; the others were plain steps."""
    uncut_rounds: Int[Array, ""]
    """Rounds of a row that neither its budget nor an EOS cut short."""
    uncut_tokens: Int[Array, ""]
    """Tokens that these emitted."""


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule"),
    donate_argnames=("state",),
)
def decode_rounds(
    params: Params,
    state: decode.DecodeState,
    num_rounds: Int[Array, ""],
    hold: Bool[Array, ""],
    together: Bool[Array, ""] | bool = False,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[Tally, decode.DecodeState]:
    """Runs rounds until all rows are finished, or `num_rounds` of them.

    Args:
      params: Variables of target and drafter.
      state: Is given up.
      num_rounds: The most rounds.
      hold: Whether every round starts where the first one did and finishes no row.
      together: Whether to end as soon as a row that ran is finished or has no room for
        a full draft.
      target: The model whose law the tokens have.
      drafter: Where proposals come from.
      rule: Decides how much of them to keep.
    """
    idle = state.done

    def unfinished(carry):
        tally, state = carry
        has_room = state.limit - state.length > drafter.depth
        whole = idle | (~state.done & has_room)
        more = ~state.done.all() & (whole.all() | ~jnp.asarray(together))
        return (tally.rounds < num_rounds) & more

    def body(carry):
        tally, before = carry
        after, info = decode.step(
            params, before, target=target, drafter=drafter, rule=rule
        )
        tally = _count(tally, before, info, drafter.depth)
        length = jnp.where(hold, before.length, after.length)
        after = after._replace(
            length=length,
            finish=jnp.where(hold, before.finish, after.finish),
            cache=after.cache.rewind(length - 1),
        )
        return tally, after

    zero = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(unfinished, body, (Tally(zero, zero, zero, zero), state))


def _count(tally, before, info, depth):
    room = before.limit - before.length - 1
    whole = info.num_emitted == info.verdict.num_accepted + 1
    uncut = ~before.done & (room >= depth) & whole
    return Tally(
        rounds=tally.rounds + 1,
        wide=tally.wide + (info.draft.num_valid.max() > 0).astype(jnp.int32),
        uncut_rounds=tally.uncut_rounds + uncut.sum(dtype=jnp.int32),
        uncut_tokens=tally.uncut_tokens
        + jnp.where(uncut, info.num_emitted, 0).sum(dtype=jnp.int32),
    )


@partial(jax.jit, static_argnames=("drafter", "rule"), donate_argnames=("state",))
def draft_rounds(
    params: Params,
    state: decode.DecodeState,
    num_rounds: Int[Array, ""],
    *,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[Draft, decode.DecodeState]:
    """Drafts `num_rounds` times at one context; returns the last draft.

    The context is one token shorter every other time: a loop whose passes were all the
    same would be free to compute one of them.
    """

    def body(index, carry):
        _, drafter_state, cache = carry
        length = state.length - index % 2
        context = _context(params, state, length, cache, drafter, rule)
        draft, drafter_state, cache = drafter.draft(drafter_state, context)
        return draft, drafter_state, cache

    start = (state.drafter_state, state.cache)
    shapes = jax.eval_shape(lambda: body(0, (None, *start)))[0]
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    draft, drafter_state, cache = jax.lax.fori_loop(
        0, num_rounds, body, (blank, *start)
    )
    return draft, state._replace(drafter_state=drafter_state, cache=cache)


@partial(jax.jit, static_argnames=("target", "width"), donate_argnames=("state",))
def target_passes(
    params: Params,
    state: decode.DecodeState,
    num_passes: Int[Array, ""],
    *,
    target: LanguageModel,
    width: int,
) -> tuple[Int[Array, "B {width}"], decode.DecodeState]:
    """Reads a block `num_passes` times at one context, and makes its policy rows.

    Each block is what the last one's rows say, and the context is one token shorter
    every other time: no pass can be left out, or done once for all.
    """

    def body(index, carry):
        tokens, cache = carry
        length = state.length - index % 2
        output, cache = target.apply(params.target, tokens, cache.rewind(length - 1))
        history = History.chain(state.tokens, length, tokens[:, 1:])
        rows = policy(output.logits, state.sampling, history)
        return rng.first_argmax(rows), cache

    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    block = jnp.repeat(last, width, axis=1)
    block, cache = jax.lax.fori_loop(0, num_passes, body, (block, state.cache))
    return block, state._replace(cache=cache)


def _context(params, state, length, cache, drafter, rule):
    """Returns what the loop would show the drafter, with room for a full draft."""
    sampling = state.sampling if state.draft_sampling is None else state.draft_sampling
    noise = rng.RoundNoise.at(state.key, length, rng.DRAFT)
    if is_greedy(state.sampling) and is_greedy(sampling):
        noise = rng.NoNoise()
    elif rule.noise == "position":
        noise = rng.PositionNoise(state.key, length)
    return RoundContext(
        params=params,
        tokens=state.tokens,
        length=length,
        max_draft=jnp.full_like(length, drafter.depth),
        sampling=sampling,
        noise=noise,
        target_cache=cache.rewind(length - 1),
    )


def midway(state: decode.DecodeState, depth: int) -> decode.DecodeState:
    """Returns a finished state, set back to the middle of its new text.

    This is the deployed context: real text, and caches of about the usual length. There
    is room for a full draft, and rows that decoded something run again.
    """
    emitted = state.length - state.prompt_length
    length = state.prompt_length + (emitted + 1) // 2
    return state._replace(
        length=length,
        limit=length + depth + 1,
        finish=jnp.where(emitted > 0, decode.RUNNING, state.finish),
        cache=state.cache.rewind(length - 1),
    )


@dataclass(frozen=True)
class Replay:
    """Proposes one draft over and over at no cost; its state is that draft.

    In the loop it leaves the cost of verifying a full draft of the same kind (chain or
    tree, with or without laws).
    """

    num_nodes: int
    depth: int
    hidden_layers: tuple[int, ...]
    siblings: str = "none"

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns nothing to replay; the state is put in from outside."""
        return ()

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Returns the state as it is."""
        return state

    def draft(self, state: Draft, context: RoundContext):
        """Returns the draft with all of its nodes valid."""
        full = jnp.full_like(state.num_valid, self.num_nodes)
        return state._replace(num_valid=full), state, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is."""
        return state


@dataclass(frozen=True)
class Discarding(Around):
    """Drafts as another drafter does and proposes nothing: a plain step follows.

    In the loop it leaves the cost of drafting beside a target pass, which has used the
    processor's caches in the meantime.
    """

    def init(self, *arguments, **options):
        """Returns the other's state."""
        return self.drafter.init(*arguments, **options)

    def prefill(self, *arguments):
        """Reads one chunk of the prompts."""
        return self.drafter.prefill(*arguments)

    def draft(self, state, context):
        """Returns a draft without valid nodes."""
        draft, state, cache = self.drafter.draft(state, context)
        # Beyond the compiler's sight: what is drafted could else be left out.
        drafted = jax.lax.optimization_barrier(draft)
        return (
            drafted._replace(num_valid=jnp.zeros_like(draft.num_valid)),
            state,
            cache,
        )

    def update(self, *arguments):
        """Learns from the round."""
        return self.drafter.update(*arguments)
