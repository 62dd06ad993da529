"""Rounds of the real, compiled loop, and the scores of the tokens they emit.

Many rows start from one prompt with keys of their own, so that rounds are aligned: the
first token of a round, where most faults show, is not diluted by the others. The law
that each token should have comes from one forward of the target over the finished text,
which knows nothing of drafts, rounds or rollbacks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax import decode, rng
from specdec_jax.audit.scores import Scores, score
from specdec_jax.audit.subject import (
    Subject,
    begin,
    check_finite,
    one_round,
    read_prompt,
    settings,
)
from specdec_jax.base import Draft, RoundContext
from specdec_jax.decode import DecodeState
from specdec_jax.drafters.model import fit_vocabulary
from specdec_jax.sampling import History, Sampling, certain, policy

NUM_ROUNDS = 3
JOINT = 3
"""Tokens of a text whose joint law is tested; each round emits one at least."""

_COINS = 2**31 - 1
"""Folded into a row's key for the coins of its scores; no length is as large."""

_CELLS = 2**24
"""Entries of the largest array of laws: rows at once times N + 1 times V."""


class Sample(NamedTuple):
    """Scored tokens of R rows; [R, rounds, E] by round and place within it."""

    scores: Scores
    emitted: Bool[np.ndarray, "R rounds E"]
    drafted: Bool[np.ndarray, "R rounds E"]
    """Whether something was proposed at the place."""
    joint: Int[np.ndarray, "R JOINT"]
    """Buckets of the first tokens of the text."""


