"""The loop: draft, verify, accept, commit, on a batch of rows that advance unequally.

One row's buffer of T slots between two rounds (`length` 7, prompt of 4):

    slot          0 1 2 3 4 5 6 7 8 9 ...
    tokens        p p p p t t t . . .      committed below length, garbage above
    target cache  x x x x x x . . . .      all committed tokens but the last

A round reads the block `[last committed token, d1 .. dK]` on top of the cache, so row
i of the logits judges draft i + 1 and row K gives the bonus token. Rolling back is
setting a length; nothing moves, except the accepted path of a tree.

The functions are pure and not jitted; wrap them in `jax.jit` with `target`, `drafter`
and `rule` closed over or static (they hash by value), or use `SpeculativeDecoder`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax import rng
from specdec_jax.base import (
    AcceptanceRule,
    Draft,
    Drafter,
    LanguageModel,
    Params,
    RoundContext,
    Verdict,
)
from specdec_jax.sampling import is_greedy
from specdec_jax.state import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    EOS,
    ERROR,
    LENGTH,
    PREFILL_CHUNK,
    PROMPT,
    RUNNING,
    STOP,
    Counts,
    DecodeState,
    append,
    bucket,
    buffer_capacity,
    freeze,
    init,
    insert,
    take,
)
from specdec_jax.verify import Round, verify_round

__all__ = [
    "ACCEPTED",
    "BONUS",
    "CORRECTED",
    "EOS",
    "ERROR",
    "LENGTH",
    "PREFILL_CHUNK",
    "PROMPT",
    "RUNNING",
    "STOP",
    "Counts",
    "DecodeState",
    "Round",
    "StepInfo",
    "bucket",
    "buffer_capacity",
    "freeze",
    "generate",
    "init",
    "insert",
    "prefill",
    "run",
    "step",
    "take",
    "verify_round",
]


class StepInfo(NamedTuple):
    """Everything else about a round."""

    draft: Draft
    verdict: Verdict
    tokens: Int[Array, "B E"]
    """`[:num_emitted]` of each row was emitted."""
    num_emitted: Int[Array, " B"]
    log_probs: Float[Array, "B E V"]
    """The policy row that each of these tokens was judged by."""


def prefill(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    chunk: int = PREFILL_CHUNK,
) -> DecodeState:
    """Reads all prompt tokens but the last, in fixed chunks, into every cache.

    The last prompt token is the first input of the first round, so a prompt of length 1
    reads nothing. Rows shorter than the longest write garbage above their length.
    """

    def read_chunk(carry):
        index, cache, drafter_state = carry
        first = index * chunk
        start = jnp.full_like(state.length, 0) + first
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, first, chunk, axis=1)
        output, cache = target.apply(
            params.target,
            tokens,
            cache.rewind(start),
            hidden_layers=drafter.hidden_layers,
        )
        num_valid = jnp.clip(state.prompt_length - 1 - start, 0, chunk)
        drafter_state = drafter.prefill(
            params, drafter_state, tokens, start, num_valid, output
        )
        return index + 1, cache, drafter_state

    longest = state.prompt_length.max() - 1
    _, cache, drafter_state = jax.lax.while_loop(
        lambda carry: carry[0] * chunk < longest,
        read_chunk,
        (jnp.zeros((), jnp.int32), state.cache, state.drafter_state),
    )
    cache = cache.rewind(state.prompt_length - 1)
    return state._replace(cache=cache, drafter_state=drafter_state)


def step(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[DecodeState, StepInfo]:
    """Runs one round on every row that is not finished.

    Each such row gains between 1 and depth + 1 tokens. Budgets never cut a block, since
    no more is drafted than fits; EOS does. Counts are of emitted tokens.
    """
    running = ~state.done
    room = jnp.clip(state.limit - state.length - 1, 0, drafter.depth)
    draft_sampling = (
        state.sampling if state.draft_sampling is None else state.draft_sampling
    )
    draft_noise, noise = _noise(state, draft_sampling, drafter, rule)
    context = RoundContext(
        params=params,
        tokens=state.tokens,
        length=state.length,
        max_draft=jnp.where(running, room, 0),
        sampling=draft_sampling,
        noise=draft_noise,
        target_cache=state.cache,
    )
    result = verify_round(
        params,
        state.drafter_state,
        context,
        state.sampling,
        noise,
        target=target,
        drafter=drafter,
        rule=rule,
    )
    num_emitted, finish = _cut(state, result)
    state = _emit(state, result, num_emitted, finish)
    return state, StepInfo(
        result.draft, result.verdict, result.tokens, num_emitted, result.log_probs
    )


def run(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    num_rounds: int | Int[Array, ""] | None = None,
) -> DecodeState:
    """Runs rounds until every row is finished, or `num_rounds` of them.

    The tokens do not depend on how a run is cut into pieces.
    """

    def unfinished(carry):
        index, state = carry
        more = ~state.done.all()
        return more if num_rounds is None else more & (index < num_rounds)

    def body(carry):
        index, state = carry
        state, _ = step(params, state, target=target, drafter=drafter, rule=rule)
        return index + 1, state

    start = (jnp.zeros((), jnp.int32), state)
    return jax.lax.while_loop(unfinished, body, start)[1]


def generate(
    params: Params,
    key: Key[Array, "..."],
    prompts: Int[Array, "B S"],
    prompt_length: Int[Array, "..."],
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    max_new_tokens: int | Int[Array, " B"],
    **settings: Any,
) -> DecodeState:
    """Decodes a batch to the end: `init`, `prefill` and rounds, as one program.

    Args:
      params: Variables of target and drafter.
      key: One typed key, or one a row. Not consumed.
      prompts: Right-padded token ids.
      prompt_length: Tokens of each prompt.
      target: The model whose law the output has.
      drafter: Where proposals come from.
      rule: The output is lossless if `rule.lossless`.
      max_new_tokens: Budget, one for all or one a row.
      **settings: The other arguments of `init`.

    Returns:
      The final state; row b's new tokens are `tokens[b, prompt_length[b]:length[b]]`.
    """
    state = init(
        params,
        key,
        prompts,
        prompt_length,
        target=target,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        **settings,
    )
    state = prefill(params, state, target=target, drafter=drafter)
    return run(params, state, target=target, drafter=drafter, rule=rule)


def _noise(state, draft_sampling, drafter, rule):
    """Returns the drafter's noise and the rule's for this round."""
    if is_greedy(state.sampling) and is_greedy(draft_sampling):
        return rng.NoNoise(), rng.NoNoise()
    if rule.noise == "position" or drafter.num_nodes == 0:
        shared = rng.PositionNoise(state.key, state.length)
        return shared, shared
    return (
        rng.RoundNoise.at(state.key, state.length, rng.DRAFT),
        rng.RoundNoise.at(state.key, state.length, rng.ACCEPT),
    )


def _cut(state: DecodeState, result: Round):
    """Returns how many of the round's tokens are emitted, and what finishes the row."""
    places = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]
    never = result.tokens.shape[1]

    def first(mask):
        return jnp.where(mask, places, never).min(axis=1)

    wanted = result.verdict.num_accepted + 1
    is_eos = (result.tokens[..., None] == state.eos_token_ids[:, None]).any(-1)
    num_eos = first(is_eos) + 1
    num_usable = first(~result.finite)
    num_emitted = jnp.minimum(jnp.minimum(wanted, num_eos), num_usable)
    num_emitted = jnp.where(state.done, 0, num_emitted)
    full = state.length + num_emitted >= state.limit
    finish = jnp.select(
        [
            state.done,
            num_eos <= jnp.minimum(wanted, num_usable),
            num_usable < wanted,
            full,
        ],
        [state.finish, EOS, ERROR, LENGTH],
        RUNNING,
    )
    return num_emitted, finish.astype(jnp.int32)


