"""Wrong drafters, a wrong model and wrong steps of the loop."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from specdec_jax import decode
from specdec_jax.audit.table import TableModel
from specdec_jax.base import Noise, Params
from specdec_jax.drafters import EarlyExit, ModelDrafter, Nested, Staged
from specdec_jax.rng import first_argmax
from specdec_jax.sampling import History, policy

# Drafters that say something else than they do: the law is lost.


@dataclass(frozen=True)
class GreedyToldSoft(ModelDrafter):
    """Drafts the likeliest token and reports the law it was not drawn from."""

    def draft(self, state, context):
        """See `base.Drafter`."""
        draft, state, cache = super().draft(state, context)
        if draft.log_probs is None:  # a greedy draft is one-hot and honest
            return draft, state, cache
        return draft._replace(tokens=first_argmax(draft.log_probs)), state, cache


@dataclass(frozen=True)
class DropsUnlikely(ModelDrafter):
    """Throws a drafted token away, and all after it, if the draft found it unlikely."""

    least: float = 0.25

    def draft(self, state, context):
        """See `base.Drafter`."""
        draft, state, cache = super().draft(state, context)
        if draft.log_probs is None:  # a greedy draft is one-hot and honest
            return draft, state, cache
        chosen = of_tokens(draft.log_probs, draft.tokens)
        likely = jnp.cumprod((chosen > jnp.log(self.least)).astype(jnp.int32), axis=1)
        kept = jnp.minimum(draft.num_valid, likely.sum(1, dtype=jnp.int32))
        return draft._replace(num_valid=kept), state, cache


@dataclass(frozen=True)
class TrimmedToldWhole(ModelDrafter):
    """Draws among few ids and reports the law that it has over all of them."""

    kept: int = 3
    """The lowest ids are kept."""

    def draft(self, state, context):
        """See `base.Drafter`."""
        draft, state, cache = super().draft(state, context)
        if draft.log_probs is None:  # a greedy draft is one-hot and honest
            return draft, state, cache
        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        block = jnp.concatenate([last, draft.tokens], axis=1)
        logits, _ = super()._apply(
            context.params, block, cache.rewind(context.length - 1)
        )
        history = History.chain(context.tokens, context.length, draft.tokens)
        told = policy(logits, context.sampling, history)[:, :-1]
        return draft._replace(log_probs=told), state, cache

    def _apply(self, params, tokens, cache):
        logits, cache = super()._apply(params, tokens, cache)
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
        return jnp.where(ids < self.kept, logits, -jnp.inf), cache


@dataclass(frozen=True)
class NestedMisreported(Nested):
    """Reports how a token came out of an inner round, not whose draw it is.

    Accepted, corrected or bonus, it is a draw from the middle model's law, and that
    must be told (ALGORITHMS B.5).
    """

    residual_when_rejected: bool = False
    """Tells the residual of corrected tokens; else the inner law of accepted ones."""

    def _told(self, found):
        middle, accepted = found.log_probs, found.verdict.num_accepted[:, None]
        inner = found.draft.log_probs
        if inner is None:
            return middle
        inner = jnp.pad(inner, ((0, 0), (0, 1), (0, 0)))
        places = jnp.arange(middle.shape[1], dtype=jnp.int32)[None]
        if not self.residual_when_rejected:
            return jnp.where((places < accepted)[..., None], inner, middle)
        corrected = (places == accepted) & (accepted < found.draft.num_valid[:, None])
        left = jnp.maximum(jnp.exp(middle) - jnp.exp(inner), 0)
        left = jnp.log(left) - jnp.log(left.sum(-1, keepdims=True))
        return jnp.where(corrected[..., None], left, middle)


@dataclass(frozen=True)
class NestedSharedNoise(Nested):
    """Draws inner drafts, inner coins and corrections of all rounds with one noise."""

    def draft(self, state, context):
        """See `base.Drafter`."""
        return super().draft(state, context._replace(noise=_Childless(context.noise)))


class _Childless(NamedTuple):
    """Noise that hands itself on for inner uses."""

    noise: Noise

    def gumbel(self, offset, vocab_size):
        return self.noise.gumbel(offset, vocab_size)

    def uniform(self, offset):
        return self.noise.uniform(offset)

    def child(self, index, shift=0):
        return self


def of_tokens(log_probs: Float[Array, "B K V"], tokens: Array) -> Float[Array, "B K"]:
    """Returns the log-probability of each token in its row."""
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]


# Drafters that are honest and worse than they could be: only time is lost.


@dataclass(frozen=True)
class HoleInCache(ModelDrafter):
    """Goes on after a round without the last token it had drafted itself."""

    def _catch_up(self, cache, context):
        last = (context.length - 1)[:, None]
        token = jnp.take_along_axis(context.tokens, last, axis=1)
        logits, cache = self._apply(context.params, token, cache.rewind(last[:, 0]))
        return logits, cache.rewind(context.length)


@dataclass(frozen=True)
class StaleCache(ModelDrafter):
    """Rolls its cache back by one token too few."""

    def _catch_up(self, cache, context):
        return super()._catch_up(cache, context._replace(length=context.length + 1))


@dataclass(frozen=True)
class LatePositions(ModelDrafter):
    """Starts its cache one slot late, so that every position is off by one."""

    def _apply(self, params, tokens, cache):
        moved = cache.rewind(cache.length + 1)
        logits, cache = super()._apply(params, tokens, moved)
        return logits, cache.rewind(cache.length - 1)


@dataclass(frozen=True)
class StagedNearSighted(Staged):
    """Leaves its stages the window of the loop's own drafter, 2 tokens."""

    def _each(self, params):
        for stage, own in zip(self.stages, params.draft, strict=True):
            yield stage, Params(params.target, own)


