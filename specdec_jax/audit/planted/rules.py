"""Rejection taken apart, so that one part at a time can be wrong.

With the parts as they come, `Chain()` is the rejection rule. Each fault replaces one:
what the rule is told, the ratio, the row of the corrected token, the coins, or how
flags become a length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.acceptance import rejection
from specdec_jax.base import Draft, Noise, Verdict
from specdec_jax.rng import draw, first_argmax

Row = Float[Array, " V"]
Rows = Float[Array, "M V"]


def as_it_is(draft: Draft, target: Rows) -> tuple[Draft, Rows]:
    """Hears the draft's law and the target's rows as they are."""
    return draft, target


def residual(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Returns the row of a corrected token, unnormalised; `slot` was rejected."""
    if draft.log_probs is None:
        return rejection.residual_one_hot(target[slot], draft.tokens[slot])
    return rejection.residual(target[slot], draft.log_probs[slot])


def fresh(noise: Noise, slots: Int[Array, " N"]) -> Float[Array, " N"]:
    """Returns one coin a slot."""
    return jnp.asarray(jax.vmap(noise.uniform)(slots))


def below(coins: Float[Array, " N"], log_ratio: Float[Array, " N"]):
    """Returns the flags of acceptance; strict, so that a coin of 0 accepts nothing."""
    return jnp.log(coins.astype(log_ratio.dtype)) < log_ratio


def leading(flags: Bool[Array, " N"]) -> Int[Array, ""]:
    """Returns how many flags are true before the first false one."""
    return jnp.cumprod(flags.astype(jnp.int32)).sum(dtype=jnp.int32)


@dataclass(frozen=True)
class Chain:
    """The rejection rule in replaceable parts; exact as it comes."""

    hear: Callable = as_it_is
    log_ratio: Callable = rejection.log_accept
    corrected: Callable = residual
    coins: Callable = fresh
    flags: Callable = below
    count: Callable = leading
    noise: str = "round"
    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = ("none",)

    def law(self, draft: Draft, target_log_probs: Rows):
        """See `base.AcceptanceRule.law`; sees neither coins nor counting."""
        draft, target = self.hear(draft, target_log_probs)
        accept = jnp.exp(jnp.minimum(self.log_ratio(draft, target), 0))
        zero = jnp.zeros((1,), accept.dtype)
        reach = jnp.cumprod(jnp.concatenate([zero + 1, accept]))
        stop = reach * (1 - jnp.concatenate([accept, zero]))
        places = jnp.arange(len(target), dtype=jnp.int32)
        rows = jax.vmap(lambda n: self._following(draft, target, n))(places)
        return stop, jax.nn.softmax(rows, axis=-1)

    def __call__(self, noise: Noise, draft: Draft, target_log_probs: Rows) -> Verdict:
        """See `base.AcceptanceRule`."""
        draft, target = self.hear(draft, target_log_probs)
        slots = jnp.arange(len(target) - 1, dtype=jnp.int32)
        log_ratio = self.log_ratio(draft, target)
        n = self.count(self.flags(self.coins(noise, slots), log_ratio))
        row = self._following(draft, target, n)
        return Verdict(n, draw(row, noise, n), slots)

    def _following(self, draft, target, n):
        if len(target) < 2:
            return target[n]
        slot = jnp.minimum(n, len(target) - 2)
        wrong = self.corrected(draft, target, slot)
        return jnp.where(n < draft.num_valid, wrong.astype(target.dtype), target[n])


def log_mass(mass: Row) -> Row:
    """Returns the logarithm, `-inf` where there is nothing."""
    return jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1)), -jnp.inf)


# What the rule is told.


def draft_softer(draft: Draft, target: Rows) -> tuple[Draft, Rows]:
    """Believes the draft to be softer than it is: 0.9 of its logits."""
    if draft.log_probs is None:
        return draft, target
    rows = jax.nn.log_softmax(draft.log_probs * 0.9, axis=-1)
    return draft._replace(log_probs=rows), target


def bonus_without_policy(draft: Draft, target: Rows) -> tuple[Draft, Rows]:
    """Forgets the temperature in the bonus row: 0.7 of the others' logits."""
    return draft, target.at[-1].set(jax.nn.log_softmax(target[-1] * 0.7))