def _emit(state: DecodeState, result: Round, num_emitted, finish) -> DecodeState:
    """Commits the emitted tokens and counts them."""
    verdict, draft = result.verdict, result.draft
    rows = jnp.arange(len(state.tokens), dtype=jnp.int32)
    places = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]

    def write(buffer, values):
        return append(buffer, state.length, values, num_emitted)

    emitting = (num_emitted > 0).astype(jnp.int32)
    kept = jnp.minimum(verdict.num_accepted, num_emitted)
    last = jnp.where(_was_judged(draft, verdict), CORRECTED, BONUS)
    accepted = places < verdict.num_accepted[:, None]
    origin = jnp.where(accepted, ACCEPTED, last[:, None])
    counts = state.counts
    counts = Counts(
        rounds=counts.rounds + emitting,
        num_drafted=counts.num_drafted + emitting * draft.num_valid,
        num_accepted=counts.num_accepted + kept,
        histogram=counts.histogram.at[rows, kept].add(emitting),
    )
    length = state.length + num_emitted
    return state._replace(
        tokens=write(state.tokens, result.tokens),
        length=length,
        finish=finish,
        cache=result.cache.rewind(length - 1),
        drafter_state=result.drafter_state,
        log_probs=write(state.log_probs, result.model_log_probs),
        policy_log_probs=write(state.policy_log_probs, result.policy_log_probs),
        origin=write(state.origin, origin),
        counts=counts,
    )


def _was_judged(draft: Draft, verdict: Verdict) -> Bool[Array, " B"]:
    """Returns whether anything was drafted at the place of the next token."""
    if draft.parents is None:
        return verdict.num_accepted < draft.num_valid
    slots = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    deepest = jnp.take_along_axis(
        jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1),
        verdict.num_accepted[:, None],
        axis=1,
    )
    children = (draft.parents == deepest) & (slots < draft.num_valid[:, None])
    return children.any(axis=1)
