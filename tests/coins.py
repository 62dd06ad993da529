"""Noise that a test chooses, and the law of a rule as its drawing part has it."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.acceptance import block, multi_draft, rejection
from specdec_jax.audit.planted import rules


class Injected(NamedTuple):
    """Noise whose numbers the test chooses: `coins[i]`, and `gumbels[d]`."""

    coins: jax.Array
    gumbels: jax.Array

    def uniform(self, offset):
        return self.coins[offset]

    def gumbel(self, offset, vocab_size):
        return self.gumbels[offset]

    def child(self, index, shift=0):
        raise AssertionError("rules draw for themselves only")


def law_by_coins(rule, chances, monkeypatch):
    """Returns `law` as the drawing part of a rule has it, coin by coin.

    Each coin sits just below or just above its chance, which `chances(draft, target)`
    computes anew, and stands for the whole interval on its side; the place where tokens
    are drawn hands out the law it was given instead of a token.
    """
    for module in (rejection, block, multi_draft, rules):
        monkeypatch.setattr(module, "draw", lambda row, noise, offset: row)

    def law(draft, target):
        chance = chances(draft, target)
        sides = itertools.product([True, False], repeat=len(chance))

        def decide(below):
            coins = jnp.where(below, chance * (1 - 1e-13), chance * (1 + 1e-13))
            noise = Injected(jnp.minimum(coins, 1 - 2**-24), None)
            verdict = rule(noise, draft, target)
            path = jnp.append(jnp.full((1,), -1, jnp.int32), verdict.path)
            weight = jnp.where(below, chance, 1 - chance).prod()
            row = jax.nn.softmax(verdict.next_token)
            end = path[verdict.num_accepted]
            return end + 1, weight, jnp.where(weight > 0, weight * row, 0)

        ends, weights, rows = jax.vmap(decide)(jnp.array(list(sides)))
        stop = jnp.zeros(len(target)).at[ends].add(weights)
        rows = jnp.zeros_like(target).at[ends].add(rows)
        return stop, rows / jnp.where(stop > 0, stop, 1)[:, None]

    return law


def ratios(draft, target):
    """Returns min(1, p/q) of each token of a chain, the chances of rejection."""
    slots = jnp.arange(len(target) - 1, dtype=jnp.int32)
    ratio = jnp.exp(target[slots, draft.tokens])
    if draft.log_probs is not None:
        proposed = jnp.exp(draft.log_probs[slots, draft.tokens])
        ratio = jnp.where(proposed > 0, ratio / proposed, 0)
    return jnp.where(slots < draft.num_valid, jnp.minimum(ratio, 1), 0)


def law_by_draws(rule):
    """Returns `law` as the drawing part of the coupled rule has it, draw by draw."""

    def law(draft, target):
        size, vocab_size = target.shape
        stop, rows = jnp.zeros(size), jnp.zeros_like(target)
        for draws in itertools.product(range(vocab_size), repeat=size):
            chosen = jnp.asarray(draws)[:, None] == jnp.arange(vocab_size)[None]
            verdict = rule(Injected(None, jnp.where(chosen, 0.0, -1e9)), draft, target)
            n, token = verdict.num_accepted, verdict.next_token
            weight = jnp.exp(jnp.where(chosen, target, 0).sum())
            stop = stop.at[n].add(weight)
            rows = rows.at[n, token].add(weight)
        return stop, rows / jnp.where(stop > 0, stop, 1)[:, None]

    return law