def chunk_rows(subject: Subject, num_samples: int) -> int:
    """Returns how many rows run at once, a power of two."""
    cells = subject.target.vocab_size * (subject.drafter.num_nodes + 1)
    most = max(_CELLS // cells, 1)
    size = 1
    while size * 2 <= min(most, num_samples, 2**15):
        size *= 2
    return size


class Prompt(NamedTuple):
    """One prompt, read once; every row starts from here."""

    tokens: Sequence[int]
    state: DecodeState
    reference_cache: Any
    draft_caches: tuple[Any, ...]
    """One for each of the subject's `draft_laws`, None without a model."""

    @classmethod
    def read(
        cls, subject: Subject, tokens: Sequence[int], sampling: Sampling
    ) -> "Prompt":
        """Reads a prompt into the loop's state and into independent caches."""
        block = NUM_ROUNDS * (subject.drafter.depth + 1)
        key = rng.request_keys(jax.random.key(0), 1)
        # One round more than is run: no budget shortens a draft.
        budget = block + subject.drafter.depth + 1
        state = begin(subject, [tokens], key, sampling, max_new_tokens=budget)
        # Of few sizes, like every shape: prompts of any length share programs.
        capacity = decode.bucket(len(tokens) + block)
        reference, *drafts = [
            None if model is None else read_prompt(model, variables, tokens, capacity)
            for model, variables in (
                (subject.reference, subject.params.target),
                *(law[:2] for law in subject.draft_laws),
            )
        ]
        return cls(tokens, state, reference, tuple(drafts))


def first_laws(
    subject: Subject, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[Float[np.ndarray, "C V"], Float[np.ndarray, "C V"]]:
    """Returns the target's and the draft's probabilities right after each prompt.

    The draft's are zeros where nothing is proposed.
    """
    keys = rng.request_keys(jax.random.key(0), len(prompts))
    budget = subject.drafter.depth + 1
    state = begin(subject, prompts, keys, sampling, max_new_tokens=budget)
    found = _first_laws(
        subject.params, state, target=subject.target, drafter=subject.drafter
    )
    target, draft = jax.device_get(found)
    return target, draft


@partial(jax.jit, static_argnames=("target", "drafter"))
def _first_laws(params, state, *, target, drafter):
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    cache = state.cache.rewind(state.length - 1)
    output, _ = target.apply(params.target, last, cache)
    history = History.plain(state.tokens, state.length)
    law = jnp.exp(policy(output.logits, state.sampling, history))[:, 0]
    context = RoundContext(
        params=params,
        tokens=state.tokens,
        length=state.length,
        max_draft=jnp.full_like(state.length, drafter.depth),
        sampling=state.sampling,
        noise=rng.RoundNoise.at(state.key, state.length, rng.DRAFT),
        target_cache=cache,
    )
    draft, _, _ = drafter.draft(state.drafter_state, context)
    told, drafted = _proposals((draft,), law.shape[1])
    return law, jnp.where(drafted[:, 0, :1], jnp.exp(told[:, 0, 0]), 0)


def sample(
    subject: Subject,
    prompt: Prompt,
    keys: Key[Array, " R"],
    sampling: Sampling,
    rows_at_once: int,
) -> Iterator[tuple[Sample, float | None]]:
    """Yields scored rounds, a chunk of rows at a time.

    The second item is the largest deviation of the draft law that the loop was told
    from the draft model's own on the same tokens, in probability; None if no model
    drafts.
    """
    for first in range(0, len(keys), rows_at_once):
        chunk = keys[first : first + rows_at_once]
        state, infos = _run(subject, prompt, chunk, NUM_ROUNDS)
        check_finite(state)
        target = _text_laws(subject, prompt, state.tokens, sampling)
        start = np.int32(len(prompt.tokens))
        found = jax.device_get(_score(state.tokens, start, infos, target, chunk))
        yield Sample(*found), _told_against_own(subject, prompt, state, infos, sampling)


def _run(subject, prompt, keys, num_rounds):
    """Runs rounds on one row a key; returns the last state and each round's facts."""
    state, infos = _many(prompt.state, keys), []
    for _ in range(num_rounds):
        state, info = one_round(
            subject.params, state, step=subject.step, **subject.loop
        )
        infos.append(_as_chain(info))
    return state, tuple(infos)


@jax.jit
def _as_chain(info):
    """Returns a round with its tree as a chain: what was proposed on the way taken.

    At each place that is the first child of the node that the text was at, told by the
    law it was drawn from. A chain's token is the one that the text has there, so that
    the law which follows is the one of the text.
    """
    draft = info.draft
    if draft.parents is None:
        return info
    depth = info.tokens.shape[1] - 1
    slots = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    valid = slots < draft.num_valid[:, None]
    path = jnp.pad(
        info.verdict.path[:, : depth - 1], ((0, 0), (1, 0)), constant_values=-1
    )
    children = (draft.parents[:, None] == path[..., None]) & valid[:, None]
    reached = slots[:, :depth] <= info.verdict.num_accepted[:, None]
    first = jnp.argmax(children, axis=-1)
    if draft.log_probs is None:
        tokens = jnp.take_along_axis(draft.tokens, first, axis=1)
        laws = certain(tokens, info.log_probs.shape[-1])
    else:
        laws = jnp.take_along_axis(draft.log_probs, first[..., None], axis=1)
    number = (children.any(axis=-1) & reached).sum(axis=1, dtype=jnp.int32)
    chain = Draft(info.tokens[:, :depth], number, laws.astype(jnp.float32))
    return info._replace(draft=chain)


@jax.jit
def _many(state, keys):
    """Returns the one row of a state, once a key."""
    rows = jnp.zeros(keys.shape, jnp.int32)
    return decode.take(state, rows)._replace(key=keys)


def _text_laws(subject, prompt, tokens, sampling):
    """Returns the target's policy rows behind each new token, [R, S, V]."""
    size = NUM_ROUNDS * (subject.drafter.depth + 1)
    return _laws(
        subject.params.target,
        prompt.reference_cache,
        tokens,
        np.int32(len(prompt.tokens)),
        sampling,
        model=subject.reference,
        size=size,
        vocab_size=subject.target.vocab_size,
    )


@partial(jax.jit, static_argnames=("sampling", "model", "size", "vocab_size"))
def _laws(variables, cache, tokens, start, sampling, *, model, size, vocab_size):
    """Returns the policy rows behind `size` tokens from slot `start` on."""
    batch = len(tokens)
    cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, batch, axis=0), cache)
    block = jax.lax.dynamic_slice_in_dim(tokens, start - 1, size, axis=1)
    own = jnp.minimum(block, model.vocab_size - 1)
    logits = model.apply(variables, own, cache)[0].logits
    logits = fit_vocabulary(logits, vocab_size)
    length = jnp.broadcast_to(start, (batch,))
    history = History.chain(tokens, length, block[:, 1:])
    return policy(logits, settings(sampling, batch, vocab_size, start), history)