@dataclass(frozen=True)
class LateEarlyExit(EarlyExit):
    """Takes the target's cache to hold the last committed token already."""

    def _committed(self, context):
        return context.target_cache.rewind(context.length)


@dataclass(frozen=True)
class ForgetsTemperature(ModelDrafter):
    """Drafts at another temperature than asked for, and says so."""

    def _apply(self, params, tokens, cache):
        logits, cache = super()._apply(params, tokens, cache)
        return logits * 0.5, cache


@dataclass(frozen=True)
class SeesStaleSlots(TableModel):
    """A target that attends to two slots beyond what is committed and in the block."""

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        padded = jnp.pad(tokens, ((0, 0), (2, 0)), mode="edge")
        early = cache.rewind(jnp.maximum(cache.length - 2, 0))
        output, _ = super().apply(variables, padded, early)
        _, cache = super().apply(variables, tokens, cache)
        return output._replace(logits=output.logits[:, 2:]), cache


# Steps that count or stop wrongly.


def over_budget(params: Any, state: decode.DecodeState, **loop: Any):
    """Runs a round with room for one token more than was asked for."""
    limit = state.limit
    state, info = decode.step(params, state._replace(limit=limit + 1), **loop)
    return state._replace(limit=limit), info


def past_eos(params: Any, state: decode.DecodeState, **loop: Any):
    """Looks for the end of a text in the last token of a round only."""
    eos = state.eos_token_ids
    blind = state._replace(eos_token_ids=jnp.full_like(eos, -1))
    after, info = decode.step(params, blind, **loop)
    last = jnp.take_along_axis(after.tokens, after.length[:, None] - 1, axis=1)
    ended = (last == eos).any(axis=1) & ~state.done
    finish = jnp.where(ended, decode.EOS, after.finish)
    return after._replace(eos_token_ids=eos, finish=finish), info


def counts_verdicts(params: Any, state: decode.DecodeState, **loop: Any):
    """Counts what the rule accepted in finished rows too."""
    after, info = decode.step(params, state, **loop)
    extra = jnp.where(state.done, info.verdict.num_accepted + 1, 0)
    counts = after.counts._replace(num_accepted=after.counts.num_accepted + extra)
    return after._replace(counts=counts), info


def drops_bonus(params: Any, state: decode.DecodeState, **loop: Any):
    """Emits the drafts of a fully accepted round and forgets the bonus token."""
    after, info = decode.step(params, state, **loop)
    whole = (info.verdict.num_accepted == info.draft.num_valid) & ~after.done
    short = (whole & (info.num_emitted > 1)).astype(jnp.int32)
    length = after.length - short
    return after._replace(length=length, cache=after.cache.rewind(length - 1)), info