def rows_shifted(draft: Draft, target: Rows) -> tuple[Draft, Rows]:
    """Judges each draft by the row after its own."""
    return draft, jnp.roll(target, -1, axis=0)


def first_is_right(draft: Draft, target: Rows) -> tuple[Draft, Rows]:
    """Accepts the first drafted token without a test."""
    if draft.log_probs is None or len(target) < 2:
        return draft, target
    return draft._replace(log_probs=draft.log_probs.at[0].set(target[0])), target


# The ratio.


def inverted(draft: Draft, target: Rows) -> Float[Array, " N"]:
    """Accepts with q/p."""
    ratio = rejection.log_accept(draft, target)
    return jnp.where(ratio > -jnp.inf, -ratio, -jnp.inf)


def lenient(draft: Draft, target: Rows) -> Float[Array, " N"]:
    """Accepts with p / (0.9 q)."""
    return rejection.log_accept(draft, target) - jnp.log(0.9).astype(target.dtype)


def argmax_only(draft: Draft, target: Rows) -> Float[Array, " N"]:
    """Accepts the target's likeliest token and nothing else, at any temperature."""
    best = first_argmax(target)[: len(target) - 1]
    same = (draft.tokens == best) & (rejection.log_accept(draft, target) > -jnp.inf)
    return jnp.where(same, 0.0, -jnp.inf).astype(target.dtype)


def typical(draft: Draft, target: Rows) -> Float[Array, " N"]:
    """Accepts what the target holds to be likely enough (Medusa's typical rule)."""
    slots = jnp.arange(len(target) - 1, dtype=jnp.int32)
    probs = jnp.exp(target)
    entropy = -jnp.where(probs > 0, probs * target, 0).sum(-1)
    bar = jnp.minimum(0.09, 0.3 * jnp.exp(-entropy)).astype(target.dtype)
    enough = probs[slots, jnp.clip(draft.tokens, 0, target.shape[1] - 1)] > bar[:-1]
    valid = slots < draft.num_valid
    return jnp.where(enough & valid, 0.0, -jnp.inf).astype(target.dtype)


# The row of the corrected token.


def target_again(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Draws from the target after a rejection."""
    return target[slot]


def residual_plus(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Adds 1e-6 to every token's residual mass."""
    return log_mass(jnp.exp(residual(draft, target, slot)) + 1e-6)


def absolute(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Takes abs(p - q) for the residual."""
    if draft.log_probs is None:
        return residual(draft, target, slot)
    return log_mass(jnp.abs(jnp.exp(target[slot]) - jnp.exp(draft.log_probs[slot])))


def next_row(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Takes the target's row of the following place for the residual."""
    rolled = jnp.roll(target, -1, axis=0)
    return residual(draft, rolled, slot)


def softmax_of_residual(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Takes residual masses for logits: every token keeps some probability."""
    return jnp.exp(residual(draft, target, slot))


def in_bfloat16(draft: Draft, target: Rows, slot: Int[Array, ""]) -> Row:
    """Rounds the residual's masses to bfloat16 before they are subtracted."""
    if draft.log_probs is None:
        return residual(draft, target, slot)
    p, q = (
        jnp.exp(row[slot]).astype(jnp.bfloat16) for row in (target, draft.log_probs)
    )
    return log_mass(jnp.maximum(p - q, 0).astype(target.dtype))


# Coins, and from flags to a length.


def one_coin(noise: Noise, slots: Int[Array, " N"]) -> Float[Array, " N"]:
    """Uses the first coin for all slots."""
    return jnp.full(slots.shape, jnp.asarray(noise.uniform(0)))


def coins_in_bfloat16(noise: Noise, slots: Int[Array, " N"]) -> Float[Array, " N"]:
    """Rounds coins to bfloat16, which has 128 of them."""
    return fresh(noise, slots).astype(jnp.bfloat16).astype(jnp.float32)


def at_most(coins: Float[Array, " N"], log_ratio: Float[Array, " N"]):
    """Accepts at equality: a coin of 0 accepts a token of probability 0."""
    return jnp.log(coins.astype(log_ratio.dtype)) <= log_ratio


def matches(flags: Bool[Array, " N"]) -> Int[Array, ""]:
    """Returns the number of true flags, wherever they are."""
    return flags.sum(dtype=jnp.int32)
