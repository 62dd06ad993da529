"""Coins chosen by hand: where does a rule's decision flip?

Statistics need ten million rounds to see a coin of too few bits, and never see one
that is exactly 0. Injected, one coin is enough (ALGORITHMS C.3, 2).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specdec_jax.base import Draft

_ONE = np.float32(1 - 2**-24)


class Injected(NamedTuple):
    """Noise whose coins are given and whose Gumbels are 0."""

    coins: Float[Array, " N"]

    def uniform(self, offset: Any) -> Any:
        """Returns the coin of a slot."""
        return self.coins[offset]

    def gumbel(self, offset: Any, vocab_size: int) -> Float[Array, " V"]:
        """Returns zeros."""
        return jnp.zeros((vocab_size,), jnp.float32)

    def child(self, index: Any, shift: Any = 0) -> "Injected":
        """Refuses: rules draw for themselves only."""
        raise AssertionError("a rule draws for itself only")


def coin_problems(rule: Any, seed: int = 0) -> list[str]:
    """Returns what is wrong with a rule's coins, as sentences; empty if nothing is.

    For one drafted token, whatever the rule: a coin just below the probability of
    acceptance that its `law` states keeps the token, one just above does not, a coin
    of 0 keeps no impossible token, and the largest coin keeps one that target and
    draft agree on.

    Args:
      rule: A rule that flips coins; one with noise by position has none.
      seed: Of the rows.
    """
    if rule.noise != "round" or not callable(rule):
        return []
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((2, 8, 2, 5)).astype(np.float32)
    target, draft = (
        rows - np.log(np.exp(rows).sum(-1, keepdims=True)) for rows in logits[:2]
    )
    tokens = rng.integers(0, 5, (8, 1)).astype(np.int32)
    accept = np.asarray(_accept(rule, tokens, draft[:, :1], target))
    uncertain = (accept > 0.01) & (accept < 0.99)
    problems = []
    below = _kept(rule, accept * np.float32(1 - 1e-5), tokens, draft[:, :1], target)
    above = _kept(rule, accept * np.float32(1 + 1e-5), tokens, draft[:, :1], target)
    if not (below[uncertain] & ~above[uncertain]).all():
        problems.append("a coin next to the acceptance probability falls on its wrong "
                        "side: too few bits, or another probability")  # fmt: skip
    impossible = target.copy()
    impossible[np.arange(8), 0, tokens[:, 0]] = -np.inf
    zero = np.zeros(8, np.float32)
    if _kept(rule, zero, tokens, draft[:, :1], impossible).any():
        problems.append("a coin of 0 accepts a token that the target cannot emit")
    if not _kept(rule, zero + _ONE, tokens, target[:, :1], target).all():
        problems.append("the largest coin rejects a token that both models agree on")
    return problems


def _draft(token, law):
    return Draft(token, jnp.ones((), jnp.int32), law)


@partial(jax.jit, static_argnames="rule")
def _accept(rule, tokens, draft, target):
    """Returns the stated probability that the drafted token is kept."""
    stop, _ = jax.vmap(lambda t, q, p: rule.law(_draft(t, q), p))(tokens, draft, target)
    return stop[:, 1]


def _kept(rule, coins, tokens, draft, target):
    """Returns whether the drafted token is kept with the given coin."""
    return np.asarray(_num_accepted(coins, tokens, draft, target, rule=rule)) == 1


@partial(jax.jit, static_argnames="rule")
def _num_accepted(coins, tokens, draft, target, *, rule):
    def one(coin, token, law, rows):
        return rule(Injected(coin[None]), _draft(token, law), rows).num_accepted

    return jax.vmap(one)(coins, tokens, draft, target)
