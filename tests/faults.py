"""Faults to plant, each of a kind that real implementations shipped (CASES.md A, B)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.acceptance import Rejection, rejection
from specdec_jax.base import Verdict


class RuleFault(NamedTuple):
    """A wrong rule, or a right one that is told something wrong.

    `prepare(target, draft)` returns the rows the target is judged by and those that the
    draft is drawn from; `told(draft)` what the rule hears of the honest draft.
    """

    name: str
    make: Callable
    prepare: Callable | None = None
    told: Callable = lambda draft: draft


@dataclass(frozen=True)
class WrongResidual(Rejection):
    """Draws the corrected token from `law(target row, draft row)`."""

    law_of_next: Callable = None

    def __call__(self, noise, draft, target):
        verdict = super().__call__(noise, draft, target)
        n = verdict.num_accepted
        slot = jnp.minimum(n, len(target) - 2)
        wrong = self.law_of_next(target, draft.log_probs, slot)
        row = jnp.where(n < draft.num_valid, wrong, target[n])
        return verdict._replace(next_token=rejection.draw(row, noise, n))


@dataclass(frozen=True)
class FirstUnconditional(Rejection):
    """Accepts the first drafted token without a test."""

    def __call__(self, noise, draft, target):
        told = draft.log_probs.at[0].set(target[0])
        return super().__call__(noise, draft._replace(log_probs=told), target)


@dataclass(frozen=True)
class CountsMatches(Rejection):
    """Takes the number of accepted flags for the length of the accepted prefix."""

    def __call__(self, noise, draft, target):
        ratio = rejection.log_accept(draft, target)
        slots = jnp.arange(len(ratio), dtype=jnp.int32)
        coins = jax.vmap(noise.uniform)(slots)
        n = (jnp.log(coins) < ratio).sum(dtype=jnp.int32)
        row = rejection._next_log_probs(draft, target, n)
        return Verdict(n, rejection.draw(row, noise, n), slots)


@dataclass(frozen=True)
class OneCoin(Rejection):
    """Uses one coin for all positions of the round."""

    def __call__(self, noise, draft, target):
        shared = noise._replace(coins=jnp.full_like(noise.coins, noise.coins[0]))
        return super().__call__(shared, draft, target)


def _log_mass(mass):
    return jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1)), -jnp.inf)


def _told_softer(draft):
    return draft._replace(log_probs=jax.nn.log_softmax(draft.log_probs * 0.9, axis=-1))


def _bonus_without_policy(target, draft):
    """The bonus row forgets the temperature: 0.7 of the others' logits."""
    bonus = target[-1] * 0.7
    bonus = bonus - np.log(np.exp(bonus).sum(-1, keepdims=True))
    return [*target[:-1], bonus], draft


RULES = [
    RuleFault("draft law misreported", Rejection, told=_told_softer),
    RuleFault("bonus row without the policy", Rejection, _bonus_without_policy),
    RuleFault("no residual", lambda: WrongResidual(lambda target, draft, n: target[n])),
    RuleFault(
        "residual with epsilon 1e-6",
        lambda: WrongResidual(
            lambda target, draft, n: _log_mass(
                jnp.maximum(jnp.exp(target[n]) - jnp.exp(draft[n]), 0) + 1e-6
            )
        ),
    ),
    RuleFault(
        "absolute difference as residual",
        lambda: WrongResidual(
            lambda target, draft, n: _log_mass(
                jnp.abs(jnp.exp(target[n]) - jnp.exp(draft[n]))
            )
        ),
    ),
    RuleFault(
        "residual of the wrong row",
        lambda: WrongResidual(
            lambda target, draft, n: rejection.residual(target[n + 1], draft[n])
        ),
    ),
    RuleFault("first token unconditional", FirstUnconditional),
    RuleFault("matches counted, not the prefix", CountsMatches),
    RuleFault("one coin for all positions", OneCoin),
]
