"""The whole run, round by round, as a pytree of fixed size.

Off by default: `run` here is `decode.run` with a record beside the state. The tokens
are the same; what each round costs more is a few reductions over the laws that it has
made anyway.

    state, trace = trace.run(params, state, target=..., drafter=..., rule=...,
                             num_rounds=64)

`text.page` makes a page of it (`specdec generate --trace FILE.html`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax import decode
from specdec_jax.base import AcceptanceRule, Drafter, LanguageModel, Params
from specdec_jax.decode import DecodeState, StepInfo
from specdec_jax.verify import ancestry


class Trace(NamedTuple):
    """R rounds of B rows with drafts of N nodes. Rows are axis 0, rounds axis 1.

    A round in which a row emitted nothing (`num_emitted` 0) means nothing. Laws are
    policies: temperature, filters and penalties applied. Of a node that the verdict did
    not look at (`judged` false) the target's side is NaN.
    """

    start: Int[Array, "B R"]
    """Committed tokens when the round began."""
    num_valid: Int[Array, "B R"]
    """Drafted nodes."""
    num_accepted: Int[Array, "B R"]
    num_emitted: Int[Array, "B R"]
    """Accepted tokens and the next one, less what EOS or bad logits cut off."""
    next_token: Int[Array, "B R"]
    """The corrected or bonus token."""
    next_log_prob: Float[Array, "B R"]
    """Its log-probability under the target, in nats."""
    target_entropy: Float[Array, "B R E"]
    """Of the law behind emitted token i, in nats; E = depth + 1."""
    tokens: Int[Array, "B R N"]
    parents: Int[Array, "B R N"]
    """Node that each node follows; -1 is the last committed token."""
    judged: Bool[Array, "B R N"]
    """Whether the verdict looked at it: all before it was accepted."""
    accepted: Bool[Array, "B R N"]
    target_log_prob: Float[Array, "B R N"]
    draft_log_prob: Float[Array, "B R N"]
    """Under the law it was drawn from; 0 for drafts without laws."""
    draft_entropy: Float[Array, "B R N"]
    """Of that law, in nats."""
    residual_mass: Float[Array, "B R N"]
    """`sum max(p - q, 0)`: the probability that rejection sampling rejects there."""


def blank(batch_size: int, num_rounds: int, drafter: Drafter) -> Trace:
    """Returns a trace of rounds that did not happen."""
    rows, nodes = (batch_size, num_rounds), (batch_size, num_rounds, drafter.num_nodes)
    places = (batch_size, num_rounds, drafter.depth + 1)
    shapes = {
        "target_entropy": (places, jnp.float32),
        "tokens": (nodes, jnp.int32),
        "parents": (nodes, jnp.int32),
        "judged": (nodes, jnp.bool_),
        "accepted": (nodes, jnp.bool_),
        "next_log_prob": (rows, jnp.float32),
    }
    for name in Trace._fields[-4:]:
        shapes[name] = (nodes, jnp.float32)
    return Trace(
        *(jnp.zeros(*shapes.get(name, (rows, jnp.int32))) for name in Trace._fields)
    )


def record(
    trace: Trace, index: Int[Array, ""], before: DecodeState, info: StepInfo
) -> Trace:
    """Writes a round to place `index`; past the trace's end it is dropped.

    Args:
      trace: Rounds so far.
      index: Round of this run.
      before: The state that the round began with.
      info: What `decode.step` said of it.
    """
    round_ = _round(before, info)
    return jax.tree.map(
        lambda all_, one: all_.at[:, index].set(one.astype(all_.dtype), mode="drop"),
        trace,
        round_,
    )


def run(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    num_rounds: int,
) -> tuple[DecodeState, Trace]:
    """Runs rounds until every row is finished, or `num_rounds` of them.

    Args:
      params: Variables of target and drafter.
      state: Its keys are not consumed.
      target: The model whose law the tokens have.
      drafter: Where proposals come from.
      rule: The output is lossless if `rule.lossless`.
      num_rounds: Rounds the trace has room for; the budget of new tokens always does.

    Returns:
      The state as `decode.run` leaves it, and the trace.
    """

    def unfinished(carry):
        index, state, _ = carry
        return ~state.done.all() & (index < num_rounds)

    def body(carry):
        index, before, trace = carry
        state, info = decode.step(
            params, before, target=target, drafter=drafter, rule=rule
        )
        return index + 1, state, record(trace, index, before, info)

    start = blank(len(state.length), num_rounds, drafter)
    carry = (jnp.zeros((), jnp.int32), state, start)
    _, state, trace = jax.lax.while_loop(unfinished, body, carry)
    return state, trace


def _round(before: DecodeState, info: StepInfo) -> Trace:
    """Returns one round; its leaves lack the axis of rounds."""
    draft, verdict, rows = info.draft, info.verdict, info.log_probs
    slots = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    parents, depth = draft.parents, slots + 1
    if parents is None:
        parents = jnp.broadcast_to(slots - 1, draft.tokens.shape)
    else:
        depth = ancestry(parents)[1][:, 1:]
    accepted = _on_path(verdict, slots)
    judged = _judged(parents, accepted) & (slots < draft.num_valid[:, None])
    # The row that judged a node is the row of its place in the text.
    place = jnp.broadcast_to(depth - 1, draft.tokens.shape)
    p = jnp.take_along_axis(rows, place[..., None], axis=1)
    target = _at(p, draft.tokens)
    if draft.log_probs is None:
        draft_log_prob = draft_entropy = jnp.zeros(target.shape, target.dtype)
        residual = 1 - jnp.exp(target)
    else:
        draft_log_prob = _at(draft.log_probs, draft.tokens)
        draft_entropy = _entropy(draft.log_probs)
        left = jnp.exp(p) - jnp.exp(draft.log_probs.astype(p.dtype))
        residual = jnp.maximum(left, 0).sum(axis=-1)
    last = jnp.take_along_axis(rows, verdict.num_accepted[:, None, None], axis=1)
    return Trace(
        start=before.length,
        num_valid=draft.num_valid,
        num_accepted=verdict.num_accepted,
        num_emitted=info.num_emitted,
        next_token=verdict.next_token,
        next_log_prob=_at(last, verdict.next_token[:, None])[:, 0],
        target_entropy=_entropy(rows),
        tokens=draft.tokens,
        parents=parents,
        judged=judged,
        accepted=accepted,
        target_log_prob=jnp.where(judged, target, jnp.nan),
        draft_log_prob=draft_log_prob,
        draft_entropy=draft_entropy,
        residual_mass=jnp.where(judged, residual, jnp.nan),
    )


def _on_path(verdict, slots):
    """Returns which nodes were accepted."""
    kept = slots < verdict.num_accepted[:, None]
    return ((verdict.path[:, :, None] == slots[:, None]) & kept[:, :, None]).any(axis=1)


def _judged(parents, accepted):
    """Returns which nodes the verdict came to, valid or not.

    All before such a node was accepted, and no earlier sibling was.
    """
    slots = jnp.arange(parents.shape[1], dtype=jnp.int32)
    reached = jnp.take_along_axis(accepted, jnp.maximum(parents, 0), axis=1)
    siblings = parents[:, :, None] == parents[:, None, :]
    earlier = (slots[None, :] < slots[:, None])[None] & accepted[:, None, :]
    return ((parents < 0) | reached) & ~(siblings & earlier).any(axis=-1)


def _at(rows, tokens):
    return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]


def _entropy(log_probs):
    """Entropy in nats; where(-inf) first, since 0 * -inf is NaN."""
    safe = jnp.where(log_probs > -jnp.inf, log_probs, 0)
    return -(jnp.exp(log_probs) * safe).sum(axis=-1)
