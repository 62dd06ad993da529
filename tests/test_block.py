"""Block verification: its law, its coins, and that it gains over token by token."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coins import Injected, law_by_coins

from specdec_jax.acceptance import Block, Rejection
from specdec_jax.audit import faults
from specdec_jax.audit.enumeration import deviation, random_tables
from specdec_jax.base import Draft
from specdec_jax.rng import RoundNoise


def chances(draft, target):
    """Returns h_1 .. h_K as the paper has them, step by step."""
    weight, found = jnp.ones(()), []
    for i in range(len(target) - 1):
        token = draft.tokens[i]
        ratio = jnp.exp(target[i, token]) / jnp.exp(draft.log_probs[i, token])
        ratio = jnp.where(draft.log_probs[i, token] > -jnp.inf, ratio, 0)
        weight = jnp.where(i < draft.num_valid, jnp.minimum(1, weight * ratio), 0)
        if i + 1 < len(target) - 1:
            left = weight * jnp.exp(target[i + 1]) - jnp.exp(draft.log_probs[i + 1])
            mass = jnp.maximum(left, 0).sum()
            total = mass + 1 - weight
            inner = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), 1)
            found.append(jnp.where(i + 1 < draft.num_valid, inner, weight))
        else:
            found.append(weight)
    return jnp.stack(found)


def test_it_draws_what_its_law_says(monkeypatch):
    with jax.enable_x64(True):
        law = law_by_coins(Block(), chances, monkeypatch)
        for keep, valid in [(None, 3), (2, 3), (None, 2), (None, 0)]:
            target, draft = random_tables(5, 3, 3, keep=keep)
            assert deviation(law, target, draft, num_valid=valid) < 1e-12


@pytest.mark.parametrize(
    "name", [n for n, f in faults.FAULTS.items() if f.source == "B.3"]
)
def test_coin_by_coin_a_planted_fault_is_seen(name, monkeypatch):
    def told(draft, target):
        log_keep = wrong._chances(draft, target)[1]
        return jnp.exp(log_keep)

    wrong = faults.FAULTS[name].wrong
    with jax.enable_x64(True):
        law = law_by_coins(wrong, told, monkeypatch)
        worst = max(deviation(law, *random_tables(seed, 4, 2)) for seed in range(2))
        assert worst > 1e-4


def test_each_coin_decides_at_its_chance_and_a_failure_before_it_does_not_matter():
    target, draft_rows = random_tables(4, 4, 3)
    tokens = (0, 2, 3)
    target = jnp.stack([rows[tokens[:d]] for d, rows in enumerate(target)])
    laws = jnp.stack([rows[tokens[:d]] for d, rows in enumerate(draft_rows)])
    target, laws = target.astype(jnp.float32), laws.astype(jnp.float32)
    draft = Draft(jnp.array(tokens), jnp.int32(3), laws)
    chance = np.asarray(chances(draft, target))
    assert ((chance > 0.01) & (chance < 0.99)).all()
    for place in range(3):
        for factor, kept in [(1 - 1e-5, place + 1), (1 + 1e-5, 0)]:
            coins = np.full(3, 1 - 2**-24, np.float32)
            coins[place] = chance[place] * factor
            noise = Injected(jnp.asarray(coins), jnp.zeros((4, 4)))
            assert Block()(noise, draft, target).num_accepted == kept


def test_one_token_is_rejection_draw_for_draw():
    rows = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (3, 9)))
    draft = Draft(jnp.array([2]), jnp.int32(1), rows[2:])

    def verdicts(rule):
        draw = jax.vmap(lambda key: rule(RoundNoise(key), draft, rows[:2]))
        return jax.jit(draw)(jax.random.split(jax.random.key(1), 300))

    for one, other in zip(verdicts(Block()), verdicts(Rejection()), strict=True):
        np.testing.assert_array_equal(one, other)


def kept_on_chains(rule, target, draft, num_valid):
    """Returns the law of each chain's draft, and how much of it is kept on average."""
    num_draft, vocab_size = len(draft), target[0].shape[-1]
    chains = jnp.array(list(itertools.product(range(vocab_size), repeat=num_draft)))
    chains = chains.astype(jnp.int32)

    def kept(chain):
        rows = jnp.stack([r[tuple(chain[:d])] for d, r in enumerate(target)])
        laws = jnp.stack([r[tuple(chain[:d])] for d, r in enumerate(draft)])
        told = Draft(chain, num_valid, laws)
        stop, _ = rule.law(told, rows)
        places = jnp.arange(num_draft, dtype=jnp.int32)
        ratio = jnp.exp(rows[places, chain] - laws[places, chain])
        weight, total = jnp.ones(()), jnp.zeros(())
        for i in range(num_draft):
            weight = jnp.minimum(1, weight * ratio[i])
            total += jnp.where(i < num_valid, weight, 0)
        mass = jnp.exp(laws[places, chain].sum())
        return mass, stop @ jnp.arange(num_draft + 1.0), total

    mass, stopped, weights = jax.vmap(kept)(chains)
    return mass @ stopped, mass @ weights


def test_it_never_keeps_less_and_mostly_more():
    with jax.enable_x64(True):
        both = [random_tables(seed, 3, 3) for seed in range(120)]
        target, draft = (
            [jnp.stack(rows) for rows in zip(*one, strict=True)]
            for one in zip(*both, strict=True)
        )
        one = jnp.full((120,), 3, jnp.int32)
        block, weights = jax.jit(
            jax.vmap(lambda p, q, n: kept_on_chains(Block(), p, q, n))
        )(target, draft, one)
        token, _ = jax.jit(
            jax.vmap(lambda p, q, n: kept_on_chains(Rejection(), p, q, n))
        )(target, draft, one)
    gain = np.asarray(block - token)
    assert gain.min() > -1e-12
    assert (gain > 1e-4).mean() > 0.9
    # The running weights estimate what is kept, without a coin.
    np.testing.assert_allclose(block, weights, atol=1e-12)


def test_gains_on_the_notes_example_are_the_known_ones():
    """p and q of the notes' example 9; gains of ALGORITHMS B.3 in tokens a round."""
    p = np.log([0.30, 0.35, 0.20, 0.10, 0.05])
    q = np.log([0.50, 0.20, 0.15, 0.10, 0.05])
    gains = []
    with jax.enable_x64(True):
        rows = [jnp.broadcast_to(p, (5,) * (d + 1)) for d in range(6)]
        laws = [jnp.broadcast_to(q, (5,) * (d + 1)) for d in range(5)]
        valid = jnp.arange(2, 6, dtype=jnp.int32)
        block, token = (
            jax.jit(jax.vmap(lambda n, r=rule: kept_on_chains(r, rows, laws, n)[0]))(
                valid
            )
            for rule in (Block(), Rejection())
        )
        gains = (1 + block) / (1 + token) - 1
    np.testing.assert_allclose(gains, [0.023, 0.054, 0.090, 0.129], atol=5e-4)