def _proposals(
    drafts: tuple[Draft, ...], vocab_size: int
) -> tuple[Float[Array, "R rounds K V"], Bool[Array, "R rounds K"]]:
    """Returns the laws that the loop was told, one-hot for deterministic drafts."""
    laws, valid = [], []
    for draft in drafts:
        told = draft.log_probs
        laws.append(certain(draft.tokens, vocab_size) if told is None else told)
        places = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        valid.append(places < draft.num_valid[:, None])
    return jnp.stack(laws, 1), jnp.stack(valid, 1)


@jax.jit
def _score(tokens, start, infos, target, keys):
    """Returns a `Sample`'s fields; target is [R, S, V] by place in the text."""
    batch, size, vocab_size = target.shape
    coins = jax.vmap(lambda key: jax.random.uniform(key, (size,), jnp.float32))(
        rng.fold(keys, _COINS)
    )
    draft, drafted = _proposals(tuple(info.draft for info in infos), vocab_size)
    width = infos[0].tokens.shape[1]
    missing = width - draft.shape[2]
    draft = jnp.pad(draft, ((0, 0), (0, 0), (0, missing), (0, 0)))
    drafted = jnp.pad(drafted, ((0, 0), (0, 0), (0, missing)))
    number = jnp.stack([info.num_emitted for info in infos], 1)
    before = jnp.cumsum(number, axis=1) - number
    places = jnp.arange(width, dtype=jnp.int32)[None, None]
    emitted = places < number[..., None]
    # Place of each token in the text; those not emitted look at any place.
    where = jnp.minimum(before[..., None] + places, size - 1).reshape(batch, -1)
    text = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)

    def each_row(text, coins, target, draft, drafted, where):
        return jax.vmap(score)(text[where], coins[where], target[where], draft, drafted)

    flat = jax.vmap(each_row)(
        text, coins, target, draft.reshape(batch, -1, vocab_size),
        drafted.reshape(batch, -1), where,
    )  # fmt: skip
    scores = jax.tree.map(lambda leaf: leaf.reshape(emitted.shape), flat)
    slots = jnp.where(emitted, before[..., None] + places, size).reshape(batch, -1)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    joint = jnp.zeros((batch, size), jnp.int32)
    joint = joint.at[rows, slots].set(flat.bucket, mode="drop")
    return Scores(*scores), emitted, drafted, joint[:, :JOINT]


def _told_against_own(subject, prompt, state, infos, sampling):
    """Returns how far the last round's told laws are from the draft models' own.

    Of several that draft, a token may be any one's; what is neither a model's nor
    deterministic cannot be told from a misreported law.
    """
    laws, info = subject.draft_laws, infos[-1]
    told = info.draft.log_probs
    if told is None or all(law.model is None for law in laws):
        return None
    text = _with_drafts(
        state.tokens, state.length - info.num_emitted, info.draft.tokens
    )
    offset = state.length - info.num_emitted - len(prompt.tokens)
    gaps = []
    for law, cache in zip(laws, prompt.draft_caches, strict=True):
        if law.model is None:
            one_hot = (told.max(-1) == 0) | (not law.deterministic)
            gaps.append(jnp.where(one_hot, 0.0, jnp.inf))
            continue
        own = _laws(
            law.variables,
            cache,
            text,
            np.int32(len(prompt.tokens)),
            sampling,
            model=law.model,
            size=NUM_ROUNDS * (subject.drafter.depth + 1),
            vocab_size=subject.target.vocab_size,
        )
        gaps.append(_gaps(own, offset, info.draft))
    drafted = np.arange(told.shape[1]) < np.asarray(info.draft.num_valid)[:, None]
    nearest = np.min([np.asarray(gap) for gap in gaps], axis=0)
    return float(np.where(drafted, nearest, 0).max())


@jax.jit
def _with_drafts(tokens, length, drafted):
    """Returns texts as they would be had the draft been committed."""
    rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    slots = jnp.arange(drafted.shape[1], dtype=jnp.int32)[None] + length[:, None]
    return tokens.at[rows, slots].set(drafted, mode="drop")


@jax.jit
def _gaps(own, offset, draft):
    """Returns the largest difference in probability at each drafted place, [R, K]."""
    places = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    slots = jnp.minimum(offset[:, None] + places, own.shape[1] - 1)
    own = jnp.take_along_axis(own, slots[..., None], axis=1)
    return jnp.abs(jnp.exp(own) - jnp.exp(draft.log_probs)).max(-1)
